"""The rates that devices sustain in our programs: the data sheet times measured shares.

`docs/planner.md` compares the predictions with every measured step. No jax.
"""

import math
from dataclasses import dataclass

from jaxrl_llm.config import ConfigError
from jaxrl_llm.distributed.hardware import (
    MEMORY,
    USABLE,
    Hardware,
    filled_memory,
    hardware_of,
)
from jaxrl_llm.references import nearest

GB = 1e9
CPU = "cpu"  # programs are compiled for it, and it has no rates
# Shares of the data sheet, measured on H200s in November 2026.
MATMUL_SHARE = 0.67  # large bf16 matmuls of an update: 665 of 989 TFLOP/s
ATTENTION_SHARE = 0.58  # our attention kernels at head dim 128, rows of 131,072 tokens
MEMORY_SHARE = 0.93  # 4.46 of 4.8 TB/s
CACHE_SHARE = 0.8  # share of that rate, reading the KV cache in decode attention
HOST_SHARE = 0.9  # copies of offloaded moments
LINK_SHARE = 0.5  # 220 of 450 GB/s into each of four devices in a layout switch
EXCHANGE_SHARE = 0.33  # share of the link in all-to-all: 148 of 450 GB/s on two devices
NETWORK_SHARE = 0.7  # assumed: no measurement over a network exists
HIDDEN = 0.2  # share of the weights' collectives that runs behind matmuls


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Sustained rates of one device. Bytes and FLOPs are a second's, in one direction."""

    name: str
    capacity: float  # bytes of memory that a run may use
    matmul: float
    attention: float
    memory: float
    cache: float
    host: float
    link: float  # from other devices of the host
    exchange: float  # rate from devices of the host, each sending something else
    network: float  # from other hosts, each device by its own card
    hidden: float = HIDDEN

    @property
    def filled(self) -> float:
        """Bytes that models, slots and cache may fill; infinite where nothing limits them."""
        limited = math.isfinite(self.capacity)
        return filled_memory(self.name, self.capacity) if limited else math.inf

    def bandwidth(self, group: int, on_host: int) -> float:
        """Bytes a second into one device of a group, `on_host` of whose members share its host.

        Between hosts, the members of a host each bring another part and exchange it by their links.
        """
        if group <= on_host:
            return self.link
        return min(self.link, self.network * on_host)


def rates_of(name: str) -> Rates:
    """The rates of a device such as "h200".

    Raises: ConfigError for a device without a data sheet here.
    """
    key = name.lower()
    hardware = hardware_of(f"NVIDIA {name}")
    if hardware is None or key not in MEMORY:
        raise ConfigError(
            f"--hardware={name} is not known{nearest(key, MEMORY)}; there are {', '.join(MEMORY)}"
        )
    return _measured(key, hardware, MEMORY[key])


def _measured(name: str, sheet: Hardware, memory: float) -> Rates:
    link = sheet.link_bandwidth or sheet.host_bandwidth
    network = sheet.network_bandwidth or sheet.host_bandwidth / 2
    bandwidth = sheet.memory_bandwidth * MEMORY_SHARE
    return Rates(
        name=name,
        capacity=memory * USABLE,
        matmul=sheet.flops * MATMUL_SHARE,
        attention=sheet.flops * ATTENTION_SHARE,
        memory=bandwidth,
        cache=bandwidth * CACHE_SHARE,
        host=sheet.host_bandwidth * HOST_SHARE,
        link=link * LINK_SHARE,
        exchange=link * EXCHANGE_SHARE,
        network=network * NETWORK_SHARE,
    )
