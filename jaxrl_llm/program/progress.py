"""The progress of a step, and what is in flight on each mesh."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Generic, TypeVar

import jax
from jax.sharding import Mesh

from jaxrl_llm.distributed.transfer import takes_part
from jaxrl_llm.observability.timing import Timer
from jaxrl_llm.program.guards import memory_guard
from jaxrl_llm.program.segment import Segment
from jaxrl_llm.program.stage import States
from jaxrl_llm.types import OfflineBatch, RolloutBatch

B = TypeVar("B", RolloutBatch, OfflineBatch)
Results = tuple[States, Any, Any]  # new states, fields, and metrics by stage


class Progress(Generic[B]):
    """States, batch and metrics of a step so far, and the segment in flight on each mesh.

    What a segment gives is taken over when it is waited for, in an order that no clock decides.
    The clock of a segment stops when its results are there. On one mesh the caller waits for them.
    A segment that ran at the same time as a host stage is waited for after it. Its time is then the
    longer of the two. With several meshes a thread waits.
    """

    def __init__(self, states: States, batch: B, step: int, timer: Timer) -> None:
        self.states = states
        self.batch = batch
        self.metrics: dict[str, Any] = {}
        self.step = step
        self.timer = timer
        self._in_flight: dict[Mesh, tuple[Segment, Callable[[], Results]]] = {}

    def add(self, mesh: Mesh, segment: Segment, end: Callable[[], Results]) -> None:
        """`end` waits for what is in flight. Requires: nothing else is on devices of `mesh`."""
        self._in_flight[mesh] = segment, end

    def wait_for(self, names: Iterable[str]) -> None:
        """Wait for the segments in flight that write one of these fields, or update these roles."""
        names = set(names)
        for mesh, (segment, _) in tuple(self._in_flight.items()):
            written = {name for stage in segment.stages for name in stage.writes}
            if names & (written | set(segment.updated)):
                self.wait(mesh)

    def wait(self, *meshes: Mesh) -> None:
        """Wait for what is in flight on devices of these meshes, or on all, and take it over."""
        for mesh in tuple(self._in_flight):
            if meshes and not any(_meet(mesh, other) for other in meshes):
                continue
            segment, end = self._in_flight.pop(mesh)
            new_states, writes, by_stage = end()
            self.states = self.states | new_states
            self.batch = self.batch.replace(**writes)
            self.metrics = joined(self.metrics, _begun(segment, by_stage, self.step))

    def is_busy(self, mesh: Mesh) -> bool:
        """True if a segment is in flight on a device of `mesh`. It does not depend on the clock."""
        return any(_meet(mesh, other) for other in self._in_flight)

    def end(self, segment: Segment, results: Results, mesh: Mesh) -> Results:
        """Wait until the results are there, and stop the clock."""
        if not takes_part(mesh):
            return results
        _, writes, by_stage = results
        with segment_memory_guard(segment):
            jax.block_until_ready(writes or by_stage)
        self.timer.stop(segment.name)
        return results


def _meet(one: Mesh, other: Mesh) -> bool:
    """True if the meshes share a device."""
    return one == other or not set(one.devices.flat).isdisjoint(other.devices.flat)


def _begun(segment: Segment, by_stage: dict[str, Any], step: int) -> dict[str, Any]:
    """The metrics of the stages that have begun."""
    metrics: dict[str, Any] = {}
    for stage in segment.stages:
        if step >= stage.first_step:
            metrics = joined(metrics, by_stage[stage.name])
    return metrics


def joined(metrics: dict[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """`metrics` and `more`, of a further stage. ValueError for a name that both have."""
    if again := sorted(more.keys() & metrics.keys()):
        raise ValueError(
            f"two stages report the metric {again[0]!r}, so one value would be lost; rename that "
            "of your stage or of your loss"
        )
    return metrics | dict(more)


def segment_memory_guard(segment: Segment) -> AbstractContextManager[None]:
    return memory_guard(segment.name, segment.needs_less_memory)
