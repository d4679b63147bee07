"""The kernel for the gradient of the weights: of each group x^T times the gradient of its outputs.

A job is a tile of inputs and outputs of one group. Its steps are blocks of 64 rows. The first block
starts at a multiple of 8, where a tile of shared memory starts. Rows of other groups in the first
and the last block are set to zero in x, in shared memory. Rows after the last group's may hold NaN,
and zero times NaN is NaN: there both operands are set to zero. A group without rows gets zeros.

Shape letters: see the package.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

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
)
from jaxrl_llm.kernels.hopper import SMS, Interpret, Ref, accumulator, num_blocks
from jaxrl_llm.kernels.mosaic import plgpu

INPUTS = CONSUMERS * CHUNK  # inputs of a tile
ALIGNED = 8  # rows of a tile of shared memory, from whose first one TMA loads


@dataclass(frozen=True, kw_only=True)
class Tile:
    """Sizes of the kernel."""

    outputs: int = 256
    stages: int = 4
    band: int = 8  # tiles of inputs that run next to each other, so that they share outputs


def weights_gradient(
    x_MD: jax.Array,
    gradient_MF: jax.Array,
    sizes_G: jax.Array,
    *,
    tile: Tile | None = None,
    interpret: Interpret = None,
) -> jax.Array:
    """x^T times the gradient of each group, [G, D, F] in bfloat16.

    Requires: M is a multiple of `ALIGNED`.
    """
    outputs = column_tile(gradient_MF.shape[1])
    stages = 4 if outputs == 256 else 6  # for which shared memory has room
    tile = tile or Tile(outputs=outputs, stages=stages)
    sizes_G = sizes_G.astype(jnp.int32)
    groups_G2 = jnp.stack([cumulative(sizes_G) - sizes_G, sizes_G], axis=1)
    run = _lowered_once if interpret is None else _run  # no jit in interpret mode
    return run(x_MD, gradient_MF, groups_G2, tile, interpret)


def _run(
    x_MD: jax.Array,
    gradient_MF: jax.Array,
    groups_G2: jax.Array,
    tile: Tile,
    interpret: Interpret,
) -> jax.Array:
    G, D, F = groups_G2.shape[0], x_MD.shape[1], gradient_MF.shape[1]
    ctas = min(SMS, G * (D // INPUTS) * (F // tile.outputs))
    run = plgpu.kernel(
        partial(_kernel, tile=tile, ctas=ctas),
        out_type=jax.ShapeDtypeStruct((G, D, F), x_MD.dtype),
        grid=(ctas,),
        grid_names=("cta",),
        num_threads=CONSUMERS + 1,
        thread_name="warpgroup",
        scratch_types=dict(
            x_smem=matrices(tile.stages, DEPTH, INPUTS),
            dy_smem=matrices(tile.stages, DEPTH, tile.outputs),
            out_smem=matrices(CONSUMERS, 2, CHUNK, PIECE),
            masked=plgpu.Barrier(num_arrivals=CONSUMERS),
            **ring_barriers(tile.stages, 2),
        ),
        compiler_params=compiler(),
        interpret=interpret,
        kernel_name="grouped_matmul_weights",
    )
    return run(x_MD, gradient_MF, groups_G2)


_lowered_once = jax.jit(_run, static_argnums=(3, 4))  # for all layers


def _place(
    job: jax.Array, input_tiles: int, output_tiles: int, band: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Group, tile of inputs and tile of outputs of a job: groups one after the other."""
    per_group = jnp.asarray(input_tiles * output_tiles, job.dtype)
    group, rest = lax.div(job, per_group), lax.rem(job, per_group)
    band = min(band, input_tiles)
    per_band = jnp.asarray(band * output_tiles, job.dtype)
    first = lax.div(rest, per_band) * band
    size = jnp.minimum(input_tiles - first, band)
    rest = lax.rem(rest, per_band)
    return group, first + lax.rem(rest, size), lax.div(rest, size)


def _keep(smem: Ref, first: jax.Array, end: jax.Array) -> None:
    """Set all rows of a block but those from `first` to `end` to zero."""
    block = smem[...]
    row = plgpu.broadcasted_iota(jnp.int32, block.shape, 0, layout=plgpu.Layout.WGMMA)
    smem[...] = jnp.where((row >= first) & (row < end), block, jnp.zeros_like(block))


