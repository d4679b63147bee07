"""What devices can do by their data sheets: memory, memory bandwidth, links. No jax.

FLOPs a second are in models/flops.py. Numbers are per device and in one direction; bytes are
decimal (1 GB is 1e9 bytes).
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Hardware:
    """A device and the links between devices, as their vendor states them."""

    name: str
    memory_bytes: float
    memory_bandwidth: float  # bytes a second
    link_bandwidth: float  # bytes a second to other devices of the host
    network_bandwidth: float  # bytes a second to other hosts
    host_bandwidth: float  # bytes a second to the host's memory


# In each direction, NVLink 4 has 450 GB/s, NVLink 3 has 300, PCIe 5 x16 has 64 and PCIe 4 has 32.
# A host of eight has a network card of 400 Gb/s a device (200 for A100).
HARDWARE = {
    "A100": Hardware("A100", 80e9, 2.04e12, 300e9, 25e9, 32e9),
    "H100": Hardware("H100", 80e9, 3.35e12, 450e9, 50e9, 64e9),
    "H200": Hardware("H200", 141e9, 4.8e12, 450e9, 50e9, 64e9),
    "GH200": Hardware("GH200", 141e9, 4.8e12, 450e9, 50e9, 450e9),
    "B200": Hardware("B200", 180e9, 8.0e12, 900e9, 50e9, 64e9),
    "L40S": Hardware("L40S", 48e9, 0.864e12, 32e9, 25e9, 32e9),
    "L4": Hardware("L4", 24e9, 0.3e12, 32e9, 12.5e9, 32e9),
}


def hardware_of(device_kind: str) -> Hardware | None:
    """The data sheet of a device such as "NVIDIA H200"; None for an unknown one."""
    words = device_kind.replace("-", " ").upper().split()
    return next((found for name, found in HARDWARE.items() if name in words), None)
