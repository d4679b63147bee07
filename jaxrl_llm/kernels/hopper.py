"""The card that the Mosaic kernels are written for, and the compiler that they are lowered with."""

import functools

import jax
from jax.experimental.mosaic.gpu import fragmented_array

SMS = 132  # streaming multiprocessors of an H100 SXM or H200


def on_hopper() -> bool:
    """True where jax's devices are NVIDIA GPUs of compute capability 9.0 (H100, H200)."""
    if jax.default_backend() != "gpu":
        return False
    return getattr(jax.devices()[0], "compute_capability", "") == "9.0"


def _ask_for_ptxas_once() -> None:
    """Keeps the version of ptxas, which does not change while the process runs.

    Lowering asks for it at every conversion from or to 8 bits and less, truth values included, and
    jax (0.10 and 0.11) starts a ptxas each time: 225 for the programs of a GRPO step, a quarter of
    the time that their lowering took.
    """
    bindings = vars(fragmented_array).get("mgpu_lib")  # None without jax's CUDA plugin
    extension, name = getattr(bindings, "_mosaic_gpu_ext", None), "_get_ptxas_isa_version"
    if hasattr(extension, name):
        setattr(extension, name, functools.cache(getattr(extension, name)))


_ask_for_ptxas_once()
