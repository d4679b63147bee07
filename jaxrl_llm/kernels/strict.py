"""Strict operations: a row's result has the same bits in every batch, and in every program.

XLA chooses the order of a sum by the shapes: the rows of a matmul, the keys of a row, what is fused
with what. Here rows are computed in chunks of one size by a loop whose body is the same in every
program. Barriers keep it apart from its surroundings. Padding fills the last chunk. The gradient is
the ordinary one of the same function: only results of the forward pass are compared.

Shape letters: M rows, C rows of a chunk, X queries, N query heads, K KV heads, H head dim, J keys
of a block.
"""

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm.kernels.hopper import num_blocks, on_gpu


@dataclass(frozen=True, kw_only=True)
class Strict:
    """Settings of strict operations. Sampler and trainer must have equal ones."""

    rows: int  # C
    block: int  # J, keys of a block; sums over keys go block after block
    align: int = 1  # runs of tokens begin at multiples of this in a row
    kernels: bool = False  # projections and norms by kernels, of any number of rows


_in_scope: ContextVar[Strict | None] = ContextVar("strict", default=None)


@contextlib.contextmanager
def strict_scope(strict: Strict | None) -> Iterator[None]:
    """Trace layers within this context strictly, unless `strict` is None."""
    token = _in_scope.set(strict)
    try:
        yield
    finally:
        _in_scope.reset(token)


def strict_in_scope() -> Strict | None:
    """The enclosing `strict_scope`; None where layers may be computed in any order."""
    return _in_scope.get()


def by_rows(strict: Strict, run: Callable[..., Any], shared: Any, *rows: Any, lead: int = 2) -> Any:
    """`run(shared, *rows)`, computed in chunks of `strict.rows` rows.

    Each array of `rows` begins with the same `lead` dims, which are joined, and so do the results.

    Requires: `run` treats every row alike and apart, and takes one joined dim.
    """
    return _by_rows(strict.rows, run, lead, shared, rows)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _by_rows(size: int, run: Callable[..., Any], lead: int, shared: Any, rows: Any) -> Any:
    shape = jax.tree.leaves(rows)[0].shape[:lead]
    joined = jax.tree.map(lambda x: x.reshape(-1, *x.shape[lead:]), rows)

    def chunk(rows: Any) -> Any:
        return lax.optimization_barrier(run(shared, *lax.optimization_barrier(rows)))

    found = _for_each_chunk(chunk, joined, size)
    return jax.tree.map(lambda x: x.reshape(*shape, *x.shape[1:]), found)


def _for_each_chunk(run: Callable[[Any], Any], rows: Any, size: int) -> Any:
    """`run` of chunks of `size` rows, joined again. The last chunk is filled with zeros."""
    number = jax.tree.leaves(rows)[0].shape[0]
    chunks = -(-number // size)

    def padded(x: Array) -> Array:
        return jnp.pad(x, ((0, chunks * size - number), *((0, 0),) * (x.ndim - 1)))

    each = _for_each_on_gpu if on_gpu() else _for_each_on_cpu
    found = each(run, jax.tree.map(padded, rows), size, chunks)
    return jax.tree.map(lambda x: x[:number], found)


def _for_each_on_gpu(run: Callable[[Any], Any], rows: Any, size: int, chunks: int) -> Any:
    cut = jax.tree.map(lambda x: x.reshape(chunks, size, *x.shape[1:]), rows)
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), lax.map(run, cut))


def _for_each_on_cpu(run: Callable[[Any], Any], rows: Any, size: int, chunks: int) -> Any:
    """A loop whose number of steps XLA does not know, which has no gradient.

    XLA's CPU compiler would join a loop of one step with its surroundings. On a GPU each step of
    such a loop would wait for the host.
    """

    def of(index: Array) -> Any:
        return jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, index * size, size), rows)

    def step(index: Array, found: Any) -> Any:
        return jax.tree.map(
            lambda all_, x: lax.dynamic_update_slice_in_dim(all_, x, index * size, 0),
            found,
            run(of(index)),
        )

    shapes = jax.eval_shape(lambda: run(of(jnp.int32(0))))
    empty = jax.tree.map(lambda x: jnp.zeros((chunks * size, *x.shape[1:]), x.dtype), shapes)
    return lax.fori_loop(0, lax.optimization_barrier(jnp.int32(chunks)), step, empty)


def _backward(
    size: int, run: Callable[..., Any], lead: int, residuals: Any, gradient: Any
) -> tuple[Any, Any]:
    shared, rows = residuals

    def whole(shared: Any, rows: Any) -> Any:
        shape = jax.tree.leaves(rows)[0].shape[:lead]
        joined = jax.tree.map(lambda x: x.reshape(-1, *x.shape[lead:]), rows)
        found = run(shared, *joined)
        return jax.tree.map(lambda x: x.reshape(*shape, *x.shape[1:]), found)

    return jax.vjp(whole, shared, rows)[1](gradient)


_by_rows.defvjp(lambda *operands: (_by_rows(*operands), operands[3:]), _backward)


@jax.custom_vjp
def strict_sum(x: Float[Array, "... D"]) -> Float[Array, "..."]:
    """The sum over the last dim, in one order for every number of rows.

    Written as additions of slices: XLA may not exchange these, as it may the order of a reduction.
    """
    parts = next(n for n in (32, 16, 8, 4, 2, 1) if x.shape[-1] % n == 0)
    slices = jnp.split(x, parts, axis=-1)
    columns = lax.optimization_barrier(reduce(jnp.add, slices))
    return reduce(jnp.add, [columns[..., i] for i in range(columns.shape[-1])])


