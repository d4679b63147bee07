"""Policy losses with the ratio of a whole response; one value a token, [B, R].

Requires: a row holds all tokens of its response, in every micro-batch, padded or packed. Loss and
metrics are as in `policy_losses.py`.
"""

import jax
import jax.numpy as jnp

from jaxrl_llm.algorithms.policy_losses import per_token_metrics
from jaxrl_llm.algorithms.shapes import Tokens
from jaxrl_llm.numerics import clip, masked_mean

MAX_SEQUENCE_LOG_RATIO = 10.0  # bound of the mean over tokens, as in verl


def gspo(
    logprobs: Tokens,
    old_logprobs: Tokens,
    advantages: Tokens,
    mask: Tokens,
    *,
    clip_low: float = 0.0003,
    clip_high: float = 0.0004,
) -> tuple[Tokens, dict[str, Tokens]]:
    """GSPO: PPO's clip on the length-normalised ratio of the response.

    s = exp(mean over its tokens of logprobs - old_logprobs)
    loss = max(-A s, -A clip(s, 1 - clip_low, 1 + clip_high))

    At token t the ratio has the value s and the gradient of s logprobs_t, so advantages may differ
    between tokens. The value s stays near 1, so the bounds are small. The defaults are the paper's.
    The paper averages over the tokens of a response first: use seq-mean-token-mean. Zheng et al.
    2025, arXiv:2507.18071.
    """
    keep = mask != 0
    log_ratio = jnp.where(keep, logprobs - old_logprobs, 0.0)
    mean = jax.lax.stop_gradient(masked_mean(log_ratio, mask, axis=1))[:, None]
    own = jnp.where(keep, logprobs, 0.0)
    log_s = clip(mean + own - jax.lax.stop_gradient(own), -jnp.inf, MAX_SEQUENCE_LOG_RATIO)
    s = jnp.exp(log_s)
    advantages = jnp.where(keep, advantages, 0.0)
    unclipped = -advantages * s
    clipped = -advantages * clip(s, 1.0 - clip_low, 1.0 + clip_high)
    loss = jnp.maximum(unclipped, clipped)
    return loss, per_token_metrics(log_ratio, clipfrac=clipped > unclipped)


def geo_mean(
    logprobs: Tokens,
    old_logprobs: Tokens,
    advantages: Tokens,
    mask: Tokens,
    *,
    clip_low: float = 0.4,
    clip_high: float = 0.4,
) -> tuple[Tokens, dict[str, Tokens]]:
    """GMPO: the geometric mean of the clipped ratios of a response.

    d_t = logprobs_t - old_logprobs_t, at most clip_high where A > 0, at least -clip_low where A < 0
    loss = -mean(A) exp(mean d_t), the same on every token of the response

    The bounds are on the log-ratio: 0.4 is a ratio from 0.67 to 1.5. They are wide because the mean
    is robust. Use seq-mean-token-mean, which averages over responses as the paper and verl do.
    Importance weights of tokens count with their mean; verl takes their geometric mean.
    Requires: one advantage a response. Metrics: clipped with A > 0; `_lower`: clipped with A < 0.
    Zhao et al. 2025, arXiv:2507.20673.
    """
    keep = mask != 0
    log_ratio = jnp.where(keep, logprobs - old_logprobs, 0.0)
    advantages = jnp.where(keep, advantages, 0.0)
    within = clip(log_ratio, -clip_low, clip_high)
    held = jnp.where(advantages > 0, jnp.minimum(log_ratio, within), jnp.maximum(log_ratio, within))
    held = jnp.where(advantages == 0, 0.0, held)  # no side is clipped
    ratio = jnp.exp(masked_mean(held, mask, axis=1))
    loss = -masked_mean(advantages, mask, axis=1) * ratio
    out = log_ratio != within
    return jnp.where(keep, loss[:, None], 0.0), per_token_metrics(
        log_ratio, clipfrac=out & (advantages > 0), clipfrac_lower=out & (advantages < 0)
    )
