"""The devices of a plan: a mesh on hosts, and how fast its axes move bytes. No jax."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from jaxrl_llm.config import MeshConfig
from jaxrl_llm.config.schema import AXES
from jaxrl_llm.estimate.rates import Rates


@dataclass(frozen=True, kw_only=True)
class Devices:
    """A mesh of devices on `hosts` equal hosts."""

    mesh: MeshConfig
    hosts: int
    rates: Rates
    numbers: tuple[int, ...] = ()  # numbers of the devices, where there are several groups
    host_devices: int = (
        0  # devices of a whole host, where the mesh is one group of several; 0 counts
    )

    @property
    def count(self) -> int:
        return self.mesh.num_devices

    def meets(self, other: "Devices") -> bool:
        """True if the groups share a device."""
        return self == other or not set(self.numbers).isdisjoint(other.numbers)

    @property
    def per_host(self) -> int:
        return self.host_devices or max(1, self.count // self.hosts)

    @property
    def shards(self) -> int:
        """Into how many parts stored weights and optimizer states are split."""
        return self.count // self.mesh.data

    @property
    def switches(self) -> bool:
        """True if generation uses another layout of the weights than they are stored in."""
        return not self.shards == self.mesh.tensor == self.tensor("generate")

    def tensor(self, does: str) -> int:
        """Devices that share the heads in a phase."""
        mesh = self.mesh
        own = {"generate": mesh.generation.tensor, "pass": mesh.passes.tensor}.get(does, 0)
        return own or mesh.tensor

    def replicas(self, does: str) -> int:
        """Shares of the batch in a phase."""
        if does == "generate":
            return self.count // self.tensor(does)
        return self.mesh.replicas_with(self.tensor(does))

    def size(self, axes: Sequence[str]) -> int:
        """Devices of a group along these axes."""
        return math.prod(getattr(self.mesh, axis) for axis in axes)

    def on_host(self, axes: Sequence[str]) -> int:
        """The devices of such a group on the host of one of them."""
        inner, there, per_host = 1, 1, self.per_host
        for axis in reversed(AXES):
            size = getattr(self.mesh, axis)
            if axis in axes:
                there *= max(1, min(size, per_host // inner))
            inner *= size
        return min(there, self.size(axes))

    def seconds(self, received: float, axes: Sequence[str]) -> float:
        """Seconds in which one device of such a group receives so many bytes."""
        if received == 0.0:
            return 0.0
        return received / self.rates.bandwidth(self.size(axes), self.on_host(axes))

    def exchange_seconds(self, received: float, axes: Sequence[str]) -> float:
        """Seconds of an all-to-all: as much comes from each other device of the group.

        What comes from other hosts has the network card of one device only.
        """
        others, near = self.size(axes) - 1, self.on_host(axes) - 1
        if received == 0.0 or others == 0:
            return 0.0
        inside = received * near / others
        return max(inside / self.rates.exchange, (received - inside) / self.rates.network)

    def neighbours(self, group: int) -> float:
        """Bytes a second between `group` neighbouring devices."""
        return self.rates.bandwidth(group, min(group, self.per_host))