def _kernel(
    x_ref: Ref,
    dy_ref: Ref,
    groups_ref: Ref,
    out_ref: Ref,
    *,
    tile: Tile,
    ctas: int,
    x_smem: Ref,
    dy_smem: Ref,
    out_smem: Ref,
    masked: Ref,
    loaded: Ref,
    free: Ref,
) -> None:
    outputs = tile.outputs
    input_tiles, output_tiles = x_ref.shape[1] // INPUTS, dy_ref.shape[1] // outputs
    ring = Ring(loaded, free, tile.stages)
    cta, warpgroup = lax.axis_index("cta"), lax.axis_index("warpgroup")
    jobs = own_jobs(groups_ref.shape[0] * input_tiles * output_tiles, ctas)

    def job_of(number: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        return _place(cta + number * ctas, input_tiles, output_tiles, tile.band)

    last = groups_ref.shape[0] - 1
    used = groups_ref[last, 0] + groups_ref[last, 1]

    def blocks_of(group: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """Start of the first block, first row and end of the rows in it, number of blocks."""
        first, rows = groups_ref[group, 0], groups_ref[group, 1]
        start = pl.multiple_of(lax.div(first, jnp.int32(ALIGNED)) * ALIGNED, ALIGNED)
        end = first + rows - start
        return start, first - start, end, jnp.where(rows > 0, num_blocks(end, DEPTH), 0)

    @pl.when(warpgroup < CONSUMERS)
    def _consume() -> None:
        plgpu.set_max_registers(CONSUMER_REGISTERS, action="increase")
        mine = pl.ds(warpgroup * CHUNK, CHUNK)
        half = pl.ds(warpgroup * (outputs // CONSUMERS), outputs // CONSUMERS)

        def one_job(number: jax.Array, at: jax.Array) -> jax.Array:
            group, input_tile, output_tile = job_of(number)
            block, first, end, steps = blocks_of(group)

            def matmul(acc_ref: Ref, step: jax.Array, stage: jax.Array) -> None:
                kept = jnp.where(step == 0, first, 0), end - step * DEPTH
                foreign = (kept[0] > 0) | (kept[1] < DEPTH)
                of_none = (kept[1] < DEPTH) & (block + (step + 1) * DEPTH > used)

                @pl.when(foreign)
                def _mask() -> None:
                    _keep(x_smem.at[stage, :, mine], *kept)
                    pl.when(of_none)(lambda: _keep(dy_smem.at[stage, :, half], *kept))
                    plgpu.commit_smem()

                @pl.when(of_none)
                def _both_halves() -> None:
                    plgpu.barrier_arrive(masked)
                    plgpu.barrier_wait(masked)

                x = x_smem.at[stage, :, mine].transpose((1, 0))
                plgpu.wgmma(acc_ref, x, dy_smem.at[stage])

            acc = pl.run_scoped(
                lambda ref: ring.multiplied(ref, matmul, at, steps), accumulator(CHUNK, outputs)
            )

            def copy(buffer: Ref, offset: int) -> None:
                inputs = pl.ds(input_tile * INPUTS + warpgroup * CHUNK, CHUNK)
                columns = pl.ds(output_tile * outputs + offset, PIECE)
                plgpu.copy_smem_to_gmem(
                    buffer, out_ref.at[group, inputs, columns], commit_group=False
                )

            store(acc, out_smem.at[warpgroup], out_smem.at[warpgroup], copy)
            return at + steps

        lax.fori_loop(0, jobs, one_job, jnp.int32(0))
        plgpu.wait_smem_to_gmem(0)

    @pl.when(warpgroup == CONSUMERS)
    def _produce() -> None:
        plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")

        def one_job(number: jax.Array, at: jax.Array) -> jax.Array:
            group, input_tile, output_tile = job_of(number)
            start, _, _, steps = blocks_of(group)
            inputs = pl.ds(input_tile * INPUTS, INPUTS)
            columns = pl.ds(output_tile * outputs, outputs)

            @pl.loop(0, steps)
            def _load(step: jax.Array) -> None:
                block = pl.ds(start + step * DEPTH, DEPTH)

                def loads(stage: jax.Array, barrier: Ref) -> None:
                    plgpu.copy_gmem_to_smem(x_ref.at[block, inputs], x_smem.at[stage], barrier)
                    plgpu.copy_gmem_to_smem(dy_ref.at[block, columns], dy_smem.at[stage], barrier)

                ring.fill(at + step, loads)

            return at + steps

        ring.drain(lax.fori_loop(0, jobs, one_job, jnp.int32(0)))
