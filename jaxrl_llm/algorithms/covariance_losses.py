"""Policy losses that preserve entropy by treating a few tokens differently.

Entropy falls mostly through tokens of large covariance (A - mean A) (logprobs - mean logprobs).
The means and the choice of tokens are over one micro-batch, as in verl: all rows of one pass, on
every device of the mesh. A micro-batch chooses at least one token, so many small micro-batches
choose more tokens than a large one. Cui et al. 2025, arXiv:2505.22617.

Shapes: B samples, R response tokens. Loss and metrics are as in `policy_losses.py`.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxrl_llm.algorithms.policy_losses import masked_log_ratio, per_token_metrics
from jaxrl_llm.algorithms.shapes import Tokens
from jaxrl_llm.numerics import absolute, clip, masked_count, masked_mean, mix32


def clip_cov(
    logprobs: Tokens,
    old_logprobs: Tokens,
    advantages: Tokens,
    mask: Tokens,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    clip_cov_ratio: float = 0.0002,
    clip_cov_lb: float = 1.0,
    clip_cov_ub: float = 5.0,
) -> tuple[Tokens, dict[str, Tokens]]:
    """Clip-Cov: PPO's clip, and no gradient for a few tokens of large covariance.

    loss = max(-A ratio, -A clip(ratio, 1 - clip_low, 1 + clip_high)), and 0 on the drawn tokens

    Of n tokens, max(clip_cov_ratio n, 1) are drawn. Eligible are tokens with a covariance between
    `clip_cov_lb` and `clip_cov_ub` that PPO does not clip. The draw is a hash of position and
    log-probability, so a resumed run draws the same tokens. There is no dual clip.

    Metric: `actor/pg_clipfrac` counts the drawn tokens.
    """
    keep = mask != 0
    log_ratio = masked_log_ratio(logprobs, old_logprobs, mask)
    ratio = jnp.exp(log_ratio)
    advantages = jnp.where(keep, advantages, 0.0)
    unclipped = -advantages * ratio
    clipped = -advantages * clip(ratio, 1.0 - clip_low, 1.0 + clip_high)
    covariance = _covariance(logprobs, advantages, mask)
    eligible = keep & (clipped <= unclipped)
    eligible &= (covariance > clip_cov_lb) & (covariance < clip_cov_ub)
    drawn = _lowest(_hash(logprobs), eligible, _share(clip_cov_ratio, mask))
    loss = jnp.where(drawn, 0.0, jnp.maximum(unclipped, clipped))
    return loss, per_token_metrics(log_ratio, clipfrac=drawn)


def kl_cov(
    logprobs: Tokens,
    old_logprobs: Tokens,
    advantages: Tokens,
    mask: Tokens,
    *,
    kl_cov_ratio: float = 0.0002,
    ppo_kl_coef: float = 0.1,
) -> tuple[Tokens, dict[str, Tokens]]:
    """KL-Cov: no clip, and a penalty on the tokens of largest covariance.

    loss = -A ratio, plus ppo_kl_coef |logprobs - old_logprobs| on max(kl_cov_ratio n, 1) of the n
    tokens

    At equal log-probs the penalty has gradient 0. Metric: `actor/ppo_kl` is the mean of
    |logprobs - old_logprobs| over all tokens, as in verl.
    """
    log_ratio = masked_log_ratio(logprobs, old_logprobs, mask)
    advantages = jnp.where(mask != 0, advantages, 0.0)
    covariance = _covariance(logprobs, advantages, mask)
    chosen = _lowest(-covariance, mask != 0, _share(kl_cov_ratio, mask))
    loss = -advantages * jnp.exp(log_ratio)
    loss += jnp.where(chosen, ppo_kl_coef * absolute(log_ratio), 0.0)
    return loss, {"actor/ppo_kl": jax.lax.stop_gradient(absolute(log_ratio))}


def _covariance(logprobs: Array, advantages: Array, mask: Array) -> Array:
    logprobs = jax.lax.stop_gradient(jnp.where(mask != 0, logprobs, 0.0))
    return (advantages - masked_mean(advantages, mask)) * (logprobs - masked_mean(logprobs, mask))


def _share(ratio: float, mask: Array) -> Array:
    """max(ratio n, 1) of n tokens, rounded down; 1e-6 guards against a product just below."""
    return jnp.maximum(jnp.floor(ratio * masked_count(mask) * (1.0 + 1e-6)), 1.0)


def _hash(logprobs: Array) -> Array:
    """A pseudo-random number below 2^24 for each token, the same in every run."""
    bits = jax.lax.bitcast_convert_type(jax.lax.stop_gradient(logprobs), jnp.uint32)
    position = jnp.arange(logprobs.size, dtype=jnp.uint32).reshape(logprobs.shape)
    return (mix32(bits ^ mix32(position)) >> 8).astype(jnp.float32)


def _lowest(x: Array, eligible: Array, count: Array) -> Array:
    """True for the `count` eligible entries with the smallest x, ties by position."""
    flat = jnp.where(eligible, x, jnp.inf).reshape(-1)
    rank = jnp.argsort(jnp.argsort(flat, stable=True), stable=True)
    return (rank < count).reshape(x.shape) & eligible
