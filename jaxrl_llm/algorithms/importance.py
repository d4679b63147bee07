"""Importance weights for the gap between sampler and trainer.

`rollout_logprobs` come from the sampler, `old_logprobs` from the trainer for the same tokens and
weights. In exact arithmetic they are equal; in bf16, or with a stale sampler, they are not, and the
gradient is then that of another policy. How large the gap is says `mismatch.py`; `rejection.py`
leaves samples out instead of weighing them.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxrl_llm.algorithms.fields import field_names, function_of_fields
from jaxrl_llm.numerics import masked_mean, masked_sum, masked_var, safe_divide

MAX_LOG_RATIO = 20.0

Metrics = dict[str, Float[Array, ""]]


def parse_threshold(threshold: float | str) -> tuple[float | None, float]:
    """(lower, upper) of a number, which has no lower bound, or of a band "0.5_2.0", as in verl.

    Raises ValueError unless 0 < lower <= upper.
    """
    lower_text, _, upper_text = str(threshold).rpartition("_")
    try:
        upper = float(upper_text)
        lower = float(lower_text) if lower_text else None
    except ValueError:
        upper, lower = 0.0, None
    if upper <= 0 or (lower is not None and not 0 < lower <= upper):
        raise ValueError(
            f"an importance threshold of {threshold!r}: expected a number over 0, such as 2.0, "
            'which cuts weights off, or a band such as "0.5_2.0", outside of which they are 0'
        )
    return lower, upper


def token_weights(
    old_logprobs: Float[Array, "B R"],
    rollout_logprobs: Float[Array, "B R"],
    mask: Float[Array, "B R"],
    *,
    upper: float = 2.0,
    lower: float | None = None,
    normalize: bool = False,
) -> tuple[Float[Array, "B R"], Metrics]:
    """Each token's own ratio: w = pi_trainer / pi_sampler, truncated; and metrics.

    Without `lower`, min(w, upper); with it, w inside of [lower, upper] and 0 outside (IcePop).
    `normalize` divides by the mean weight of a token. 0 outside the mask, no gradient.

    It corrects each token by its own ratio and not by those before it: little variance, some bias.
    Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training";
    IcePop: Ling team 2025, arXiv:2510.18855. verl's `rollout_is=token`.
    """
    log_ratio = jnp.where(mask != 0, old_logprobs - rollout_logprobs, 0.0)
    raw = jnp.exp(jnp.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO))
    weights = jnp.where(mask != 0, _truncated(raw, lower, upper), 0.0)
    metrics = _metrics(weights, raw, mask, lower, upper)
    if normalize:
        mean = masked_mean(weights, mask)
        weights, metrics["rollout_corr/rollout_is_batch_norm_factor"] = _normalized(weights, mean)
    return jax.lax.stop_gradient((weights, metrics))


def sequence_weights(
    old_logprobs: Float[Array, "B R"],
    rollout_logprobs: Float[Array, "B R"],
    mask: Float[Array, "B R"],
    *,
    upper: float = 2.0,
    lower: float | None = None,
    normalize: bool = False,
) -> tuple[Float[Array, "B R"], Metrics]:
    """The ratio of whole responses on each of their tokens: w = prod of the tokens' ratios.

    Truncated as `token_weights` has it; `normalize` divides by the mean weight of a response.
    Unbiased before the truncation, of a variance that grows with the length: for short responses.
    verl's `rollout_is=sequence`.
    """
    log_ratio = masked_sum(old_logprobs - rollout_logprobs, mask, axis=1)[:, None]
    raw = jnp.exp(jnp.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO))
    raw = jnp.broadcast_to(raw, mask.shape)
    weights = jnp.where(mask != 0, _truncated(raw, lower, upper), 0.0)
    metrics = _metrics(weights, raw, mask, lower, upper)
    if normalize:
        mean = masked_mean(masked_mean(weights, mask, axis=1), jnp.any(mask != 0, axis=1))
        weights, metrics["rollout_corr/rollout_is_batch_norm_factor"] = _normalized(weights, mean)
    return jax.lax.stop_gradient((weights, metrics))


def _truncated(raw: Array, lower: float | None, upper: float) -> Array:
    if lower is None:
        return jnp.minimum(raw, upper)
    return jnp.where((raw >= lower) & (raw <= upper), raw, 0.0)


def _normalized(weights: Array, mean: Array) -> tuple[Array, Array]:
    factor = jnp.where(mean > 1e-8, mean, 1.0)
    return weights / factor, factor


def _metrics(weights: Array, raw: Array, mask: Array, lower: float | None, upper: float) -> Metrics:
    """Of the weights before they are normalised, and how many ratios lay outside of the bounds."""
    keep = mask != 0
    some = jnp.any(keep, axis=1)
    mean = masked_mean(weights, mask)
    below, above = raw < (1.0 / upper if lower is None else lower), raw > upper
    of_sequences = masked_mean(weights, mask, axis=1)
    found = {
        "mean": mean,
        "max": _largest(weights, keep),
        "min": 0.0 - _largest(0.0 - weights, keep),
        "std": jnp.sqrt(masked_var(weights, mask, unbiased=False)),
        # Of one token's worth: 1 where all weights are equal, near 0 where one rules.
        "eff_sample_size": safe_divide(jnp.square(mean), masked_mean(jnp.square(weights), mask)),
        "ratio_fraction_high": masked_mean(above, mask),
        "ratio_fraction_low": masked_mean(below, mask),
        "seq_mean": masked_mean(of_sequences, some),
        "seq_std": jnp.sqrt(masked_var(of_sequences, some)),
        "seq_max": _largest(of_sequences, some),
        "seq_min": 0.0 - _largest(0.0 - of_sequences, some),
    }
    if lower is not None:
        found["oob_ratio"] = masked_mean(below | above, mask)
    return {f"rollout_corr/rollout_is_{name}": value for name, value in found.items()}


def _largest(x: Array, keep: Array) -> Array:
    """Maximum over `keep`; 0 where it selects nothing."""
    return jnp.where(jnp.any(keep), jnp.max(jnp.where(keep, x, -jnp.inf)), 0.0)


# ------------------------------------------------------------------------- applied to a loss


def importance_weighted(policy_loss: Callable[..., Any]) -> Callable[..., Any]:
    """`policy_loss` times the field `importance_weights`, which joins the fields that it reads.

    The metrics stay as they were. Works on any policy loss, since the signature of the result
    declares the field like a hand-written one.
    """

    def weighted(given: dict[str, Any]) -> Any:
        weights = given.pop("importance_weights")
        loss, metrics = policy_loss(**given)
        return loss * weights, metrics

    fields = (*field_names(policy_loss), "importance_weights")
    return function_of_fields(fields, policy_loss, weighted)


def corrected_in_the_update(
    policy_loss: Callable[..., Any],
    importance: Callable[..., Any] | None,
    rejection: Callable[..., Any] | None,
) -> Callable[..., Any]:
    """`policy_loss` corrected from the current policy to the sampler's: no old policy between them.

    What is rejected has loss 0 and stays in the count that the loss is divided by, as in verl's
    bypass mode: how many are rejected is known only after the pass. `normalize` and the metrics
    are a micro-batch's.
    """
    if importance is None and rejection is None:
        return policy_loss
    own = field_names(policy_loss)

    def corrected(given: dict[str, Any]) -> Any:
        policies = [jax.lax.stop_gradient(given["logprobs"]), given["rollout_logprobs"]]
        loss, metrics = policy_loss(**{k: v for k, v in given.items() if k in own or k not in read})
        if importance is not None:
            weights, _ = importance(*policies, given["mask"])
            loss = loss * weights
            metrics = metrics | {"rollout_corr/rollout_is_mean": weights}
        if rejection is not None:
            kept, _ = rejection(*policies, given["mask"])
            loss = jnp.where(kept != 0, loss, 0.0)
            rejected = (given["mask"] != 0) & (kept == 0)
            metrics = metrics | {
                "rollout_corr/rollout_rs_masked_fraction": rejected.astype(jnp.float32)
            }
        return loss, metrics

    read = dict.fromkeys((*own, "logprobs", "rollout_logprobs", "mask"))
    return function_of_fields(tuple(read), policy_loss, corrected)
