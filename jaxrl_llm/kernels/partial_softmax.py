"""Softmaxes of attention: over parts of the keys, joined by log-sum-exps; sinks; soft caps."""

from functools import reduce

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

_MAX_PAIRED = 8  # parts whose weights are computed in pairs; more were not timed

# A part's result, its log-sum-exps in base 2, and the rows for which it was written (None: all).
PartialResult = tuple[Float[Array, "..."], Float[Array, "..."], Bool[Array, "..."] | None]


def merge(partials: list[PartialResult]) -> Float[Array, "..."]:
    """The attention over all parts, in float32.

    Unrolled over the splits, without reductions, so that XLA makes one loop of it. Up to
    _MAX_PAIRED splits, the weight of split i is 1 / sum over j of 2^(lse_j - lse_i). A common
    denominator would be a kernel of its own, which takes longer than these exponentials.
    """

    def written(x: Array, where_B: Array | None, otherwise: float) -> Array:
        if where_B is None:
            return x
        return jnp.where(where_B.reshape(-1, *(1,) * (x.ndim - 1)), x, otherwise)

    results = [written(out, where_B, 0.0).astype(jnp.float32) for out, _, where_B in partials]
    if len(partials) == 1:
        return results[0]
    lses = [written(lse_BKL, where_B, -jnp.inf) for _, lse_BKL, where_B in partials]

    def paired(i: int) -> Array:
        others = (jnp.exp2(lse - lses[i]) for j, lse in enumerate(lses) if j != i)
        return 1.0 / (1.0 + reduce(jnp.add, others))

    if len(partials) <= _MAX_PAIRED:
        ratios = [paired(i) for i in range(len(partials))]
    else:
        total = reduce(jnp.logaddexp2, lses)
        ratios = [jnp.exp2(lse - total) for lse in lses]
    # A split without an entry has lse -inf: its ratio may be NaN, and its weight is 0.
    weights = [
        jnp.where(lse == -jnp.inf, 0.0, ratio)[..., None]
        for lse, ratio in zip(lses, ratios, strict=True)
    ]
    weighted = [weight * result for weight, result in zip(weights, results, strict=True)]
    return sum(weighted[1:], weighted[0])


def softmax_with_sinks(scores: Array, sinks: Array | None) -> Array:
    """The softmax over the last dim, whose sum has exp(sinks) too if there are any.

    `sinks` have a last dim of 1 and broadcast to the scores.
    """
    if sinks is None:
        return jax.nn.softmax(scores, axis=-1)
    sinks = sinks.astype(scores.dtype)
    top = jax.lax.stop_gradient(jnp.maximum(scores.max(axis=-1, keepdims=True), sinks))
    exponentials = jnp.exp(scores - top)
    return exponentials / (exponentials.sum(axis=-1, keepdims=True) + jnp.exp(sinks - top))


def soft_cap(scores: Array, cap: float | None) -> Array:
    """cap * tanh(scores / cap), which is between -cap and cap; without a cap the scores."""
    return scores if cap is None else cap * jnp.tanh(scores / cap)
