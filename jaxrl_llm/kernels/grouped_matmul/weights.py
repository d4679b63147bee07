"""The kernel for the gradient of the weights: of each group x^T times the gradient of its outputs.

A job is a tile of inputs and outputs of one group. Its steps are blocks of 64 rows from the group's
first row on. The last block has rows of the next group or of none: both operands are set to zero
there, in shared memory, since zero times NaN is NaN. A group without rows gets zeros.

Shape letters: those of the package.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxrl_llm.kernels.grouped_matmul.common import (
    CHUNK,
    COMPILER,
    CONSUMER_REGISTERS,
    CONSUMERS,
    DEPTH,
    PIECE,
    PRODUCER_REGISTERS,
    column_tile,
    cumulative,
    drain,
    fill_stage,
    matrices,
    multiplied,
    own_jobs,
    ring,
    store,
)
from jaxrl_llm.kernels.hopper import SMS, Interpret, Ref, accumulator, num_blocks

INPUTS = CONSUMERS * CHUNK  # of a tile


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
    """x^T times the gradient of each group, [G, D, F] in bfloat16."""
    tile = tile or Tile(outputs=column_tile(gradient_MF.shape[1]))
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
            **ring(tile.stages, 2),
        ),
        compiler_params=COMPILER,
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


def _zero_after(smem: Ref, rows: jax.Array) -> None:
    """Set the rows of a block from `rows` on to zero."""
    block = smem[...]
    row = plgpu.broadcasted_iota(jnp.int32, block.shape, 0, layout=plgpu.Layout.WGMMA)
    smem[...] = jnp.where(row < rows, block, jnp.zeros_like(block))


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
    stages, outputs = tile.stages, tile.outputs
    input_tiles, output_tiles = x_ref.shape[1] // INPUTS, dy_ref.shape[1] // outputs
    cta, warpgroup = lax.axis_index("cta"), lax.axis_index("warpgroup")
    jobs = own_jobs(groups_ref.shape[0] * input_tiles * output_tiles, ctas)

    def job_of(number: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        return _place(cta + number * ctas, input_tiles, output_tiles, tile.band)

    @pl.when(warpgroup < CONSUMERS)
    def _consume() -> None:
        plgpu.set_max_registers(CONSUMER_REGISTERS, action="increase")
        mine = pl.ds(warpgroup * CHUNK, CHUNK)
        half = pl.ds(warpgroup * (outputs // CONSUMERS), outputs // CONSUMERS)

        def one_job(number: jax.Array, at: jax.Array) -> jax.Array:
            group, input_tile, output_tile = job_of(number)
            rows = groups_ref[group, 1]
            steps = num_blocks(rows, DEPTH)

            def matmul(acc_ref: Ref, step: jax.Array, stage: jax.Array) -> None:
                left = rows - step * DEPTH

                @pl.when(left < DEPTH)
                def _mask() -> None:
                    _zero_after(x_smem.at[stage, :, mine], left)
                    _zero_after(dy_smem.at[stage, :, half], left)
                    plgpu.commit_smem()
                    plgpu.barrier_arrive(masked)
                    plgpu.barrier_wait(masked)

                x = x_smem.at[stage, :, mine].transpose((1, 0))
                plgpu.wgmma(acc_ref, x, dy_smem.at[stage])

            counted = dict(at=at, steps=steps, stages=stages, loaded=loaded, free=free)
            acc = pl.run_scoped(
                lambda ref: multiplied(ref, matmul, **counted), accumulator(CHUNK, outputs)
            )

            def copy(buffer: Ref, offset: int) -> None:
                inputs = pl.ds(input_tile * INPUTS + warpgroup * CHUNK, CHUNK)
                columns = pl.ds(output_tile * outputs + offset, PIECE)
                plgpu.copy_smem_to_gmem(
                    buffer, out_ref.at[group, inputs, columns], commit_group=False
                )

            store(acc, out_smem.at[warpgroup], copy)
            return at + steps

        lax.fori_loop(0, jobs, one_job, jnp.int32(0))
        plgpu.wait_smem_to_gmem(0)

    @pl.when(warpgroup == CONSUMERS)
    def _produce() -> None:
        plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")

        def one_job(number: jax.Array, at: jax.Array) -> jax.Array:
            group, input_tile, output_tile = job_of(number)
            first, rows = groups_ref[group, 0], groups_ref[group, 1]
            inputs = pl.ds(input_tile * INPUTS, INPUTS)
            columns = pl.ds(output_tile * outputs, outputs)
            steps = num_blocks(rows, DEPTH)

            @pl.loop(0, steps)
            def _load(step: jax.Array) -> None:
                block = pl.ds(first + step * DEPTH, DEPTH)

                def loads(stage: jax.Array, barrier: Ref) -> None:
                    plgpu.copy_gmem_to_smem(x_ref.at[block, inputs], x_smem.at[stage], barrier)
                    plgpu.copy_gmem_to_smem(dy_ref.at[block, columns], dy_smem.at[stage], barrier)

                fill_stage(at + step, loads, stages, loaded, free)

            return at + steps

        drain(lax.fori_loop(0, jobs, one_job, jnp.int32(0)), stages, free)
