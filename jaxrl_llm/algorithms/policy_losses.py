"""Policy losses, one value a token; `aggregation.py` makes one number of them.

Positional parameters are batch fields, keyword-only parameters are settings. Shapes: B samples,
R response tokens. A loss returns (loss [B, R], metrics); each metric is [B, R], and the caller
averages it over the mask. Metrics that most losses have:

- `actor/ppo_kl`: old_logprobs - logprobs
- `actor/pg_clipfrac`: 1 on tokens that the clip changed
- `actor/pg_clipfrac_lower`: 1 on tokens that the second clip changed

Guarantees: outside the mask loss, gradient and metrics are 0, and the inputs are not read.

Losses on whole responses are in `sequence_losses.py`; losses that choose tokens by their
covariance are in `covariance_losses.py`.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxrl_llm.algorithms.shapes import Tokens
from jaxrl_llm.numerics import clip

MAX_LOG_RATIO = 20.0  # exp(20) is about 5e8: large, and still finite in float32


def ppo_clip(
    logprobs: Tokens,
    old_logprobs: Tokens,
    advantages: Tokens,
    mask: Tokens,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    clip_c: float = 3.0,
) -> tuple[Tokens, dict[str, Tokens]]:
    """PPO's clipped surrogate with separate bounds and a dual clip.

    ratio = exp(clamp(logprobs - old_logprobs, -20, 20))
    loss = max(-A ratio, -A clip(ratio, 1 - clip_low, 1 + clip_high)); where A < 0, at most
    -A clip_c: a bad token that became far more likely has a bounded loss

    Metrics: `actor/pg_clipfrac` (the clipped side was chosen), `actor/pg_clipfrac_lower` (the dual
    clip was chosen), `actor/ppo_kl`. At equal log-probabilities the ratio is exactly 1, ppo_kl
    exactly 0, and the gradient -A.

    Schulman et al. 2017, arXiv:1707.06347; dual clip: Ye et al. 2020, arXiv:1912.09729;
    clip_high > clip_low is DAPO's clip-higher, arXiv:2503.14476. Requires: clip_c > 1, and
    bounds that are not negative.
    """
    log_ratio = masked_log_ratio(logprobs, old_logprobs, mask)
    advantages = jnp.where(mask != 0, advantages, 0.0)
    ratio = jnp.exp(log_ratio)
    unclipped = -advantages * ratio
    clipped = -advantages * clip(ratio, 1.0 - clip_low, 1.0 + clip_high)
    upper = jnp.maximum(unclipped, clipped)
    bound = -advantages * clip_c
    negative = advantages < 0
    loss = jnp.where(negative, jnp.minimum(upper, bound), upper)
    return loss, per_token_metrics(
        log_ratio, clipfrac=clipped > unclipped, clipfrac_lower=negative & (upper > bound)
    )


def cispo(
    logprobs: Tokens,
    old_logprobs: Tokens,
    advantages: Tokens,
    mask: Tokens,
    *,
    clip_low: float = 1.0,
    clip_high: float = 0.2,
) -> tuple[Tokens, dict[str, Tokens]]:
    """CISPO: REINFORCE with a clipped importance weight; a clipped token keeps its gradient.

    loss = -stop(clip(ratio, 1 - clip_low, 1 + clip_high)) A logprobs

    The paper bounds the weight only above: clip_low = 1 is no bound, since a ratio is not negative.
    The value of the loss has no meaning; its gradient does. MiniMax 2025, arXiv:2506.13585.
    """
    keep = mask != 0
    log_ratio = masked_log_ratio(logprobs, old_logprobs, mask)
    ratio = jnp.exp(log_ratio)
    weight = jax.lax.stop_gradient(clip(ratio, 1.0 - clip_low, 1.0 + clip_high))
    loss = -weight * jnp.where(keep, advantages, 0.0) * jnp.where(keep, logprobs, 0.0)
    return loss, per_token_metrics(log_ratio, clipfrac=ratio != weight)


def sapo(
    logprobs: Tokens,
    old_logprobs: Tokens,
    advantages: Tokens,
    mask: Tokens,
    *,
    tau_pos: float = 1.0,
    tau_neg: float = 1.05,
) -> tuple[Tokens, dict[str, Tokens]]:
    """SAPO: a soft gate instead of the clip; the gradient fades and is never cut off.

    loss = -A (4 / tau) sigmoid(tau (ratio - 1)), tau = tau_pos where A > 0, else tau_neg

    At ratio 1 the gradient equals REINFORCE's. A larger tau fades faster. The paper averages over
    the tokens of a response first: use seq-mean-token-mean.

    Gao et al. 2025, arXiv:2511.20347. Requires: positive temperatures.
    """
    log_ratio = masked_log_ratio(logprobs, old_logprobs, mask)
    advantages = jnp.where(mask != 0, advantages, 0.0)
    tau = jnp.where(advantages > 0, tau_pos, tau_neg)
    gate = jax.nn.sigmoid(tau * (jnp.exp(log_ratio) - 1.0)) * (4.0 / tau)
    return -gate * advantages, per_token_metrics(log_ratio)


def policy_gradient(
    logprobs: Tokens, advantages: Tokens, mask: Tokens
) -> tuple[Tokens, dict[str, Tokens]]:
    """REINFORCE: loss = -A logprobs. verl's `gpg`.

    It has no ratio and reads no old policy, so that pass is not computed. It is on-policy only in
    the first optimizer step of an iteration: do not use it with several mini-batches or epochs.
    Williams 1992; GPG: Chu et al. 2025, arXiv:2504.02546.
    """
    keep = mask != 0
    return -jnp.where(keep, logprobs, 0.0) * jnp.where(keep, advantages, 0.0), {}


def dro(
    logprobs: Tokens, old_logprobs: Tokens, advantages: Tokens, mask: Tokens, *, beta: float
) -> tuple[Tokens, dict[str, Tokens]]:
    """DRO: REINFORCE with a quadratic penalty on the log-ratio instead of a clip.

    loss = -(A logprobs - beta / 2 (logprobs - old_logprobs)^2)

    The paper's loss is one of whole responses; this one is per token, as in verl. Richemond et al.
    2024, arXiv:2405.19107. Requires: a positive beta.
    """
    keep = mask != 0
    log_ratio = jnp.where(keep, logprobs - old_logprobs, 0.0)
    gain = jnp.where(keep, logprobs, 0.0) * jnp.where(keep, advantages, 0.0)
    return 0.5 * beta * jnp.square(log_ratio) - gain, per_token_metrics(log_ratio)


def dppo_tv(
    logprobs: Tokens,
    old_logprobs: Tokens,
    advantages: Tokens,
    mask: Tokens,
    *,
    divergence_low: float = 0.2,
    divergence_high: float = 0.2,
    clip_c: float = 20.0,
) -> tuple[Tokens, dict[str, Tokens]]:
    """DPPO, total variation: no loss on a token whose probability has moved too far.

    loss = -A stop(min(ratio, clip_c)) logprobs, and 0 where A > 0 and p - p_old > divergence_high,
    or A <= 0 and p_old - p > divergence_low

    |p - p_old| is the total variation of a token against all others. Unlike a bound on the ratio
    it lets rare tokens move. Metrics: `actor/pg_clipfrac` (outside the bounds), `..._lower` (ratio
    above clip_c). Qi et al. 2026, arXiv:2602.04879. Requires: clip_c > 1.
    """
    p, p_old = _probabilities(logprobs, old_logprobs, mask)
    within = jnp.where(advantages > 0, p - p_old <= divergence_high, p - p_old >= -divergence_low)
    return _within_trust_region(logprobs, old_logprobs, advantages, mask, within, clip_c)


def dppo_kl(
    logprobs: Tokens,
    old_logprobs: Tokens,
    advantages: Tokens,
    mask: Tokens,
    *,
    divergence_low: float = 0.05,
    divergence_high: float = 0.05,
    clip_c: float = 20.0,
) -> tuple[Tokens, dict[str, Tokens]]:
    """DPPO, KL: `dppo_tv` with the KL of the old to the current policy, in nats.

    KL = p_old log(p_old / p) + (1 - p_old) log((1 - p_old) / (1 - p)), a token against all others

    A token whose KL exceeds the bound has no loss, unless its advantage moves it back.
    """
    p, p_old = _probabilities(logprobs, old_logprobs, mask)
    log_ratio = jnp.where(mask != 0, old_logprobs - logprobs, 0.0)
    rest = jnp.log((1.0 - p_old + 1e-8) / (1.0 - p + 1e-8))  # 1e-8 as in verl
    kl = p_old * log_ratio + (1.0 - p_old) * rest
    raised = (kl <= divergence_high) | (p <= p_old)
    lowered = (kl <= divergence_low) | (p >= p_old)
    within = jnp.where(advantages > 0, raised, lowered)
    return _within_trust_region(logprobs, old_logprobs, advantages, mask, within, clip_c)


def _within_trust_region(
    logprobs: Array, old_logprobs: Array, advantages: Array, mask: Array, within: Array, c: float
) -> tuple[Array, dict[str, Array]]:
    keep = mask != 0
    log_ratio = masked_log_ratio(logprobs, old_logprobs, mask)
    ratio = jnp.exp(log_ratio)
    weight = jax.lax.stop_gradient(jnp.where(within & keep, jnp.minimum(ratio, c), 0.0))
    loss = -jnp.where(keep, advantages, 0.0) * weight * jnp.where(keep, logprobs, 0.0)
    return loss, per_token_metrics(
        log_ratio, clipfrac=~within & keep, clipfrac_lower=(ratio > c) & within & keep
    )


def _probabilities(logprobs: Array, old_logprobs: Array, mask: Array) -> tuple[Array, Array]:
    keep = mask != 0
    current, old = (jnp.where(keep, x, 0.0) for x in (logprobs, old_logprobs))
    return jax.lax.stop_gradient(jnp.exp(current)), jnp.exp(old)


# ------------------------------------------------------------------------- what losses share


def masked_log_ratio(logprobs: Array, old_logprobs: Array, mask: Array) -> Array:
    """logprobs - old_logprobs clamped to ±20, 0 outside the mask.

    Padding becomes 0 before exp, so that the gradient has no inf * 0.
    """
    log_ratio = jnp.where(mask != 0, logprobs - old_logprobs, 0.0)
    return clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO)


def per_token_metrics(
    log_ratio: Array, *, clipfrac: Array | None = None, clipfrac_lower: Array | None = None
) -> dict[str, Array]:
    """`actor/ppo_kl` of a log-ratio that is 0 outside the mask, and the given clip fractions."""
    metrics = {"actor/ppo_kl": 0.0 - log_ratio}  # not -log_ratio: that prints a zero as -0.0
    if clipfrac is not None:
        metrics["actor/pg_clipfrac"] = clipfrac
    if clipfrac_lower is not None:
        metrics["actor/pg_clipfrac_lower"] = clipfrac_lower
    return {k: jax.lax.stop_gradient(v.astype(jnp.float32)) for k, v in metrics.items()}
