"""A program of the decode attention kernels: its blocks, its shared memory, its steps.

Shape letters: those of `decode_attention_mosaic`.

A ring of TMA loads runs ahead of the program: as soon as a block of keys (values) has been
multiplied, its place is refilled with the block that many steps later. A cache in float8_e4m3fn is
loaded as it is: a block is widened to float16, exactly, on its way from the ring to a second place
in shared memory, and multiplied there.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

TILE_ROWS = 64  # of a warpgroup's matrix product
_WHOLE = ((),) if jax.__version_info__ < (0, 11) else ()  # jax 0.10's load wants an index


@dataclasses.dataclass(frozen=True)
class DecodeTuning:
    """How the kernel uses an SM. Shared memory of a program decides how many fit: see `smem`."""

    block: int = 64  # cache entries a step; lengths of prompt rows and pages are its multiples
    stages: int = 2  # blocks of keys and values in flight
    programs_per_sm: int = 4  # split until the grid holds that many for every SM

    def __post_init__(self) -> None:
        if self.block % 64 or not 64 <= self.block <= 256:
            raise ValueError(f"block is {self.block}: use 64, 128, 192 or 256")
        if self.stages < 2:
            raise ValueError(f"stages is {self.stages}: use at least 2, or nothing overlaps")

    def smem(self, head_dim: int, cache_dtype: jax.typing.DTypeLike, prompt_rows: int = 0) -> int:
        """Bytes of shared memory of one program, at most; 113 KiB let two share an SM, 74 three.

        `prompt_rows` are the rows of prompt results that are merged into it.
        """
        itemsize = jnp.dtype(cache_dtype).itemsize
        rows = (TILE_ROWS + prompt_rows) * head_dim * 2
        sums = 2 * 1024 + prompt_rows * 4
        widened = 0 if itemsize == 2 else self.block * head_dim * 2
        ring = 2 * self.stages * self.block * head_dim * itemsize
        return rows + sums + widened + ring


def default_tuning(head_dim: int, cache_dtype: jax.typing.DTypeLike = jnp.bfloat16) -> DecodeTuning:
    """At least two programs an SM, and 128 KiB of loads in flight on it.

    More stages were measured slower on an H200 (H = 128), at any number of slots. At H = 64 a block
    of 64 entries is wrong on the card, though right where it is interpreted: both products then
    have an accumulator of 64 x 64, and the second block's scores do not start from zero.
    """
    block = block_entries(head_dim)
    a_block = 2 * block * head_dim * jnp.dtype(cache_dtype).itemsize
    return DecodeTuning(block=block, stages=max(2, 64 * 1024 // a_block))


def block_entries(head_dim: int) -> int:
    """Cache entries that the kernel takes at once: never as many as a head has dimensions."""
    return 128 if head_dim == 64 else 64


def matrix(shape: tuple[int, ...], dtype: jnp.dtype) -> Any:
    """Shared memory laid out for the tensor cores: rows of H elements in swizzled tiles."""
    row_bytes = min(128, shape[-1] * dtype.itemsize)
    tiling = plgpu.TilingTransform((8, row_bytes // dtype.itemsize))
    return plgpu.SMEM(shape, dtype, transforms=(tiling, plgpu.SwizzleTransform(row_bytes)))


def scratch_types(
    H: int,
    cache_dtype: jnp.dtype,
    tuning: DecodeTuning,
    *,
    with_sums: bool,
    prompt_parts: tuple[int, int],
    interpreted: bool,
) -> dict[str, Any]:
    """What a program needs; `prompt_parts` are the parts of its prompt and the rows of each."""
    ring = (tuning.stages, tuning.block, H)
    operand = jnp.dtype(operand_dtype(cache_dtype))
    num_prompt_parts, rows_a_part = prompt_parts
    # Rows of a tile that are not queries may be anything, so parts lie in one another's tiles.
    rows = TILE_ROWS + num_prompt_parts * rows_a_part
    scratch: dict[str, Any] = {
        "q_MH": plgpu.SMEM((rows, H), jnp.bfloat16),
        "k_ring": matrix(ring, cache_dtype),
        "v_ring": matrix(ring, cache_dtype),
        "q_barrier": plgpu.Barrier(),
        "k_barriers": plgpu.Barrier(num_barriers=tuning.stages),
        "v_barriers": plgpu.Barrier(num_barriers=tuning.stages),
    }
    if operand != cache_dtype:
        scratch["wide_JH"] = matrix((tuning.block, H), operand)
    if with_sums:
        scratch["sums_M"] = plgpu.SMEM((TILE_ROWS,), jnp.float32)
    if num_prompt_parts:
        scratch["prompt_sums"] = plgpu.SMEM((num_prompt_parts, 2 * TILE_ROWS), jnp.float32)
        scratch["prompt_barrier"] = plgpu.Barrier(num_arrivals=2 * num_prompt_parts)
    if interpreted:
        scratch["spill_MH"] = plgpu.SMEM((TILE_ROWS, H), operand)
        scratch["spill_MJ"] = plgpu.SMEM((TILE_ROWS, tuning.block), operand)
        scratch["spill_HJ"] = plgpu.SMEM((H, tuning.block), operand)
    return scratch


def operand_dtype(cache_dtype: jnp.dtype) -> Any:
    """What the tensor cores multiply. The card widens float8 to float16, not to bfloat16."""
    return cache_dtype if cache_dtype == jnp.bfloat16 else jnp.float16


@dataclasses.dataclass(frozen=True)
class Blocks:
    """The blocks that one program reads: steps 0 to `steps` - 1. Every field is an int32 scalar.

    Step i is block `prefix_block` + i of the prompt row while i < `prefix_steps` (which may be
    negative), and block `own_block` + i - `prefix_steps` of the slot's own entries after that.
    """

    steps: jax.Array
    prefix_steps: jax.Array
    prefix_block: jax.Array
    own_block: jax.Array
    prefix_visible: tuple[jax.Array, jax.Array]  # first visible entry, end of the visible ones
    own_visible: tuple[jax.Array, jax.Array]

    @classmethod
    def of(
        cls,
        prefix_length: jax.Array,
        own_length: jax.Array,
        part: jax.Array,
        num_splits: int,
        window: int | None,
        block: int,
    ) -> "Blocks":
        """The blocks of part `part` out of `num_splits` equal parts (to a block)."""
        first = jnp.int32(0)
        if window is not None:
            first = jnp.maximum(prefix_length + own_length - window, 0)
        prefix_first = jnp.minimum(first, prefix_length)
        own_first = jnp.maximum(first - prefix_length, 0)

        def ceil_blocks(entries: jax.Array) -> jax.Array:
            return lax.div(entries + (block - 1), jnp.int32(block))

        prefix_block = lax.div(prefix_first, jnp.int32(block))
        own_block = lax.div(own_first, jnp.int32(block))
        # A prompt that lies wholly before the window has no visible entry in its last block.
        prefix_steps = jnp.where(
            prefix_first < prefix_length, ceil_blocks(prefix_length) - prefix_block, 0
        )
        steps = prefix_steps + ceil_blocks(own_length) - own_block
        a_part = lax.div(steps + (num_splits - 1), jnp.int32(num_splits))
        begin = jnp.minimum(part * a_part, steps)
        return cls(
            steps=jnp.minimum(a_part, steps - begin),
            prefix_steps=prefix_steps - begin,
            prefix_block=prefix_block + begin,
            own_block=own_block,
            prefix_visible=(prefix_first, prefix_length),
            own_visible=(own_first, own_length),
        )

    def start(self, step: jax.Array, in_prefix: bool, block: int) -> jax.Array:
        """The first entry of a step's block, in the prompt row or of the slot's own."""
        index = self.prefix_block + step if in_prefix else self.own_block + step - self.prefix_steps
        return index * block

    def visible(self, step: jax.Array, block: int) -> tuple[jax.Array, jax.Array]:
        """First visible entry of a step's block and their end, counted from the block's first."""
        in_prefix = step < self.prefix_steps
        start = jnp.where(in_prefix, self.start(step, True, block), self.start(step, False, block))
        low, high = (
            jnp.where(in_prefix, in_row, in_own)
            for in_row, in_own in zip(self.prefix_visible, self.own_visible, strict=True)
        )
        return low - start, high - start


@dataclasses.dataclass(frozen=True)
class Scratch:
    """A program's shared memory and barriers, as `scratch_types` asks for them."""

    q_MH: Any
    k_ring: Any
    v_ring: Any
    q_barrier: Any
    k_barriers: Any
    v_barriers: Any
    wide_JH: Any = None  # only with a float8 cache
    sums_M: Any = None  # only where parts are merged later
    prompt_sums: Any = None  # [S, 2 M], only with prompts' parts, as is the barrier
    prompt_barrier: Any = None
    spill_MH: Any = None  # the rest only when interpreted
    spill_MJ: Any = None
    spill_HJ: Any = None


