"""Profiles by jax: traces of the devices, written for xprof or Perfetto, and read back."""

import math
import re
import shutil
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

_GPU = re.compile(r"/device:GPU:(\d+)")


def start(folder: Path) -> None:
    """Begin a trace in `folder`; an earlier trace there is replaced."""
    shutil.rmtree(folder, ignore_errors=True)
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # a line a Python call would be most of the file
    jax.profiler.start_trace(folder, profiler_options=options)


def stop() -> None:
    """End the trace and write it.

    Requires: what is to be in it has been waited for.
    """
    jax.profiler.stop_trace()


@contextmanager
def trace(folder: Path) -> Iterator[None]:
    """A trace of the block in `folder`."""
    start(folder)
    try:
        yield
    finally:
        stop()


def read(folder: Path) -> Any:
    """The trace in `folder`, as `jax.profiler.ProfileData`."""
    (file,) = folder.glob("**/*.xplane.pb")
    return jax.profiler.ProfileData.from_file(str(file))


@dataclass(frozen=True, kw_only=True)
class DeviceEvent:
    """Something that a GPU did: a kernel or a copy."""

    start: float  # ns
    end: float
    name: str
    launched: int  # order in which the host launched what one trace holds
    program: int  # a number of the compiled program; 0 where the trace does not say
    operation: str  # XLA's instruction, or ""
    scope: str  # the named scopes of the operation, or ""


def first_gpu(data: Any) -> list[DeviceEvent]:
    """Events of the first GPU of a trace, in the order of launches; empty without a GPU."""
    planes = {int(found[1]): p for p in data.planes if (found := _GPU.fullmatch(p.name))}
    if not planes:
        return []
    lines = [line for line in planes[min(planes)].lines if line.name.startswith("Stream")]
    events = [_event(event) for line in lines for event in line.events]
    return sorted(events, key=lambda event: (event.launched, event.start))


def _event(event: Any) -> DeviceEvent:
    stats = dict(event.stats)
    return DeviceEvent(
        start=event.start_ns,
        end=event.start_ns + event.duration_ns,
        name=event.name,
        launched=int(stats.get("correlation_id", 0)),
        program=int(stats.get("program_id", 0)),
        operation=str(stats.get("hlo_op", "")),
        scope=str(stats.get("name", "")),
    )


def covered_ns(event: DeviceEvent, spans: Sequence[tuple[float, float]]) -> float:
    """The part of the event's time that lies in `spans`.

    Requires: the spans come from `joined`.
    """
    total, at = 0.0, max(bisect_right(spans, (event.start, math.inf)) - 1, 0)
    while at < len(spans) and spans[at][0] < event.end:
        begin, end = spans[at]
        total += max(0.0, min(event.end, end) - max(event.start, begin))
        at += 1
    return total


def joined(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Disjoint spans, in order, that cover what `spans` cover."""
    found: list[tuple[float, float]] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((begin, end))
    return found