def _sum_backward(shape: Array, gradient: Array) -> tuple[Array]:
    return (jnp.broadcast_to(gradient[..., None], shape.shape),)


# The residual gives its shape only; nothing reads its values.
strict_sum.defvjp(lambda x: (strict_sum(x), x), _sum_backward)

# Keys, values and visibility of a chunk's queries in one block: [C, J, K, H] twice and bool [C, J].
Block = tuple[Array, Array, Array]


def attend_in_blocks(
    strict: Strict,
    q_XNH: Float[Array, "X N H"],
    steps_X: Int[Array, " X"],
    place: Any,
    block_at: Callable[[Any, Array], Block],
) -> Float[Array, "X N H"]:
    """Attention of each query to its own list of `steps_X` blocks of keys, in their order.

    `place` is a pytree of arrays [X, ...] that says where a query's keys are: `block_at(place of a
    chunk, step)` reads a block of all its queries.

    Guarantees: blocks of which a query sees nothing change none of its bits.
    """

    def chunk(inputs: Any) -> Array:
        q_CNH, steps_C, place_C = inputs
        first = _no_keys(q_CNH, place_C, block_at)
        last = jnp.max(steps_C)

        def step(carry: Any) -> Any:
            index, sums = carry
            block = block_at(place_C, index)
            given = lax.optimization_barrier((q_CNH, sums, block))
            return index + 1, lax.optimization_barrier(_add_block(*given))

        _, (acc, _, total) = lax.while_loop(lambda c: c[0] < last, step, (jnp.int32(0), first))
        acc, total = lax.optimization_barrier((acc, total))
        out = jnp.where(total > 0, acc / jnp.where(total > 0, total, 1.0), 0.0)
        return lax.optimization_barrier(out.reshape(q_CNH.shape).astype(q_CNH.dtype))

    return _for_each_chunk(chunk, (q_XNH, steps_X, place), strict.rows)


def _no_keys(
    q_CNH: Array, place: Any, block_at: Callable[[Any, Array], Block]
) -> tuple[Array, ...]:
    """The sums before the first block: weighted values, maximum and weights."""
    (C, N, H), keys = q_CNH.shape, jax.eval_shape(block_at, place, jnp.int32(0))[0]
    K = keys.shape[2]
    shape = (C, K, N // K)
    # Finite: the exponential of -inf less this is 0.
    return (
        jnp.zeros((*shape, H), jnp.float32),
        jnp.full((*shape, 1), -1e30, jnp.float32),
        jnp.zeros((*shape, 1), jnp.float32),
    )


def _add_block(q_CNH: Array, sums: tuple[Array, ...], block: Block) -> tuple[Array, ...]:
    (acc, top, total), (k_CJKH, v_CJKH, sees_CJ) = sums, block
    C, N, H = q_CNH.shape
    q_CKGH = q_CNH.reshape(C, k_CJKH.shape[2], -1, H)
    scores = jnp.einsum("CKGH,CJKH->CKGJ", q_CKGH, k_CJKH, preferred_element_type=jnp.float32)
    sees_CJ = sees_CJ[:, None, None]
    scores = jnp.where(sees_CJ, scores * H**-0.5, -jnp.inf)
    new_top = jnp.maximum(top, jnp.max(scores, axis=-1, keepdims=True))
    weights = jnp.exp(scores - new_top)
    keep = jnp.exp(top - new_top)
    # An unseen value may be anything, and 0 * NaN is NaN.
    v_CJKH = jnp.where(sees_CJ[:, 0, 0, :, None, None], v_CJKH, 0)
    new = jnp.einsum(
        "CKGJ,CJKH->CKGH", weights.astype(v_CJKH.dtype), v_CJKH, preferred_element_type=jnp.float32
    )
    return acc * keep + new, new_top, total * keep + weights.sum(axis=-1, keepdims=True)


class Runs(NamedTuple):
    """Where each query's keys are: two runs, of which the second follows the first."""

    first_X: Int[Array, " X"]
    first_end_X: Int[Array, " X"]
    second_X: Int[Array, " X"]
    second_end_X: Int[Array, " X"]

    def steps(self, block: int) -> Int[Array, " X"]:
        """The number of blocks that hold the keys; each run begins a block."""
        second = num_blocks(self.second_end_X - self.second_X, block)
        return num_blocks(self.first_end_X - self.first_X, block) + second

    def block(
        self, step: Int[Array, ""], block: int
    ) -> tuple[Bool[Array, " X"], Int[Array, "X J"], Bool[Array, "X J"]]:
        """Block number `step`: whether it is in the first run, its keys, which the run has."""
        of_first_X = num_blocks(self.first_end_X - self.first_X, block)
        in_first_X = step < of_first_X
        begin_X = jnp.where(in_first_X, self.first_X, self.second_X)
        begin_X += (step - jnp.where(in_first_X, 0, of_first_X)) * block
        end_X = jnp.where(in_first_X, self.first_end_X, self.second_end_X)
        key_XJ = begin_X[:, None] + jnp.arange(block)
        return in_first_X, key_XJ, key_XJ < end_X[:, None]
