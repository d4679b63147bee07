"""The kernel for rows: each row times the weights of its group, or times their transpose.

A tile has rows of one group alone, in chunks of 64. A group's rows start anywhere, and TMA loads 64
rows from any row on. The last chunk of a group of 64 rows or more is moved up until it ends with
the group. Its first rows are computed twice, with the same bits. So chunks are stored whole, but
for rows of smaller groups, which are stored in runs of 1, 2, 4 ... rows. Rows after the last
group's are tiles without steps, which write zeros.

Weights may be float8_e4m3fn, as few rows are bound by the bytes of their weights. A consumer then
converts its block of weights to bfloat16, from shared memory to shared memory, before each step.

Shape letters: see the package; T row tiles, H groups and the rows of none, R rank.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from jaxrl_llm.kernels.float8 import FLOAT8
from jaxrl_llm.kernels.grouped_matmul.common import (
    CHUNK,
    CONSUMER_REGISTERS,
    CONSUMERS,
    DEPTH,
    PIECE,
    PRODUCER_REGISTERS,
    Ring,
    column_tile,
    compiler,
    cumulative,
    matrices,
    own_jobs,
    ring_barriers,
    store,
    view,
    views,
)
from jaxrl_llm.kernels.grouped_matmul.factors import FactorMemory, Factors, factor_memory
from jaxrl_llm.kernels.hopper import (
    SHARED_BYTES_RESERVED,
    SM_SHARED_BYTES,
    SMS,
    Interpret,
    Ref,
    ScratchType,
    accumulator,
    along,
    by_column,
    load_whole,
)
from jaxrl_llm.kernels.mosaic import plgpu

RUNS = (32, 16, 8, 4, 2, 1)  # rows of a store of a part of a chunk
MOST_STAGES = 6
BARRIER_BYTES = 1024  # shared memory of the barriers, with some to spare


class Extras(NamedTuple):
    """The factors that change the products of a row, or None."""

    scale_GF: jax.Array | None = None  # factors of the outputs of weights, float32
    # See factors.py: bfloat16, R one of RANKS. Of `a` the inputs are last, as wgmma wants them.
    a_GRD: jax.Array | None = None
    b_GRF: jax.Array | None = None

    @property
    def rank(self) -> int:
        """Columns of the factors, or 0."""
        return 0 if self.a_GRD is None else self.a_GRD.shape[1]


@dataclass(frozen=True, kw_only=True)
class Tile:
    """Sizes of the kernel.

    With two chunks a consumer has a chunk and all columns of the tile; with one it has half of the
    columns.
    """

    chunks: int = 2
    columns: int = 256
    stages: int = 4
    band: int = 8  # row tiles that run next to each other, so that they share weights

    @property
    def width(self) -> int:
        """Columns of a consumer."""
        return self.columns if self.chunks == CONSUMERS else self.columns // CONSUMERS


def default_tile(
    rows: int, groups: int, outputs: int, *, float8: bool = False, rank: int = 0
) -> Tile:
    """Tiles of 128 rows where groups have as many on average, else of 64.

    A tile of 128 rows and 256 columns loads the fewest bytes a product, and its accumulators fill
    the registers. Small groups would leave its second chunk empty. Float8 weights and factors are
    for few rows.
    """
    few = float8 or rank > 0 or rows < CONSUMERS * CHUNK * groups
    tile = Tile(chunks=1 if few else CONSUMERS, columns=column_tile(outputs))
    return replace(tile, stages=_stages_that_fit(tile, float8, rank))


def _stages_that_fit(tile: Tile, float8: bool, rank: int) -> int:
    """The stages of the ring for which shared memory has room."""
    stores = CONSUMERS * 2 * CHUNK * PIECE * 2
    converted = CONSUMERS * 2 * DEPTH * tile.width * 2 if float8 else 0
    fixed = stores + converted + rank * tile.columns * 2 + BARRIER_BYTES
    of_stage = DEPTH * (2 * tile.chunks * CHUNK + (1 if float8 else 2) * tile.columns + 2 * rank)
    return min(MOST_STAGES, (SM_SHARED_BYTES - SHARED_BYTES_RESERVED - fixed) // of_stage)


def multiply_rows(
    x_MD: jax.Array,
    weights_GDF: jax.Array,
    sizes_G: jax.Array,
    extras: Extras | None = None,
    *,
    transposed: bool = False,
    tile: Tile | None = None,
    interpret: Interpret = None,
) -> jax.Array:
    """The grouped matmul in bfloat16, zeros after the last group's rows.

    `transposed` contracts the weights' last dim: x is [M, F], the result [M, D].

    Requires: float8 weights and extras are not transposed; float8 weights and factors have tiles of
        one chunk.
    """
    G, D, F = weights_GDF.shape
    extras = extras or Extras()
    float8 = weights_GDF.dtype == FLOAT8
    assert not (transposed and (float8 or any(e is not None for e in extras)))
    outputs = D if transposed else F
    tile = tile or default_tile(x_MD.shape[0], G, outputs, float8=float8, rank=extras.rank)
    assert tile.chunks == 1 or not (float8 or extras.rank)
    run = _lowered_once if interpret is None else _run  # no jit in interpret mode
    jobs = row_tiles(sizes_G, x_MD.shape[0], tile.chunks)
    return run(x_MD, weights_GDF, *jobs, extras, transposed, tile, interpret)


def row_tiles(sizes_G: jax.Array, rows: int, chunks: int) -> tuple[jax.Array, jax.Array]:
    """The row tiles [T, 1 + 2 chunks] in the order of rows, and their number [1], int32.

    A tile is its group (G: none), then first row and number of rows of each chunk.
    """
    G, tile_rows = sizes_G.shape[0], chunks * CHUNK
    sizes_G = sizes_G.astype(jnp.int32)
    ends_G, tile_ends_G = cumulative(sizes_G), cumulative((sizes_G + tile_rows - 1) // tile_rows)
    none_tiles = (rows - ends_G[-1] + tile_rows - 1) // tile_rows
    tile_T = jnp.arange(rows // tile_rows + G + 1, dtype=jnp.int32)
    group_T = (tile_ends_G <= tile_T[:, None]).sum(axis=1, dtype=jnp.int32)
    start_T, end_T = _after_zero(ends_G)[group_T], jnp.append(ends_G, rows)[group_T]
    tile_T -= _after_zero(tile_ends_G)[group_T]
    fields = [group_T]
    for chunk in range(chunks):
        first_T = start_T + tile_T * tile_rows + chunk * CHUNK
        left_T = end_T - first_T
        moves_T = (left_T > 0) & (left_T < CHUNK) & (end_T - start_T >= CHUNK)
        fields += [
            jnp.where(moves_T, end_T - CHUNK, first_T),
            jnp.where(moves_T, CHUNK, jnp.clip(left_T, 0, CHUNK)),
        ]
    return jnp.stack(fields, axis=1), tile_ends_G[-1:] + none_tiles


def _after_zero(ends_G: jax.Array) -> jax.Array:
    """A zero, then the ends. XLA would fold the constants of `jnp.insert` at length."""
    return jnp.pad(ends_G, (1, 0))


def _run(
    x_MD: jax.Array,
    weights_GDF: jax.Array,
    tiles: jax.Array,
    num_tiles: jax.Array,
    extras: Extras,
    transposed: bool,
    tile: Tile,
    interpret: Interpret,
) -> jax.Array:
    given = {name: e for name, e in extras._asdict().items() if e is not None}
    rank, outputs = extras.rank, weights_GDF.shape[1 if transposed else 2]
    column_tiles = outputs // tile.columns
    ctas = min(SMS, tiles.shape[0] * column_tiles)
    block = (tile.columns, DEPTH) if transposed else (DEPTH, tile.columns)
    run = plgpu.kernel(
        partial(
            _kernel,
            names=tuple(given),
            tile=tile,
            transposed=transposed,
            column_tiles=column_tiles,
            ctas=ctas,
            interpret=interpret,
        ),
        out_type=jax.ShapeDtypeStruct((x_MD.shape[0], outputs), x_MD.dtype),
        grid=(ctas,),
        grid_names=("cta",),
        num_threads=CONSUMERS + 1,
        thread_name="warpgroup",
        scratch_types=dict(
            x_smem=views(tile.stages, tile.chunks, CHUNK, DEPTH, interpret=interpret),
            w_smem=_stages(tile, *block, dtype=weights_GDF.dtype),
            converted=_converted(tile, weights_GDF.dtype),
            out_smem=views(CONSUMERS, 2, CHUNK, PIECE, interpret=interpret),
            of_factors=factor_memory(rank, tile.columns, tile.stages, interpret) if rank else None,
            **ring_barriers(tile.stages, tile.chunks + (2 if rank else 1)),
        ),
        compiler_params=compiler(),
        interpret=interpret,
        kernel_name="grouped_matmul_rows",
    )
    return run(x_MD, weights_GDF, tiles, num_tiles, *given.values())


def _stages(tile: Tile, *block: int, dtype: DTypeLike) -> ScratchType:
    """Shared memory of the blocks of weights."""
    if dtype != FLOAT8:
        return matrices(tile.stages, *block)
    # A consumer's columns, at most a line of swizzled bytes, so that its rows meet no other's bank.
    width = tile.width
    transforms = (plgpu.TilingTransform((8, width)), plgpu.SwizzleTransform(width))
    return plgpu.SMEM((tile.stages, *block), FLOAT8, transforms=transforms)


def _converted(tile: Tile, dtype: DTypeLike) -> ScratchType:
    """Shared memory of two converted blocks of each consumer, or None."""
    return matrices(CONSUMERS, 2, DEPTH, tile.width) if dtype == FLOAT8 else None


_lowered_once = jax.jit(_run, static_argnums=(5, 6, 7))  # for all layers


def _place(
    job: jax.Array, row_tiles: jax.Array, column_tiles: int, band: int
) -> tuple[jax.Array, jax.Array]:
    """Row tile and column tile of a job: bands of row tiles, column after column within."""
    per_band = jnp.asarray(band * column_tiles, job.dtype)
    first = lax.div(job, per_band) * band
    size = jnp.minimum(row_tiles - first, band)
    rest = lax.rem(job, per_band)
    return first + lax.rem(rest, size), lax.div(rest, size)


def _store_chunk(
    acc: jax.Array,
    buffers: tuple[Ref, Ref, Ref],
    out_ref: Ref,
    first: jax.Array,
    rows: jax.Array,
    base: jax.Array,
) -> None:
    """Write the first `rows` rows of an accumulator to the rows from `first` and columns from
    `base` on. `buffers` are the views of a consumer's buffers.
    """
    tiles, in_rows, plain = buffers

    def whole(buffer: Ref, offset: int) -> None:
        target = out_ref.at[pl.ds(first, CHUNK), pl.ds(base + offset, PIECE)]
        plgpu.copy_smem_to_gmem(buffer, target, commit_group=False)

    def runs(buffer: Ref, offset: int) -> None:
        begin = rows - rows
        for size in RUNS:
            target = out_ref.at[pl.ds(first + begin, size), pl.ds(base + offset, PIECE)]
            run = buffer.at[pl.ds(begin, size)]
            copy = partial(plgpu.copy_smem_to_gmem, run, target, commit_group=False)
            pl.when(rows & size != 0)(copy)
            begin += rows & size

    pl.when(rows == CHUNK)(lambda: store(acc, tiles, in_rows, whole))
    pl.when(rows < CHUNK)(lambda: store(acc, plain, plain, runs))


def _block(
    w_smem: Ref,
    converted: Ref | None,
    transposed: bool,
    step: jax.Array,
    stage: jax.Array,
    mine: pl.Slice | slice,
) -> Ref:
    """A consumer's columns of a step's block of weights, in bfloat16."""
    if transposed:
        return w_smem.at[stage, mine].transpose((1, 0))
    if converted is None:
        return w_smem.at[stage, :, mine]
    block = w_smem[stage, :, mine]
    # The matmul of the step before the last, which read this buffer, is done.
    own = lax.axis_index("warpgroup"), lax.rem(step, jnp.asarray(2, step.dtype))
    buffer = converted.at[own]
    # Hopper converts float8 to float16 alone, which holds all of its values.
    buffer[...] = block.astype(jnp.float16).astype(jnp.float32).astype(jnp.bfloat16)
    plgpu.commit_smem()
    return buffer


def _scaled(acc: jax.Array, scale_ref: Ref, group: jax.Array, base: jax.Array) -> jax.Array:
    """The accumulator times the factors of its columns, from `base` on."""
    group = jnp.minimum(group, scale_ref.shape[0] - 1)
    own = scale_ref.at[group, pl.ds(base, acc.shape[1])]
    return acc * along(load_whole(own, by_column()), acc.shape, axis=1)


def _load_chunks(
    x_ref: Ref,
    buffers: Ref,
    chunks: list[tuple[jax.Array, jax.Array]],
    entries: pl.Slice | slice,
    loaded: Ref,
) -> None:
    """Start the loads of a step's rows: the first chunk, and others that have any."""
    for number, (first, rows) in enumerate(chunks):
        source = x_ref.at[pl.ds(first, CHUNK), entries]
        copy = partial(plgpu.copy_gmem_to_smem, source, buffers.at[number], loaded)
        if number == 0:
            copy()
        else:
            pl.when(rows > 0)(copy)
            pl.when(rows == 0)(partial(plgpu.barrier_arrive, loaded))


