"""The load pipeline of the decode attention kernel: tile jobs, their blocks, shared memory.

TMA loads run ahead of the matmuls in a ring of `stages` blocks of keys and as many of values. As
soon as a block has been multiplied, its stage is loaded with the block `stages` steps later. That
block may belong to the CTA's next tile job. A float8_e4m3fn cache is loaded as float8. Each block
is then converted to float16, which is exact, in a buffer of its own.

Shape letters: see kernel.py.
"""

import dataclasses
from collections.abc import Callable
from functools import partial

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from jaxrl_llm.kernels.hopper import (
    SHARED_BYTES_RESERVED,
    SM_SHARED_BYTES,
    Ref,
    RegisterLayout,
    ScratchType,
    num_blocks,
)
from jaxrl_llm.kernels.mosaic import plgpu

TILE_ROWS = 64  # rows of a warpgroup's matmul
MAX_GROUP_SIZE = TILE_ROWS - 1  # query heads of a KV head that are rows
ROWS_HEAD_DIMS = (64, 128)  # with queries as rows: at 256 two accumulators exceed the registers
MAX_COLUMNS = 16  # queries of a slot that are columns; more fill enough of a tile's rows
REDUCTION_BYTES = 1024  # for column maxima, which pass from warp to warp
WHOLE = ((),) if jax.__version_info__ < (0, 11) else ()  # jax 0.10's load takes an index


@dataclasses.dataclass(frozen=True)
class DecodeTuning:
    """Sizes of the pipeline. The shared memory of a CTA decides how many share an SM."""

    block: int = 64  # cache entries of a step, 64 to 256 by 64; divides a prompt row and a page
    stages: int = 2  # blocks of keys and of values in flight


