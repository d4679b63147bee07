"""Devices that exist for the compiler only, so that programs compile on a machine without GPUs.

Needs Python 3.12 or later and three packages, installed with --no-deps next to jax 0.11:
jax-cuda13-plugin, jax-cuda13-pjrt and nvidia-cuda-nvcc (for ptxas). No driver, cuBLAS, cuDNN or
NCCL. `h200.txtpb` describes the card.
"""

import functools
import importlib.metadata
import os
import re
from pathlib import Path
from typing import Any

from jaxrl_llm.config import ConfigError

PACKAGES = ("jax-cuda13-plugin", "jax-cuda13-pjrt", "nvidia-cuda-nvcc")
CARD = Path(__file__).with_name("h200.txtpb")
# Cards with the same cores, which differ in their memory: bytes, and bytes a second.
HOPPER = {"h200": (151_397_597_184, 4_800_000_000_000), "h100": (85_520_809_984, 3_350_000_000_000)}
# XLA chooses a kernel by timing, which needs a card. Triton's matmuls are an error without this.
COMPILER_OPTIONS = {"xla_gpu_autotune_level": 4}


def missing_packages() -> list[str]:
    """The packages that compiling for a card needs and this environment lacks."""
    installed = {distribution.name for distribution in importlib.metadata.distributions()}
    return [name for name in PACKAGES if name not in installed]


def check_compiler(hardware: str) -> None:
    """ConfigError unless programs can be compiled for `hardware` here."""
    if hardware not in HOPPER:
        raise ConfigError(
            f"programs are compiled for {', '.join(HOPPER)}; for {hardware} add --quick, which "
            "computes without compiling"
        )
    if missing := missing_packages():
        raise ConfigError(
            f"compiling for {hardware} on a machine without GPUs needs Python 3.12 and "
            f"{', '.join(missing)} (pip install --no-deps). Without them: --quick computes "
            "without compiling, and --hardware=cpu compiles for CPU devices"
        )


@functools.cache  # two topologies have two different devices 0
def compile_devices(count: int, hardware: str = "h200") -> tuple[Any, ...]:
    """So many cards of one host, for the compiler only."""
    # The plugin looks for a driver and cuDNN at import; compiling needs neither.
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    from jax.experimental import topologies

    topology = topologies.get_topology_desc(
        platform="cuda", target_config=description(hardware), topology=f"1x1x{count}"
    )
    return tuple(topology.devices)


def description(hardware: str) -> str:
    """XLA's description of a card with Hopper's cores."""
    memory, bandwidth = HOPPER[hardware]
    text = CARD.read_text()
    text = re.sub(r"device_memory_size: \d+", f"device_memory_size: {memory}", text)
    return re.sub(r"memory_bandwidth: \d+", f"memory_bandwidth: {bandwidth}", text)
