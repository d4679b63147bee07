"""A matmul for Hopper whose rows have the same bits for any number of rows, in Pallas.

Each output is one chain of tensor-core steps over the contracted dim, from its start to its end, in
float32. Tile sizes do not change the chain, so that they may follow the shapes: cuBLAS also splits
the chain where there are few tiles. A CTA owns a tile of the output; a producer warpgroup loads by
TMA, two consumers multiply.

Shape letters: M rows, D contracted, F outputs.
"""

import math
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from jaxrl_llm.kernels.hopper import SMS, Interpret, Ref, ScratchType, accumulator

CONSUMERS = 2


@dataclass(frozen=True, kw_only=True)
class Tile:
    """Sizes of the kernel: rows of a consumer, outputs of a CTA, steps in flight."""

    rows: int = 64
    outputs: int = 128
    depth: int = 64  # contracted entries of a step
    stages: int = 4
    group: int = 8  # row tiles that run next to each other, so that they share weights


def default_tile(num_rows: int, outputs: int) -> Tile:
    """Large tiles where these give every SM one, else smaller ones."""

    def tiles(tile: Tile) -> int:
        return -(-num_rows // (CONSUMERS * tile.rows)) * (outputs // tile.outputs)

    large = Tile(rows=128, stages=3)
    if outputs % 128 == 0 and tiles(large) >= SMS:
        return large
    medium = Tile(stages=6)
    if outputs % 128 == 0 and tiles(medium) >= SMS:
        return medium
    return Tile(outputs=64, stages=8)


def fits(depth: int, outputs: int, dtype: jax.typing.DTypeLike) -> bool:
    """Whether the kernel takes a kernel [D, F] of this dtype."""
    return dtype == jnp.bfloat16 and depth % 64 == 0 and outputs % 64 == 0


def strict_matmul(
    x_MD: Float[Array, "M D"],
    kernel_DF: Float[Array, "D F"],
    tile: Tile | None = None,
    *,
    interpret: Interpret = None,
) -> Float[Array, "M F"]:
    """`x_MD @ kernel_DF` in bfloat16.

    Requires: `fits`.
    Guarantees: a row of the result has the same bits for any M, in any place and with any tile.
    """
    M, F = x_MD.shape[0], kernel_DF.shape[1]
    tile = tile or default_tile(M, F)
    rows = CONSUMERS * tile.rows
    added = -M % rows
    x_MD = jnp.pad(x_MD, ((0, added), (0, 0)))
    run = _lowered_once if interpret is None else _matmul  # no jit in interpret mode
    return run(x_MD, kernel_DF, tile, interpret)[:M]


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def strict_dot(x: Array, kernel: Array, contract: int) -> Array:
    """`jnp.tensordot(x, kernel, contract)` by `strict_matmul`, with its ordinary gradient."""
    depth = math.prod(kernel.shape[:contract])
    y_MF = strict_matmul(x.reshape(-1, depth), kernel.reshape(depth, -1))
    return y_MF.reshape(*x.shape[: x.ndim - contract], *kernel.shape[contract:])


def _dot_backward(
    contract: int, residuals: tuple[Array, Array], gradient: Array
) -> tuple[Array, Array]:
    plain = partial(jnp.tensordot, axes=contract)
    return jax.vjp(plain, *residuals)[1](gradient)


strict_dot.defvjp(
    lambda x, kernel, contract: (strict_dot(x, kernel, contract), (x, kernel)), _dot_backward
)


def _matmul(x_MD: Array, kernel_DF: Array, tile: Tile, interpret: Interpret) -> Array:
    M, F = x_MD.shape[0], kernel_DF.shape[1]
    row_tiles, column_tiles = M // (CONSUMERS * tile.rows), F // tile.outputs
    run = plgpu.kernel(
        partial(_kernel, tile=tile, row_tiles=row_tiles, column_tiles=column_tiles),
        out_type=jax.ShapeDtypeStruct((M, F), x_MD.dtype),
        grid=(row_tiles * column_tiles,),
        grid_names=("tile",),
        num_threads=CONSUMERS + 1,
        thread_name="warpgroup",
        scratch_types=dict(
            x_smem=_matrices(tile.stages, CONSUMERS * tile.rows, tile.depth),
            w_smem=_matrices(tile.stages, tile.depth, tile.outputs),
            out_smem=_matrices(CONSUMERS, tile.rows, tile.outputs),
            loaded=plgpu.Barrier(num_arrivals=2, num_barriers=tile.stages),
            free=plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=tile.stages),
        ),
        interpret=interpret,
        kernel_name="strict_matmul",
    )
    return run(x_MD, kernel_DF)