@dataclasses.dataclass(frozen=True)
class Program:
    """One slot, KV head and part.

    The interpreter takes the operands of a product from memory only, and that of jax 0.10 knows
    neither layouts nor transposed operands: there, operands go through the `spill` places.
    """

    memory: Scratch
    blocks: Blocks
    block: int
    stages: int
    window: int | None
    to_base_2: Any  # a score's factor: 1 / sqrt(H), the keys' scale and the base of exp2
    keys: tuple[Any, Any]  # [P, H] and [O, R, H] in global memory, None for one that is not read
    values: tuple[Any, Any]
    page_of: Callable[[Any], Any] | None = None  # the page of one of the slot's own, by its number

    @property
    def interpreted(self) -> bool:
        return self.memory.spill_MH is not None

    @property
    def operand(self) -> Any:
        return operand_dtype(self.memory.k_ring.dtype)

    def held(self, x: jax.Array, layout: Any) -> jax.Array:
        return x if self.interpreted else plgpu.layout_cast(x, layout)

    def positions(self, shape: tuple[int, ...], axis: int, layout: Any) -> jax.Array:
        layout = None if self.interpreted else layout
        return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=layout)

    def page(self, step: Any) -> Any:
        """The page of a step's block, read ahead of the two loads that use it."""
        if self.page_of is None:
            return jnp.int32(0)
        entry = jnp.maximum(self.blocks.start(jnp.int32(step), False, self.block), 0)
        return self.page_of(lax.div(entry, jnp.int32(self.keys[1].shape[1])))

    def load(self, step: Any, place: Any, page: Any, keys: bool) -> None:
        """Starts the load of a step's block of keys or values, if there is such a step."""
        blocks, J = self.blocks, self.block
        ring = self.memory.k_ring if keys else self.memory.v_ring
        barriers = self.memory.k_barriers if keys else self.memory.v_barriers
        prefix_PH, own_ORH = self.keys if keys else self.values
        step = jnp.int32(step)

        def start(rows: Any, entry: Any) -> None:
            block_JH = rows.at[pl.ds(entry, J)]
            plgpu.copy_gmem_to_smem(block_JH, ring.at[place], barriers.at[place])

        in_prefix = step < blocks.prefix_steps
        if prefix_PH is not None:

            @pl.when((step < blocks.steps) & in_prefix)
            def _() -> None:
                start(prefix_PH, blocks.start(step, True, J))

        if own_ORH is not None:

            @pl.when((step < blocks.steps) & ~in_prefix)
            def _() -> None:
                entry = blocks.start(step, False, J)
                start(own_ORH.at[page], lax.rem(entry, jnp.int32(own_ORH.shape[1])))

    def queries(self) -> Any:
        """The queries as a product's left operand: registers, which leaves `q_MH` free."""
        if self.interpreted:
            self.memory.spill_MH[...] = self.tile(0).astype(self.operand)
            return self.memory.spill_MH
        q = self.tile(0)
        return q if q.dtype == self.operand else q.astype(jnp.float32).astype(self.operand)

    def tile(self, first_row: Any) -> jax.Array:
        """A tile's rows from `q_MH`, in registers."""
        tile = self.memory.q_MH.at[pl.ds(first_row, TILE_ROWS)]
        if self.interpreted:
            return tile[...]
        return plgpu.load(tile, *_WHOLE, layout=plgpu.Layout.WGMMA, optimized=False)

    def clear(self, block_JH: jax.Array, end: Any, layout: Any) -> jax.Array:
        """The block with zeros for its entries from `end` on."""
        entry = self.positions(block_JH.shape, 0, layout)
        return jnp.where(entry < end, block_JH, jnp.zeros_like(block_JH))

    def widen(self, block_ref: Any, end: Any = None) -> None:
        """Copies a float8 block into `wide_JH`, cleared from `end` on; its place is free then.

        Safe by the barrier of the warpgroup that goes before each store: all of it has waited for
        the product that read `wide_JH` last.
        """
        layout = plgpu.Layout.WGMMA_8BIT
        block = self.held(block_ref[...], layout).astype(self.operand)
        if end is not None:
            block = lax.cond(
                end < self.block,
                lambda block: self.clear(block, end, layout),
                lambda block: block,
                block,
            )
        self.memory.wide_JH[...] = block
        plgpu.commit_smem()

    def scores(self, q: Any, step: Any, place: Any, next_page: Any) -> jax.Array:
        """Products of the queries with a step's keys, [M, J]; the keys' place is loaded anew."""
        wide_JH = self.memory.wide_JH
        plgpu.barrier_wait(self.memory.k_barriers.at[place])
        if wide_JH is not None:
            self.widen(self.memory.k_ring.at[place])
            self.load(step + self.stages, place, next_page, keys=True)
        keys_JH = self.memory.k_ring.at[place] if wide_JH is None else wide_JH

        def multiply(scores_ref: Any) -> jax.Array:
            keys_HJ = keys_JH.transpose((1, 0))
            if self.interpreted:
                self.memory.spill_HJ[...] = keys_JH[...].T
                plgpu.commit_smem()  # this read, before the load that refills the place
                keys_HJ = self.memory.spill_HJ
            plgpu.wgmma(scores_ref, q, keys_HJ)
            return scores_ref[...]

        shape = (TILE_ROWS, self.block)
        scores = pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef(shape, jnp.float32))
        if wide_JH is None:
            self.load(step + self.stages, place, next_page, keys=True)
        return self.masked(scores, step)

    def masked(self, scores: jax.Array, step: Any) -> jax.Array:
        """-inf for entries that are not seen.

        Most blocks are seen whole: passing them by saves a sixth of the loop's instructions.
        """
        visible_from, visible_to = self.blocks.visible(step, self.block)
        partial = visible_to < self.block
        if self.window is not None:
            partial |= visible_from > 0

        def mask(scores: jax.Array) -> jax.Array:
            entry = self.positions(scores.shape, 1, plgpu.Layout.WGMMA)
            seen = entry < visible_to
            if self.window is not None:
                seen &= entry >= visible_from
            return jnp.where(seen, scores, -jnp.inf)

        return lax.cond(partial, mask, lambda scores: scores, scores)

    def weighted_values(
        self, weights: jax.Array, step: Any, place: Any, next_page: Any
    ) -> jax.Array:
        """Products of the weights with a step's values, [M, H]; their place is loaded anew."""
        wide_JH, v_ring = self.memory.wide_JH, self.memory.v_ring
        left: Any = weights.astype(self.operand)
        if self.interpreted:
            self.memory.spill_MJ[...] = left
            left = self.memory.spill_MJ
        plgpu.barrier_wait(self.memory.v_barriers.at[place])

        # A weight of zero does not undo a NaN: values past the length are cleared.
        visible_to = self.blocks.visible(step, self.block)[1]
        if wide_JH is None:

            @pl.when(visible_to < self.block)
            def _() -> None:
                layout = plgpu.Layout.WGMMA
                v_ring[place] = self.clear(self.held(v_ring[place], layout), visible_to, layout)
                plgpu.commit_smem()

        else:
            self.widen(v_ring.at[place], visible_to)
            self.load(step + self.stages, place, next_page, keys=False)

        def multiply(values_ref: Any) -> jax.Array:
            plgpu.wgmma(values_ref, left, v_ring.at[place] if wide_JH is None else wide_JH)
            return values_ref[...]

        # A fresh accumulator a block, added by the caller: as many instructions as scaling one
        # that lives through the loop, and the interpreter can run it.
        shape = (TILE_ROWS, v_ring.shape[-1])
        values = pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef(shape, jnp.float32))
        if wide_JH is None:
            self.load(step + self.stages, place, next_page, keys=False)
        return values

    def attend(self, q: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Sum of weighted values, maximum score in base 2, and sum of weights, over all steps."""

        def step_fn(step: Any, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            acc, high, total = carry
            place = lax.rem(step, jnp.int32(self.stages))
            next_page = self.page(step + self.stages)  # in flight while this step's keys arrive
            scores = self.scores(q, step, place, next_page)
            new_high = jnp.maximum(high, scores.max(axis=1) * self.to_base_2)
            keep = jnp.exp2(high - new_high)
            # A multiplication and a subtraction: one instruction together.
            weights = jnp.exp2(
                scores * self.to_base_2 - lax.broadcast_in_dim(new_high, scores.shape, [0])
            )
            total = total * keep + weights.sum(axis=1)
            new = self.weighted_values(weights, step, place, next_page)
            acc = acc * lax.broadcast_in_dim(keep, acc.shape, [0]) + new
            return acc, new_high, total

        rows, H = plgpu.Layout.WGMMA.reduce(1), self.memory.q_MH.shape[1]
        carry = (
            self.held(jnp.zeros((TILE_ROWS, H), jnp.float32), plgpu.Layout.WGMMA),
            self.held(jnp.full((TILE_ROWS,), -jnp.inf, jnp.float32), rows),
            self.held(jnp.zeros((TILE_ROWS,), jnp.float32), rows),
        )
        return lax.fori_loop(0, self.blocks.steps, step_fn, carry)

    def store(self, acc: jax.Array, high: jax.Array, total: jax.Array) -> None:
        """The result, and where there is a place for them its log-sum-exps, in shared memory."""
        out_MH = self.memory.q_MH.at[pl.ds(0, TILE_ROWS)]
        out_MH[...] = acc.astype(out_MH.dtype)
        if self.memory.sums_M is not None:
            self.memory.sums_M[...] = high + jnp.log2(total)
        plgpu.commit_smem()

    def join_prompt(
        self, state: tuple[jax.Array, ...], num_parts: int, G: int, place: jax.Array
    ) -> tuple[jax.Array, ...]:
        """`attend`'s result with the prompt's parts, which lie behind the queries, merged into it.

        The first part has an entry: its log-sum-exp is finite, whatever the others' are.
        """
        plgpu.barrier_wait(self.memory.prompt_barrier)
        layout = plgpu.Layout.WGMMA.reduce(1)

        def join(part: Any, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            acc, high, total = state
            sums_M = self.memory.prompt_sums.at[part, pl.ds(place * G, TILE_ROWS)]
            if self.interpreted:
                sums = sums_M[...]
            else:
                sums = plgpu.load(sums_M, *_WHOLE, layout=layout, optimized=False)
            new_high = jnp.maximum(high, sums)
            keep, weight = jnp.exp2(high - new_high), jnp.exp2(sums - new_high)
            out = self.tile((part + 1) * G).astype(jnp.float32)
            acc = acc * lax.broadcast_in_dim(keep, acc.shape, [0])
            acc += out * lax.broadcast_in_dim(weight, acc.shape, [0])
            return acc, new_high, total * keep + weight

        # A loop: unrolled, the parts' tiles would be in registers together.
        return lax.fori_loop(0, num_parts, join, state)
