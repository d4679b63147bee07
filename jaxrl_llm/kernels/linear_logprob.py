"""Log-probabilities of chosen tokens from hidden states, without materialising the logits.

For 16k tokens and a vocabulary of 152k, float32 logits take 10 GB, and so does their gradient.
Here only one chunk of them exists at a time, forward and backward. The backward pass is a
`jax.custom_vjp` for two reasons. It accumulates the weight's gradient in float32 also for a bf16
weight, and it reuses the log-sum-exp, so that recomputing a chunk takes one matmul.

Shape letters: N tokens (possibly several axes), D model width, V vocabulary, K chunks, C tokens of
a chunk.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, TypeVar, overload

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxrl_llm.kernels.partial_softmax import soft_cap
from jaxrl_llm.kernels.strict import Strict
from jaxrl_llm.kernels.vocabulary_sums import sums_of_columns

# Logits of a default chunk: 1 GiB in float32, over all devices. With a vocabulary of 152k these are
# 1766 tokens, which keep a GPU busy.
DEFAULT_CHUNK_LOGITS = 2**28

Carry = TypeVar("Carry")
Saved = tuple[Array, Array, Array, Array | None, Array, Array | None]


@overload
def linear_logprob(
    hidden_ND: Float[Array, "*N D"],
    weight_VD: Float[Array, "V D"],
    targets_N: Int[Array, " *N"],
    *,
    lengths: Int[Array, "*M"] | None = None,
    temperature: float = 1.0,
    chunk: int | None = None,
    with_entropy: Literal[False] = False,
    softcap: float | None = None,
    strict: Strict | None = None,
) -> tuple[Float[Array, " *N"], None]: ...


@overload
def linear_logprob(
    hidden_ND: Float[Array, "*N D"],
    weight_VD: Float[Array, "V D"],
    targets_N: Int[Array, " *N"],
    *,
    lengths: Int[Array, "*M"] | None = None,
    temperature: float = 1.0,
    chunk: int | None = None,
    with_entropy: Literal[True],
    softcap: float | None = None,
    strict: Strict | None = None,
) -> tuple[Float[Array, " *N"], Float[Array, " *N"]]: ...


@overload
def linear_logprob(
    hidden_ND: Float[Array, "*N D"],
    weight_VD: Float[Array, "V D"],
    targets_N: Int[Array, " *N"],
    *,
    lengths: Int[Array, "*M"] | None = None,
    temperature: float = 1.0,
    chunk: int | None = None,
    with_entropy: bool,
    softcap: float | None = None,
    strict: Strict | None = None,
) -> tuple[Float[Array, " *N"], Float[Array, " *N"] | None]: ...


def linear_logprob(
    hidden_ND: Float[Array, "*N D"],
    weight_VD: Float[Array, "V D"],
    targets_N: Int[Array, " *N"],
    *,
    lengths: Int[Array, "*M"] | None = None,
    temperature: float = 1.0,
    chunk: int | None = None,
    with_entropy: bool = False,
    softcap: float | None = None,
    strict: Strict | None = None,
) -> tuple[Float[Array, " *N"], Float[Array, " *N"] | None]:
    """(log p(target), entropy or None) under softmax(hidden @ weight.T / temperature), in float32.

    `chunk` is the number of tokens whose logits exist at once, over all devices. None takes what
    fits 1 GiB. `lengths` ([] or [B]) is the number of tokens wanted per row, from its first. Chunks
    past the longest row are not computed. The entropy, in nats, costs one more sum over the logits.
    With a `softcap` logits x become softcap * tanh(x / softcap), before the temperature.

    Chunks split the last axis before D. Under a mesh pass [B, T, D] with B sharded: every device
    then works on its rows of every chunk, and no hidden state moves. The weight may be sharded over
    V, not over D. Its gradient is reduced across devices once per chunk, so prefer few, large
    chunks on many devices.

    With `strict`, all tokens are one axis, in chunks of `strict.rows`. A token's log-prob then has
    the bits of `strict_logprob` in any batch. `lengths` are of one row only, and nothing is capped.

    Guarantees: gradients flow through both results, and the weight's is accumulated in float32.
    Tokens of chunks that are not computed get 0 and no gradient. Other unwanted tokens get
    unspecified numbers.
    """
    if chunk is None:
        chunk = max(1, DEFAULT_CHUNK_LOGITS // weight_VD.shape[0])
    assert strict is None or softcap is None, "config rules refuse both"
    whole = targets_N.ndim == 1 and targets_N.size > 0
    if strict is not None and (not whole or targets_N.size % strict.rows):
        return _joined_strictly(
            hidden_ND, weight_VD, targets_N, lengths, temperature, with_entropy, strict
        )
    tokens = targets_N.shape[-1]
    rows = targets_N.size // max(tokens, 1)
    num_chunks = _num_chunks(tokens, max(1, chunk // max(rows, 1)))
    if strict is not None:
        num_chunks = targets_N.size // strict.rows
    axis, dealt = targets_N.ndim - 1, lengths is None
    hidden_KCD = _split(hidden_ND, axis, num_chunks, dealt)
    targets_KC = _split(targets_N, axis, num_chunks, dealt)
    stop = None
    if lengths is not None:
        stop = -(-jnp.max(lengths).astype(jnp.int32) // targets_KC.shape[-1])
    run = partial(_join, tokens=tokens, dealt=dealt)
    how = (temperature, softcap, with_entropy, strict is not None)
    logprobs, entropy = _scan(hidden_KCD, weight_VD, targets_KC, stop, *how)
    return run(logprobs), None if entropy is None else run(entropy)


def _joined_strictly(
    hidden_ND: Array,
    weight_VD: Array,
    targets_N: Array,
    lengths: Array | None,
    temperature: float,
    with_entropy: bool,
    strict: Strict,
) -> tuple[Array, Array | None]:
    """`linear_logprob` of one axis of whole chunks. Only a single row keeps its length."""
    chunks = max(1, -(-targets_N.size // strict.rows))
    groups = max(1, -(-chunks // _most_together(strict.rows, weight_VD.shape[0])))
    chunks = groups * -(-chunks // groups)  # so that the backward pass can join them
    added = chunks * strict.rows - targets_N.size
    hidden_XD = jnp.pad(hidden_ND.reshape(-1, hidden_ND.shape[-1]), ((0, added), (0, 0)))
    found = linear_logprob(
        hidden_XD,
        weight_VD,
        jnp.pad(targets_N.reshape(-1), (0, added)),
        lengths=lengths.reshape(()) if lengths is not None and lengths.size == 1 else None,
        temperature=temperature,
        with_entropy=with_entropy,
        strict=strict,
    )
    logprobs, entropy = (
        None if x is None else x[: targets_N.size].reshape(targets_N.shape) for x in found
    )
    assert logprobs is not None
    return logprobs, entropy


def head_logits(hidden_ND: Float[Array, "*N D"], weight_VD: Float[Array, "V D"]) -> Array:
    """float32 logits [*N, V]. Of weights in another dtype than hidden states: see `head_matmul`."""
    exact = hidden_ND.dtype != weight_VD.dtype
    return head_matmul("...d,vd->...v", hidden_ND, weight_VD, exact=exact)


def head_matmul(equation: str, x: Array, y: Array, *, exact: bool) -> Array:
    """A matmul of the head, with float32 sums; with `exact` of float32 inputs that are not rounded.

    It is exact where the head's weights are float32 and the hidden states are not. A GPU rounds the
    inputs of other float32 matmuls to TF32.
    """
    if exact:
        x, y = x.astype(jnp.float32), y.astype(jnp.float32)
    precision = jax.lax.Precision.HIGHEST if exact else None
    return jnp.einsum(equation, x, y, precision=precision, preferred_element_type=jnp.float32)


def strict_logits(hidden_CD: Array, weight_VD: Array) -> Array:
    """float32 logits of a chunk, apart from what is computed before and after."""
    logits_CV = head_logits(jax.lax.optimization_barrier(hidden_CD), weight_VD)
    return jax.lax.optimization_barrier(logits_CV)


def strict_sums(logits_CV: Array, temperature: float) -> Array:
    """`sums_of_columns` of a chunk's logits over the temperature, as every caller has them."""
    logits_CV = jax.lax.optimization_barrier(logits_CV)
    return jax.lax.optimization_barrier(sums_of_columns(logits_CV / temperature))


