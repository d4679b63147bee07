"""The gap between the sampler and the trainer: how large it is, and correcting for it.

`rollout_logprobs` come from the sampler, `old_logprobs` from the trainer for the same tokens and
weights. In exact arithmetic they are equal; in bf16, or with a stale sampler, they are not.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxrl_llm.algorithms.fields import field_names
from jaxrl_llm.numerics import masked_count, masked_mean, masked_var, safe_divide

MAX_LOG_RATIO = 20.0


def token_truncated(
    old_logprobs: Float[Array, "B R"],
    rollout_logprobs: Float[Array, "B R"],
    mask: Float[Array, "B R"],
    *,
    threshold: float = 2.0,
) -> Float[Array, "B R"]:
    """Truncated importance weight of each token: min(pi_trainer / pi_sampler, threshold).

    0 outside the mask, no gradient. It corrects each token by its own ratio and not by those
    before it: little variance, some bias. Yao et al. 2025, "Your efficient RL framework secretly
    brings you off-policy RL training"; verl's `rollout_is=token`. Raises ValueError unless
    threshold is over 0.
    """
    if threshold <= 0:
        raise ValueError(f"an importance threshold of {threshold}: it must be over 0, such as 2.0")
    log_ratio = jnp.clip(old_logprobs - rollout_logprobs, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    weights = jnp.minimum(jnp.exp(log_ratio), threshold)
    return jax.lax.stop_gradient(jnp.where(mask != 0, weights, 0.0))


def importance_weighted(policy_loss: Callable[..., Any]) -> Callable[..., Any]:
    """`policy_loss` times the field `importance_weights`, which joins the fields that it reads.

    The metrics stay as they were. Works on any policy loss, since the signature of the result
    declares the field like a hand-written one.
    """
    settings = [
        parameter
        for parameter in inspect.signature(policy_loss).parameters.values()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    ]
    fields = (*field_names(policy_loss), "importance_weights")
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    signature = inspect.Signature([*(inspect.Parameter(f, kind) for f in fields), *settings])

    def weighted(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        weights = bound.arguments.pop("importance_weights")
        loss, metrics = policy_loss(**bound.arguments)
        return loss * weights, metrics

    weighted.__doc__ = f"{_name(policy_loss)} times the importance weights."
    weighted.__signature__ = signature  # pyright: ignore[reportFunctionMemberAccess]
    return weighted


def _name(fn: Callable[..., Any]) -> str:
    return getattr(fn.func if isinstance(fn, functools.partial) else fn, "__name__", "policy loss")


def mismatch_metrics(
    old_logprobs: Float[Array, "B R"],
    rollout_logprobs: Float[Array, "B R"],
    mask: Float[Array, "B R"],
) -> dict[str, Float[Array, ""]]:
    """How far the sampler is from the trainer, under the names that verl and NeMo-RL use.

    - `training/rollout_probs_diff_{max,mean,std}`: of |p_trainer - p_sampler| over tokens.
    - `rollout_corr/kl`, `rollout_corr/k3_kl`: KL(sampler || trainer), two estimators.
    - `rollout_corr/ppl_ratio`: perplexity of the trainer over the sampler's, mean over sequences.
    - `token_mult_prob_error`: mean over tokens of exp(|log-ratio|); 1 is perfect.

    All are 0 when the mask selects nothing.
    """
    keep = mask != 0
    old = jnp.where(keep, old_logprobs, 0.0)
    rollout = jnp.where(keep, rollout_logprobs, 0.0)
    log_ratio = jnp.clip(old - rollout, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    gap = jnp.abs(jnp.exp(old) - jnp.exp(rollout))
    sequences = masked_count(jnp.max(mask, axis=1, initial=0.0))
    ppl_ratio = jnp.exp(-masked_mean(log_ratio, mask, axis=1))
    ppl_ratio = jnp.where(jnp.any(keep, axis=1), ppl_ratio, 0.0)
    return {
        "training/rollout_probs_diff_max": jnp.max(gap, initial=0.0),
        "training/rollout_probs_diff_mean": masked_mean(gap, mask),
        "training/rollout_probs_diff_std": jnp.sqrt(masked_var(gap, mask)),
        "rollout_corr/kl": masked_mean(0.0 - log_ratio, mask),
        "rollout_corr/k3_kl": masked_mean(jnp.exp(log_ratio) - log_ratio - 1.0, mask),
        "rollout_corr/ppl_ratio": safe_divide(jnp.sum(ppl_ratio), sequences),
        "token_mult_prob_error": masked_mean(jnp.exp(jnp.abs(log_ratio)), mask),
    }
