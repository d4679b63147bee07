"""Rejection: leave out tokens or responses on which sampler and trainer differ too much.

A rule measures the distance of the two policies for each token, or over a response (sum, mean or
maximum), by an estimator of KL(sampler || trainer). With d = old_logprobs - rollout_logprobs:
k1 = -d, k2 = d^2 / 2, k3 = exp(d) - d - 1. Schulman, http://joschu.net/blog/kl-approx.html
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxrl_llm.algorithms.shapes import Scalar, Tokens
from jaxrl_llm.config.thresholds import Rule
from jaxrl_llm.numerics import masked_mean, masked_sum

MAX_LOG_RATIO = 20.0


def reject(
    old_logprobs: Tokens, rollout_logprobs: Tokens, mask: Tokens, *, rules: tuple[Rule, ...]
) -> tuple[Tokens, dict[str, Scalar]]:
    """The mask without the tokens that any rule rejects, [B, R], and metrics; no gradient.

    A token rule rejects tokens, a sequence rule whole responses. A distance on its bound is kept.
    Metrics: `rollout_corr/rollout_rs_masked_fraction` (share of tokens), `..._seq_masked_fraction`
    (share of responses with a rejected token); both again for each rule, with its mean distance.
    """
    keep = mask != 0
    d = jnp.where(keep, old_logprobs - rollout_logprobs, 0.0)
    d = jnp.clip(d, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    distances = {"k1": 0.0 - d, "k2": 0.5 * jnp.square(d), "k3": jnp.exp(d) - d - 1.0}
    kept, metrics = keep, {}
    for rule in rules:
        level, _, kind = rule.name.rpartition("_")
        distance = _over_sequences(distances[kind], mask, level)
        within = (distance >= rule.lower) & (distance <= rule.upper)
        kept = kept & within
        name = f"rollout_corr/rollout_rs_{rule.name}"
        metrics |= _fractions(name, keep, keep & within)
        metrics[f"{name}_mean"] = masked_mean(distance, mask)
    metrics |= _fractions("rollout_corr/rollout_rs", keep, kept)
    return jax.lax.stop_gradient((jnp.where(kept, mask, 0.0), metrics))


def _over_sequences(distance: Array, mask: Array, level: str) -> Array:
    if level == "token":
        return distance
    if level == "seq_sum":
        value = masked_sum(distance, mask, axis=1)
    elif level == "seq_mean":
        value = masked_mean(distance, mask, axis=1)
    else:
        assert level == "seq_max", level
        value = jnp.max(jnp.where(mask != 0, distance, 0.0), axis=1, initial=0.0)
    return jnp.broadcast_to(value[:, None], mask.shape)


def _fractions(name: str, before: Array, after: Array) -> dict[str, Array]:
    lost = (before & ~after).astype(jnp.float32)
    return {
        f"{name}_masked_fraction": masked_mean(lost, before),
        f"{name}_seq_masked_fraction": masked_mean(lost.max(axis=1), jnp.any(before, axis=1)),
    }