@dataclasses.dataclass(frozen=True)
class MatmulForms:
    """The forms of matmuls that a kernel contains: see matmuls.py."""

    rows: bool  # for prompt tiles, and for slots with more than MAX_COLUMNS queries
    columns: bool  # for the other slots

    @classmethod
    def of(cls, L: int, with_prompt_tiles: bool, strictly: bool = False) -> "MatmulForms":
        """`strictly` takes rows only, as flash attention does."""
        columns = L <= MAX_COLUMNS and not strictly
        return cls(rows=with_prompt_tiles or not columns, columns=columns)

    def smem(self, tuning: DecodeTuning, H: int, L: int, cache_dtype: jnp.dtype) -> int:
        """An upper bound of the shared memory of a CTA, in bytes."""
        itemsize = jnp.dtype(cache_dtype).itemsize
        ring = 2 * tuning.stages * tuning.block * H * itemsize
        widened = 0 if itemsize == 2 else tuning.block * H * 2
        rows = 2 * TILE_ROWS * H * 2 if self.rows else L * H * 2  # queries and result, or result
        columns = L * (2 * H + tuning.block) * 2 if self.columns else 0  # queries and weights
        newest = 2 * 2 * H * itemsize  # new keys and values of two jobs
        return ring + widened + rows + columns + newest + REDUCTION_BYTES * self.columns + 1024

    def ctas_per_sm(self, tuning: DecodeTuning, H: int, L: int, cache_dtype: jnp.dtype) -> int:
        """CTAs that fit an SM. With rows a thread takes more than 168 registers, else fewer."""
        cta = self.smem(tuning, H, L, cache_dtype) + SHARED_BYTES_RESERVED
        return max(1, min(2 if self.rows else 3, SM_SHARED_BYTES // cta))


def default_tuning(head_dim: int, cache_dtype: jax.typing.DTypeLike = jnp.bfloat16) -> DecodeTuning:
    """Up to 64 KiB of loads in flight in each of the two or three CTAs of an SM.

    More stages were slower on an H200 (head dim 128), at any number of slots. The block never
    equals the head dim. That gave wrong results on the GPU (64, queries as rows), though not in
    interpret mode. The accumulators of both matmuls then have one shape. The scores of the second
    block do not start from zero.
    """
    block, itemsize = block_entries(head_dim), jnp.dtype(cache_dtype).itemsize
    widened = 0 if itemsize == 2 else 2 * block * head_dim
    ring = 64 * 1024 - widened
    return DecodeTuning(block=block, stages=max(2, ring // (2 * block * head_dim * itemsize)))


def block_entries(head_dim: int) -> int:
    """Cache entries of a block: never the head dim (see `default_tuning`)."""
    return 128 if head_dim == 64 else 64


def max_group_size(head_dim: int) -> int:
    """Query heads of a KV head that the kernel takes."""
    return MAX_GROUP_SIZE if head_dim in ROWS_HEAD_DIMS else MAX_COLUMNS


def padded_rows(rows: int) -> int:
    """Rows rounded up to a multiple of 8: a tile in shared memory has 8 rows."""
    return -(-rows // 8) * 8


def matrix(shape: tuple[int, ...], dtype: jnp.dtype) -> ScratchType:
    """Shared memory for an operand of the tensor cores: rows of H elements in swizzled tiles."""
    row_bytes = min(128, shape[-1] * dtype.itemsize)
    tiling = plgpu.TilingTransform((8, row_bytes // dtype.itemsize))
    return plgpu.SMEM(shape, dtype, transforms=(tiling, plgpu.SwizzleTransform(row_bytes)))


def scratch_types(
    H: int,
    L: int,
    cache_dtype: jnp.dtype,
    tuning: DecodeTuning,
    forms: MatmulForms,
    *,
    direct_output: bool,
    slots_per_tile: int,
    interpreted: bool,
) -> dict[str, ScratchType]:
    """The shared memory and barriers of a CTA, by their names in `Scratch`.

    `slots_per_tile` is 0 without prompt tiles. A direct output is copied without the padding rows
    of the queries. A tiled array cannot be cut there, so its shared memory is not tiled.
    """
    ring = (tuning.stages, tuning.block, H)
    bfloat16, operand = jnp.dtype(jnp.bfloat16), jnp.dtype(operand_dtype(cache_dtype))
    out_rows = TILE_ROWS if forms.rows else L
    scratch: dict[str, ScratchType] = {
        "out_MH": plgpu.SMEM((L, H), bfloat16)
        if direct_output
        else matrix((out_rows, H), bfloat16),
        "k_ring": matrix(ring, cache_dtype),
        "v_ring": matrix(ring, cache_dtype),
        "new_22H": plgpu.SMEM((2, 2, H), cache_dtype),
        "q_barrier": plgpu.Barrier(num_arrivals=2),
        "k_barriers": plgpu.Barrier(num_barriers=tuning.stages),
        "v_barriers": plgpu.Barrier(num_barriers=tuning.stages),
    }
    if not direct_output:
        scratch["query_lse_M"] = plgpu.SMEM((out_rows,), jnp.float32)
    if forms.rows:
        scratch["q_MH"] = matrix((TILE_ROWS, H), operand)
    if forms.columns:
        scratch["q_2LH"] = matrix((2, L, H), operand)
        scratch["weights_LJ"] = matrix((L, tuning.block), operand)
    if slots_per_tile:
        scratch["gathered_q_barrier"] = plgpu.Barrier(num_arrivals=slots_per_tile)
    if operand != cache_dtype:
        scratch["wide_JH"] = matrix((tuning.block, H), operand)
    if interpreted:
        J = tuning.block
        shapes: dict[str, tuple[int, int]] = {"spill_HJ": (H, J)}
        if forms.rows:
            shapes |= {"spill_MH": (TILE_ROWS, H), "spill_MJ": (TILE_ROWS, J)}
        if forms.columns:
            shapes |= {"spill_HL": (H, L), "spill_JL": (J, L)}
        scratch |= {name: plgpu.SMEM(shape, operand) for name, shape in shapes.items()}
    return scratch


def operand_dtype(cache_dtype: jax.typing.DTypeLike) -> jnp.dtype:
    """The dtype of matmul operands. Hopper converts float8 to float16, not to bfloat16."""
    return jnp.dtype(jnp.bfloat16 if cache_dtype == jnp.bfloat16 else jnp.float16)


@partial(
    jax.tree_util.register_dataclass,
    data_fields=[
        "steps",
        "prefix_steps",
        "prefix_block",
        "own_block",
        "prefix_visible",
        "own_visible",
    ],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class Blocks:
    """The blocks that a tile job reads, one per step. All fields are int32 scalars.

    Step i is block `prefix_block` + i of the prompt row while i < `prefix_steps` (which may be
    negative), and block `own_block` + i - `prefix_steps` of the slot's own entries after that.
    """

    steps: jax.Array
    prefix_steps: jax.Array
    prefix_block: jax.Array
    own_block: jax.Array
    # First visible entry (None without a window: entry 0), and the end of the visible ones.
    prefix_visible: tuple[jax.Array | None, jax.Array]
    own_visible: tuple[jax.Array | None, jax.Array]

    @classmethod
    def of(
        cls,
        prefix_length: jax.Array,
        own_length: jax.Array,
        split: jax.Array,
        split_blocks: int | jax.Array,
        window: int | None,
        block: int,
    ) -> "Blocks":
        """The blocks of one split of `split_blocks` blocks. The last splits have fewer or none."""
        first = jnp.int32(0)
        if window is not None:
            first = jnp.maximum(prefix_length + own_length - window, 0)
        prefix_first = jnp.minimum(first, prefix_length)
        own_first = jnp.maximum(first - prefix_length, 0)
        prefix_block = lax.div(prefix_first, jnp.int32(block))
        own_block = lax.div(own_first, jnp.int32(block))
        # The last block of a prompt that lies before the window has no visible entry.
        prefix_steps = jnp.where(
            prefix_first < prefix_length, num_blocks(prefix_length, block) - prefix_block, 0
        )
        steps = prefix_steps + num_blocks(own_length, block) - own_block
        begin = jnp.minimum(split * split_blocks, steps)
        return cls(
            steps=jnp.minimum(split_blocks, steps - begin),
            prefix_steps=prefix_steps - begin,
            prefix_block=prefix_block + begin,
            own_block=own_block,
            prefix_visible=(None if window is None else prefix_first, prefix_length),
            own_visible=(None if window is None else own_first, own_length),
        )

    def start(self, step: jax.Array, in_prefix: bool, block: int) -> jax.Array:
        """The first entry of a step's block, in the prompt row or in the slot's own entries."""
        index = self.prefix_block + step if in_prefix else self.own_block + step - self.prefix_steps
        return index * block

    def newest(self) -> jax.Array:
        """The own entry of the new token, negative for a slot without one."""
        return self.own_visible[1] - 1

    def newest_step(self, block: int) -> jax.Array:
        """The step whose block holds the newest entry, -1 if this job has no such step.

        The newest entry is the last visible one, so this can only be the last step.
        """
        last, newest = self.steps - 1, self.newest()
        start = self.start(last, False, block)
        has_it = (last >= 0) & (newest >= 0) & (start <= newest) & (newest < start + block)
        return jnp.where(has_it, last, -1)

    def visible(self, step: jax.Array, block: int) -> tuple[jax.Array | None, jax.Array]:
        """First visible entry of a step's block and their end, relative to the block's first."""
        in_prefix = step < self.prefix_steps
        start = jnp.where(in_prefix, self.start(step, True, block), self.start(step, False, block))
        (first_in_row, end_in_row), (first_in_own, end_in_own) = (
            self.prefix_visible,
            self.own_visible,
        )
        end = jnp.where(in_prefix, end_in_row, end_in_own) - start
        if first_in_row is None or first_in_own is None:
            return None, end
        return jnp.where(in_prefix, first_in_row, first_in_own) - start, end


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["blocks", "slot", "head", "row", "split", "prompt_tile"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class TileJob:
    """A job of a CTA: some blocks of one KV head, for a slot or a prompt tile.

    Every field but the first is an int32 scalar. A field that the job does not use may be anything.
    """

    blocks: Blocks
    slot: jax.Array
    head: jax.Array
    row: jax.Array
    split: jax.Array
    prompt_tile: jax.Array  # negative for the job of a slot

    def without_blocks(self) -> "TileJob":
        """The same job with nothing to read."""
        return dataclasses.replace(
            self, blocks=dataclasses.replace(self.blocks, steps=jnp.int32(0))
        )


@dataclasses.dataclass(frozen=True)
class Load:
    """Where a block lies, if it `exists`: scalars, computed once for its keys and its values."""

    exists: jax.Array
    in_prefix: jax.Array
    head: jax.Array
    row: jax.Array
    prefix_entry: jax.Array
    page: jax.Array
    entry_in_page: jax.Array


@dataclasses.dataclass(frozen=True)
class Scratch:
    """The shared memory and barriers of a CTA: see `scratch_types`."""

    out_MH: Ref
    k_ring: Ref
    v_ring: Ref
    new_22H: Ref  # new key and value of a job's slot, double-buffered
    q_barrier: Ref
    k_barriers: Ref
    v_barriers: Ref
    query_lse_M: Ref = None  # unless the output is direct
    q_MH: Ref = None  # queries as rows
    q_2LH: Ref = None  # queries as columns, double-buffered
    weights_LJ: Ref = None  # with queries as columns
    gathered_q_barrier: Ref = None  # the queries of a prompt tile's slots
    wide_JH: Ref = None  # with a float8 cache
    spill_HJ: Ref = None  # this and the following in interpret mode only
    spill_MH: Ref = None
    spill_MJ: Ref = None
    spill_HL: Ref = None
    spill_JL: Ref = None


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """The ring of loads of a CTA, at one of its tile jobs."""

    memory: Scratch
    job: TileJob
    following: TileJob  # the next job, whose first blocks are loaded while this one finishes
    first_step: jax.Array  # steps of all jobs before this one
    block: int
    stages: int
    to_base_2: float  # factor of a score: log2(e) / sqrt(H); of a capped one, cap log2(e)
    to_tanh: float | None  # factor of a score before the tanh of a soft cap
    prefix_CK2PH: Ref  # global memory
    own_OK2RH: Ref
    page_of: Callable[[jax.Array, jax.Array], jax.Array]  # (slot, index in its list) -> page
    new_2H: Ref  # key and value of the slot's new token, in shared memory
    newest_step: jax.Array  # the step whose block holds their entry; -1: none

    @property
    def blocks(self) -> Blocks:
        return self.job.blocks

    @property
    def interpreted(self) -> bool:
        return self.memory.spill_HJ is not None

    @property
    def operand(self) -> jnp.dtype:
        return operand_dtype(self.memory.k_ring.dtype)

    def in_layout(self, x: jax.Array, layout: RegisterLayout) -> jax.Array:
        return x if self.interpreted else plgpu.layout_cast(x, layout)

    def positions(self, shape: tuple[int, ...], axis: int, layout: RegisterLayout) -> jax.Array:
        layout = None if self.interpreted else layout
        return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=layout)

    def stage(self, step: jax.Array | int) -> jax.Array:
        """The stage of the ring that holds a step's block."""
        return lax.rem(self.first_step + step, jnp.int32(self.stages))

    def find(self, step: jax.Array | int) -> Load:
        """Where the block of a step lies. Steps past this job's are the first of the next job.

        The page is looked up here, ahead of the two loads that use it.
        """
        step = jnp.int32(step)
        later = step >= self.blocks.steps
        job = jax.tree.map(partial(jnp.where, later), self.following, self.job)
        step = jnp.where(later, step - self.blocks.steps, step)
        entry = jnp.maximum(job.blocks.start(step, False, self.block), 0)
        page_entries = jnp.int32(self.own_OK2RH.shape[3])
        return Load(
            exists=step < job.blocks.steps,
            in_prefix=step < job.blocks.prefix_steps,
            head=job.head,
            row=job.row,
            prefix_entry=job.blocks.start(step, True, self.block),
            page=self.page_of(job.slot, lax.div(entry, page_entries)),
            entry_in_page=lax.rem(entry, page_entries),
        )

    def load(self, found: Load, stage: jax.Array, keys: bool) -> None:
        """Start loading a block's keys or values, if the block exists."""
        ring = self.memory.k_ring if keys else self.memory.v_ring
        barriers = self.memory.k_barriers if keys else self.memory.v_barriers

        def start(rows: Ref, entry: jax.Array) -> None:
            block_JH = rows.at[0 if keys else 1, pl.ds(entry, self.block)]
            plgpu.copy_gmem_to_smem(block_JH, ring.at[stage], barriers.at[stage])

        @pl.when(found.exists & found.in_prefix)
        def _() -> None:
            start(self.prefix_CK2PH.at[found.row, found.head], found.prefix_entry)

        @pl.when(found.exists & ~found.in_prefix)
        def _() -> None:
            start(self.own_OK2RH.at[found.page, found.head], found.entry_in_page)

    def fill_ring(self) -> None:
        """Load blocks of the next job into the stages that this job leaves free."""
        found = [self.find(i) for i in range(self.stages)]
        for i in range(self.stages):

            @pl.when(i >= self.blocks.steps)
            def _(i: int = i) -> None:
                self.load(found[i], self.stage(i), keys=True)
                self.load(found[i], self.stage(i), keys=False)

    def write_newest(self) -> None:
        """Start writing the new key and value into the slot's page.

        Nothing waits for this write. A load of the same block may read the entry before, during
        or after it: `patch_block` replaces what was loaded. This is the kernel's only race.
        """
        newest, page_entries = self.blocks.newest(), jnp.int32(self.own_OK2RH.shape[3])
        page = self.page_of(self.job.slot, lax.div(jnp.maximum(newest, 0), page_entries))

        @pl.when(self.newest_step >= 0)
        def _() -> None:
            entry = lax.rem(newest, page_entries)
            rows_2RH = self.own_OK2RH.at[page, self.job.head]
            plgpu.copy_smem_to_gmem(self.new_2H, rows_2RH.at[:, entry])

    def patch_block(self, step: jax.Array, stage: jax.Array, *, keys: bool) -> None:
        """Make a step's keys or values ready for the matmul: in the ring, or in `wide_JH`.

        Values past the length become 0: a weight of 0 times NaN is NaN. The new key or value is
        inserted in the block of `newest_step`.
        """
        end = self.blocks.visible(step, self.block)[1]
        block_JH = (self.memory.k_ring if keys else self.memory.v_ring).at[stage]
        if self.memory.wide_JH is not None:
            self._widen(block_JH, None if keys else end)
            block_JH = self.memory.wide_JH
        elif not keys:

            @pl.when(end < self.block)
            def _() -> None:
                layout = plgpu.Layout.WGMMA
                block_JH[...] = self._cleared(self.in_layout(block_JH[...], layout), end, layout)
                plgpu.commit_smem()

        @pl.when(step == self.newest_step)
        def _() -> None:
            self._set_row(block_JH, end - 1, self.new_2H.at[0 if keys else 1])

    def _cleared(self, block_JH: jax.Array, end: jax.Array, layout: RegisterLayout) -> jax.Array:
        """The block with zeros for its entries from `end` on."""
        entry = self.positions(block_JH.shape, 0, layout)
        return jnp.where(entry < end, block_JH, jnp.zeros_like(block_JH))

    def _widen(self, block_ref: Ref, end: jax.Array | None = None) -> None:
        """Convert a float8 block into `wide_JH`, with zeros from `end` on. Its stage is then free.

        Safe: before each store all warps of the warpgroup meet at a barrier, so all have waited
        for the matmul that read `wide_JH` last.
        """
        layout = plgpu.Layout.WGMMA_8BIT
        block = self.in_layout(block_ref[...], layout).astype(self.operand)
        if end is not None:
            block = lax.cond(
                end < self.block,
                lambda block: self._cleared(block, end, layout),
                lambda block: block,
                block,
            )
        self.memory.wide_JH[...] = block
        plgpu.commit_smem()

    def _set_row(self, block_JH: Ref, entry: jax.Array, row_H: Ref) -> None:
        """Write one row of a block. The 8 rows of its tile are rewritten: a row has no address."""
        in_tile = lax.rem(entry, jnp.int32(8))
        tile_8H = block_JH.at[pl.ds(pl.multiple_of(entry - in_tile, 8), 8)]
        if self.interpreted:
            is_row = jax.lax.broadcasted_iota(jnp.int32, tile_8H.shape, 0) == in_tile
            tile_8H[...] = jnp.where(is_row, row_H[...].astype(block_JH.dtype), tile_8H[...])
        else:
            layout, tile_H8 = plgpu.Layout.WGMMA_TRANSPOSED, tile_8H.transpose((1, 0))
            shape = tile_H8.shape
            row = plgpu.load(row_H, *WHOLE, layout=layout.reduce(1), optimized=False)
            row = lax.broadcast_in_dim(row.astype(block_JH.dtype), shape, [0])
            # Not an iota in that layout: jax counts as if registers ran along the last dimension.
            number = plgpu.broadcasted_iota(jnp.int32, shape[1:], 0, layout=layout.reduce(0))
            number = lax.broadcast_in_dim(number, shape, [1])
            is_row = plgpu.layout_cast(number, layout) == in_tile
            tile = plgpu.load(tile_H8, *WHOLE, layout=layout)
            tile_H8[...] = jnp.where(is_row, plgpu.layout_cast(row, layout), tile)
        plgpu.commit_smem()
