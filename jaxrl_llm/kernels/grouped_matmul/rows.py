"""The kernel for rows: each row times the weights of its group, or times their transpose.

A tile has rows of one group alone, in chunks of 64. A group's rows start anywhere, and TMA loads
64 rows from any row on. The last chunk of a group of 64 rows or more is moved up until it ends with
the group: its first rows are computed twice, with the same bits. So chunks are stored whole, but
for those of smaller groups, which are stored in runs of 1, 2, 4 ... rows. Rows after the last
group's are tiles without steps, which write zeros.

Weights may be float8_e4m3fn, as few rows are bound by the bytes of their weights. A consumer then
converts its block of weights to bfloat16, from shared memory to shared memory, before each step.

Shape letters: those of the package; T row tiles, H groups and the rows of none.
"""

from dataclasses import dataclass
from functools import partial

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
from jaxrl_llm.kernels.hopper import SMS, Interpret, Ref, ScratchType, accumulator
from jaxrl_llm.kernels.mosaic import plgpu

RUNS = (32, 16, 8, 4, 2, 1)  # rows of a store of a part of a chunk


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


def default_tile(rows: int, groups: int, outputs: int, *, float8: bool = False) -> Tile:
    """Tiles of 128 rows where groups have as many on average, else of 64, as with float8 weights.

    A tile of 128 rows and 256 columns loads the fewest bytes a product, and its accumulators fill
    the registers. Small groups would leave its second chunk empty.
    """
    columns, stages = column_tile(outputs)
    if float8:  # a block takes half of the shared memory, so there is room for one more
        return Tile(chunks=1, columns=columns, stages=5)
    if rows < CONSUMERS * CHUNK * groups:
        return Tile(chunks=1, columns=columns)
    return Tile(columns=columns, stages=stages)


def multiply_rows(
    x_MD: jax.Array,
    weights_GDF: jax.Array,
    sizes_G: jax.Array,
    *,
    transposed: bool = False,
    tile: Tile | None = None,
    interpret: Interpret = None,
) -> jax.Array:
    """The grouped matmul in bfloat16, zeros after the last group's rows.

    `transposed` contracts the weights' last dim: x is [M, F], the result [M, D].

    Requires: float8 weights are not transposed.
    """
    G, D, F = weights_GDF.shape
    float8 = weights_GDF.dtype == FLOAT8
    assert not (float8 and transposed), "only the forward pass reads float8"
    tile = tile or default_tile(x_MD.shape[0], G, D if transposed else F, float8=float8)
    run = _lowered_once if interpret is None else _run  # no jit in interpret mode
    jobs = row_tiles(sizes_G, x_MD.shape[0], tile.chunks)
    return run(x_MD, weights_GDF, *jobs, transposed, tile, interpret)


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
    transposed: bool,
    tile: Tile,
    interpret: Interpret,
) -> jax.Array:
    outputs = weights_GDF.shape[1 if transposed else 2]
    column_tiles = outputs // tile.columns
    ctas = min(SMS, tiles.shape[0] * column_tiles)
    block = (tile.columns, DEPTH) if transposed else (DEPTH, tile.columns)
    run = plgpu.kernel(
        partial(
            _kernel,
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
            **ring_barriers(tile.stages, tile.chunks + 1),
        ),
        compiler_params=compiler(),
        interpret=interpret,
        kernel_name="grouped_matmul_rows",
    )
    return run(x_MD, weights_GDF, tiles, num_tiles)


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


_lowered_once = jax.jit(_run, static_argnums=(4, 5, 6))  # for all layers


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


def _kernel(
    x_ref: Ref,
    w_ref: Ref,
    tiles_ref: Ref,
    num_ref: Ref,
    out_ref: Ref,
    *,
    tile: Tile,
    transposed: bool,
    column_tiles: int,
    ctas: int,
    x_smem: Ref,
    w_smem: Ref,
    converted: Ref | None,
    out_smem: Ref,
    loaded: Ref,
    free: Ref,
    interpret: Interpret,
) -> None:
    groups, width = w_ref.shape[0], tile.width
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

    @pl.when(warpgroup < CONSUMERS)
    def _consume() -> None:
        plgpu.set_max_registers(CONSUMER_REGISTERS, action="increase")
        chunk = warpgroup if tile.chunks == CONSUMERS else 0
        mine = pl.ds(0 if tile.chunks == CONSUMERS else warpgroup * width, width)

        def weights_of(step: jax.Array, stage: jax.Array) -> Ref:
            if transposed:
                return w_smem.at[stage, mine].transpose((1, 0))
            if converted is None:
                return w_smem.at[stage, :, mine]
            block = w_smem[stage, :, mine]
            # The matmul of the step before the last, which read this buffer, is done.
            buffer = converted.at[warpgroup, lax.rem(step, jnp.asarray(2, step.dtype))]
            # Hopper converts float8 to float16 alone, which holds all of its values.
            buffer[...] = block.astype(jnp.float16).astype(jnp.float32).astype(jnp.bfloat16)
            plgpu.commit_smem()
            return buffer

        def matmul(acc_ref: Ref, step: jax.Array, stage: jax.Array) -> None:
            plgpu.wgmma(acc_ref, x_tiles.at[stage, chunk], weights_of(step, stage))

        def one_job(number: jax.Array, at: jax.Array) -> jax.Array:
            row_tile, column = job_of(number)
            _, steps = group_and_steps(row_tile)
            first, rows = (tiles_ref[row_tile, 1 + 2 * chunk + i] for i in range(2))
            base = column * tile.columns + (0 if tile.chunks == CONSUMERS else warpgroup * width)

            @pl.when(rows > 0)
            def _multiply() -> None:
                acc = pl.run_scoped(
                    lambda ref: ring.multiplied(ref, matmul, at, steps), accumulator(CHUNK, width)
                )

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
                    for c, (first, rows) in enumerate(chunks):
                        copy = partial(
                            plgpu.copy_gmem_to_smem,
                            x_ref.at[pl.ds(first, CHUNK), entries],
                            x_rows.at[stage, c],
                            barrier,
                        )
                        if c == 0:
                            copy()
                        else:
                            pl.when(rows > 0)(copy)
                            pl.when(rows == 0)(partial(plgpu.barrier_arrive, barrier))

                ring.fill(at + step, loads)

            return at + steps

        ring.drain(lax.fori_loop(0, jobs, one_job, jnp.int32(0)))
