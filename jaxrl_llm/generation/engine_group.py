"""Engines of several replicas as one: each has its copy of the weights, and its sequences.

A replica is one device, or the devices that share the heads.
"""

from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from jaxrl_llm.distributed.layout import Layout
from jaxrl_llm.distributed.multihost import processes_of
from jaxrl_llm.generation.sequence import Beginning, Sequence
from jaxrl_llm.generation.session import Engine, EngineSettings
from jaxrl_llm.models.base import ModelSpec


@dataclass(eq=False)
class Placed:
    """A prompt that several sequences share, and the engine that has them."""

    engine: Engine
    beginning: Beginning


@dataclass(eq=False)
class EngineGroup:
    """`Engine` over several devices. A prompt goes to the next one, its samples together.

    Which engine has a sequence follows from the order of `beginning`, and never from a clock.
    """

    engines: list[Engine]
    _next: int = field(default=0, init=False)
    _place_of: dict[Sequence, Placed] = field(default_factory=dict, init=False)
    _threads: ThreadPoolExecutor | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        if len(self.engines) > 1:
            self._threads = ThreadPoolExecutor(len(self.engines), "engine")

    @property
    def has_work(self) -> bool:
        """True while a sequence can go on without `append`."""
        return any(engine.has_work for engine in self.engines)

    @property
    def num_steps(self) -> int:
        """Decode steps of the engine that has done most."""
        return max(engine.num_steps for engine in self.engines)

    def beginning(self, tokens: Seq[int]) -> Placed:
        """A prompt that several sequences share."""
        engine = self.engines[self._next % len(self.engines)]
        self._next += 1
        return Placed(engine, engine.beginning(tokens))

    def add(self, prompt: Seq[int], *, beginning: Placed, **options: Any) -> Sequence:
        """See `Engine.add`."""
        sequence = beginning.engine.add(prompt, beginning=beginning.beginning, **options)
        self._place_of[sequence] = beginning
        return sequence

    def append(self, sequence: Sequence, tokens: Seq[int], *, limit: int) -> None:
        """See `Engine.append`."""
        self._place_of[sequence].engine.append(sequence, tokens, limit=limit)

    def finish(self, sequence: Sequence) -> None:
        """See `Engine.finish`."""
        self._place_of.pop(sequence).engine.finish(sequence)

    def abort(self, sequence: Sequence) -> None:
        """See `Engine.abort`."""
        self._place_of.pop(sequence).engine.abort(sequence)

    def step(self) -> list[Sequence]:
        """See `Engine.step`; the engines work at the same time."""
        busy = [engine for engine in self.engines if engine.has_work]
        if self._threads is None or len(busy) == 1:
            return [sequence for engine in busy for sequence in engine.step()]
        return [x for changed in self._threads.map(Engine.step, busy) for x in changed]

    def close(self) -> None:
        """End the threads."""
        if self._threads is not None:
            self._threads.shutdown()


def replicas_of(layout: Layout) -> list[Layout]:
    """The layout of each replica, of all processes, in their order."""
    mesh, rows = layout.mesh, layout.axes("batch")
    names = (*rows, *(axis for axis in mesh.axis_names if axis not in rows))
    devices = mesh.devices.transpose([mesh.axis_names.index(axis) for axis in names])
    groups = devices.reshape(-1, *[1] * len(rows), *devices.shape[len(rows) :])
    return [Layout(Mesh(group, names), layout.rules) for group in groups]


def replicas_here(layout: Layout) -> list[Layout]:
    """The replicas of this process.

    Requires: the devices of a replica belong to one process.
    """
    here = {jax.process_index()}
    return [x for x in replicas_of(layout) if processes_of(x.mesh.devices.flat) == here]


def engines_on(
    spec: ModelSpec, params: Any, settings: EngineSettings, replicas: Seq[Layout]
) -> EngineGroup:
    """An engine on each of these replicas of this process.

    Requires: `params` are in generation form, and each replica has all of them, split as its
        layout says.
    """
    engines = []
    for layout in replicas:
        own = layout if layout.mesh.size > 1 else None
        with jax.default_device(layout.mesh.devices.flat[0]):
            engines.append(Engine(spec, jax.tree.map(partial(_on, layout), params), settings, own))
    return EngineGroup(engines)


def _on(replica: Layout, x: jax.Array) -> jax.Array:
    """The copy of an array that a replica has. Nothing is moved."""
    shards = {shard.device: shard.data for shard in x.addressable_shards}
    parts = [shards[device] for device in replica.mesh.devices.flat]
    if len(parts) == 1:
        return parts[0]
    assert isinstance(x.sharding, NamedSharding)
    place = NamedSharding(replica.mesh, x.sharding.spec)
    return jax.make_array_from_single_device_arrays(x.shape, place, parts)