_lowered_once = jax.jit(_matmul, static_argnums=(2, 3))  # for all layers


def _matrices(number: int, rows: int, columns: int) -> ScratchType:
    """Shared memory of bfloat16 matrices in the tiles that TMA writes and wgmma reads."""
    transforms = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    return plgpu.SMEM((number, rows, columns), jnp.bfloat16, transforms=transforms)


def _place(index: Array, row_tiles: int, column_tiles: int, group: int) -> tuple[Array, Array]:
    """Row tile and column tile of a CTA: groups of row tiles, column after column within."""
    group = min(group, row_tiles)
    per_group = jnp.asarray(group * column_tiles, index.dtype)
    first = lax.div(index, per_group) * group
    size = jnp.minimum(row_tiles - first, group)
    rest = lax.rem(index, per_group)
    return first + lax.rem(rest, size), lax.div(rest, size)


def _kernel(
    x_ref: Ref,
    w_ref: Ref,
    out_ref: Ref,
    *,
    tile: Tile,
    row_tiles: int,
    column_tiles: int,
    x_smem: Ref,
    w_smem: Ref,
    out_smem: Ref,
    loaded: Ref,
    free: Ref,
) -> None:
    steps, stages = x_ref.shape[1] // tile.depth, tile.stages
    row_tile, column_tile = _place(lax.axis_index("tile"), row_tiles, column_tiles, tile.group)
    warpgroup = lax.axis_index("warpgroup")
    columns = pl.ds(column_tile * tile.outputs, tile.outputs)

    def stage_of(step: Array) -> Array:
        return lax.rem(step, jnp.asarray(stages, step.dtype))

    @pl.when(warpgroup < CONSUMERS)
    def _consume() -> None:
        plgpu.set_max_registers(232, action="increase")
        mine = pl.ds(warpgroup * tile.rows, tile.rows)

        def multiply(acc_ref: Ref) -> Array:
            @pl.loop(0, steps)
            def _step(step: Array) -> None:
                stage = stage_of(step)
                plgpu.barrier_wait(loaded.at[stage])
                plgpu.wgmma(acc_ref, x_smem.at[stage, mine], w_smem.at[stage])
                plgpu.wgmma_wait(1)

                @pl.when(step > 0)
                def _release() -> None:
                    plgpu.barrier_arrive(free.at[stage_of(step - 1)])

            result = acc_ref[...]
            plgpu.barrier_arrive(free.at[(steps - 1) % stages])
            return result

        acc = pl.run_scoped(multiply, accumulator(tile.rows, tile.outputs))
        out_smem[warpgroup] = acc.astype(jnp.bfloat16)
        plgpu.commit_smem()
        first = (row_tile * CONSUMERS + warpgroup) * tile.rows
        plgpu.copy_smem_to_gmem(
            out_smem.at[warpgroup], out_ref.at[pl.ds(first, tile.rows), columns]
        )
        plgpu.wait_smem_to_gmem(0)

    @pl.when(warpgroup == CONSUMERS)
    def _produce() -> None:
        plgpu.set_max_registers(40, action="decrease")
        rows = pl.ds(row_tile * CONSUMERS * tile.rows, CONSUMERS * tile.rows)

        @pl.loop(0, steps)
        def _load(step: Array) -> None:
            stage = stage_of(step)

            @pl.when(step >= stages)
            def _wait() -> None:
                plgpu.barrier_wait(free.at[stage])

            entries = pl.ds(step * tile.depth, tile.depth)
            plgpu.copy_gmem_to_smem(x_ref.at[rows, entries], x_smem.at[stage], loaded.at[stage])
            plgpu.copy_gmem_to_smem(w_ref.at[entries, columns], w_smem.at[stage], loaded.at[stage])

        @pl.loop(max(steps - stages, 0), steps)
        def _drain(step: Array) -> None:
            plgpu.barrier_wait(free.at[stage_of(step)])
