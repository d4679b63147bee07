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
            number_no_kernels()
            found = getattr(mosaic_gpu, name)
            setattr(self, name, found)  # the next read ends here
            return found

    plgpu = _Imported()

_DUMPS = "mosaic_gpu.dump_basename"  # attribute of a kernel's module

__all__ = ["cache_ptxas_version", "find_kernel_runtime", "number_no_kernels", "plgpu"]


def find_kernel_runtime() -> None:
    """Prepare to read an executable with such kernels, as jax does at an import."""
    import jax.experimental.mosaic.gpu  # noqa: F401


def number_no_kernels() -> None:
    """Make jax name a kernel's dumps by its name alone.

    jax 0.11 adds a number that counts the kernels which a process has lowered, and this name is in
    the program. So the program, and its key in the compile cache, depended on what came before.

    Guarantees: no effect without jax's CUDA plugin or in jax 0.10, and none on a second call.
    """
    import jax.experimental.mosaic.gpu as gpu
    from jax.extend.mlir import ir

    dialect: Any = vars(gpu)["dialect"]
    options_of = getattr(dialect, "get_or_set_dump_options", None)
    if options_of is None or hasattr(options_of, "__wrapped__"):
        return

    @functools.wraps(options_of)
    def named_alike(module: Any) -> Any:
        attributes = module.operation.attributes
        if _DUMPS not in attributes and "sym_name" in attributes:
            attributes[_DUMPS] = ir.StringAttr.get(attributes["sym_name"].value, module.context)
        return options_of(module)

    dialect.get_or_set_dump_options = named_alike


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
