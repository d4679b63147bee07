"""Orbax's saving and loading of arrays that lie on some of the processes only.

Orbax refuses an array whose devices are all of one process of several, and needs a part of each
array on each process. Here it sees a part that is written by another process.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
from orbax.checkpoint import type_handlers

from jaxrl_llm.distributed.transfer import holds, without_data

ELSEWHERE = 2**30  # number of a replica that no process writes


@dataclass(frozen=True)
class _Part:
    """A part of an array, on a device of another process: its shape alone."""

    data: jax.ShapeDtypeStruct
    index: tuple[slice, ...]
    replica_id: int = ELSEWHERE


class _Seen:
    """An array as Orbax sees it: like any array of several processes."""

    is_fully_addressable = False

    def __init__(self, array: jax.Array) -> None:
        self._array = array

    def __getattr__(self, name: str) -> Any:
        return getattr(self._array, name)

    @property
    def addressable_shards(self) -> list[Any]:
        array = self._array
        if array.addressable_shards:
            return list(array.addressable_shards)
        shape = array.sharding.shard_shape(array.shape)
        index = next(iter(array.sharding.devices_indices_map(array.shape).values()))
        return [_Part(jax.ShapeDtypeStruct(shape, array.dtype), index)]


class _ArrayHandler(type_handlers.ArrayHandler):
    """Orbax's handler of jax.Array, for arrays on any processes."""

    def __init__(self, handler: type_handlers.ArrayHandler) -> None:
        vars(self).update(vars(handler))

    async def serialize(self, values: Sequence[Any], *rest: Any, **named: Any) -> Any:
        seen: Any = [_Seen(value) for value in values]
        return await super().serialize(seen, *rest, **named)

    async def deserialize(self, infos: Sequence[Any], args: Any = None) -> Any:
        """Read the arrays of this process. Arrays that lie elsewhere have no data."""
        wanted: list[Any] = list(args or [None] * len(infos))
        absent = {i for i, each in enumerate(wanted) if _is_elsewhere(each)}
        here = [i for i in range(len(infos)) if i not in absent]
        arrays: dict[int, Any] = {}
        if here:
            loaded = await super().deserialize([infos[i] for i in here], [wanted[i] for i in here])
            arrays = dict(zip(here, loaded, strict=True))
        return [arrays[i] if i in arrays else _of_others(wanted[i]) for i in range(len(infos))]


def _is_elsewhere(args: Any) -> bool:
    sharding: Any = getattr(args, "sharding", None)
    known = isinstance(sharding, jax.sharding.Sharding) and args.global_shape is not None
    return known and not holds(sharding)


def _of_others(args: Any) -> jax.Array:
    """An array that lies on other processes, as this one holds it."""
    kind = jax.ShapeDtypeStruct(args.global_shape, args.dtype, sharding=args.sharding)
    return without_data(kind)


def save_on_any_processes() -> None:
    """Have Orbax take arrays that lie on some processes only. Nothing changes in one process."""
    handler = type_handlers.get_type_handler(jax.Array)
    if jax.process_count() > 1 and not isinstance(handler, _ArrayHandler):
        assert isinstance(handler, type_handlers.ArrayHandler)
        log = logging.getLogger("absl")  # where Orbax warns that another handler is replaced
        level = log.level
        log.setLevel(logging.ERROR)
        type_handlers.register_type_handler(jax.Array, _ArrayHandler(handler), override=True)
        log.setLevel(level)
