"""The head of a language model in chunks of tokens: one chunk of logits exists at a time.

Shape letters: N tokens (possibly several axes), D model width, V vocabulary, G chunks, C tokens of
a chunk.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxrl_llm.kernels.partial_softmax import soft_cap
from jaxrl_llm.kernels.strict import Strict

# Logits of a default chunk: 1 GiB in float32, over all devices. With a vocabulary of 152k these are
# 1766 tokens, which keep a GPU busy.
DEFAULT_CHUNK_LOGITS = 2**28

Carry = TypeVar("Carry")


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


def chunk_logits(
    hidden_CD: Array, weight_VD: Array, temperature: float, softcap: float | None
) -> Array:
    """Logits of a chunk with their soft cap, over the temperature."""
    return soft_cap(head_logits(hidden_CD, weight_VD), softcap) / temperature


def uncapped(
    grad_logits_CV: Array, logits_CV: Array, temperature: float, softcap: float | None
) -> Array:
    """The gradient of a chunk's logits before their temperature and soft cap."""
    grad_logits_CV = grad_logits_CV / temperature
    if softcap is None:
        return grad_logits_CV
    return grad_logits_CV * (1.0 - jnp.square(logits_CV * (temperature / softcap)))


def in_chunks(
    targets_N: Int[Array, " *N"],
    *others: Array,
    vocab: int,
    lengths: Int[Array, "*M"] | None,
    chunk: int | None,
    strict: Strict | None,
) -> tuple[list[Array], Array | None, Callable[[Array], Array]]:
    """The targets, and other arrays of the same tokens, in chunks of at most `chunk` tokens.

    Chunks from the second result on are not computed; None: all are. The third joins a result.

    Requires: with `strict`, one axis of whole chunks; see `over_whole_chunks`.
    """
    dealt, stop = lengths is None, None
    number = num_chunks(targets_N.shape, vocab, chunk)
    if strict is not None:
        number = targets_N.size // strict.rows
    arrays = [split(x, targets_N.ndim - 1, number, dealt) for x in (targets_N, *others)]
    if lengths is not None:
        stop = -(-jnp.max(lengths).astype(jnp.int32) // arrays[0].shape[-1])
    return arrays, stop, partial(join, tokens=targets_N.shape[-1], dealt=dealt)


def num_chunks(shape: Sequence[int], vocab: int, chunk: int | None) -> int:
    """Number of chunks of at most `chunk` tokens, up to twice as many if that avoids padding.

    None takes what fits 1 GiB.
    """
    if chunk is None:
        chunk = max(1, DEFAULT_CHUNK_LOGITS // vocab)
    *rows, tokens = shape
    fewest = max(1, -(-tokens // max(1, chunk // max(math.prod(rows), 1))))
    exact = (k for k in range(fewest, 2 * fewest) if tokens % k == 0)
    return next(exact, fewest)


def are_whole_chunks(targets_N: Array, strict: Strict) -> bool:
    """True for tokens on one axis that fill their chunks."""
    return targets_N.ndim == 1 and targets_N.size > 0 and targets_N.size % strict.rows == 0


def over_whole_chunks(
    run: Callable[..., Any],
    targets_N: Array,
    *others: Array,
    vocab: int,
    lengths: Array | None,
    strict: Strict,
) -> Any:
    """`run(targets, *others, lengths=)` of one axis of chunks that the backward pass can join.

    Only a single row keeps its length.
    """
    chunks = max(1, -(-targets_N.size // strict.rows))
    groups = max(1, -(-chunks // _most_together(strict.rows, vocab)))
    added = groups * -(-chunks // groups) * strict.rows - targets_N.size

    def flat(x: Array) -> Array:
        x = x.reshape(-1, *x.shape[targets_N.ndim :])
        no_token = -1 if jnp.issubdtype(x.dtype, jnp.integer) else 0
        return jnp.pad(x, [(0, added)] + [(0, 0)] * (x.ndim - 1), constant_values=no_token)

    one_row = lengths.reshape(()) if lengths is not None and lengths.size == 1 else None
    found = run(*map(flat, (targets_N, *others)), lengths=one_row)
    return jax.tree.map(lambda x: x[: targets_N.size].reshape(targets_N.shape), found)


def split(x: Array, axis: int, num_chunks: int, dealt: bool = True) -> Array:
    """x with `axis` split over a new first axis of G = `num_chunks` chunks.

    If `dealt`, chunk k gets tokens k, k + G, k + 2G, ...: if the axis is sharded, every device has
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


def join(x_GC: Array, tokens: int, dealt: bool = True) -> Array:
    """The inverse of `split` on the last axis, without the padding."""
    x = jnp.moveaxis(x_GC, 0, -1 if dealt else -2)
    return x.reshape(*x.shape[:-2], -1)[..., :tokens]


def chunk_by_chunk(
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


def head_gradients(
    grad_logits: Callable[..., Array],
    hidden_GCD: Array,
    weight_VD: Array,
    saved: tuple[Any, ...],
    stop: Array | None = None,
    *,
    strictly: bool = False,
) -> tuple[Array, Array]:
    """Gradients of the hidden states and of the head, in their dtypes; sums are float32.

    `grad_logits(hidden_CD, *chunk_of_saved)` gives the gradient of a chunk's logits [..., C, V].
    """
    chunks = (hidden_GCD, *saved)
    if strictly:
        most = _most_together(hidden_GCD.shape[1], weight_VD.shape[0])
        number = max(1, len(hidden_GCD))
        together = next(n for n in range(min(most, number), 0, -1) if number % n == 0)
        chunks = jax.tree.map(partial(_larger, together, stop), chunks)
        stop = None if stop is None else -(-stop // together)

    run = partial(head_matmul, exact=hidden_GCD.dtype != weight_VD.dtype)

    def body(grad_weight_VD: Array, chunk: Any) -> tuple[Array, Array]:
        hidden_CD, *rest = chunk
        grad_logits_CV = grad_logits(hidden_CD, *rest).astype(weight_VD.dtype)
        grad_hidden_CD = run("...v,vd->...d", grad_logits_CV, weight_VD)
        grad_weight_VD += run("...v,...d->vd", grad_logits_CV, hidden_CD)
        return grad_weight_VD, grad_hidden_CD.astype(hidden_CD.dtype)

    zero = jnp.zeros(weight_VD.shape, jnp.float32)
    grad_weight_VD, grad_hidden_GCD = chunk_by_chunk(body, zero, chunks, stop)
    return grad_hidden_GCD.reshape(hidden_GCD.shape), grad_weight_VD.astype(weight_VD.dtype)


def _larger(together: int, stop: Array | None, x_GC: Array) -> Array:
    """Chunks of `together` strict chunks; zeros, which have no gradient, from chunk `stop` on.

    Only values must be strict. Each chunk reads and writes the whole gradient of the weights, which
    takes longer than the matmuls of a strict chunk.
    """
    if stop is not None:
        computed_G = (jnp.arange(len(x_GC)) < stop).reshape(-1, *(1,) * (x_GC.ndim - 1))
        x_GC = jnp.where(computed_G, x_GC, 0)
    return x_GC.reshape(len(x_GC) // together, together * x_GC.shape[1], *x_GC.shape[2:])


def _most_together(rows: int, vocab_size: int) -> int:
    """The most strict chunks that the backward pass joins."""
    return max(1, DEFAULT_CHUNK_LOGITS // (rows * vocab_size))
