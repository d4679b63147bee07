"""Log-probabilities over the tokens that filters kept, from hidden states.

A sampler with top-k, top-p or min-p draws from the softmax over a few tokens of each position. Here
the trainer computes this distribution from the ids of these tokens. Only their logits are read, and
only they get a gradient. So the softmax needs no pass over the vocabulary, and the backward pass
computes no logits again. `linear_logprob` explains chunks, dtypes, meshes, soft caps and `strict`.

Shape letters: N tokens (possibly several axes), D model width, V vocabulary, K tokens kept at most,
G chunks, C tokens of a chunk.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxrl_llm.kernels.head_chunks import (
    are_whole_chunks,
    chunk_by_chunk,
    head_gradients,
    head_logits,
    in_chunks,
    over_whole_chunks,
    uncapped,
)
from jaxrl_llm.kernels.linear_logprob import strict_logits
from jaxrl_llm.kernels.partial_softmax import soft_cap
from jaxrl_llm.kernels.strict import Strict


class KeptStatistics(NamedTuple):
    """Statistics of the distribution over the kept tokens, float32."""

    logprobs: Float[Array, " *N"]
    entropy: Float[Array, " *N"]  # nats
    sum_squares: Float[Array, " *N"]  # squared probabilities; without a gradient


def kept_logprob(
    hidden_ND: Float[Array, "*N D"],
    weight_VD: Float[Array, "V D"],
    targets_N: Int[Array, " *N"],
    ids_NK: Int[Array, "*N K"],
    *,
    lengths: Int[Array, "*M"] | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    chunk: int | None = None,
    strict: Strict | None = None,
) -> KeptStatistics:
    """Statistics under softmax(hidden @ weight.T / temperature) over the tokens `ids_NK`.

    log p(target) = z_target - log sum_k exp(z_k), where z are the logits over the temperature. An
    id of -1 is no token. Arguments are as in `linear_logprob`; with `strict` the log-probs have the
    bits of `strict_kept_logprob`.

    Requires: the ids of a token differ, but for -1.
    Guarantees: gradients flow through log-probs and entropy. A target that is not kept has log-prob
        0 and no gradient, and so have tokens of chunks that are not computed.
    """
    assert strict is None or softcap is None, "config rules refuse both"
    tokens = {"vocab": weight_VD.shape[0], "lengths": lengths, "strict": strict}
    if strict is not None and not are_whole_chunks(targets_N, strict):

        def run(targets: Array, hidden: Array, ids: Array, lengths: Array | None) -> KeptStatistics:
            how: Any = {"temperature": temperature, "strict": strict}
            return kept_logprob(hidden, weight_VD, targets, ids, lengths=lengths, **how)

        return over_whole_chunks(run, targets_N, hidden_ND, ids_NK, **tokens)
    arrays, stop, join = in_chunks(targets_N, hidden_ND, ids_NK, chunk=chunk, **tokens)
    targets_GC, hidden_GCD, ids_GCK = arrays
    how = (temperature, softcap, strict is not None)
    return KeptStatistics(*map(join, _scan(hidden_GCD, weight_VD, targets_GC, ids_GCK, stop, *how)))


def strict_kept_logprob(
    logits_CV: Array, ids_CK: Array, targets_C: Array, temperature: float
) -> tuple[Array, Array]:
    """Log-probs of a chunk's targets over the kept tokens, and the logits of these.

    The logits are over the temperature.

    Requires: a chunk as large as every other caller's, and its `strict_logits`.
    """
    logits_CV, ids_CK, targets_C = jax.lax.optimization_barrier((logits_CV, ids_CK, targets_C))
    chosen_CK = jax.lax.optimization_barrier(_at_ids(logits_CV, ids_CK))
    z_CK = chosen_CK / temperature
    logprobs_C = _distribution(z_CK, ids_CK, targets_C).logprobs_C
    return jax.lax.optimization_barrier((logprobs_C, z_CK))


class _Distribution(NamedTuple):
    """The softmax over the kept tokens of each position of a chunk."""

    probs_CK: Array
    logs_CK: Array  # their logarithms; 0 for no token
    is_target_CK: Array
    logprobs_C: Array


def _distribution(z_CK: Array, ids_CK: Array, targets_C: Array) -> _Distribution:
    kept_CK = ids_CK >= 0
    top_C1 = jnp.max(jnp.where(kept_CK, z_CK, -jnp.inf), axis=-1, keepdims=True)
    relative_CK = jnp.where(kept_CK, z_CK - jnp.where(jnp.isfinite(top_C1), top_C1, 0.0), 0.0)
    weights_CK = jnp.where(kept_CK, jnp.exp(relative_CK), 0.0)
    total_C1 = jnp.sum(weights_CK, axis=-1, keepdims=True)
    total_C1 = jnp.where(total_C1 > 0, total_C1, 1.0)
    logs_CK = jnp.where(kept_CK, relative_CK - jnp.log(total_C1), 0.0)
    is_target_CK = kept_CK & (ids_CK == targets_C[..., None])
    logprobs_C = jnp.sum(jnp.where(is_target_CK, logs_CK, 0.0), axis=-1)
    return _Distribution(weights_CK / total_C1, logs_CK, is_target_CK, logprobs_C)


def _at_ids(logits_CV: Array, ids_CK: Array) -> Array:
    return jnp.take_along_axis(logits_CV, jnp.maximum(ids_CK, 0), axis=-1, mode="clip")


def _forward(
    hidden_GCD: Array,
    weight_VD: Array,
    targets_GC: Array,
    ids_GCK: Array,
    stop: Array | None,
    temperature: float,
    softcap: float | None,
    strictly: bool,
) -> tuple[Array, Array, Array, Array]:
    """(logprobs, entropy, sums of squares), each [G, C], and the kept logits [G, C, K]."""

    def body(carry: None, chunk: Any) -> tuple[None, tuple[Array, ...]]:
        hidden_CD, targets_C, ids_CK = chunk
        if strictly:
            logits_CV = strict_logits(hidden_CD, weight_VD)
            logprobs_C, z_CK = strict_kept_logprob(logits_CV, ids_CK, targets_C, temperature)
        else:
            logits_CV = head_logits(hidden_CD, weight_VD)
            z_CK = soft_cap(_at_ids(logits_CV, ids_CK), softcap) / temperature
            logprobs_C = _distribution(z_CK, ids_CK, targets_C).logprobs_C
        probs_CK, logs_CK, *_ = _distribution(z_CK, ids_CK, targets_C)
        entropy_C = -jnp.sum(probs_CK * logs_CK, axis=-1)
        return carry, (logprobs_C, entropy_C, jnp.square(probs_CK).sum(axis=-1), z_CK)

    return chunk_by_chunk(body, None, (hidden_GCD, targets_GC, ids_GCK), stop)[1]


def _primal(*operands: Any) -> tuple[Array, Array, Array]:
    return _forward(*operands)[:3]


def _scan_fwd(*operands: Any) -> tuple[tuple[Array, ...], tuple[Any, ...]]:
    *results, z_GCK = _forward(*operands)
    return tuple(results), (*operands[:5], z_GCK)


def _scan_bwd(
    temperature: float,
    softcap: float | None,
    strictly: bool,
    saved: tuple[Any, ...],
    grads: tuple[Array, Array, Array],
) -> tuple[Array, Array, None, None, None]:
    """With z the kept logits over the temperature, p = softmax(z) and H the entropy:

    d logprob / dz = onehot - p;  dH / dz = -p (log p + H). Other logits have no gradient.
    """
    hidden_GCD, weight_VD, targets_GC, ids_GCK, stop, z_GCK = saved

    def grad_logits(
        _: Array, targets_C: Array, ids_CK: Array, z_CK: Array, grad_C: Array, grad_entropy_C: Array
    ) -> Array:
        probs_CK, logs_CK, is_target_CK, _ = _distribution(z_CK, ids_CK, targets_C)
        entropy_C1 = -jnp.sum(probs_CK * logs_CK, axis=-1, keepdims=True)
        some_C = is_target_CK.any(axis=-1)
        grad_C1 = jnp.where(some_C, grad_C, 0.0)[..., None]
        grad_z_CK = jnp.where(is_target_CK, grad_C1, 0.0) - probs_CK * (
            grad_C1 + grad_entropy_C[..., None] * (logs_CK + entropy_C1)
        )
        grad_z_CK = uncapped(grad_z_CK, z_CK, temperature, softcap)
        return _spread(grad_z_CK.astype(weight_VD.dtype), ids_CK, weight_VD.shape[0])

    chunks = (targets_GC, ids_GCK, z_GCK, grads[0], grads[1])
    found = head_gradients(grad_logits, hidden_GCD, weight_VD, chunks, stop, strictly=strictly)
    return *found, None, None, None


def _spread(values_CK: Array, ids_CK: Array, vocab: int) -> Array:
    """The values at their ids, [C, V]; 0 elsewhere.

    The matmuls that read it add up in a fixed order. A sum of scattered rows would not, on a GPU.
    """

    def one(values_K: Array, ids_K: Array) -> Array:
        # Out of range and all different: the scatter drops them and has no duplicates.
        at_K = jnp.where(ids_K >= 0, ids_K, vocab + jnp.arange(ids_K.size, dtype=ids_K.dtype))
        zeros_V = jnp.zeros((vocab,), values_K.dtype)
        return zeros_V.at[at_K].set(values_K, mode="drop", unique_indices=True)

    spread = one
    for _ in range(ids_CK.ndim - 1):
        spread = jax.vmap(spread)
    return spread(values_CK, ids_CK)


_scan = jax.custom_vjp(_primal, nondiff_argnums=(5, 6, 7))
_scan.defvjp(_scan_fwd, _scan_bwd)
