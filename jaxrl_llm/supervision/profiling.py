"""Profiles of chosen steps, and the time of the collectives in them.

A GPU's trace names the instruction of each kernel, its program and its scopes. Asynchronous
collectives have another name there than in the program's text. These are matched by their order,
which equals the text's, because XLA launches what it scheduled in the order of the schedule.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxrl_llm.distributed.communication import KINDS, Collective, stage_pattern
from jaxrl_llm.distributed.multihost import is_main
from jaxrl_llm.observability import profile
from jaxrl_llm.observability.profile import DeviceEvent
from jaxrl_llm.observability.timing import Timer
from jaxrl_llm.supervision.listener import Listener
from jaxrl_llm.supervision.watchdog import Watch

FOLDER = "profile"
UNTIMED = "no collective was timed: the trace has no GPU"
Key = tuple[str, str, str, str]  # program, stage, axis, kind


@dataclass(kw_only=True)
class StepProfiler(Listener):
    """Traces the steps that the config names, on the main process."""

    run_dir: Path
    steps: tuple[int, ...]
    message: Callable[[str], None]
    watch: Watch = field(default_factory=Watch)
    trace: Path | None = None  # folder of the last step's trace
    _running: bool = False

    def begin(self, step: int, timer: Timer) -> None:
        """Begin the trace of a step, if it is to be traced."""
        if step in self.steps and is_main():
            profile.start(self._folder(step))
            self._running = True

    def measured(self, step: int, batch: Any, metrics: Mapping[str, float]) -> dict[str, float]:
        """Write the trace of the step, if there is one."""
        if step in self.steps:
            self.watch.enter("profile", learn=False)  # process 0 writes a trace, others wait
        self.trace = self._folder(step) if self._running else None
        if self.trace is not None:
            self.close()
            self.message(f"step {step} is traced in {self.trace}")
        return {}

    def _folder(self, step: int) -> Path:
        return self.run_dir / FOLDER / f"step_{step}"

    def close(self) -> None:
        """Write a trace that a step which failed left open."""
        if self._running:
            self._running = False
            profile.stop()


@dataclass(kw_only=True)
class Measured:
    """The time of a row's collectives on the first GPU. It includes waiting for other devices."""

    calls: int = 0
    seconds: float = 0.0
    hidden: float = 0.0  # seconds of these in which other work ran on the GPU too

    def to_json(self, size: float) -> dict[str, Any]:
        """For a row that moved `size` bytes in the step."""
        return {
            "calls": self.calls,
            "ms": 1e3 * self.seconds,
            "gb_per_s": size / self.seconds / 1e9,
            "hidden": self.hidden / self.seconds,
        }


def time_collectives(
    events: Sequence[DeviceEvent], programs: Mapping[str, Sequence[Collective]]
) -> tuple[dict[Key, Measured], float]:
    """The time of each row of `programs`, and the seconds of collectives that belong to no row."""
    by_program: dict[int, list[DeviceEvent]] = defaultdict(list)
    for event in events:
        by_program[event.program].append(event)
    work = profile.joined((e.start, e.end) for e in events if not _is_collective(e))
    times: dict[Key, Measured] = {}
    missing = 0.0
    for each in by_program.values():
        name = _name(each, programs)
        rows = _rows(each, programs[name]) if name is not None else {}
        for event in each:
            if not _is_collective(event):
                continue
            seconds = (event.end - event.start) / 1e9
            row = rows.get(event.operation)
            if name is None or row is None:
                missing += seconds
                continue
            measured = times.setdefault((name, row.stage, row.axis, row.kind), Measured())
            measured.calls += 1
            measured.seconds += seconds
            measured.hidden += profile.covered_ns(event, work) / 1e9
    return times, missing


def _is_collective(event: DeviceEvent) -> bool:
    return _kind(event) is not None or event.name.startswith("nccl")


def _kind(event: DeviceEvent) -> str | None:
    """The kind of collective that an event belongs to, by the name of its instruction."""
    stem = re.sub(r"(-start)?(\.\d+)*$", "", event.operation)
    return stem if stem in KINDS else None


def _name(
    events: Sequence[DeviceEvent], programs: Mapping[str, Sequence[Collective]]
) -> str | None:
    """The program whose stages are in most of the events' scopes."""
    votes: Counter[str] = Counter()
    scopes = Counter(event.scope for event in events)
    for name, collectives in programs.items():
        stages = stage_pattern({each.stage for each in collectives})
        votes[name] = sum(count for scope, count in scopes.items() if stages.search(scope))
    best = max(votes, key=lambda name: votes[name], default=None)
    return best if best is not None and votes[best] else None


def _rows(
    events: Sequence[DeviceEvent], collectives: Sequence[Collective]
) -> dict[str, Collective]:
    """The collective of each operation; uncertain ones are left out."""
    by_name = {each.name: each for each in collectives}
    operations: dict[str, DeviceEvent] = {}  # in the order of their first launch
    for event in events:
        if _kind(event) is not None:
            operations.setdefault(event.operation, event)
    found = {name: by_name[name] for name in operations if name in by_name}
    taken = {each.name for each in found.values()}
    for kind in KINDS:
        names = [n for n, e in operations.items() if n not in found and _kind(e) == kind]
        left = [each for each in collectives if each.kind == kind and each.name not in taken]
        if len(names) == len(left):
            found |= dict(zip(names, left, strict=True))
            continue
        for name in names:  # where an operation did not run, its stage and kind may say enough
            scope = operations[name].scope
            fitting = [each for each in left if stage_pattern({each.stage}).search(scope)]
            if fitting and len({(each.stage, each.axis) for each in fitting}) == 1:
                found[name] = fitting[0]
    return found
