"""Policy losses, one value a token: aggregation over tokens is `aggregation.py`'s.

Positional parameters are batch fields, keyword-only parameters are settings. A loss returns
(loss [B, R], metrics), each metric also [B, R], to be averaged over the mask by the caller.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

MAX_LOG_RATIO = 20.0  # exp(20) is about 5e8: large, and still finite in float32


def ppo_clip(
    logprobs: Float[Array, "B R"],
    old_logprobs: Float[Array, "B R"],
    advantages: Float[Array, "B R"],
    mask: Float[Array, "B R"],
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    clip_c: float = 3.0,
) -> tuple[Float[Array, "B R"], dict[str, Float[Array, "B R"]]]:
    """PPO's clipped surrogate with separate bounds and a dual clip.

    ratio = exp(clamp(logprobs - old_logprobs, -20, 20))
    loss = max(-A ratio, -A clip(ratio, 1 - clip_low, 1 + clip_high)), and where A < 0 at most
    -A clip_c: a token that became far more likely, although it was bad, has a bounded loss.

    Metrics: `actor/pg_clipfrac` (the clipped side was chosen), `actor/pg_clipfrac_lower` (the dual
    clip was), `actor/ppo_kl` (old_logprobs - logprobs). On equal log-probabilities the ratio is
    exactly 1 and ppo_kl exactly 0. Tokens outside the mask have loss and metrics 0.

    Schulman et al. 2017, arXiv:1707.06347; dual clip Ye et al. 2020, arXiv:1912.09729;
    clip_high > clip_low is DAPO's clip-higher, arXiv:2503.14476. Raises ValueError unless
    clip_c > 1 and the bounds are not negative.
    """
    if clip_c <= 1.0:
        raise ValueError(f"clip_c is {clip_c}; the dual clip needs a bound over 1, such as 3.0")
    if clip_low < 0.0 or clip_high < 0.0:
        raise ValueError(f"clip_low {clip_low} and clip_high {clip_high} must not be negative")
    keep = mask != 0
    # Padding is set to 0 before exp: a value there must not become inf * 0 in the gradient.
    log_ratio = jnp.where(keep, logprobs - old_logprobs, 0.0)
    log_ratio = jnp.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    advantages = jnp.where(keep, advantages, 0.0)
    ratio = jnp.exp(log_ratio)
    unclipped = -advantages * ratio
    clipped = -advantages * jnp.clip(ratio, 1.0 - clip_low, 1.0 + clip_high)
    upper = jnp.maximum(unclipped, clipped)
    bound = -advantages * clip_c
    negative = advantages < 0
    loss = jnp.where(negative, jnp.minimum(upper, bound), upper)
    metrics = {
        "actor/pg_clipfrac": clipped > unclipped,
        "actor/pg_clipfrac_lower": negative & (upper > bound),
        "actor/ppo_kl": 0.0 - log_ratio,  # not -log_ratio: that prints an exact zero as -0.0
    }
    return loss, {k: jax.lax.stop_gradient(v.astype(jnp.float32)) for k, v in metrics.items()}
