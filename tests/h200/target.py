"""Programs compiled for H200s on a machine that has none, and what their compiled form shows.

What they need is in jaxrl_llm/estimate/topology.py.
"""

import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

# The plugin looks for a driver and cuDNN at import; compiling needs neither.
os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
# XLA would compile many forms of a kernel to choose the fastest and, without a card to time them,
# take its first guess after all: up to half of the seconds. Nothing reads the machine code of XLA's
# own kernels either, so that LLVM and ptxas need not optimise it; ours are compiled apart.
os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_autotune_level=0 "
    "--xla_gpu_disable_gpuasm_optimizations=true --xla_llvm_disable_expensive_passes=true"
)

import jax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl_llm.distributed.mesh import make_mesh
from jaxrl_llm.estimate.topology import compile_devices, missing_packages

# Products by cuBLAS, which need no tuning: with Triton's XLA compiles each fusion twice.
CUBLAS = {"xla_gpu_enable_triton_gemm": False, "xla_gpu_autotune_level": 0}

needs_compiler = [
    pytest.mark.h200,
    pytest.mark.skipif(bool(missing_packages()), reason=f"needs {', '.join(missing_packages())}"),
]


def h200_mesh(sizes: tuple[int, int, int], **settings: Any) -> Mesh:
    """A mesh (data, fsdp, tensor) of H200s of one host that exist for the compiler only.

    `settings` go to `make_mesh`.
    """
    others = math.prod(settings.get(axis, 1) for axis in ("sequence", "pipeline"))
    return make_mesh(*sizes, **settings, devices=compile_devices(math.prod(sizes) * others))


def one_h200() -> NamedSharding:
    """The sharding of arrays on a single card."""
    return NamedSharding(h200_mesh((1, 1, 1)), PartitionSpec())


def abstract(tree: Any, sharding: NamedSharding | None = None) -> Any:
    """Every array of a pytree as a ShapeDtypeStruct on the card."""
    sharding = sharding or one_h200()
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)


def compiled_in_a_process(code: str) -> tuple[list[str], list[str]]:
    """What ptxas says of each of our kernels that `code` compiles, and the resources of each.

    The compiler prints them where the environment asks for it, and that is read when it is loaded:
    so in a process of its own. (Dumped to files they come with every stage of the kernels, which
    takes half as long again.)
    """
    import nvidia.cu13

    compilers = Path(nvidia.cu13.__path__[0]) / "bin"
    environment = os.environ | {
        "MOSAIC_GPU_DUMP_PTXAS": "1",
        "MOSAIC_GPU_DUMP_RESOURCES": "1",
        "PATH": f"{compilers}{os.pathsep}{os.environ['PATH']}",
        "PYTHONUNBUFFERED": "1",  # Python prints the resources, the compiler the rest
    }
    printed = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        cwd=Path(__file__).parent,
        check=True,
        timeout=300,
        stdout=subprocess.PIPE,
        text=True,
    ).stdout
    resources = [line for line in printed.splitlines() if line.startswith("Resources(")]
    logs = re.findall(r"^ptxas .*?Compile time = .*?$", printed, re.MULTILINE | re.DOTALL)
    # Two kernels that are alike are compiled once.
    assert len(logs) == printed.count("Compiling entry function") <= len(resources), printed
    return logs, resources


class InMemory(NamedSharding):
    """A sharding in the memory of a kind.

    Devices that exist for the compiler only say nothing about their memories, so that jax forgets
    what kind a NamedSharding on them is of.
    """

    def __init__(self, sharding: NamedSharding, kind: str) -> None:
        super().__init__(sharding.mesh, sharding.spec)
        self._kind = kind

    @property
    def memory_kind(self) -> str:
        return self._kind

    def __eq__(self, other: object) -> bool:
        return isinstance(other, InMemory) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> tuple[Any, ...]:
        return self.mesh, self.spec, self._kind


def in_memory(tree: Any, kind: str = "device") -> Any:
    """Every ShapeDtypeStruct of a pytree with its sharding in that memory."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=InMemory(x.sharding, kind)), tree
    )


def moments_in_memory(state: Any, kind: str) -> Any:
    """An abstract TrainState in the card's memory, with the moments in one of that kind."""
    adam, *rest = in_memory(state.opt_state)
    adam = adam._replace(mu=in_memory(adam.mu, kind), nu=in_memory(adam.nu, kind))
    placed = in_memory(state.replace(opt_state=()))
    return placed.replace(opt_state=(adam, *rest))