def strict_logprob(
    logits_CV: Array, sums_CM: Array, targets_C: Array, temperature: float
) -> tuple[Array, Array]:
    """Log-probs of a chunk's targets, and the log-sum-exp of the logits over the temperature.

    Requires: a chunk as large as every other caller's, and its `strict_sums`.
    """
    inputs = jax.lax.optimization_barrier((logits_CV, sums_CM, targets_C))
    logits_CV, sums_CM, targets_C = inputs
    chosen_C = jnp.take_along_axis(logits_CV, targets_C[:, None], axis=-1, mode="clip")[:, 0]
    lse_C = jax.nn.logsumexp(sums_CM, axis=-1)
    return jax.lax.optimization_barrier((chosen_C / temperature - lse_C, lse_C))


def sum_squared_probs(
    hidden_ND: Float[Array, "*N D"],
    weight_VD: Float[Array, "V D"],
    *,
    temperature: float = 1.0,
    softcap: float | None = None,
    chunk: int | None = None,
) -> Float[Array, " *N"]:
    """Sum over the vocabulary of p^2, p = softmax(hidden @ weight.T / temperature), in float32.

    Shapes, `softcap` and `chunk` are as in `linear_logprob`. The result has no gradient.
    """
    if chunk is None:
        chunk = max(1, DEFAULT_CHUNK_LOGITS // weight_VD.shape[0])
    axis, tokens = hidden_ND.ndim - 2, hidden_ND.shape[-2]
    rows = hidden_ND.size // max(tokens * hidden_ND.shape[-1], 1)
    hidden_KCD = _split(hidden_ND, axis, _num_chunks(tokens, max(1, chunk // max(rows, 1))))

    def body(_: None, hidden_CD: Array) -> tuple[None, Array]:
        logits_CV = _chunk_logits(hidden_CD, weight_VD, temperature, softcap)
        lse_C = jax.nn.logsumexp(logits_CV, axis=-1)
        return None, jnp.sum(jnp.exp(2.0 * (logits_CV - lse_C[..., None])), axis=-1)

    squares_KC = jax.lax.scan(body, None, jax.lax.stop_gradient(hidden_KCD))[1]
    return _join(squares_KC, tokens)


def linear_logprob_reference(
    hidden_ND: Float[Array, "*N D"],
    weight_VD: Float[Array, "V D"],
    targets_N: Int[Array, " *N"],
    *,
    temperature: float = 1.0,
    softcap: float | None = None,
) -> tuple[Float[Array, " *N"], Float[Array, " *N"]]:
    """`linear_logprob` with entropy from whole logits, in float32: what the tests compare with."""
    hidden_ND, weight_VD = hidden_ND.astype(jnp.float32), weight_VD.astype(jnp.float32)
    logits_NV = soft_cap(jnp.einsum("...d,vd->...v", hidden_ND, weight_VD), softcap) / temperature
    logprobs_NV = jax.nn.log_softmax(logits_NV)
    chosen_N = jnp.take_along_axis(logprobs_NV, targets_N[..., None], axis=-1)[..., 0]
    return chosen_N, -jnp.sum(jnp.exp(logprobs_NV) * logprobs_NV, axis=-1)


def _num_chunks(tokens: int, per_chunk: int) -> int:
    """Number of chunks of at most per_chunk tokens, up to twice as many if that avoids padding."""
    fewest = max(1, -(-tokens // per_chunk))
    exact = (k for k in range(fewest, 2 * fewest) if tokens % k == 0)
    return next(exact, fewest)


def _split(x: Array, axis: int, num_chunks: int, dealt: bool = True) -> Array:
    """x with `axis` split over a new first axis of K = `num_chunks` chunks.

    If `dealt`, chunk k gets tokens k, k + K, k + 2K, ...: if the axis is sharded, every device has
    an equal share of each chunk. Otherwise chunk k gets the C tokens from k * C on.
    """
    size = x.shape[axis]
    padding = [(0, 0)] * x.ndim
    padding[axis] = (0, -size % num_chunks)
    x = jnp.pad(x, padding)
    length = x.shape[axis] // num_chunks
    sizes = (length, num_chunks) if dealt else (num_chunks, length)
    x = x.reshape(*x.shape[:axis], *sizes, *x.shape[axis + 1 :])
    return jnp.moveaxis(x, axis + dealt, 0)


def _join(x_KC: Array, tokens: int, dealt: bool = True) -> Array:
    """The inverse of `_split` on the last axis, without the padding."""
    x = jnp.moveaxis(x_KC, 0, -1 if dealt else -2)
    return x.reshape(*x.shape[:-2], -1)[..., :tokens]


def _chunk_logits(
    hidden_CD: Array, weight_VD: Array, temperature: float, softcap: float | None
) -> Array:
    return soft_cap(head_logits(hidden_CD, weight_VD), softcap) / temperature


def _uncapped(
    grad_logits_CV: Array, logits_CV: Array, temperature: float, softcap: float | None
) -> Array:
    """The gradient of a chunk's logits before their temperature and soft cap."""
    grad_logits_CV = grad_logits_CV / temperature
    if softcap is None:
        return grad_logits_CV
    return grad_logits_CV * (1.0 - jnp.square(logits_CV * (temperature / softcap)))


def _is_target(targets_C: Array, vocab: int) -> Array:
    # A comparison: a gather from logits that are sharded over the vocabulary would move them all.
    return targets_C[..., None] == jnp.arange(vocab, dtype=targets_C.dtype)


def _chunk_by_chunk(
    body: Callable[[Carry, Any], tuple[Carry, Any]], carry: Carry, chunks: Any, stop: Array | None
) -> tuple[Carry, Any]:
    """`jax.lax.scan` over pytrees that ends before chunk `stop`: results from there on stay 0."""
    num_chunks = jax.tree.leaves(chunks)[0].shape[0]
    _, results = jax.eval_shape(body, carry, jax.tree.map(lambda x: x[0], chunks))
    results = jax.tree.map(lambda x: jnp.zeros((num_chunks, *x.shape), x.dtype), results)

    def step(k: Array, state: tuple[Carry, Any]) -> tuple[Carry, Any]:
        carry, found = body(state[0], jax.tree.map(lambda x: x[k], chunks))
        return carry, jax.tree.map(lambda all_, x: all_.at[k].set(x), state[1], found)

    return jax.lax.fori_loop(0, num_chunks if stop is None else stop, step, (carry, results))


def _forward(
    hidden_KCD: Array,
    weight_VD: Array,
    targets_KC: Array,
    stop: Array | None,
    temperature: float,
    softcap: float | None,
    with_entropy: bool,
    strictly: bool,
) -> tuple[Array, Array, Array | None]:
    """(logprobs, log-sum-exp, entropy or None), each [K, C]."""

    def body(carry, chunk):
        hidden_CD, targets_C = chunk
        if strictly:
            logits_CV = strict_logits(hidden_CD, weight_VD)
            sums_CM = strict_sums(logits_CV, temperature)
            found_C, lse_C = strict_logprob(logits_CV, sums_CM, targets_C, temperature)
            entropy_C = _strict_entropy(logits_CV, lse_C, temperature) if with_entropy else None
            return carry, (found_C, lse_C, entropy_C)
        logits_CV = _chunk_logits(hidden_CD, weight_VD, temperature, softcap)
        chosen_C, top_C, total_C, mean_C = _sums(logits_CV, targets_C, with_entropy)
        log_total_C = jnp.log(total_C)
        found_C = chosen_C - log_total_C
        entropy_C = None
        if mean_C is not None:
            # Not lse - sum(p * logits), a small difference of large numbers.
            entropy_C = log_total_C - mean_C / total_C
        return carry, (found_C, top_C + log_total_C, entropy_C)

    return _chunk_by_chunk(body, None, (hidden_KCD, targets_KC), stop)[1]


def _sums(
    logits_CV: Array, targets_C: Array, with_mean: bool
) -> tuple[Array, Array, Array, Array | None]:
    """The target's logit less the maximum, the maximum, and the sum of p, not normalised.

    `with_mean` adds the sum of p times the logit less the maximum.

    All sums are of logits relative to their maximum, so that XLA reads the logits once.
    """
    top_C = jnp.max(logits_CV, axis=-1)
    relative_CV = logits_CV - top_C[..., None]
    weights_CV = jnp.exp(relative_CV)
    total_C = jnp.sum(weights_CV, axis=-1)
    is_target = _is_target(targets_C, logits_CV.shape[-1])
    chosen_C = jnp.sum(jnp.where(is_target, relative_CV, 0.0), axis=-1)
    mean_C = jnp.sum(weights_CV * relative_CV, axis=-1) if with_mean else None
    return chosen_C, top_C, total_C, mean_C


def _strict_entropy(logits_CV: Array, lse_C: Array, temperature: float) -> Array:
    """The entropy, apart from the log-probs: one pass over the logits."""
    logits_CV, lse_C = jax.lax.optimization_barrier((logits_CV, lse_C))
    logprobs_CV = logits_CV / temperature - lse_C[:, None]
    return -jnp.sum(jnp.exp(logprobs_CV) * logprobs_CV, axis=-1)


def _primal(
    hidden_KCD: Array,
    weight_VD: Array,
    targets_KC: Array,
    stop: Array | None,
    temperature: float,
    softcap: float | None,
    with_entropy: bool,
    strictly: bool,
) -> tuple[Array, Array | None]:
    how = (temperature, softcap, with_entropy, strictly)
    out = _forward(hidden_KCD, weight_VD, targets_KC, stop, *how)
    return out[0], out[2]


def _scan_fwd(
    hidden_KCD: Array,
    weight_VD: Array,
    targets_KC: Array,
    stop: Array | None,
    temperature: float,
    softcap: float | None,
    with_entropy: bool,
    strictly: bool,
) -> tuple[tuple[Array, Array | None], Saved]:
    how = (temperature, softcap, with_entropy, strictly)
    logprobs, lse, entropy = _forward(hidden_KCD, weight_VD, targets_KC, stop, *how)
    return (logprobs, entropy), (hidden_KCD, weight_VD, targets_KC, stop, lse, entropy)


def _scan_bwd(
    temperature: float,
    softcap: float | None,
    with_entropy: bool,
    strictly: bool,
    saved: Saved,
    grads: tuple[Array, Array | None],
) -> tuple[Array, Array, None, None]:
    """With z the logits over the temperature, p = softmax(z) and H the entropy:

    d logprob / dz = onehot - p;  dH / dz = -p (z - lse + H). `_uncapped` goes on to the logits.
    """
    hidden_KCD, weight_VD, targets_KC, stop, lse_KC, entropy_KC = saved
    grad_logprobs_KC, grad_entropy_KC = grads
    chunks = (hidden_KCD, targets_KC, lse_KC, entropy_KC, grad_logprobs_KC, grad_entropy_KC)
    if strictly:
        most = _most_together(targets_KC.shape[1], weight_VD.shape[0])
        number = max(1, len(targets_KC))
        together = next(n for n in range(min(most, number), 0, -1) if number % n == 0)
        chunks = jax.tree.map(partial(_larger, together, stop), chunks)
        stop = None if stop is None else -(-stop // together)

    run = partial(head_matmul, exact=hidden_KCD.dtype != weight_VD.dtype)

    def body(grad_weight_VD, chunk):
        hidden_CD, targets_C, lse_C, entropy_C, grad_C, grad_entropy_C = chunk
        logits_CV = _chunk_logits(hidden_CD, weight_VD, temperature, softcap)
        logprobs_CV = logits_CV - lse_C[..., None]
        weights_CV = grad_C[..., None]
        if with_entropy:
            weights_CV = weights_CV + grad_entropy_C[..., None] * (
                logprobs_CV + entropy_C[..., None]
            )
        is_target = _is_target(targets_C, weight_VD.shape[0])
        grad_logits_CV = jnp.where(is_target, grad_C[..., None], 0.0)
        grad_logits_CV = grad_logits_CV - jnp.exp(logprobs_CV) * weights_CV
        grad_logits_CV = _uncapped(grad_logits_CV, logits_CV, temperature, softcap)
        grad_logits_CV = grad_logits_CV.astype(weight_VD.dtype)
        grad_hidden_CD = run("...v,vd->...d", grad_logits_CV, weight_VD)
        grad_weight_VD += run("...v,...d->vd", grad_logits_CV, hidden_CD)
        return grad_weight_VD, grad_hidden_CD.astype(hidden_CD.dtype)

    zero = jnp.zeros(weight_VD.shape, jnp.float32)
    grad_weight_VD, grad_hidden_KCD = _chunk_by_chunk(body, zero, chunks, stop)
    if strictly:
        grad_hidden_KCD = grad_hidden_KCD.reshape(hidden_KCD.shape)
    return grad_hidden_KCD, grad_weight_VD.astype(weight_VD.dtype), None, None


def _larger(together: int, stop: Array | None, x_KC: Array) -> Array:
    """Chunks of `together` strict chunks; zeros, which have no gradient, from chunk `stop` on.

    Only values must be strict. Each chunk reads and writes the whole gradient of the weights, which
    takes longer than the matmuls of a strict chunk.
    """
    if stop is not None:
        computed_K = (jnp.arange(len(x_KC)) < stop).reshape(-1, *(1,) * (x_KC.ndim - 1))
        x_KC = jnp.where(computed_K, x_KC, 0)
    return x_KC.reshape(len(x_KC) // together, together * x_KC.shape[1], *x_KC.shape[2:])


def _most_together(rows: int, vocab_size: int) -> int:
    """The most strict chunks that the backward pass joins."""
    return max(1, DEFAULT_CHUNK_LOGITS // (rows * vocab_size))


_scan = jax.custom_vjp(_primal, nondiff_argnums=(4, 5, 6, 7))
_scan.defvjp(_scan_fwd, _scan_bwd)
