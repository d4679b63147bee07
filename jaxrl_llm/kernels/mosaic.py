"""jax's language of kernels for Hopper GPUs, imported when the first kernel is built.

The import takes 0.3 s of CPU time, and a machine without such a GPU needs none of it.
"""

import functools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jax.experimental.pallas import mosaic_gpu as plgpu
else:

    class _Imported:
        """The module, from the first of its names on that is read."""

        def __getattr__(self, name: str) -> Any:
            from jax.experimental.pallas import mosaic_gpu

            cache_ptxas_version()
            found = getattr(mosaic_gpu, name)
            setattr(self, name, found)  # the next read ends here
            return found

    plgpu = _Imported()

__all__ = ["cache_ptxas_version", "plgpu"]


def cache_ptxas_version() -> None:
    """Make jax ask for the version of ptxas once per process.

    jax (0.10 and 0.11) starts a ptxas process at every conversion from or to a type of 8 bits or
    fewer, booleans included. For the programs of a GRPO step these were 225 processes, a quarter
    of the lowering time. The version cannot change while the process runs.

    Guarantees: no effect without jax's CUDA plugin, and none on a second call.
    """
    from jax.experimental.mosaic.gpu import fragmented_array

    bindings = vars(fragmented_array).get("mgpu_lib")  # None without jax's CUDA plugin
    extension, name = getattr(bindings, "_mosaic_gpu_ext", None), "_get_ptxas_isa_version"
    ask = getattr(extension, name, None)
    if ask is not None and not hasattr(ask, "cache_info"):
        setattr(extension, name, functools.cache(ask))
