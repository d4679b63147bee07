"""Fields of a step on their way between meshes."""

from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import Mesh

from jaxrl_llm.distributed.sharding import batch_sharding
from jaxrl_llm.distributed.transfer import moved


def sharding_of(field: Any) -> Any:
    """The sharding of a field: an array, or a record of arrays that lie together."""
    return jax.tree.leaves(field)[0].sharding


class Moves:
    """Fields of a step on the meshes that read them. Each moves once to a mesh."""

    def __init__(self) -> None:
        self.bytes = 0
        self._moved: dict[tuple[str, Mesh], tuple[Any, Any]] = {}

    def to(self, mesh: Mesh, fields: Mapping[str, Any]) -> dict[str, Any]:
        """The fields, [rows, ...] each, on `mesh`. Waits for those that move."""
        return {name: self._field(mesh, name, field) for name, field in fields.items()}

    def is_there(self, mesh: Mesh, name: str, field: Any) -> bool:
        """True if `to` would move nothing."""
        there = sharding_of(field).device_set == batch_sharding(mesh).device_set
        return there or self._moved.get((name, mesh), (None, None))[0] is field

    def _field(self, mesh: Mesh, name: str, field: Any) -> Any:
        sharding = batch_sharding(mesh)
        if sharding_of(field).device_set == sharding.device_set:
            return field
        known, there = self._moved.get((name, mesh), (None, None))
        if known is not field:
            jax.block_until_ready(field)
            there = jax.tree.map(lambda x: moved(x, sharding), field)
            self.bytes += sum(x.nbytes for x in jax.tree.leaves(field))
            self._moved[name, mesh] = field, there
        return there
