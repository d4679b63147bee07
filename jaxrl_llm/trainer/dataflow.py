"""The hybrid programming model: stages declare what they read and write; a planner orders them.

The fields are those of `RolloutBatch`, offline those of `OfflineBatch`. A stage whose outputs
nobody needs is left out (GRPO drops the critic, a KL coefficient of 0 the reference model). A field
without a writer, a field with two writers and a cycle are refused before any device is touched.
"""

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxrl_llm.types import INPUT_FIELDS, OFFLINE_FIELDS, OFFLINE_INPUTS, ROLLOUT_FIELDS

HOST = "host"  # role of a stage that runs Python
DEVICE = "device"  # role of a stage that is traced but needs no state


@dataclass(frozen=True, kw_only=True)
class BatchFields:
    """The vocabulary of a plan: a batch's fields, and those of them that no stage writes."""

    batch: str
    names: tuple[str, ...]
    inputs: tuple[str, ...]


ROLLOUT = BatchFields(batch="RolloutBatch", names=ROLLOUT_FIELDS, inputs=INPUT_FIELDS)
OFFLINE = BatchFields(batch="OfflineBatch", names=OFFLINE_FIELDS, inputs=OFFLINE_INPUTS)


@dataclass(frozen=True, kw_only=True)
class StageOutput:
    """What a stage returns: a value for each name in `writes`, metrics, its role's new state."""

    writes: tuple[Any, ...] = ()
    metrics: dict[str, Any]
    state: Any = None  # None leaves the role's state as it was


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One step of the dataflow.

    A device stage is traced: fn(state of its role, step, *fields) -> StageOutput. A host stage
    runs Python: fn(context, step, *numpy fields) -> StageOutput. A stage that `updates` its role's
    state is a goal of the plan: it is always kept.
    """

    name: str
    fn: Callable[..., StageOutput]
    reads: tuple[str, ...]
    writes: tuple[str, ...] = ()
    inner_shapes: tuple[tuple[int, ...], ...] = ()  # of a host stage's writes, after their B
    role: str  # actor | critic | reference | reward | kl_controller | device | host
    updates: bool = False
    # XLA's, for a program whose stages all have the same.
    compiler_options: Mapping[str, bool] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Consecutive stages that run together: one compiled program, or one host stage."""

    stages: tuple[Stage, ...]

    @property
    def is_host(self) -> bool:
        return self.stages[0].role == HOST

    @property
    def name(self) -> str:
        """The names of its stages, as they stand in `timing_s/<name>`."""
        return "+".join(stage.name for stage in self.stages)


def plan(
    stages: Sequence[Stage], goals: Sequence[str] = (), fields: BatchFields = ROLLOUT
) -> tuple[Stage, ...]:
    """The needed stages in an order that respects every read.

    Needed are the stages that update a state, the writers of the `goals`, and whatever those
    read, back to the input fields. Among stages that are ready, the order given is kept, except
    that a host stage waits until every device stage that does not depend on it was dispatched.

    Raises ValueError for an unknown field, a gap, a double writer or a cycle.
    """
    writers = _writers(stages, fields)
    needed = _needed(stages, writers, goals, fields)
    return _ordered([s for s in stages if s.name in needed], writers)


def segments(stages: Sequence[Stage], *, fuse: bool = True) -> tuple[Segment, ...]:
    """Planned stages grouped into programs.

    Without a host stage everything is one program. With one, what the host waits for ends a
    program, so that the stages which do not wait for the host form a program of their own and
    run on the device while the host works. `fuse=False` gives every stage its own program.
    """
    if not fuse:
        return tuple(Segment(stages=(stage,)) for stage in stages)
    out: list[list[Stage]] = []
    host_reads = {name for stage in stages if stage.role == HOST for name in stage.reads}
    for stage in stages:
        previous = out[-1] if out else None
        ends = previous is None or previous[-1].role == HOST or stage.role == HOST
        feeds_host = previous is not None and bool(host_reads & _all_writes(previous))
        if ends or (feeds_host and not host_reads & set(stage.writes)):
            out.append([stage])
        else:
            assert previous is not None
            previous.append(stage)
    return tuple(Segment(stages=tuple(group)) for group in out)


def _all_writes(stages: Sequence[Stage]) -> set[str]:
    return {name for stage in stages for name in stage.writes}


def _writers(stages: Sequence[Stage], fields: BatchFields) -> dict[str, Stage]:
    names = [stage.name for stage in stages]
    repeated = {name for name in names if names.count(name) > 1}
    if repeated:
        raise ValueError(f"two stages are called {sorted(repeated)[0]!r}; give each its own name")
    writers: dict[str, Stage] = {}
    for stage in stages:
        for name in (*stage.reads, *stage.writes):
            if name not in fields.names:
                near = difflib.get_close_matches(name, fields.names, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise ValueError(
                    f"stage {stage.name!r} names the field {name!r}, which {fields.batch} does not "
                    f"have{hint} A new field is declared in jaxrl_llm/types.py."
                )
        for name in stage.writes:
            if name in fields.inputs:
                raise ValueError(f"stage {stage.name!r} writes {name!r}, which is an input")
            if name in writers:
                raise ValueError(
                    f"both {writers[name].name!r} and {stage.name!r} write {name!r}; "
                    "leave one of them out"
                )
            writers[name] = stage
    return writers


def _needed(
    stages: Sequence[Stage],
    writers: dict[str, Stage],
    goals: Sequence[str],
    fields: BatchFields,
) -> dict[str, Stage]:
    needed: dict[str, Stage] = {}
    wanted = [(name, "the caller") for name in goals]
    for stage in stages:
        if stage.updates:
            needed[stage.name] = stage
            wanted += [(name, f"stage {stage.name!r}") for name in stage.reads]
    while wanted:
        name, reader = wanted.pop()
        if name in fields.inputs:
            continue
        if name not in writers:
            raise ValueError(
                f"{reader} reads {name!r}, which no stage writes; add a stage that writes it, or "
                f"choose an algorithm that does not need it (fields with a writer: "
                f"{', '.join(sorted(writers)) or 'none'})"
            )
        stage = writers[name]
        if stage.name not in needed:
            needed[stage.name] = stage
            wanted += [(read, f"stage {stage.name!r}") for read in stage.reads]
    return needed


def _ordered(stages: Sequence[Stage], writers: dict[str, Stage]) -> tuple[Stage, ...]:
    """Topological order. An updating stage also waits for every reader of its role's old state."""
    waits = {
        stage.name: {writers[read].name for read in stage.reads if read in writers}
        for stage in stages
    }
    for stage in stages:
        if stage.updates:
            waits[stage.name] |= {
                other.name for other in stages if other.role == stage.role and not other.updates
            }
    left, done, out = list(stages), set(), []
    while left:
        ready = [stage for stage in left if waits[stage.name] <= done]
        if not ready:
            names = ", ".join(stage.name for stage in left)
            raise ValueError(f"the stages {names} wait for each other: their reads form a cycle")
        device = [stage for stage in ready if stage.role != HOST]
        chosen = (device or ready)[0]
        left.remove(chosen)
        done.add(chosen.name)
        out.append(chosen)
    return tuple(out)
