"""The GPU that the Mosaic kernels are written for, and names for types that Pallas lacks."""

import functools
from typing import Any, TypeAlias

import jax
from jax.experimental.mosaic.gpu import fragmented_array

SMS = 132  # streaming multiprocessors of an H100 SXM or H200

# Pallas exports no type for these, or one that its own functions do not accept.
Ref: TypeAlias = Any  # in a kernel's body: global or shared memory, barriers, an accumulator
RegisterLayout: TypeAlias = Any  # a plgpu.Layout, or one that is reduced along an axis
ScratchType: TypeAlias = Any  # plgpu.SMEM(...), plgpu.Barrier(...)
Interpret: TypeAlias = Any  # None on a GPU. On a CPU InterpretGPUParams, public from jax 0.11 on


def on_hopper() -> bool:
    """True where jax's devices are NVIDIA GPUs of compute capability 9.0 (H100, H200)."""
    if jax.default_backend() != "gpu":
        return False
    return getattr(jax.devices()[0], "compute_capability", "") == "9.0"


def cache_ptxas_version() -> None:
    """Make jax ask for the version of ptxas once per process. Call it when a process starts.

    jax (0.10 and 0.11) starts a ptxas process at every conversion from or to a type of 8 bits or
    fewer, booleans included. For the programs of a GRPO step these were 225 processes, a quarter
    of the lowering time. The version cannot change while the process runs.

    Guarantees: no effect without jax's CUDA plugin, and none on a second call.
    """
    bindings = vars(fragmented_array).get("mgpu_lib")  # None without jax's CUDA plugin
    extension, name = getattr(bindings, "_mosaic_gpu_ext", None), "_get_ptxas_isa_version"
    ask = getattr(extension, name, None)
    if ask is not None and not hasattr(ask, "cache_info"):
        setattr(extension, name, functools.cache(ask))