def _kernel(
    x_ref: Ref,
    w_ref: Ref,
    tiles_ref: Ref,
    num_ref: Ref,
    *others: Ref,
    names: tuple[str, ...],
    tile: Tile,
    transposed: bool,
    column_tiles: int,
    ctas: int,
    x_smem: Ref,
    w_smem: Ref,
    converted: Ref | None,
    out_smem: Ref,
    of_factors: FactorMemory | None,
    loaded: Ref,
    free: Ref,
    interpret: Interpret,
) -> None:
    *given, out_ref = others
    extras = dict(zip(names, given, strict=True))
    scale_ref, factors = extras.get("scale_GF"), None
    if of_factors is not None:
        factors = Factors(extras["a_GRD"], extras["b_GRF"], of_factors)
    groups, width, rank = w_ref.shape[0], tile.width, factors.rank if factors else 0
    all_steps = x_ref.shape[1] // DEPTH
    ring = Ring(loaded, free, tile.stages)
    cta, warpgroup = lax.axis_index("cta"), lax.axis_index("warpgroup")
    num_tiles = num_ref[0]
    jobs = own_jobs(num_tiles * column_tiles, ctas)
    x_tiles, x_rows, _ = view(x_smem, interpret)
    out_tiles, out_rows, out_plain = view(out_smem, interpret)

    def job_of(number: jax.Array) -> tuple[jax.Array, jax.Array]:
        return _place(cta + number * ctas, num_tiles, column_tiles, tile.band)

    def group_and_steps(row_tile: jax.Array) -> tuple[jax.Array, jax.Array]:
        group = tiles_ref[row_tile, 0]
        return group, jnp.where(group < groups, all_steps, 0)

    weights_of = partial(_block, w_smem, converted, transposed)

    @pl.when(warpgroup < CONSUMERS)
    def _consume() -> None:
        plgpu.set_max_registers(CONSUMER_REGISTERS, action="increase")
        chunk = warpgroup if tile.chunks == CONSUMERS else 0
        mine = pl.ds(0 if tile.chunks == CONSUMERS else warpgroup * width, width)

        def one_job(number: jax.Array, at: jax.Array) -> jax.Array:
            row_tile, column = job_of(number)
            group, steps = group_and_steps(row_tile)
            first, rows = (tiles_ref[row_tile, 1 + 2 * chunk + i] for i in range(2))
            base = column * tile.columns + (0 if tile.chunks == CONSUMERS else warpgroup * width)

            @pl.when(rows > 0)
            def _multiply() -> None:
                def products(acc_ref: Ref, low_ref: Ref | None = None) -> tuple[jax.Array, ...]:
                    def matmul(acc_ref: Ref, step: jax.Array, stage: jax.Array) -> None:
                        weights, x = weights_of(step, stage, mine), x_tiles.at[stage, chunk]
                        if factors is not None:
                            factors.multiply_step(low_ref, x, stage)
                        plgpu.wgmma(acc_ref, x, weights)

                    acc = ring.multiplied(acc_ref, matmul, at, steps)
                    return (acc,) if low_ref is None else (acc, low_ref[...])

                accumulators = [accumulator(CHUNK, columns) for columns in (width, rank) if columns]
                acc, *low = pl.run_scoped(products, *accumulators)
                if scale_ref is not None:
                    acc = _scaled(acc, scale_ref, group, base)
                if factors is not None:
                    acc = factors.added(acc, low[0], group < groups, mine)
                views_of_mine = tuple(
                    buffer.at[warpgroup] for buffer in (out_tiles, out_rows, out_plain)
                )
                _store_chunk(acc, views_of_mine, out_ref, first, rows, base)

            pl.when(rows == 0)(lambda: ring.skip(at, steps))
            return at + steps

        lax.fori_loop(0, jobs, one_job, jnp.int32(0))
        plgpu.wait_smem_to_gmem(0)

    @pl.when(warpgroup == CONSUMERS)
    def _produce() -> None:
        plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")

        def one_job(number: jax.Array, at: jax.Array) -> jax.Array:
            row_tile, column = job_of(number)
            group, steps = group_and_steps(row_tile)
            columns = pl.ds(column * tile.columns, tile.columns)
            chunks = [
                tuple(tiles_ref[row_tile, 1 + 2 * c + i] for i in range(2))
                for c in range(tile.chunks)
            ]

            @pl.loop(0, steps)
            def _load(step: jax.Array) -> None:
                entries = pl.ds(step * DEPTH, DEPTH)

                def loads(stage: jax.Array, barrier: Ref) -> None:
                    block = (columns, entries) if transposed else (entries, columns)
                    plgpu.copy_gmem_to_smem(w_ref.at[group, *block], w_smem.at[stage], barrier)
                    if factors is not None:
                        factors.load_step(group, entries, stage, barrier)
                    _load_chunks(x_ref, x_rows.at[stage], chunks, entries, barrier)

                ring.fill(at + step, loads)

            if factors is not None:
                pl.when(steps > 0)(partial(factors.load_second, group, columns, at))
            return at + steps

        total = lax.fori_loop(0, jobs, one_job, jnp.int32(0))
        ring.drain(total)
        if factors is not None:
            factors.wait_for_reads(total)
