"""The two products of decode attention with a unit's blocks, in two forms.

Shape letters: those of `decode_attention_mosaic`.

- Queries as rows: scores [M, J] are queries times keys, results [M, H] weights times values. Tiles
  have 64 rows, which the queries of slots that share a prompt fill.
- Queries as columns: scores [J, L] are keys times queries, results [H, L] values times weights. The
  queries of a slot alone, up to MOST_COLUMNS, are few columns, of which the tensor cores take any
  multiple of 8: the scores, their exponentials and the result have no padding to 64. Weights go
  through shared memory, and the greatest score of a column is found across warps.
"""

import abc
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from jaxrl_llm.kernels.decode_attention_program import TILE_ROWS, WHOLE, Load, Program


class Products(abc.ABC):
    """Attention of a unit's queries to its blocks, by a program.

    The interpreter takes the operands of a product from memory only, and that of jax 0.10 knows
    neither layouts nor transposed operands: there, operands go through the `spill` places.
    """

    entries_axis: int  # of scores; the other is the queries', of results too

    def __init__(self, program: Program) -> None:
        self.program, self.memory = program, program.memory
        self.head_dim = self.memory.k_ring.shape[2]

    @property
    @abc.abstractmethod
    def num_queries(self) -> int:
        """Those of a product, padding included."""

    @abc.abstractmethod
    def queries(self, place: Any) -> Any:
        """The queries as an operand; `place` is where a slot's own were loaded."""

    @abc.abstractmethod
    def multiply_keys(self, scores_ref: Any, keys_JH: Any, q: Any) -> None:
        """Their products, into an accumulator of zeros."""

    @abc.abstractmethod
    def weights_operand(self, weights: jax.Array) -> Any:
        """The weights of a block as an operand."""

    @abc.abstractmethod
    def multiply_values(self, values_ref: Any, values_JH: Any, weights: Any) -> None:
        """Their products, into an accumulator of zeros."""

    @abc.abstractmethod
    def add_up(self, total: jax.Array, keep: jax.Array, weights: jax.Array) -> jax.Array:
        """The sum of weights, rescaled, and a block's."""

    @abc.abstractmethod
    def store(self, acc: jax.Array, high: jax.Array, total: jax.Array) -> None:
        """The result, normalised, and its log-sum-exps in base 2, into shared memory."""

    @abc.abstractmethod
    def first_total(self) -> jax.Array:
        """No weights yet."""

    def for_each_query(self, x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """What each query has, for all its scores or its whole result."""
        return lax.broadcast_in_dim(x, shape, [1 - self.entries_axis])

    def accumulator(self, others: int) -> tuple[int, int]:
        """The shape of all queries' products, of `others` each: a block's entries or H."""
        n = self.num_queries
        return (n, others) if self.entries_axis else (others, n)

    def attend(self, q: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Sum of weighted values, maximum score in base 2, and sum of weights, over all steps."""
        program = self.program

        def step_fn(step: Any, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            acc, high, total = carry
            place = program.place(step)
            ahead = program.find(step + program.stages)  # its page, while this step's keys arrive
            scores = self.scores(q, step, place, ahead)
            new_high = jnp.maximum(high, scores.max(axis=self.entries_axis) * program.to_base_2)
            keep = jnp.exp2(high - new_high)
            # A multiplication and a subtraction: one instruction together.
            weights = jnp.exp2(
                scores * program.to_base_2 - self.for_each_query(new_high, scores.shape)
            )
            total = self.add_up(total, keep, weights)
            new = self.weighted_values(weights, step, place, ahead)
            return acc * self.for_each_query(keep, acc.shape) + new, new_high, total

        layout = plgpu.Layout.WGMMA
        carry = (
            program.held(jnp.zeros(self.accumulator(self.head_dim), jnp.float32), layout),
            program.held(
                jnp.full((self.num_queries,), -jnp.inf, jnp.float32),
                layout.reduce(self.entries_axis),
            ),
            self.first_total(),
        )
        return lax.fori_loop(0, program.blocks.steps, step_fn, carry)

    def scores(self, q: Any, step: Any, place: Any, ahead: Load) -> jax.Array:
        """Products of the queries with a step's keys; the keys' place is loaded anew."""
        program, memory = self.program, self.memory
        plgpu.barrier_wait(memory.k_barriers.at[place])
        program.mend(step, place, keys=True)
        multiply = partial(self.multiply_keys, q=q)
        return self.masked(self.product(multiply, program.block, place, ahead, keys=True), step)

    def masked(self, scores: jax.Array, step: Any) -> jax.Array:
        """-inf for entries that are not seen.

        Most blocks are seen whole: passing them by saves a sixth of the loop's instructions.
        """
        program = self.program
        visible_from, visible_to = program.blocks.visible(step, program.block)
        seen_in_part = visible_to < program.block
        if visible_from is not None:
            seen_in_part |= visible_from > 0

        def mask(scores: jax.Array) -> jax.Array:
            entry = program.positions(scores.shape, self.entries_axis, plgpu.Layout.WGMMA)
            seen = entry < visible_to
            if visible_from is not None:
                seen &= entry >= visible_from
            return jnp.where(seen, scores, -jnp.inf)

        return lax.cond(seen_in_part, mask, lambda scores: scores, scores)

    def weighted_values(self, weights: jax.Array, step: Any, place: Any, ahead: Load) -> jax.Array:
        """Products of the weights with a step's values; their place is loaded anew."""
        program, memory = self.program, self.memory
        operand = self.weights_operand(weights.astype(program.operand))
        plgpu.barrier_wait(memory.v_barriers.at[place])
        program.mend(step, place, keys=False)
        multiply = partial(self.multiply_values, weights=operand)
        return self.product(multiply, self.head_dim, place, ahead, keys=False)

    def product(
        self,
        multiply: Callable[[Any, Any], None],
        others: int,
        place: Any,
        ahead: Load,
        *,
        keys: bool,
    ) -> jax.Array:
        """Products of all queries, of `others` each, with a step's keys or values.

        Their place in the ring is loaded anew: at once if they are widened, else after the product.
        """
        program, memory = self.program, self.memory
        block_JH = (memory.k_ring if keys else memory.v_ring).at[place]
        if memory.wide_JH is not None:
            block_JH = memory.wide_JH
            program.load(ahead, place, keys=keys)

        def run(accumulator_ref: Any) -> jax.Array:
            multiply(accumulator_ref, block_JH)
            return accumulator_ref[...]

        # A fresh accumulator a block, added by the caller: as many instructions as scaling one
        # that lives through the loop, and the interpreter can run it.
        shape = self.accumulator(others)
        products = pl.run_scoped(run, plgpu.WGMMAAccumulatorRef(shape, jnp.float32))
        if memory.wide_JH is None:
            program.load(ahead, place, keys=keys)
        return products

    def spilled(self, name: str, x: jax.Array) -> Any:
        """The interpreter's place for an operand, filled; the read of `x` is over then."""
        ref = getattr(self.memory, name)
        ref[...] = x
        plgpu.commit_smem()
        return ref


class QueriesAsRows(Products):
    """Products of the queries of an item's slots, or of a slot with more than MOST_COLUMNS."""

    entries_axis = 1

    @property
    def num_queries(self) -> int:
        return TILE_ROWS

    def queries(self, place: Any) -> Any:
        """In registers, which leaves `q_MH` free."""
        del place
        if self.program.interpreted:
            return self.spilled("spill_MH", self.memory.q_MH[...])
        return plgpu.load(self.memory.q_MH, *WHOLE, layout=plgpu.Layout.WGMMA)

    def multiply_keys(self, scores_ref: Any, keys_JH: Any, q: Any) -> None:
        keys_HJ = keys_JH.transpose((1, 0))
        if self.program.interpreted:
            keys_HJ = self.spilled("spill_HJ", keys_JH[...].T)
        plgpu.wgmma(scores_ref, q, keys_HJ)

    def weights_operand(self, weights: jax.Array) -> Any:
        return self.spilled("spill_MJ", weights) if self.program.interpreted else weights

    def multiply_values(self, values_ref: Any, values_JH: Any, weights: Any) -> None:
        plgpu.wgmma(values_ref, weights, values_JH)

    def first_total(self) -> jax.Array:
        zeros_M = jnp.zeros((TILE_ROWS,), jnp.float32)
        return self.program.held(zeros_M, plgpu.Layout.WGMMA.reduce(1))

    def add_up(self, total: jax.Array, keep: jax.Array, weights: jax.Array) -> jax.Array:
        return total * keep + weights.sum(axis=1)

    def store(self, acc: jax.Array, high: jax.Array, total: jax.Array) -> None:
        out = acc * self.for_each_query(_inverse(total), acc.shape)
        self.memory.out_MH[...] = out.astype(self.memory.out_MH.dtype)
        self.memory.sums_M[...] = high + jnp.log2(total)


class QueriesAsColumns(Products):
    """Products of the queries of one slot, MOST_COLUMNS at most."""

    entries_axis = 0

    @property
    def num_queries(self) -> int:
        return self.memory.q_2LH.shape[1]

    def queries(self, place: Any) -> Any:
        """In shared memory, at one of two places: the next unit's are loaded to the other."""
        return self.memory.q_2LH.at[place]

    def multiply_keys(self, scores_ref: Any, keys_JH: Any, q: Any) -> None:
        q_HL = q.transpose((1, 0))
        if self.program.interpreted:
            q_HL = self.spilled("spill_HL", q[...].T)
        plgpu.wgmma(scores_ref, keys_JH, q_HL)

    def weights_operand(self, weights: jax.Array) -> Any:
        """Shared memory, free by the barrier of the warpgroup that goes before each store."""
        self.store_transposed(weights, self.memory.weights_LJ)
        plgpu.commit_smem()
        if self.program.interpreted:
            return self.spilled("spill_JL", self.memory.weights_LJ[...].T)
        return self.memory.weights_LJ.transpose((1, 0))

    def multiply_values(self, values_ref: Any, values_JH: Any, weights: Any) -> None:
        values_HJ = values_JH.transpose((1, 0))
        if self.program.interpreted:
            values_HJ = self.spilled("spill_HJ", values_JH[...].T)
        plgpu.wgmma(values_ref, values_HJ, weights)

    def first_total(self) -> jax.Array:
        """Of each entry of a block: they are added to one another at the end, once."""
        zeros_JL = jnp.zeros((self.program.block, self.num_queries), jnp.float32)
        return self.program.held(zeros_JL, plgpu.Layout.WGMMA)

    def add_up(self, total: jax.Array, keep: jax.Array, weights: jax.Array) -> jax.Array:
        return total * self.for_each_query(keep, total.shape) + weights

    def store(self, acc: jax.Array, high: jax.Array, total: jax.Array) -> None:
        total_L, rows = total.sum(axis=0), pl.ds(0, self.num_queries)
        out = acc * self.for_each_query(_inverse(total_L), acc.shape)
        out_LH = self.memory.out_MH.at[rows]
        self.store_transposed(out.astype(out_LH.dtype), out_LH)
        if self.memory.sums_M is not None:
            self.memory.sums_M[rows] = high + jnp.log2(total_L)

    def store_transposed(self, x: jax.Array, ref: Any) -> None:
        if self.program.interpreted:
            ref[...] = x.T
        else:
            by_column = plgpu.layout_cast(x, plgpu.Layout.WGMMA_TRANSPOSED)
            ref.transpose((1, 0))[...] = by_column


def _inverse(total: jax.Array) -> jax.Array:
    """No step at all leaves zeros."""
    return 1.0 / jnp.where(total == 0.0, 1.0, total)
