"""Log-probabilities over the tokens that filters kept, from hidden states.

A sampler with top-k, top-p or min-p draws from the softmax over a few tokens of each position. Here
the trainer computes this distribution from the ids of these tokens. Only their logits are read, and
only they get a gradient. So the softmax needs no pass over the vocabulary, and the backward pass
computes no logits again. `linear_logprob` explains chunks, dtypes, meshes, soft caps and `strict`.

Shape letters: N tokens (possibly several axes), D model width, V vocabulary, K tokens kept at most,
G chunks, C tokens of a chunk.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxrl_llm.kernels.linear_logprob import (
    DEFAULT_CHUNK_LOGITS,
    _chunk_by_chunk,
    _join,
    _larger,
    _most_together,
    _num_chunks,
    _split,
    _uncapped,
    head_logits,
    head_matmul,
    strict_logits,
)
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
    if chunk is None:
        chunk = max(1, DEFAULT_CHUNK_LOGITS // weight_VD.shape[0])
    assert strict is None or softcap is None, "config rules refuse both"
    whole = targets_N.ndim == 1 and targets_N.size > 0
    if strict is not None and (not whole or targets_N.size % strict.rows):
        return _joined_strictly(
            hidden_ND, weight_VD, targets_N, ids_NK, lengths, temperature, strict
        )
    tokens = targets_N.shape[-1]
    rows = targets_N.size // max(tokens, 1)
    num_chunks = _num_chunks(tokens, max(1, chunk // max(rows, 1)))
    if strict is not None:
        num_chunks = targets_N.size // strict.rows
    axis, dealt = targets_N.ndim - 1, lengths is None
    hidden_GCD, targets_GC, ids_GCK = (
        _split(x, axis, num_chunks, dealt) for x in (hidden_ND, targets_N, ids_NK)
    )
    stop = None
    if lengths is not None:
        stop = -(-jnp.max(lengths).astype(jnp.int32) // targets_GC.shape[-1])
    how = (temperature, softcap, strict is not None)
    found = _scan(hidden_GCD, weight_VD, targets_GC, ids_GCK, stop, *how)
    return KeptStatistics(*(_join(x, tokens, dealt) for x in found))


def _joined_strictly(
    hidden_ND: Array,
    weight_VD: Array,
    targets_N: Array,
    ids_NK: Array,
    lengths: Array | None,
    temperature: float,
    strict: Strict,
) -> KeptStatistics:
    """`kept_logprob` of one axis of whole chunks. Only a single row keeps its length."""
    chunks = max(1, -(-targets_N.size // strict.rows))
    groups = max(1, -(-chunks // _most_together(strict.rows, weight_VD.shape[0])))
    chunks = groups * -(-chunks // groups)  # so that the backward pass can join them
    added = chunks * strict.rows - targets_N.size
    found = kept_logprob(
        jnp.pad(hidden_ND.reshape(-1, hidden_ND.shape[-1]), ((0, added), (0, 0))),
        weight_VD,
        jnp.pad(targets_N.reshape(-1), (0, added)),
        jnp.pad(ids_NK.reshape(-1, ids_NK.shape[-1]), ((0, added), (0, 0)), constant_values=-1),
        lengths=lengths.reshape(()) if lengths is not None and lengths.size == 1 else None,
        temperature=temperature,
        strict=strict,
    )
    return KeptStatistics(*(x[: targets_N.size].reshape(targets_N.shape) for x in found))


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

    return _chunk_by_chunk(body, None, (hidden_GCD, targets_GC, ids_GCK), stop)[1]


def _primal(
    hidden_GCD: Array,
    weight_VD: Array,
    targets_GC: Array,
    ids_GCK: Array,
    stop: Array | None,
    temperature: float,
    softcap: float | None,
    strictly: bool,
) -> tuple[Array, Array, Array]:
    how = (temperature, softcap, strictly)
    return _forward(hidden_GCD, weight_VD, targets_GC, ids_GCK, stop, *how)[:3]


def _scan_fwd(
    hidden_GCD: Array,
    weight_VD: Array,
    targets_GC: Array,
    ids_GCK: Array,
    stop: Array | None,
    temperature: float,
    softcap: float | None,
    strictly: bool,
) -> tuple[tuple[Array, ...], tuple[Any, ...]]:
    how = (temperature, softcap, strictly)
    *results, z_GCK = _forward(hidden_GCD, weight_VD, targets_GC, ids_GCK, stop, *how)
    return tuple(results), (hidden_GCD, weight_VD, targets_GC, ids_GCK, stop, z_GCK)


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
    chunks = (hidden_GCD, targets_GC, ids_GCK, z_GCK, grads[0], grads[1])
    if strictly:
        most = _most_together(targets_GC.shape[1], weight_VD.shape[0])
        number = max(1, len(targets_GC))
        together = next(n for n in range(min(most, number), 0, -1) if number % n == 0)
        chunks = jax.tree.map(partial(_larger, together, stop), chunks)
        stop = None if stop is None else -(-stop // together)

    run = partial(head_matmul, exact=hidden_GCD.dtype != weight_VD.dtype)

    def body(grad_weight_VD: Array, chunk: Any) -> tuple[Array, Array]:
        hidden_CD, targets_C, ids_CK, z_CK, grad_C, grad_entropy_C = chunk
        probs_CK, logs_CK, is_target_CK, _ = _distribution(z_CK, ids_CK, targets_C)
        entropy_C1 = -jnp.sum(probs_CK * logs_CK, axis=-1, keepdims=True)
        some_C = is_target_CK.any(axis=-1)
        grad_C1 = jnp.where(some_C, grad_C, 0.0)[..., None]
        grad_z_CK = jnp.where(is_target_CK, grad_C1, 0.0) - probs_CK * (
            grad_C1 + grad_entropy_C[..., None] * (logs_CK + entropy_C1)
        )
        grad_z_CK = _uncapped(grad_z_CK, z_CK, temperature, softcap)
        grad_logits_CV = _spread(grad_z_CK.astype(weight_VD.dtype), ids_CK, weight_VD.shape[0])
        grad_hidden_CD = run("...v,vd->...d", grad_logits_CV, weight_VD)
        grad_weight_VD += run("...v,...d->vd", grad_logits_CV, hidden_CD)
        return grad_weight_VD, grad_hidden_CD.astype(hidden_CD.dtype)

    zero = jnp.zeros(weight_VD.shape, jnp.float32)
    grad_weight_VD, grad_hidden_GCD = _chunk_by_chunk(body, zero, chunks, stop)
    grad_hidden_GCD = grad_hidden_GCD.reshape(hidden_GCD.shape)
    return grad_hidden_GCD, grad_weight_VD.astype(weight_VD.dtype), None, None, None


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
