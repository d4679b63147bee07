"""The two matmuls of decode attention per block, in two forms.

- Queries as rows: scores [M, J] are queries times keys, results [M, H] weights times values. A
  tile has 64 rows, which the queries of a prompt tile fill.
- Queries as columns: scores [J, L] are keys times queries, results [H, L] values times weights. A
  slot has few queries, and the tensor cores take any multiple of 8 columns. So neither the scores,
  nor their exponentials, nor the result are padded to 64. The weights pass through shared memory,
  and the maximum of a column is computed across warps.

Shape letters: see kernel.py.
"""

import abc
from collections.abc import Callable
from functools import partial

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from jaxrl_llm.kernels.decode_attention.pipeline import TILE_ROWS, WHOLE, Load, Pipeline
from jaxrl_llm.kernels.hopper import LOG2_E, Ref, accumulate
from jaxrl_llm.kernels.mosaic import plgpu

Operand = jax.Array | Ref  # in registers, or in shared memory


class Matmuls(abc.ABC):
    """Attention of a tile job's queries to its blocks.

    The interpreter takes operands from memory only. In jax 0.10 it supports neither layouts
    nor transposed operands. In interpret mode operands therefore pass through the `spill` buffers.
    """

    entries_axis: int  # entries' axis of the scores; queries are on the other axis, also in results

    def __init__(self, pipeline: Pipeline, *, strictly: bool = False) -> None:
        """`strictly` adds a block's values in the accumulator, as flash attention does."""
        self.pipeline, self.memory, self.strictly = pipeline, pipeline.memory, strictly
        self.head_dim = self.memory.k_ring.shape[2]

    @property
    @abc.abstractmethod
    def num_queries(self) -> int:
        """The queries of a matmul, padding included."""

    @abc.abstractmethod
    def queries(self, buffer: jax.Array) -> Operand:
        """The queries as an operand. `buffer` is where a slot's queries were loaded."""

    @abc.abstractmethod
    def multiply_keys(self, scores_ref: Ref, keys_JH: Ref, q: Operand) -> None:
        """Add the scores to an accumulator."""

    @abc.abstractmethod
    def weights_operand(self, weights: jax.Array) -> Operand:
        """The weights of a block as an operand."""

    @abc.abstractmethod
    def multiply_values(self, values_ref: Ref, values_JH: Ref, weights: Operand) -> None:
        """Add the weighted values to an accumulator."""

    @abc.abstractmethod
    def first_total(self) -> jax.Array:
        """The sum of no weights."""

    @abc.abstractmethod
    def add_up(self, total: jax.Array, keep: jax.Array, weights: jax.Array) -> jax.Array:
        """The sum of weights so far, rescaled by `keep`, plus the weights of a block."""

    @abc.abstractmethod
    def store(self, acc: jax.Array, high: jax.Array, total: jax.Array) -> None:
        """Store the normalised result and its log-sum-exps in base 2 to shared memory."""

    def for_each_query(self, x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """Broadcast one number per query to scores or results of `shape`."""
        return lax.broadcast_in_dim(x, shape, [1 - self.entries_axis])

    def accumulator_shape(self, others: int) -> tuple[int, int]:
        """The shape of a matmul's result. `others` are the block's entries or H."""
        n = self.num_queries
        return (n, others) if self.entries_axis else (others, n)

    def attend(self, q: Operand) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Sum of weighted values, maximum score in base 2, and sum of weights, over all steps."""
        pipeline = self.pipeline

        def step_fn(step: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            acc, high, total = carry
            stage = pipeline.stage(step)
            # Looks its page up while this step's keys arrive.
            ahead = pipeline.find(step + pipeline.stages)
            scores = self.scores(q, step, stage, ahead)
            new_high = jnp.maximum(high, scores.max(axis=self.entries_axis) * pipeline.to_base_2)
            keep = jnp.exp2(high - new_high)
            # A multiplication and a subtraction: one instruction together.
            weights = jnp.exp2(
                scores * pipeline.to_base_2 - self.for_each_query(new_high, scores.shape)
            )
            total = self.add_up(total, keep, weights)
            if self.strictly:
                acc *= self.for_each_query(keep, acc.shape)
                return self.weighted_values(weights, step, stage, ahead, acc), new_high, total
            new = self.weighted_values(weights, step, stage, ahead)
            return acc * self.for_each_query(keep, acc.shape) + new, new_high, total

        layout = plgpu.Layout.WGMMA
        carry = (
            pipeline.in_layout(
                jnp.zeros(self.accumulator_shape(self.head_dim), jnp.float32), layout
            ),
            pipeline.in_layout(
                jnp.full((self.num_queries,), -jnp.inf, jnp.float32),
                layout.reduce(self.entries_axis),
            ),
            self.first_total(),
        )
        return lax.fori_loop(0, pipeline.blocks.steps, step_fn, carry)

    def scores(self, q: Operand, step: jax.Array, stage: jax.Array, ahead: Load) -> jax.Array:
        """Queries times a step's keys, capped; then their stage loads the keys `ahead`."""
        pipeline, memory = self.pipeline, self.memory
        plgpu.barrier_wait(memory.k_barriers.at[stage])
        pipeline.patch_block(step, stage, keys=True)
        multiply = partial(self.multiply_keys, q=q)
        scores = self.matmul(multiply, pipeline.block, stage, ahead, keys=True)
        if pipeline.to_tanh is not None:
            scores = jnp.tanh(scores * pipeline.to_tanh)
        return self.masked(scores, step)

    def masked(self, scores: jax.Array, step: jax.Array) -> jax.Array:
        """The scores with -inf for entries that are not visible.

        Most blocks are visible whole. Skipping the mask there saves a sixth of the instructions.
        """
        pipeline = self.pipeline
        visible_from, visible_to = pipeline.blocks.visible(step, pipeline.block)
        partly_visible = visible_to < pipeline.block
        if visible_from is not None:
            partly_visible |= visible_from > 0

        def mask(scores: jax.Array) -> jax.Array:
            entry = pipeline.positions(scores.shape, self.entries_axis, plgpu.Layout.WGMMA)
            visible = entry < visible_to
            if visible_from is not None:
                visible &= entry >= visible_from
            return jnp.where(visible, scores, -jnp.inf)

        return lax.cond(partly_visible, mask, lambda scores: scores, scores)

    def weighted_values(
        self,
        weights: jax.Array,
        step: jax.Array,
        stage: jax.Array,
        ahead: Load,
        onto: jax.Array | None = None,
    ) -> jax.Array:
        """Weights times a step's values; then their stage loads the values `ahead`."""
        pipeline, memory = self.pipeline, self.memory
        operand = self.weights_operand(weights.astype(pipeline.operand))
        plgpu.barrier_wait(memory.v_barriers.at[stage])
        pipeline.patch_block(step, stage, keys=False)
        multiply = partial(self.multiply_values, weights=operand)
        return self.matmul(multiply, self.head_dim, stage, ahead, keys=False, onto=onto)

    def matmul(
        self,
        multiply: Callable[[Ref, Ref], None],
        others: int,
        stage: jax.Array,
        ahead: Load,
        *,
        keys: bool,
        onto: jax.Array | None = None,
    ) -> jax.Array:
        """The result of `multiply` with the keys or values of a stage, which then loads `ahead`.

        It is added to `onto`, if that is given, inside the matmul.

        A widened block was copied, so its stage is loaded before the matmul, else after it.
        """
        pipeline, memory = self.pipeline, self.memory
        block_JH = (memory.k_ring if keys else memory.v_ring).at[stage]
        if memory.wide_JH is not None:
            block_JH = memory.wide_JH
            pipeline.load(ahead, stage, keys=keys)

        def run(accumulator_ref: Ref) -> jax.Array:
            multiply(accumulator_ref, block_JH)
            return accumulator_ref[...]

        # A new accumulator per block, which the caller adds: as many instructions as scaling one
        # that lives through the loop, and the interpreter supports it.
        if onto is not None:
            interpreted = pipeline.interpreted
            result = accumulate(onto, lambda ref: multiply(ref, block_JH), interpreted)
        else:
            shape = self.accumulator_shape(others)
            result = pl.run_scoped(run, plgpu.WGMMAAccumulatorRef(shape, jnp.float32))
        if memory.wide_JH is None:
            pipeline.load(ahead, stage, keys=keys)
        return result

    def spilled(self, name: str, x: jax.Array) -> Ref:
        """The spill buffer of that name, filled with `x`."""
        ref = getattr(self.memory, name)
        ref[...] = x
        plgpu.commit_smem()
        return ref


class QueriesAsRows(Matmuls):
    """For a prompt tile, or a slot with more than MAX_COLUMNS queries."""

    entries_axis = 1

    @property
    def num_queries(self) -> int:
        return TILE_ROWS

    def queries(self, buffer: jax.Array) -> Operand:
        """The queries in registers, which leaves `q_MH` free."""
        del buffer
        if self.pipeline.interpreted:
            return self.spilled("spill_MH", self.memory.q_MH[...])
        return plgpu.load(self.memory.q_MH, *WHOLE, layout=plgpu.Layout.WGMMA)

    def multiply_keys(self, scores_ref: Ref, keys_JH: Ref, q: Operand) -> None:
        keys_HJ = keys_JH.transpose((1, 0))
        if self.pipeline.interpreted:
            keys_HJ = self.spilled("spill_HJ", keys_JH[...].T)
        plgpu.wgmma(scores_ref, q, keys_HJ)

    def weights_operand(self, weights: jax.Array) -> Operand:
        return self.spilled("spill_MJ", weights) if self.pipeline.interpreted else weights

    def multiply_values(self, values_ref: Ref, values_JH: Ref, weights: Operand) -> None:
        plgpu.wgmma(values_ref, weights, values_JH)

    def first_total(self) -> jax.Array:
        zeros_M = jnp.zeros((TILE_ROWS,), jnp.float32)
        return self.pipeline.in_layout(zeros_M, plgpu.Layout.WGMMA.reduce(1))

    def add_up(self, total: jax.Array, keep: jax.Array, weights: jax.Array) -> jax.Array:
        return total * keep + weights.sum(axis=1)

    def store(self, acc: jax.Array, high: jax.Array, total: jax.Array) -> None:
        out = acc * self.for_each_query(_inverse(total), acc.shape)
        self.memory.out_MH[...] = out.astype(self.memory.out_MH.dtype)
        log2 = jnp.log(total) * LOG2_E if self.strictly else jnp.log2(total)
        self.memory.query_lse_M[...] = high + log2


class QueriesAsColumns(Matmuls):
    """For a slot with at most MAX_COLUMNS queries."""

    entries_axis = 0

    @property
    def num_queries(self) -> int:
        return self.memory.q_2LH.shape[1]

    def queries(self, buffer: jax.Array) -> Operand:
        """The queries in shared memory. The next job's are loaded to the other buffer."""
        return self.memory.q_2LH.at[buffer]

    def multiply_keys(self, scores_ref: Ref, keys_JH: Ref, q: Operand) -> None:
        q_HL = q.transpose((1, 0))
        if self.pipeline.interpreted:
            q_HL = self.spilled("spill_HL", q[...].T)
        plgpu.wgmma(scores_ref, keys_JH, q_HL)

    def weights_operand(self, weights: jax.Array) -> Operand:
        """The weights in shared memory, free by the warpgroup's barrier before each store."""
        self.store_transposed(weights, self.memory.weights_LJ)
        plgpu.commit_smem()
        if self.pipeline.interpreted:
            return self.spilled("spill_JL", self.memory.weights_LJ[...].T)
        return self.memory.weights_LJ.transpose((1, 0))

    def multiply_values(self, values_ref: Ref, values_JH: Ref, weights: Operand) -> None:
        values_HJ = values_JH.transpose((1, 0))
        if self.pipeline.interpreted:
            values_HJ = self.spilled("spill_HJ", values_JH[...].T)
        plgpu.wgmma(values_ref, values_HJ, weights)

    def first_total(self) -> jax.Array:
        """One sum per entry of a block and query. `store` sums over the entries, once."""
        zeros_JL = jnp.zeros((self.pipeline.block, self.num_queries), jnp.float32)
        return self.pipeline.in_layout(zeros_JL, plgpu.Layout.WGMMA)

    def add_up(self, total: jax.Array, keep: jax.Array, weights: jax.Array) -> jax.Array:
        return total * self.for_each_query(keep, total.shape) + weights

    def store(self, acc: jax.Array, high: jax.Array, total: jax.Array) -> None:
        total_L, rows = total.sum(axis=0), pl.ds(0, self.num_queries)
        out = acc * self.for_each_query(_inverse(total_L), acc.shape)
        out_LH = self.memory.out_MH.at[rows]
        self.store_transposed(out.astype(out_LH.dtype), out_LH)
        if self.memory.query_lse_M is not None:
            self.memory.query_lse_M[rows] = high + jnp.log2(total_L)

    def store_transposed(self, x: jax.Array, ref: Ref) -> None:
        if self.pipeline.interpreted:
            ref[...] = x.T
        else:
            by_column = plgpu.layout_cast(x, plgpu.Layout.WGMMA_TRANSPOSED)
            ref.transpose((1, 0))[...] = by_column


def _inverse(total: jax.Array) -> jax.Array:
    """1 / total, or 1 where the job had no step, whose result then is 0."""
    return 1.0 / jnp.where(total == 0.0, 1.0, total)
