"""A program of the decode attention kernels: its blocks, its shared memory, its steps.

Shape letters: those of `decode_attention_mosaic`.

A ring of TMA loads runs ahead of the program: as soon as a block of keys (values) has been
multiplied, its place is refilled with the block that many steps later, which may be one of the
program's next unit of work. A cache in float8_e4m3fn is loaded as it is: a block is widened to
float16, exactly, on its way from the ring to a second place in shared memory, and multiplied there.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

TILE_ROWS = 64  # of a warpgroup's matrix product
MOST_GROUP_ROWS = TILE_ROWS - 1  # query heads of a KV head that the kernel takes
MOST_COLUMNS = 16  # queries of a slot that are taken as columns; more fill enough of a tile's rows
SM_SHARED_BYTES = 228 * 1024
SHARED_BYTES_RESERVED = 1024  # of each program
REDUCTION_BYTES = 1024  # where maxima of columns pass from warp to warp
WHOLE = ((),) if jax.__version_info__ < (0, 11) else ()  # jax 0.10's load wants an index


@dataclasses.dataclass(frozen=True)
class DecodeTuning:
    """How the kernel uses an SM. Shared memory of a program decides how many fit: see `Forms`."""

    block: int = 64  # cache entries a step; lengths of prompt rows and pages are its multiples
    stages: int = 2  # blocks of keys and values in flight

    def __post_init__(self) -> None:
        if self.block % 64 or not 64 <= self.block <= 256:
            raise ValueError(f"block is {self.block}: use 64, 128, 192 or 256")
        if self.stages < 2:
            raise ValueError(f"stages is {self.stages}: use at least 2, or nothing overlaps")


@dataclasses.dataclass(frozen=True)
class Forms:
    """The forms of products that a kernel has: see `decode_attention_products`."""

    rows: bool  # of items, and of slots with more queries than columns are taken for
    columns: bool  # of slots by themselves

    @classmethod
    def of(cls, L: int, with_items: bool) -> "Forms":
        columns = L <= MOST_COLUMNS
        return cls(rows=with_items or not columns, columns=columns)

    def smem(self, tuning: DecodeTuning, H: int, L: int, cache_dtype: jnp.dtype) -> int:
        """Bytes of shared memory of one program, at most."""
        itemsize = jnp.dtype(cache_dtype).itemsize
        ring = 2 * tuning.stages * tuning.block * H * itemsize
        widened = 0 if itemsize == 2 else tuning.block * H * 2
        rows = 2 * TILE_ROWS * H * 2 if self.rows else L * H * 2  # queries and result, or result
        columns = L * (2 * H + tuning.block) * 2 if self.columns else 0  # queries and weights
        newest = 2 * 2 * H * itemsize  # keys and values of two units
        return ring + widened + rows + columns + newest + REDUCTION_BYTES * self.columns + 1024

    def programs_per_sm(self, tuning: DecodeTuning, H: int, L: int, cache_dtype: jnp.dtype) -> int:
        """So many fit: rows take more than 168 registers a thread, columns fewer."""
        program = self.smem(tuning, H, L, cache_dtype) + SHARED_BYTES_RESERVED
        return max(1, min(2 if self.rows else 3, SM_SHARED_BYTES // program))


def default_tuning(head_dim: int, cache_dtype: jax.typing.DTypeLike = jnp.bfloat16) -> DecodeTuning:
    """Up to 64 KiB of loads in flight, of each of two or three programs an SM.

    More stages were measured slower on an H200 (H = 128), at any number of slots. With as many
    entries in a block as a head has dimensions the kernel was wrong on the card (64, queries as
    rows), though right where it is interpreted: both products then have accumulators of one shape,
    and the second block's scores do not start from zero.
    """
    block, itemsize = block_entries(head_dim), jnp.dtype(cache_dtype).itemsize
    widened = 0 if itemsize == 2 else 2 * block * head_dim
    ring = 64 * 1024 - widened
    return DecodeTuning(block=block, stages=max(2, ring // (2 * block * head_dim * itemsize)))


def block_entries(head_dim: int) -> int:
    """Cache entries that the kernel takes at once: never as many as a head has dimensions."""
    return 128 if head_dim == 64 else 64


def rows_a_slot(G: int) -> int:
    """Rows of a KV head's G queries in memory: whole groups of 8, which tiles are made of."""
    return -(-G // 8) * 8


def matrix(shape: tuple[int, ...], dtype: jnp.dtype) -> Any:
    """Shared memory laid out for the tensor cores: rows of H elements in swizzled tiles."""
    row_bytes = min(128, shape[-1] * dtype.itemsize)
    tiling = plgpu.TilingTransform((8, row_bytes // dtype.itemsize))
    return plgpu.SMEM(shape, dtype, transforms=(tiling, plgpu.SwizzleTransform(row_bytes)))


def scratch_types(
    H: int,
    L: int,
    cache_dtype: jnp.dtype,
    tuning: DecodeTuning,
    forms: Forms,
    *,
    whole: bool,
    slots_of_item: int,
    interpreted: bool,
) -> dict[str, Any]:
    """What a program needs; `slots_of_item` bring their queries to one tile, 0 without items.

    Results that are `whole` are copied without the rows that pad their queries, at which an array
    in tiles cannot be cut, and have no sums.
    """
    ring = (tuning.stages, tuning.block, H)
    bfloat16, operand = jnp.dtype(jnp.bfloat16), jnp.dtype(operand_dtype(cache_dtype))
    out_rows = TILE_ROWS if forms.rows else L
    scratch: dict[str, Any] = {
        "out_MH": plgpu.SMEM((L, H), bfloat16) if whole else matrix((out_rows, H), bfloat16),
        "k_ring": matrix(ring, cache_dtype),
        "v_ring": matrix(ring, cache_dtype),
        "new_22H": plgpu.SMEM((2, 2, H), cache_dtype),
        "q_barrier": plgpu.Barrier(num_arrivals=2),
        "k_barriers": plgpu.Barrier(num_barriers=tuning.stages),
        "v_barriers": plgpu.Barrier(num_barriers=tuning.stages),
    }
    if not whole:
        scratch["sums_M"] = plgpu.SMEM((out_rows,), jnp.float32)
    if forms.rows:
        scratch["q_MH"] = matrix((TILE_ROWS, H), operand)
    if forms.columns:
        scratch["q_2LH"] = matrix((2, L, H), operand)
        scratch["weights_LJ"] = matrix((L, tuning.block), operand)
    if slots_of_item:
        scratch["item_barrier"] = plgpu.Barrier(num_arrivals=slots_of_item)
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


def operand_dtype(cache_dtype: jnp.dtype) -> Any:
    """What the tensor cores multiply. The card widens float8 to float16, not to bfloat16."""
    return cache_dtype if cache_dtype == jnp.bfloat16 else jnp.float16


def num_blocks(entries: jax.Array, block: int) -> jax.Array:
    """Blocks that hold so many entries."""
    return lax.div(entries + (block - 1), jnp.int32(block))


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
    """The blocks that one unit of work reads: steps 0 to `steps` - 1. All are int32 scalars.

    Step i is block `prefix_block` + i of the prompt row while i < `prefix_steps` (which may be
    negative), and block `own_block` + i - `prefix_steps` of the slot's own entries after that.
    """

    steps: jax.Array
    prefix_steps: jax.Array
    prefix_block: jax.Array
    own_block: jax.Array
    # First visible entry (None without a window: the first of all), end of the visible ones.
    prefix_visible: tuple[jax.Array | None, jax.Array]
    own_visible: tuple[jax.Array | None, jax.Array]

    @classmethod
    def of(
        cls,
        prefix_length: jax.Array,
        own_length: jax.Array,
        part: jax.Array,
        part_blocks: int | jax.Array,
        window: int | None,
        block: int,
    ) -> "Blocks":
        """The blocks of part `part`, when each part has `part_blocks` and the last ones less."""
        first = jnp.int32(0)
        if window is not None:
            first = jnp.maximum(prefix_length + own_length - window, 0)
        prefix_first = jnp.minimum(first, prefix_length)
        own_first = jnp.maximum(first - prefix_length, 0)
        prefix_block = lax.div(prefix_first, jnp.int32(block))
        own_block = lax.div(own_first, jnp.int32(block))
        # A prompt that lies wholly before the window has no visible entry in its last block.
        prefix_steps = jnp.where(
            prefix_first < prefix_length, num_blocks(prefix_length, block) - prefix_block, 0
        )
        steps = prefix_steps + num_blocks(own_length, block) - own_block
        begin = jnp.minimum(part * part_blocks, steps)
        return cls(
            steps=jnp.minimum(part_blocks, steps - begin),
            prefix_steps=prefix_steps - begin,
            prefix_block=prefix_block + begin,
            own_block=own_block,
            prefix_visible=(None if window is None else prefix_first, prefix_length),
            own_visible=(None if window is None else own_first, own_length),
        )

    def start(self, step: jax.Array, in_prefix: bool, block: int) -> jax.Array:
        """The first entry of a step's block, in the prompt row or of the slot's own."""
        index = self.prefix_block + step if in_prefix else self.own_block + step - self.prefix_steps
        return index * block

    def newest(self) -> jax.Array:
        """The slot's last own entry, the current token's; negative if it has none."""
        return self.own_visible[1] - 1

    def newest_step(self, block: int) -> jax.Array:
        """The step whose block has the newest entry, -1 if it is none of this unit's.

        What a slot sees ends with it, so that can be the last step only.
        """
        last, newest = self.steps - 1, self.newest()
        start = self.start(last, False, block)
        has_it = (last >= 0) & (newest >= 0) & (start <= newest) & (newest < start + block)
        return jnp.where(has_it, last, -1)

    def visible(self, step: jax.Array, block: int) -> tuple[jax.Array | None, jax.Array]:
        """First visible entry of a step's block and their end, counted from the block's first."""
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
    data_fields=["blocks", "slot", "head", "row", "part", "item"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class Unit:
    """What a program does at a time: some blocks of one KV head, for a slot or an item of slots.

    Every field but the first is an int32 scalar; one of what is not read may be any.
    """

    blocks: Blocks
    slot: jax.Array
    head: jax.Array
    row: jax.Array
    part: jax.Array
    item: jax.Array  # negative for a slot's own

    def without_blocks(self) -> "Unit":
        """The same with nothing to read."""
        return dataclasses.replace(
            self, blocks=dataclasses.replace(self.blocks, steps=jnp.int32(0))
        )


@dataclasses.dataclass(frozen=True)
class Load:
    """Where a block lies, if `exists`: scalars, computed once for its keys and its values."""

    exists: jax.Array
    in_prefix: jax.Array
    head: jax.Array
    row: jax.Array
    prefix_entry: jax.Array
    page: jax.Array
    entry_in_page: jax.Array


@dataclasses.dataclass(frozen=True)
class Scratch:
    """A program's shared memory and barriers, as `scratch_types` asks for them."""

    out_MH: Any
    k_ring: Any
    v_ring: Any
    new_22H: Any  # the new keys and values of a unit's slot and of the next one's
    q_barrier: Any
    k_barriers: Any
    v_barriers: Any
    sums_M: Any = None  # unless results are whole
    q_MH: Any = None  # with queries as rows
    q_2LH: Any = None  # with queries as columns: a unit's and the next one's
    weights_LJ: Any = None  # with queries as columns
    item_barrier: Any = None  # the queries of an item's slots; only with items
    wide_JH: Any = None  # only with a float8 cache
    spill_HJ: Any = None  # the rest only when interpreted
    spill_MH: Any = None
    spill_MJ: Any = None
    spill_HL: Any = None
    spill_JL: Any = None


@dataclasses.dataclass(frozen=True)
class Program:
    """A program at one of its units."""

    memory: Scratch
    unit: Unit
    following: Unit  # the unit after this one, whose first blocks are loaded while this one ends
    first_step: Any  # steps of all units before this one
    block: int
    stages: int
    to_base_2: float  # a score's factor: 1 / sqrt(H) and the base of exp2
    prefix_CK2PH: Any  # keys and values in global memory
    own_OK2RH: Any
    page_of: Callable[[Any, Any], Any]  # of a slot and the page's number in its list
    new_2H: Any  # key and value of the slot's new token
    newest_step: Any  # the step whose block has their place; -1: none

    @property
    def blocks(self) -> Blocks:
        return self.unit.blocks

    @property
    def interpreted(self) -> bool:
        return self.memory.spill_HJ is not None

    @property
    def operand(self) -> Any:
        return operand_dtype(self.memory.k_ring.dtype)

    def held(self, x: jax.Array, layout: Any) -> jax.Array:
        return x if self.interpreted else plgpu.layout_cast(x, layout)

    def positions(self, shape: tuple[int, ...], axis: int, layout: Any) -> jax.Array:
        layout = None if self.interpreted else layout
        return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=layout)

    def place(self, step: Any) -> Any:
        """The place in the ring of a step's block."""
        return lax.rem(self.first_step + step, jnp.int32(self.stages))

    def find(self, step: Any) -> Load:
        """Where the block of a step lies; steps past the unit's are the following unit's first.

        Its page is read here, ahead of the two loads that use it.
        """
        step = jnp.int32(step)
        later = step >= self.blocks.steps
        unit = jax.tree.map(partial(jnp.where, later), self.following, self.unit)
        step = jnp.where(later, step - self.blocks.steps, step)
        entry = jnp.maximum(unit.blocks.start(step, False, self.block), 0)
        page_entries = jnp.int32(self.own_OK2RH.shape[3])
        return Load(
            exists=step < unit.blocks.steps,
            in_prefix=step < unit.blocks.prefix_steps,
            head=unit.head,
            row=unit.row,
            prefix_entry=unit.blocks.start(step, True, self.block),
            page=self.page_of(unit.slot, lax.div(entry, page_entries)),
            entry_in_page=lax.rem(entry, page_entries),
        )

    def load(self, found: Load, place: Any, keys: bool) -> None:
        """Starts the load of a block's keys or values, if there is such a block."""
        ring = self.memory.k_ring if keys else self.memory.v_ring
        barriers = self.memory.k_barriers if keys else self.memory.v_barriers

        def start(rows: Any, entry: Any) -> None:
            block_JH = rows.at[0 if keys else 1, pl.ds(entry, self.block)]
            plgpu.copy_gmem_to_smem(block_JH, ring.at[place], barriers.at[place])

        @pl.when(found.exists & found.in_prefix)
        def _() -> None:
            start(self.prefix_CK2PH.at[found.row, found.head], found.prefix_entry)

        @pl.when(found.exists & ~found.in_prefix)
        def _() -> None:
            start(self.own_OK2RH.at[found.page, found.head], found.entry_in_page)

    def fill_ring(self) -> None:
        """Loads blocks of the following unit into the places that this one leaves free."""
        found = [self.find(i) for i in range(self.stages)]
        for i in range(self.stages):

            @pl.when(i >= self.blocks.steps)
            def _(i: int = i) -> None:
                self.load(found[i], self.place(i), keys=True)
                self.load(found[i], self.place(i), keys=False)

    def write_newest(self) -> None:
        """Starts to write the new key and value into the slot's page.

        Nobody waits for them: what a load of the same block finds in their place, before, after or
        between, `mend` replaces. It is the one race of the kernel.
        """
        newest, page_entries = self.blocks.newest(), jnp.int32(self.own_OK2RH.shape[3])
        page = self.page_of(self.unit.slot, lax.div(jnp.maximum(newest, 0), page_entries))

        @pl.when(self.newest_step >= 0)
        def _() -> None:
            entry = lax.rem(newest, page_entries)
            rows_2RH = self.own_OK2RH.at[page, self.unit.head]
            plgpu.copy_smem_to_gmem(self.new_2H, rows_2RH.at[:, entry])

    def mend(self, step: Any, place: Any, *, keys: bool) -> None:
        """Makes a step's keys or values fit to be multiplied: in the ring, or in `wide_JH`.

        A weight of zero does not undo a NaN: values past the length are cleared. And the cache does
        not have the new token yet, whose place is in the block of `newest_step`.
        """
        end = self.blocks.visible(step, self.block)[1]
        block_JH = (self.memory.k_ring if keys else self.memory.v_ring).at[place]
        if self.memory.wide_JH is not None:
            self._widen(block_JH, None if keys else end)
            block_JH = self.memory.wide_JH
        elif not keys:

            @pl.when(end < self.block)
            def _() -> None:
                layout = plgpu.Layout.WGMMA
                block_JH[...] = self._cleared(self.held(block_JH[...], layout), end, layout)
                plgpu.commit_smem()

        @pl.when(step == self.newest_step)
        def _() -> None:
            self._set_row(block_JH, end - 1, self.new_2H.at[0 if keys else 1])

    def _cleared(self, block_JH: jax.Array, end: Any, layout: Any) -> jax.Array:
        """The block with zeros for its entries from `end` on."""
        entry = self.positions(block_JH.shape, 0, layout)
        return jnp.where(entry < end, block_JH, jnp.zeros_like(block_JH))

    def _widen(self, block_ref: Any, end: Any = None) -> None:
        """Copies a float8 block into `wide_JH`, cleared from `end` on; its place is free then.

        Safe by the barrier of the warpgroup that goes before each store: all of it has waited for
        the product that read `wide_JH` last.
        """
        layout = plgpu.Layout.WGMMA_8BIT
        block = self.held(block_ref[...], layout).astype(self.operand)
        if end is not None:
            block = lax.cond(
                end < self.block,
                lambda block: self._cleared(block, end, layout),
                lambda block: block,
                block,
            )
        self.memory.wide_JH[...] = block
        plgpu.commit_smem()

    def _set_row(self, block_JH: Any, entry: Any, row_H: Any) -> None:
        """Writes one row of a block, by way of the 8 that make a tile: fewer have no address."""
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
