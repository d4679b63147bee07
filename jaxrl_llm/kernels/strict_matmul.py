"""A matmul for Hopper whose rows have the same bits for any number of rows, in Pallas.

Each output is one chain of tensor-core steps over the contracted dim, from its start to its end, in
float32. A long contracted dim has several chains of a set length, which are added in their order.
So few rows can have a CTA for each chain. Tile sizes do not change the chains, so that they may
follow the shapes: cuBLAS also splits the dim where there are few tiles. A CTA owns a tile of the
output; a producer warpgroup loads by TMA, two consumers multiply.

Shape letters: M rows, D contracted, F outputs, C chains.
"""

import math
from dataclasses import dataclass
from functools import partial, reduce

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from jaxrl_llm.kernels.hopper import SMS, Interpret, Ref, ScratchType, accumulator
from jaxrl_llm.kernels.mosaic import plgpu

CONSUMERS = 2
DEPTH = 64  # contracted entries of a step
CHAIN = 2048  # contracted entries of a chain, at most, where there are several
LONG = 4096  # more contracted entries have several chains


@dataclass(frozen=True, kw_only=True)
class Tile:
    """Sizes of the kernel: rows of a consumer, outputs of a CTA, steps in flight."""

    rows: int = 64
    outputs: int = 128
    stages: int = 4
    group: int = 8  # row tiles that run next to each other, so that they share weights
    apart: bool = False  # a CTA for each chain, and XLA adds them

    @property
    def cta_rows(self) -> int:
        """Rows of a CTA."""
        return CONSUMERS * self.rows


