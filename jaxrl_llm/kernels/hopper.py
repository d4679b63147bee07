"""The GPU that the Mosaic kernels are written for, and names for types that Pallas lacks."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from jaxrl_llm.kernels.mosaic import plgpu

LOG2_E = math.log2(math.e)
SMS = 132  # streaming multiprocessors of an H100 SXM or H200
SM_SHARED_BYTES = 228 * 1024
SHARED_BYTES_RESERVED = 1024  # shared memory that each CTA loses to the driver

# Pallas exports no type for these, or one that its own functions do not accept.
Ref: TypeAlias = Any  # in a kernel's body: global or shared memory, barriers, an accumulator
RegisterLayout: TypeAlias = Any  # a plgpu.Layout, or one that is reduced along an axis
ScratchType: TypeAlias = Any  # plgpu.SMEM(...), plgpu.Barrier(...)
Interpret: TypeAlias = Any  # None on a GPU. On a CPU InterpretGPUParams, public from jax 0.11 on


_COMPILING = ContextVar("compiling for cards that are not here", default=False)


@contextmanager
def compiling_for_hopper() -> Iterator[None]:
    """Programs that are traced within are for an H100 or H200, whatever devices jax has."""
    token = _COMPILING.set(True)
    try:
        yield
    finally:
        _COMPILING.reset(token)


def on_gpu() -> bool:
    """True where programs are for NVIDIA GPUs."""
    return _COMPILING.get() or jax.default_backend() == "gpu"


def on_hopper() -> bool:
    """True where they have compute capability 9.0 (H100, H200)."""
    if _COMPILING.get():
        return True
    if jax.default_backend() != "gpu":
        return False
    return getattr(jax.devices()[0], "compute_capability", "") == "9.0"


def num_blocks(entries: jax.Array, block: int) -> jax.Array:
    """The number of blocks that hold `entries`, int32."""
    return jax.lax.div(entries + (block - 1), jnp.int32(block))


def accumulator(rows: int, columns: int) -> ScratchType:
    """A float32 accumulator of wgmma, for `pl.run_scoped`."""
    return plgpu.WGMMAAccumulatorRef((rows, columns), jnp.float32)


def accumulate(acc: jax.Array, matmul: Callable[[Ref], None], interpreted: bool) -> jax.Array:
    """`acc` plus what `matmul` adds to an accumulator reference."""
    if not interpreted:
        start: Ref = plgpu.WGMMAAccumulatorRef.init(acc)
        return pl.run_state(matmul)(start)

    # The interpreter cannot start an accumulator from a value.
    def from_zero(ref: Ref) -> jax.Array:
        matmul(ref)
        return ref[...]

    return acc + pl.run_scoped(from_zero, accumulator(*acc.shape))


def multiply_add(ref: Ref, a: jax.Array, b_smem: Ref, spill_smem: Ref | None) -> None:
    """Add `a @ b_smem` to an accumulator reference; `a` is in registers.

    The interpreter takes operands from memory only: there `a` passes through `spill_smem`.
    """
    if spill_smem is None:
        plgpu.wgmma(ref, a, b_smem)
        return
    spill_smem[...] = a
    plgpu.commit_smem()
    plgpu.wgmma(ref, spill_smem, b_smem)


def by_row() -> RegisterLayout:
    """The layout of one number for each row of an accumulator."""
    return plgpu.Layout.WGMMA.reduce(1)


def by_column() -> RegisterLayout:
    """The layout of one number for each column of an accumulator."""
    return plgpu.Layout.WGMMA.reduce(0)


def zeros(shape: tuple[int, ...], layout: RegisterLayout, value: float = 0.0) -> jax.Array:
    """A float32 array of `value` in registers."""
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


def along(vector: jax.Array, shape: tuple[int, ...], axis: int = 0) -> jax.Array:
    """A vector of row values (axis 0) or column values (axis 1), broadcast to a matrix."""
    return jax.lax.broadcast_in_dim(vector, shape, [axis])


def load_whole(ref: Ref, layout: RegisterLayout) -> jax.Array:
    """A whole reference into registers."""
    # jax 0.10 takes an index too, of which jax 0.11 warns.
    whole = () if jax.__version_info__ >= (0, 11) else (...,)
    return plgpu.load(ref, *whole, layout=layout, optimized=False)
