"""Policy losses that spare the entropy by treating a few tokens apart (Cui et al. 2025).

Entropy falls by the tokens whose log-probability and advantage go together: their covariance
(A - mean A) (logprobs - mean logprobs) is large. The means and the choice range over the tokens of
one micro-batch, as in verl: over all rows that a pass holds at once, on every device of the mesh.
Fewer, larger micro-batches choose more evenly; a micro-batch chooses at least one token.

https://arxiv.org/abs/2505.22617
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxrl_llm.algorithms.policy_losses import masked_log_ratio, per_token_metrics
from jaxrl_llm.numerics import masked_count, masked_mean, mix32


def clip_cov(
    logprobs: Float[Array, "B R"],
    old_logprobs: Float[Array, "B R"],
    advantages: Float[Array, "B R"],
    mask: Float[Array, "B R"],
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    clip_cov_ratio: float = 0.0002,
    clip_cov_lb: float = 1.0,
    clip_cov_ub: float = 5.0,
) -> tuple[Float[Array, "B R"], dict[str, Float[Array, "B R"]]]:
    """Clip-Cov: PPO's clip, and no gradient for a few tokens of large covariance.

    max(clip_cov_ratio n, 1) of the n tokens are drawn from those whose covariance is between the
    bounds and which PPO has not clipped; their loss is 0. The draw is a hash of the token's
    position and log-probability, not a random number: a resumed run draws the same tokens.
    `actor/pg_clipfrac` counts the drawn ones.
    """
    if not (clip_cov_ratio > 0 and clip_cov_lb < clip_cov_ub) or min(clip_low, clip_high) < 0:
        raise ValueError(
            f"clip_cov_ratio {clip_cov_ratio} must be over 0, clip_cov_lb {clip_cov_lb} under "
            f"clip_cov_ub {clip_cov_ub}, and clip_low {clip_low} and clip_high {clip_high} not "
            "negative; 0.0002, 1, 5, 0.2 and 0.2 are verl's"
        )
    keep = mask != 0
    log_ratio = masked_log_ratio(logprobs, old_logprobs, mask)
    ratio = jnp.exp(log_ratio)
    advantages = jnp.where(keep, advantages, 0.0)
    unclipped = -advantages * ratio
    clipped = -advantages * jnp.clip(ratio, 1.0 - clip_low, 1.0 + clip_high)
    covariance = _covariance(logprobs, advantages, mask)
    eligible = keep & (clipped <= unclipped)
    eligible &= (covariance > clip_cov_lb) & (covariance < clip_cov_ub)
    drawn = _lowest(_hash(logprobs), eligible, _share(clip_cov_ratio, mask))
    loss = jnp.where(drawn, 0.0, jnp.maximum(unclipped, clipped))
    return loss, per_token_metrics(log_ratio, clipfrac=drawn)


def kl_cov(
    logprobs: Float[Array, "B R"],
    old_logprobs: Float[Array, "B R"],
    advantages: Float[Array, "B R"],
    mask: Float[Array, "B R"],
    *,
    kl_cov_ratio: float = 0.0002,
    ppo_kl_coef: float = 0.1,
) -> tuple[Float[Array, "B R"], dict[str, Float[Array, "B R"]]]:
    """KL-Cov: no clip, and a penalty |logprobs - old_logprobs| on the tokens of most covariance.

    loss = -A ratio, and ppo_kl_coef |logprobs - old_logprobs| more on max(kl_cov_ratio n, 1) of
    the n tokens. `actor/ppo_kl` is the mean of that absolute value, as in verl.
    """
    if kl_cov_ratio <= 0:
        raise ValueError(f"kl_cov_ratio is {kl_cov_ratio}; it must be over 0, such as 0.0002")
    log_ratio = masked_log_ratio(logprobs, old_logprobs, mask)
    advantages = jnp.where(mask != 0, advantages, 0.0)
    covariance = _covariance(logprobs, advantages, mask)
    chosen = _lowest(-covariance, mask != 0, _share(kl_cov_ratio, mask))
    loss = -advantages * jnp.exp(log_ratio)
    loss += jnp.where(chosen, ppo_kl_coef * jnp.abs(log_ratio), 0.0)
    return loss, {"actor/ppo_kl": jax.lax.stop_gradient(jnp.abs(log_ratio))}


def _covariance(logprobs: Array, advantages: Array, mask: Array) -> Array:
    logprobs = jax.lax.stop_gradient(jnp.where(mask != 0, logprobs, 0.0))
    return (advantages - masked_mean(advantages, mask)) * (logprobs - masked_mean(logprobs, mask))


def _share(ratio: float, mask: Array) -> Array:
    """max(ratio n, 1) of the n tokens, rounded down; a product just under a whole number is it."""
    return jnp.maximum(jnp.floor(ratio * masked_count(mask) * (1.0 + 1e-6)), 1.0)


def _hash(logprobs: Array) -> Array:
    """A number a token that looks random and is the same in every run, below 2^24."""
    bits = jax.lax.bitcast_convert_type(jax.lax.stop_gradient(logprobs), jnp.uint32)
    position = jnp.arange(logprobs.size, dtype=jnp.uint32).reshape(logprobs.shape)
    return (mix32(bits ^ mix32(position)) >> 8).astype(jnp.float32)


def _lowest(x: Array, eligible: Array, count: Array) -> Array:
    """True for the `count` eligible entries of the smallest x, ties by position."""
    flat = jnp.where(eligible, x, jnp.inf).reshape(-1)
    rank = jnp.argsort(jnp.argsort(flat, stable=True), stable=True)
    return (rank < count).reshape(x.shape) & eligible
