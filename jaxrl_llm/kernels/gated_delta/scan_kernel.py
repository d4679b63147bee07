"""The recurrence of scan.py in a kernel for Hopper.

A CTA has 32 values of a head. No other value touches these columns of its states, which stay in
registers from the first chunk to the last. The next chunk's matrices load while one is multiplied.
Tensor cores take bfloat16, so each operand is the sum of two, and a product the sum of three: about
17 bits of each factor count.

Shape letters: see inputs.py.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from jaxrl_llm.kernels.hopper import (
    Interpret,
    Ref,
    ScratchType,
    accumulate,
    along,
    by_row,
    load_whole,
    on_hopper,
    zeros,
)
from jaxrl_llm.kernels.mosaic import plgpu

COLUMNS = 32  # values of a CTA
STAGES = 2
ROWS = 64  # rows of a tile of the tensor cores
LOADS = 6  # TMA copies of a chunk


def kernel_fits(left_XBNCH: jax.Array, own_XBNCV: jax.Array) -> bool:
    """Check that the kernel takes these sizes, on a Hopper GPU.

    Chunks have 64 tokens, keys 64 or 128 dims, and values a multiple of 32.
    """
    (C, H), V = left_XBNCH.shape[3:], own_XBNCV.shape[-1]
    return C == ROWS and H in (ROWS, 2 * ROWS) and V % COLUMNS == 0 and on_hopper()


def scan_in_kernel(
    left_XBNCH: jax.Array,
    right_XBNCH: jax.Array,
    enters_XBNPC: jax.Array,
    leaves_XBNPC: jax.Array,
    keeps_XBNPQ: jax.Array,
    own_XBNCV: jax.Array,
    added_XBNHPV: jax.Array | None = None,
    interpret: Interpret = None,
) -> tuple[jax.Array, jax.Array]:
    """`scan_chunks` of the `Moves`, and with `added` from the last chunk to the first.

    Requires: `kernel_fits`, and one or two states of a head.
    """
    X, B, N, C, H = left_XBNCH.shape
    P, V = keeps_XBNPQ.shape[-1], own_XBNCV.shape[-1]
    keeps_XBN1C = keeps_XBNPQ.reshape(X, B, N, 1, P * P)
    keeps_XBN1C = jnp.pad(keeps_XBN1C, ((0, 0),) * 4 + ((0, C - P * P),))
    weights_XBNWC = jnp.concatenate([enters_XBNPC, leaves_XBNPC, keeps_XBN1C], axis=3)
    parts = V // COLUMNS
    kernel = plgpu.kernel(
        partial(_body, reverse=added_XBNHPV is not None, interpreted=interpret is not None),
        out_type=(
            jax.ShapeDtypeStruct((X, B, N, H, P, V), jnp.float32),
            jax.ShapeDtypeStruct((X, B, N, C, V), jnp.float32),
        ),
        scratch_types=dict(
            left_smem=_halves(STAGES, 2, C, H),
            right_smem=_halves(STAGES, 2, C, H),
            weights_smem=plgpu.SMEM((STAGES, 2 * P + 1, C), jnp.float32),
            own_smem=plgpu.SMEM((STAGES, C, COLUMNS), jnp.float32),
            states_smem=_halves(P, 2, H, COLUMNS),
            writes_smem=_halves(P, 2, C, COLUMNS),
            loaded=plgpu.Barrier(num_arrivals=LOADS, num_barriers=STAGES),
        ),
        grid=(B, N * parts),
        grid_names=("row", "part"),
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, reduction_scratch_bytes=0
        ),
        interpret=interpret,
        kernel_name="gated_delta_scan",
    )
    added = () if added_XBNHPV is None else (added_XBNHPV,)
    halves = (*_rounded_twice(left_XBNCH), *_rounded_twice(right_XBNCH))
    return kernel(*halves, weights_XBNWC, own_XBNCV, *added)


def _halves(*shape: int) -> ScratchType:
    """Shared memory of bfloat16 matrices in the tiles that TMA writes and wgmma reads."""
    transforms = (plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(64))
    return plgpu.SMEM(shape, jnp.bfloat16, transforms=transforms)


def _rounded_twice(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """`_split` outside of a kernel, where XLA would remove a conversion to bfloat16 and back."""
    high = lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
    return high.astype(jnp.bfloat16), (x - high).astype(jnp.bfloat16)


def _split(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Two bfloat16 numbers whose sum is a float32 number but for its last 7 bits."""
    high = x.astype(jnp.bfloat16)
    return high, (x - high.astype(jnp.float32)).astype(jnp.bfloat16)


