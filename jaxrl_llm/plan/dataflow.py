"""The dataflow of a step: stages say what they read and write, and `plan` orders them.

The fields are the columns of a `RolloutBatch` or `OfflineBatch`, and whatever other names stages
write. A stage whose results nobody needs is left out: GRPO drops the critic, a KL
coefficient of 0 the reference model. A field without a writer, a field with two writers and a cycle
are refused before any device is touched.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from jaxrl_llm.program.segment import Segment
from jaxrl_llm.program.stage import HOST, Stage
from jaxrl_llm.references import nearest
from jaxrl_llm.types import INPUT_FIELDS, OFFLINE_FIELDS, OFFLINE_INPUTS, ROLLOUT_FIELDS


@dataclass(frozen=True, kw_only=True)
class BatchFields:
    """The vocabulary of a plan: the fields of a batch, and the inputs, which no stage writes."""

    batch: str
    names: tuple[str, ...]
    inputs: tuple[str, ...]


ROLLOUT = BatchFields(batch="RolloutBatch", names=ROLLOUT_FIELDS, inputs=INPUT_FIELDS)
# With turns, the prompt of a sample is known when its tools and its environment have begun.
TURNS = BatchFields(batch="RolloutBatch", names=ROLLOUT_FIELDS, inputs=("sample_ids", "group_ids"))
OFFLINE = BatchFields(batch="OfflineBatch", names=OFFLINE_FIELDS, inputs=OFFLINE_INPUTS)


def plan(
    stages: Sequence[Stage], goals: Sequence[str] = (), fields: BatchFields = ROLLOUT
) -> tuple[Stage, ...]:
    """The needed stages in an order that respects every read.

    A stage is needed if it updates a state or writes a goal, or if a needed stage reads one of its
    fields. Among stages that are ready, the order given is kept. A host stage is the exception: it
    waits until every device stage that does not depend on it was dispatched.

    Raises ValueError for an unknown field, a gap, a double writer or a cycle.
    """
    writers = _writers(stages, fields)
    needed = _needed(stages, writers, goals, fields)
    return _ordered([s for s in stages if s.name in needed], writers)


def segments(
    stages: Sequence[Stage],
    *,
    fuse: bool = True,
    place: Callable[[Stage], Any] = lambda stage: None,
) -> tuple[Segment, ...]:
    """Planned stages grouped into programs, each of stages with the same `place`.

    Without a host stage everything is one program. With one, what the host waits for ends a
    program. The stages that do not wait for the host then form a program of their own, and run on
    the device while the host works. `fuse=False` gives every stage its own program.
    """
    if not fuse:
        return tuple(Segment(stages=(stage,)) for stage in stages)
    out: list[list[Stage]] = []
    host_reads = {name for stage in stages if stage.role == HOST for name in stage.reads}
    for stage in stages:
        previous = out[-1] if out else None
        ends = previous is None or HOST in (previous[-1].role, stage.role)
        ends = ends or (previous is not None and place(previous[-1]) != place(stage))
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
        for name in stage.writes:
            if name in fields.inputs:
                raise ValueError(f"stage {stage.name!r} writes {name!r}, which is an input")
            if name in writers:
                raise ValueError(
                    f"both {writers[name].name!r} and {stage.name!r} write {name!r}; "
                    "leave one of them out"
                )
            writers[name] = stage
    known = tuple(dict.fromkeys((*fields.names, *writers)))
    for stage in stages:
        for name in stage.reads:
            if name not in known:
                hint = nearest(name, known) or "."
                raise ValueError(
                    f"stage {stage.name!r} reads the field {name!r}, which {fields.batch} does not "
                    f"have and no stage writes{hint} A stage of yours may write it: see "
                    "docs/add-a-stage.md"
                )
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
