"""Data sheets of devices: FLOPs, memory bandwidth, links. Imports no jax.

Numbers are per device and in one direction; bytes are decimal (1 GB is 1e9 bytes).
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Hardware:
    """A device and its links. None is a link that differs from host to host, or that is not there.

    The mfu of other trainers is a fraction of `flops`.
    """

    flops: float  # dense bf16 FLOPs a second
    memory_bandwidth: float  # bytes a second
    host_bandwidth: float  # bytes a second to the host's memory
    link_bandwidth: float | None = None  # bytes a second to other devices of the host
    network_bandwidth: float | None = None  # bytes a second to other hosts


# By the words in jax's name of the device. The first one counts whose words are all there: an
# "NVIDIA H100 PCIe" is not an "H100", the SXM board. In each direction NVLink 4 has 450 GB/s,
# NVLink 3 has 300, PCIe 5 x16 has 64 and PCIe 4 x16 has 32. A host of eight SXM boards has a
# network card of 400 Gb/s for each (200 for A100). Of A100's and GH200's memories it is the slower.
HARDWARE = {
    "A100 PCIE": Hardware(312e12, 1.55e12, 32e9),
    "A100": Hardware(312e12, 1.55e12, 32e9, 300e9, 25e9),
    "H100 PCIE": Hardware(756e12, 2.0e12, 64e9),
    "H100 NVL": Hardware(835e12, 3.9e12, 64e9),
    "H100": Hardware(989e12, 3.35e12, 64e9, 450e9, 50e9),
    "H200 NVL": Hardware(835e12, 4.8e12, 64e9),
    "H200": Hardware(989e12, 4.8e12, 64e9, 450e9, 50e9),
    "GH200": Hardware(989e12, 4.0e12, 450e9),
    "B200": Hardware(2250e12, 8.0e12, 64e9, 900e9, 50e9),
    "L40S": Hardware(362e12, 0.864e12, 32e9),
    "L4": Hardware(121e12, 0.3e12, 32e9),
}


# Memory of one device in bytes, by the lower-case name that `jaxrl plan` takes.
MEMORY = {
    "h200": 141e9,
    "h100": 80e9,
    "a100": 80e9,
    "b200": 180e9,
    "gh200": 96e9,
    "l40s": 48e9,
    "l4": 24e9,
}
USABLE = 0.92  # share that a run may use, as launch/runtime.py asks jax for
# Share of the usable memory that slots and cache may fill. Predicted peaks were up to 5 % too low.
# The data sheet's sizes are another 6 % below what jax finds on an H100 or H200.
FILLED = 0.95


def hardware_of(device_kind: str) -> Hardware | None:
    """The data sheet of a device such as "NVIDIA H200"; None for an unknown one."""
    words = device_kind.replace("-", " ").upper().split()
    for name, hardware in HARDWARE.items():
        if all(word in words for word in name.split()):
            return hardware
    return None


def known_name(device_kind: str) -> str | None:
    """The name in `MEMORY` of a device such as "NVIDIA H200"; None for an unknown one."""
    words = device_kind.lower().replace("-", " ").split()
    return next((name for name in MEMORY if name in words), None)


def filled_memory(name: str | None, limit: float) -> float:
    """Bytes of a device that a run may fill, of which jax may use `limit`.

    `name` is a key of `MEMORY`. The size of the data sheet counts, because a few megabytes differ
    from card to card, unless jax has less.
    """
    known = limit if name is None else min(limit, MEMORY[name] * USABLE)
    return known * FILLED