def chain_length(depth: int) -> int:
    """The contracted entries of a chain; the last has what is left."""
    if depth <= LONG:
        return depth
    chains = -(-depth // CHAIN)
    return -(-depth // (chains * DEPTH)) * DEPTH


def default_tile(num_rows: int, depth: int, outputs: int) -> Tile:
    """Large tiles where these give every SM two, else smaller ones.

    Where the last of few rounds has few tiles, most SMs wait for large ones. For example, 256 rows
    of 17,920 outputs took 58 us with the 140 large tiles, and 50 us with smaller ones (an H100).
    """

    def tiles(tile: Tile) -> int:
        return -(-num_rows // tile.cta_rows) * (outputs // tile.outputs)

    large, medium, small = (
        Tile(rows=128, stages=3),
        Tile(stages=6),
        Tile(outputs=64, stages=8),
    )
    if outputs % medium.outputs:
        medium = small
    if chain_length(depth) < depth:
        if 2 * tiles(medium) <= SMS:
            return Tile(outputs=medium.outputs, apart=True)
        # With the sums of earlier chains a large tile would exceed the registers.
        large = Tile(outputs=192)
    if outputs % large.outputs == 0 and tiles(large) >= 2 * SMS:
        return large
    return medium if tiles(medium) >= SMS else small


def fits(depth: int, outputs: int, dtype: jax.typing.DTypeLike) -> bool:
    """Check that the kernel takes a kernel [D, F] of this dtype."""
    return dtype == jnp.bfloat16 and depth % DEPTH == 0 and outputs % 64 == 0


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
    (M, D), F = x_MD.shape, kernel_DF.shape[1]
    tile = tile or default_tile(M, D, F)
    x_MD = jnp.pad(x_MD, ((0, -M % tile.cta_rows), (0, 0)))
    run = _lowered_once if interpret is None else _matmul  # no jit in interpret mode
    found = run(x_MD, kernel_DF, tile, interpret)
    if tile.apart:
        total_MF = reduce(jnp.add, list(found))
        # XLA may leave out a conversion to bfloat16 and back, but not this rounding.
        found = lax.reduce_precision(total_MF, exponent_bits=8, mantissa_bits=7).astype(x_MD.dtype)
    return found[:M]


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
    """The product, or with `apart` the sums of the chains: float32 [C, M, F]."""
    (M, D), F = x_MD.shape, kernel_DF.shape[1]
    row_tiles, column_tiles = M // tile.cta_rows, F // tile.outputs
    chains = -(-D // chain_length(D))
    out = jax.ShapeDtypeStruct((M, F), x_MD.dtype)
    if tile.apart:
        out = jax.ShapeDtypeStruct((chains, M, F), jnp.float32)
    run = plgpu.kernel(
        partial(_kernel, tile=tile, row_tiles=row_tiles, column_tiles=column_tiles),
        out_type=out,
        grid=(row_tiles * column_tiles, chains if tile.apart else 1),
        grid_names=("tile", "chain"),
        num_threads=CONSUMERS + 1,
        thread_name="warpgroup",
        scratch_types=dict(
            x_smem=_matrices(tile.stages, tile.cta_rows, DEPTH),
            w_smem=_matrices(tile.stages, DEPTH, tile.outputs),
            out_smem=_matrices(CONSUMERS, tile.rows, tile.outputs, out.dtype),
            loaded=plgpu.Barrier(num_arrivals=2, num_barriers=tile.stages),
            free=plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=tile.stages),
        ),
        interpret=interpret,
        kernel_name="strict_matmul",
    )
    return run(x_MD, kernel_DF)


_lowered_once = jax.jit(_matmul, static_argnums=(2, 3))  # for all layers


def _matrices(
    number: int, rows: int, columns: int, dtype: jax.typing.DTypeLike = jnp.bfloat16
) -> ScratchType:
    """Shared memory of matrices in the tiles that TMA moves and, if bfloat16, wgmma reads."""
    width = 128 // jnp.dtype(dtype).itemsize
    transforms = (plgpu.TilingTransform((8, width)), plgpu.SwizzleTransform(128))
    return plgpu.SMEM((number, rows, columns), dtype, transforms=transforms)


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
    depth, stages = x_ref.shape[1], tile.stages
    in_chain, steps = chain_length(depth) // DEPTH, depth // DEPTH
    chains = -(-steps // in_chain)
    row_tile, column_tile = _place(lax.axis_index("tile"), row_tiles, column_tiles, tile.group)
    warpgroup, chain = lax.axis_index("warpgroup"), lax.axis_index("chain")
    columns = pl.ds(column_tile * tile.outputs, tile.outputs)
    begin = chain * in_chain
    if tile.apart:
        steps, chains = jnp.minimum(steps - begin, in_chain), 1

    def stage_of(step: Array) -> Array:
        return lax.rem(step, jnp.asarray(stages, step.dtype))

    @pl.when(warpgroup < CONSUMERS)
    def _consume() -> None:
        plgpu.set_max_registers(232, action="increase")
        mine = pl.ds(warpgroup * tile.rows, tile.rows)

        def chain_of(first: Array, end: Array) -> Array:
            """The sum of the steps from `first` to before `end`."""

            def multiply(acc_ref: Ref) -> Array:
                @pl.loop(first, end)
                def _step(step: Array) -> None:
                    stage = stage_of(step)
                    plgpu.barrier_wait(loaded.at[stage])
                    plgpu.wgmma(acc_ref, x_smem.at[stage, mine], w_smem.at[stage])
                    plgpu.wgmma_wait(1)

                    @pl.when(step > first)
                    def _release() -> None:
                        plgpu.barrier_arrive(free.at[stage_of(step - 1)])

                result = acc_ref[...]
                plgpu.barrier_arrive(free.at[stage_of(end - 1)])
                return result

            return pl.run_scoped(multiply, accumulator(tile.rows, tile.outputs))

        def add(index: Array, total: Array) -> Array:
            first = index * in_chain
            return total + chain_of(first, jnp.minimum(first + in_chain, steps))

        if chains == 1:
            acc = chain_of(jnp.int32(0), jnp.asarray(steps, jnp.int32))
        else:
            zeros = jnp.zeros((tile.rows, tile.outputs), jnp.float32)
            acc = lax.fori_loop(0, chains, add, plgpu.layout_cast(zeros, plgpu.Layout.WGMMA))
        out_smem[warpgroup] = acc.astype(out_smem.dtype)
        plgpu.commit_smem()
        rows = pl.ds((row_tile * CONSUMERS + warpgroup) * tile.rows, tile.rows)
        to_ref = out_ref.at[chain, rows, columns] if tile.apart else out_ref.at[rows, columns]
        plgpu.copy_smem_to_gmem(out_smem.at[warpgroup], to_ref)
        plgpu.wait_smem_to_gmem(0)

    @pl.when(warpgroup == CONSUMERS)
    def _produce() -> None:
        plgpu.set_max_registers(40, action="decrease")
        rows = pl.ds(row_tile * tile.cta_rows, tile.cta_rows)

        @pl.loop(0, steps)
        def _load(step: Array) -> None:
            stage = stage_of(step)

            @pl.when(step >= stages)
            def _wait() -> None:
                plgpu.barrier_wait(free.at[stage])

            entries = pl.ds((begin + step) * DEPTH, DEPTH)
            plgpu.copy_gmem_to_smem(x_ref.at[rows, entries], x_smem.at[stage], loaded.at[stage])
            plgpu.copy_gmem_to_smem(w_ref.at[entries, columns], w_smem.at[stage], loaded.at[stage])

        @pl.loop(jnp.maximum(steps - stages, 0), steps)
        def _drain(step: Array) -> None:
            plgpu.barrier_wait(free.at[stage_of(step)])
