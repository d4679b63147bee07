"""Importance weights for the mismatch between sampler and trainer.

`rollout_logprobs` come from the sampler, `old_logprobs` from the trainer, both [B, R], for the same
tokens and weights. In exact arithmetic they are equal. In bf16, or with a stale sampler, they
differ, and the gradient is then biased. `mismatch.py` measures the difference; `rejection.py`
leaves samples out instead of weighting them.
"""

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.tree_util import Partial
from jaxtyping import Array

from jaxrl_llm.algorithms.fields import FieldFunction, field_names
from jaxrl_llm.algorithms.shapes import Scalar, Tokens
from jaxrl_llm.numerics import masked_mean, masked_sum, masked_var, safe_divide

MAX_LOG_RATIO = 20.0
SHORT_RESPONSE = 16  # tokens; up to it, stale samples get weights of whole responses

Metrics = dict[str, Scalar]


def weights_of_stale_samples(
    max_staleness: int, max_response_length: int
) -> tuple[Literal["token", "sequence"], float]:
    """Level and upper bound of the weights of an older policy's samples, unless a config says so.

    Truncated at 2, verl's default, tokens that the policy has since learned to like lose much of
    their gradient. With samples that are four updates old that costs more than the variance of
    larger weights, and weights of whole responses learn best. docs/placement.md has the runs. Those
    runs have short responses: the variance of whole ones grows with their length.
    """
    if max_staleness < 2:
        return "token", 2.0
    return ("sequence" if max_response_length <= SHORT_RESPONSE else "token"), 10.0


def token_weights(
    old_logprobs: Tokens,
    rollout_logprobs: Tokens,
    mask: Tokens,
    *,
    upper: float = 2.0,
    lower: float | None = None,
    normalize: bool = False,
) -> tuple[Tokens, Metrics]:
    """Truncated ratio of each token, w = pi_trainer / pi_sampler, [B, R]; and metrics.

    Without `lower`: min(w, upper). With it: w inside [lower, upper], 0 outside (IcePop).
    `normalize` divides by the mean weight of a token. Weights are 0 outside the mask and have no
    gradient.

    A token is not corrected for the tokens before it: low variance, some bias. verl's
    `rollout_is=token`. Yao et al. 2025, "Your efficient RL framework secretly brings you
    off-policy RL training"; IcePop: Ling team 2025, arXiv:2510.18855.
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
    old_logprobs: Tokens,
    rollout_logprobs: Tokens,
    mask: Tokens,
    *,
    upper: float = 2.0,
    lower: float | None = None,
    normalize: bool = False,
) -> tuple[Tokens, Metrics]:
    """The ratio of a whole response on each of its tokens: w = product of its tokens' ratios.

    Truncated as in `token_weights`; `normalize` divides by the mean weight of a response. Unbiased
    before the truncation, but its variance grows with the length: do not use it for long
    responses. verl's `rollout_is=sequence`.
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
    """Statistics of the weights before normalisation, and shares of ratios out of bounds."""
    keep = mask != 0
    some = jnp.any(keep, axis=1)
    mean = masked_mean(weights, mask)
    below, above = raw < (1.0 / upper if lower is None else lower), raw > upper
    of_sequences = masked_mean(weights, mask, axis=1)
    statistics = {
        "mean": mean,
        "max": _largest(weights, keep),
        "min": 0.0 - _largest(0.0 - weights, keep),
        "std": jnp.sqrt(masked_var(weights, mask, unbiased=False)),
        # Relative to the number of tokens: 1 for equal weights, near 0 if one dominates.
        "eff_sample_size": safe_divide(jnp.square(mean), masked_mean(jnp.square(weights), mask)),
        "ratio_fraction_high": masked_mean(above, mask),
        "ratio_fraction_low": masked_mean(below, mask),
        "seq_mean": masked_mean(of_sequences, some),
        "seq_std": jnp.sqrt(masked_var(of_sequences, some)),
        "seq_max": _largest(of_sequences, some),
        "seq_min": 0.0 - _largest(0.0 - of_sequences, some),
    }
    if lower is not None:
        statistics["oob_ratio"] = masked_mean(below | above, mask)
    return {f"rollout_corr/rollout_is_{name}": value for name, value in statistics.items()}