def _body(
    *refs: Ref,
    reverse: bool,
    interpreted: bool,
    left_smem: Ref,
    right_smem: Ref,
    weights_smem: Ref,
    own_smem: Ref,
    states_smem: Ref,
    writes_smem: Ref,
    loaded: Ref,
) -> None:
    lefts, rights, (weights_ref, own_ref, *added), (starts_ref, values_ref) = (
        refs[:2],
        refs[2:4],
        refs[4:-2],
        refs[-2:],
    )
    X, _, _, H, P, V = starts_ref.shape
    C, parts, layout = own_ref.shape[3], V // COLUMNS, plgpu.Layout.WGMMA
    b, part = lax.axis_index("row"), lax.axis_index("part")
    n, part = lax.div(part, jnp.int32(parts)), lax.rem(part, jnp.int32(parts))
    columns = pl.ds(part * COLUMNS, COLUMNS)

    def chunk(i: Any) -> Any:
        return X - 1 - i if reverse else i

    def load(i: Any, stage: Any) -> None:
        barrier, of_chunk = loaded.at[stage], (chunk(i), b, n)
        for half in range(2):
            for ref, smem in ((lefts[half], left_smem), (rights[half], right_smem)):
                plgpu.copy_gmem_to_smem(ref.at[of_chunk], smem.at[stage, half], barrier)
        plgpu.copy_gmem_to_smem(weights_ref.at[of_chunk], weights_smem.at[stage], barrier)
        plgpu.copy_gmem_to_smem(own_ref.at[*of_chunk, :, columns], own_smem.at[stage], barrier)

    def multiply_add(acc: Any, left: Callable[[int], Ref], right: Callable[[int], Ref]) -> Any:
        """`acc` and the product of two sums of halves, without the product of the small halves."""

        def products(ref: Ref) -> None:
            for i, j in ((1, 0), (0, 1), (0, 0)):
                plgpu.wgmma(ref, left(i), right(j))

        return accumulate(acc, products, interpreted)

    def store(smem: Ref, x: Any) -> None:
        for half, value in enumerate(_split(x)):
            smem[half, :, :] = value

    def step(i: Any, states: tuple[Any, ...]) -> tuple[Any, ...]:
        x, stage = chunk(i), lax.rem(i, jnp.int32(STAGES))

        def weights(row: int) -> Any:
            return along(load_whole(weights_smem.at[stage, row], by_row()), (C, COLUMNS))

        for p, state in enumerate(states):
            starts_ref[x, b, n, :, p, columns] = state
            store(states_smem.at[p], state)
        plgpu.commit_smem()
        # All warps have passed the matmuls of the step before, whose stage is free now.
        free = lax.rem(i + STAGES - 1, jnp.int32(STAGES))
        pl.when((i > 0) & (i + STAGES - 1 < X))(lambda: load(i + STAGES - 1, free))
        plgpu.barrier_wait(loaded.at[stage])
        values = load_whole(own_smem.at[stage], layout)
        for p in range(P):
            read = multiply_add(
                zeros((C, COLUMNS), layout),
                lambda half: left_smem.at[stage, half],
                lambda half, p=p: states_smem.at[p, half],
            )
            values = values + weights(p) * read
        values_ref[x, b, n, :, columns] = values
        for p in range(P):
            store(writes_smem.at[p], weights(P + p) * values)
        plgpu.commit_smem()
        after = []
        for p in range(P):
            keeps = [weights_smem[stage, 2 * P, p * P + q] for q in range(P)]
            kept = sum(keep * state for keep, state in zip(keeps, states, strict=True))
            for ref in added:
                kept = kept + load_whole(ref.at[x, b, n, :, p, columns], layout)
            after.append(
                multiply_add(
                    kept,
                    lambda half: right_smem.at[stage, half].transpose((1, 0)),
                    lambda half, p=p: writes_smem.at[p, half],
                )
            )
        return tuple(after)

    for i in range(min(STAGES, X)):
        load(i, i)
    lax.fori_loop(0, X, step, tuple(zeros((H, COLUMNS), layout) for _ in range(P)))