def _largest(x: Array, keep: Array) -> Array:
    """Maximum over `keep`; 0 if it selects nothing."""
    return jnp.where(jnp.any(keep), jnp.max(jnp.where(keep, x, -jnp.inf)), 0.0)


# ------------------------------------------------------------------------- applied to a loss


def importance_weighted(policy_loss: Callable[..., Any]) -> Callable[..., Any]:
    """Any policy loss times the field `importance_weights`; its metrics are unchanged.

    The result reads one more field than the loss.
    """
    reads = (*field_names(policy_loss), "importance_weights")
    return FieldFunction(Partial(_weighted, policy_loss), reads)


def _weighted(policy_loss: Callable[..., Any], *values: Any, **settings: Any) -> Any:
    *own, weights = values
    loss, metrics = policy_loss(*own, **settings)
    return loss * weights, metrics


def off_policy_masked(policy_loss: Callable[..., Any], *, most: float) -> Callable[..., Any]:
    """`policy_loss` without bad responses that the policy has left: loss 0, in the count as before.

    A response is left where the mean over its tokens of rollout_logprobs - logprobs, an estimate of
    KL(sampler || policy), is above `most`. Only tokens with a negative advantage lose their loss:
    large gradients push such responses away further, good ones pull the policy back.

    Metric: `actor/off_policy_masked`, 1 on tokens without their loss. DeepSeek-V3.2,
    arXiv:2512.02556, section 3.1.
    """
    own = field_names(policy_loss)
    reads = tuple(dict.fromkeys((*own, "logprobs", "rollout_logprobs", "advantages", "mask")))

    def kept(policy_loss: Callable[..., Any], most: float, *values: Any) -> Any:
        fields = dict(zip(reads, values, strict=True))
        loss, metrics = policy_loss(*(fields[name] for name in own))
        gap = jax.lax.stop_gradient(fields["rollout_logprobs"] - fields["logprobs"])
        left = masked_mean(gap, fields["mask"], axis=1)[:, None] > most
        hidden = left & (fields["advantages"] < 0) & (fields["mask"] != 0)
        metrics = metrics | {"actor/off_policy_masked": hidden.astype(jnp.float32)}
        return jnp.where(hidden, 0.0, loss), metrics

    return FieldFunction(Partial(kept, policy_loss, most), reads)


def corrected_in_the_update(
    policy_loss: Callable[..., Any],
    importance: Callable[..., Any] | None,
    rejection: Callable[..., Any] | None,
) -> Callable[..., Any]:
    """`policy_loss` with weights and rejection of the current policy against the sampler.

    There is no old policy between the two (verl's bypass mode). A rejected token has loss 0 and
    stays in the count that divides the loss, because rejection is known only after the pass.
    `normalize` and the metrics are over one micro-batch.
    """
    if importance is None and rejection is None:
        return policy_loss
    own = field_names(policy_loss)
    reads = tuple(dict.fromkeys((*own, "logprobs", "rollout_logprobs", "mask")))

    def corrected(
        policy_loss: Callable[..., Any],
        importance: Callable[..., Any] | None,
        rejection: Callable[..., Any] | None,
        *values: Any,
    ) -> Any:
        fields = dict(zip(reads, values, strict=True))
        policies = [jax.lax.stop_gradient(fields["logprobs"]), fields["rollout_logprobs"]]
        loss, metrics = policy_loss(*(fields[name] for name in own))
        if importance is not None:
            weights, _ = importance(*policies, fields["mask"])
            loss = loss * weights
            metrics = metrics | {"rollout_corr/rollout_is_mean": weights}
        if rejection is not None:
            kept, _ = rejection(*policies, fields["mask"])
            loss = jnp.where(kept != 0, loss, 0.0)
            rejected = (fields["mask"] != 0) & (kept == 0)
            metrics = metrics | {
                "rollout_corr/rollout_rs_masked_fraction": rejected.astype(jnp.float32)
            }
        return loss, metrics

    return FieldFunction(Partial(corrected, policy_loss, importance, rejection), reads)
