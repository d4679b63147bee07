"""The dataflow of a step: stages say what they read and write, and `plan` orders them.

The fields are those of `RolloutBatch`, offline those of `OfflineBatch`, and whatever other names
stages write. A stage whose results nobody needs is left out: GRPO drops the critic, a KL
coefficient of 0 the reference model. A field without a writer, a field with two writers and a cycle
are refused before any device is touched.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.algorithms.fields import check_metric_name, field_names
from jaxrl_llm.learner.train_state import Adapted, own_of
from jaxrl_llm.references import nearest
from jaxrl_llm.types import (
    INPUT_FIELDS,
    OFFLINE_FIELDS,
    OFFLINE_INPUTS,
    ROLLOUT_AXES,
    ROLLOUT_FIELDS,
)

HOST = "host"  # role of a stage that runs Python
DEVICE = "device"  # role of a stage that is traced and needs no state
MORE_DEVICES = "more devices on config.mesh.fsdp"  # with which every program needs less memory
# How the names of metrics begin that the trainer adds to those of the stages.
TRAINER_METRICS = ("timing_s/", "perf/", "training/global_step", "training/epoch")
States = dict[str, Any]  # what each role keeps between steps, by its name


@dataclass(frozen=True, kw_only=True)
class BatchFields:
    """The vocabulary of a plan: a batch's fields, and those of them that no stage writes."""

    batch: str
    names: tuple[str, ...]
    inputs: tuple[str, ...]


ROLLOUT = BatchFields(batch="RolloutBatch", names=ROLLOUT_FIELDS, inputs=INPUT_FIELDS)
OFFLINE = BatchFields(batch="OfflineBatch", names=OFFLINE_FIELDS, inputs=OFFLINE_INPUTS)


@dataclass(frozen=True)
class StageOutput:
    """What a stage returns: fields of the batch and metrics by name, and its role's new state."""

    writes: Mapping[str, Any] = field(default_factory=dict)
    metrics: Mapping[str, Any] = field(default_factory=dict)
    state: Any = None  # for a stage that updates


class Pieces(Protocol):
    """A device stage without updates that is cut into programs. Each method is traced.

    `begin`, then `go_on` with the numbers below `count`, then `end` do what the stage does. `kept`
    is what each `go_on` reads. `passed` and `moved` are what each of them replaces: the arrays of
    `moved` are donated, so their shapes stay. `fields` are those that the stage reads.
    """

    @property
    def count(self) -> int:
        """How often `go_on` is called."""
        ...

    def begin(self, state: Any, step: jax.Array, **fields: jax.Array) -> tuple[Any, Any, Any]:
        """`kept`, `passed` and `moved` of the first program."""
        ...

    def go_on(
        self, number: int, state: Any, step: jax.Array, *carried: Any, **fields: jax.Array
    ) -> tuple[Any, Any]:
        """The next `passed` and `moved`; `carried` are `kept` and these."""
        ...

    def end(self, step: jax.Array, passed: Any, **fields: jax.Array) -> StageOutput:
        """What the stage returns."""
        ...


class Stage:
    """One step of the dataflow. A subclass is a frozen dataclass whose `__call__` does the work.

    The keyword-only parameters of `__call__` are the fields of the batch that it reads. A stage
    that calls functions of the algorithm lists them in `functions`, and takes their fields as
    `**fields`. `writes` are the keys of `StageOutput.writes`; they are compared when the stage is
    traced.

    A device stage is traced: `__call__(state of its role, step, *, ...)`. A host stage runs Python:
    `__call__(context, step, *, ...)` with numpy arrays. With several processes it gets the rows
    that its process owns, and writes those.
    """

    name: str  # its own among the stages of a plan; `timing_s/<name>`
    role: str = DEVICE  # whose state it gets: a model's role, the KL controller, DEVICE or HOST
    writes: tuple[str, ...] = ()
    updates: bool = False  # replaces its role's state: a goal of the plan, always kept
    # The step of the run (1-based) with which it begins. An update that has not begun leaves the
    # state as it was, and reports nothing.
    first_step: int = 1
    # Of a host stage: its metrics are of all processes already. Otherwise they count as means over
    # the rows of a process, and the mean over all rows is reported.
    gathers: bool = False
    generates: bool = False  # bound by memory: its time says nothing about the use of FLOPs
    # XLA's, for a program whose stages all have the same.
    compiler_options: Mapping[str, int] | tuple[()] = ()
    # The metric that says how often a loop ran whose number is data, by the scope around the loop.
    loop_metrics: Mapping[str, str] | tuple[()] = ()
    # Functions of the algorithm: their positional parameters are fields that are read too.
    functions: Sequence[Callable[..., Any]] = ()
    __call__: Callable[..., StageOutput]  # the work of one step; see above

    @property
    def reads(self) -> tuple[str, ...]:
        """The fields of the batch that the stage gets, as keywords."""
        parameters = inspect.signature(type(self).__call__).parameters.values()
        own = [p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY]
        named = [name for fn in self.functions for name in field_names(fn)]
        return tuple(dict.fromkeys((*own, *named)))

    @property
    def shares(self) -> tuple[str, ...]:
        """Other roles whose states the stage reads too."""
        return ()

    def state_of(self, states: States) -> Any:
        """What the stage gets as its state."""
        return states.get(self.role)

    def pieces(self) -> Pieces | None:
        """The stage as programs that run one after the other, where that compiles sooner."""
        return None

    def shapes(self, rows: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Output shapes of a host stage for `rows` rows. Host stages are not traced."""
        return {name: jax.ShapeDtypeStruct((rows,), jnp.float32) for name in self.writes}

    def check(self, output: Any, rows: int) -> None:
        """ValueError unless the output is what the stage says that it writes, with `rows` rows.

        A wrong shape could broadcast silently and change the result.
        """
        if not isinstance(output, StageOutput):
            raise ValueError(
                f"stage {self.name!r} returned {type(output).__name__}, not a StageOutput: "
                "StageOutput({field: array}, {metric: number})"
            )
        if set(output.writes) != set(self.writes):
            raise ValueError(
                f"stage {self.name!r} says that it writes {_shown(self.writes)} and returned "
                f"{_shown(output.writes)}: make `writes` and the returned keys the same"
            )
        if self.updates != (output.state is not None):
            raise ValueError(
                f"stage {self.name!r} has updates={self.updates} and returned "
                f"{'a' if output.state is not None else 'no'} state"
            )
        for name, value in output.writes.items():
            if not _is_real(value):
                raise ValueError(
                    f"stage {self.name!r} returned {name} as {_kind(value)}; return an array of "
                    "real numbers"
                )
            axes = ROLLOUT_AXES.get(name)
            shape = np.shape(value)
            if shape[:1] != (rows,) or (axes is not None and len(shape) != len(axes)):
                wanted = f"[{', '.join(axes)}]" if axes else "[B, ...]"
                raise ValueError(
                    f"stage {self.name!r} returned {name} of shape {shape}; it must be {wanted}, "
                    f"and B is {rows} samples"
                )
        for name, value in output.metrics.items():
            check_metric_name(f"stage {self.name!r}", name)
            if name.startswith(TRAINER_METRICS):
                raise ValueError(
                    f"stage {self.name!r} returned the metric {name!r}, and the trainer writes "
                    f"those that begin with {', '.join(TRAINER_METRICS)}; rename it"
                )
            if not (isinstance(value, int | float) or _is_real(value)):
                raise ValueError(
                    f"stage {self.name!r} returned the metric {name!r} as {_kind(value)}; a metric "
                    "is a number"
                )
            if not self.updates and np.shape(value):
                raise ValueError(
                    f"stage {self.name!r} returned the metric {name!r} of shape {np.shape(value)}; "
                    "a metric is one number, such as the mean"
                )


def _is_real(value: Any) -> bool:
    """Whether it is an array, or a trace of one, of floats, integers or bools."""
    dtype = getattr(value, "dtype", None)
    kinds = (jnp.floating, jnp.integer, jnp.bool_)
    return dtype is not None and any(jnp.issubdtype(dtype, kind) for kind in kinds)


def _kind(value: Any) -> str:
    dtype = getattr(value, "dtype", None)
    return type(value).__name__ if dtype is None else f"an array of {dtype}"


@dataclass(frozen=True, kw_only=True, eq=False)
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

    @property
    def generates(self) -> bool:
        return any(stage.generates for stage in self.stages)

    @property
    def roles(self) -> set[str]:
        """The roles whose states its stages get."""
        return {name for stage in self.stages for name in (stage.role, *stage.shares)}

    @property
    def updated(self) -> tuple[str, ...]:
        """The roles whose states it replaces."""
        return tuple(stage.role for stage in self.stages if stage.updates)

    @property
    def needs_less_memory(self) -> list[str]:
        """Settings with which it needs less memory, the cheapest first."""
        found = []
        if self.generates:
            found += [
                "smaller config.rollout.cache_tokens or num_slots",
                "config.rollout.quantization=float8 with algorithm.rollout_is=token",
            ]
        if self.updated:
            found.append(
                "remat=projections or full of that model (config.actor, config.critic, ...)"
            )
        if not all(stage.generates for stage in self.stages):
            found.append(
                "smaller micro_batch_tokens or micro_batch_size there, or in config.warmup"
            )
        if self.updated:
            found.append("optimizer.moment_dtype=bfloat16 or optimizer.offload=true there")
        return [*found, MORE_DEVICES]

    @property
    def reads(self) -> tuple[str, ...]:
        """The fields that enter the segment from outside."""
        written: set[str] = set()
        reads: dict[str, None] = {}
        for stage in self.stages:
            reads |= dict.fromkeys(name for name in stage.reads if name not in written)
            written |= set(stage.writes)
        return tuple(reads)

    def iteration(
        self,
        learning: States,
        fixed: States,
        fields: dict[str, Any],
        step: jax.Array,
        first: Callable[..., StageOutput] | None = None,
    ) -> tuple[States, dict[str, Any], dict[str, dict[str, Any]]]:
        """Every stage in turn. This is what `Program` compiles.

        `learning` are the states that the segment replaces, `fixed` those that it only reads.
        `first` is called in place of the first stage, without a state: see `end`.
        Returns the new states, the fields that were written, and metrics by stage.
        """
        fields, metrics, states = dict(fields), {}, fixed | learning
        rows = jax.tree.leaves(fields)[0].shape[0]
        for number, stage in enumerate(self.stages):
            given = {name: fields[name] for name in stage.reads}
            with jax.named_scope(stage.name):
                state = stage.state_of(states)
                if first is not None and number == 0:
                    output = first(step, **given)
                elif stage.first_step == 1:
                    output = stage(state, step, **given)
                else:
                    output = _from_its_first_step(stage, state, step, given)
            stage.check(output, rows)
            fields |= output.writes
            metrics[stage.name] = dict(output.metrics)
            if stage.updates:
                states = states | {stage.role: output.state}
        writes = {name: fields[name] for stage in self.stages for name in stage.writes}
        return {role: states[role] for role in learning}, writes, metrics

    def supervised(self, *arguments: Any) -> Any:
        """`iteration` of a training that a run begins with; compilations are counted by name."""
        return self.iteration(*arguments)

    def begin(
        self,
        pieces: Pieces,
        learning: States,
        fixed: States,
        fields: dict[str, Any],
        step: jax.Array,
    ) -> tuple[Any, Any, Any]:
        """The first program of a chain; `pieces` are those of the first stage."""
        stage = self.stages[0]
        with jax.named_scope(stage.name):
            return pieces.begin(stage.state_of(fixed | learning), step, **self._of_first(fields))

    def go_on(
        self,
        pieces: Pieces,
        number: int,
        learning: States,
        fixed: States,
        fields: dict[str, Any],
        step: jax.Array,
        *carried: Any,
    ) -> tuple[Any, Any]:
        """A program in the middle of a chain; `carried` are what `Pieces` calls so."""
        stage = self.stages[0]
        with jax.named_scope(stage.name):
            state = stage.state_of(fixed | learning)
            return pieces.go_on(number, state, step, *carried, **self._of_first(fields))

    def end(
        self,
        pieces: Pieces,
        learning: States,
        fixed: States,
        fields: dict[str, Any],
        step: jax.Array,
        passed: Any,
    ) -> tuple[States, dict[str, Any], dict[str, dict[str, Any]]]:
        """The last program of a chain; returns what `iteration` returns."""
        first = partial(pieces.end, passed=passed)
        return self.iteration(learning, fixed, fields, step, first)

    def _of_first(self, fields: dict[str, Any]) -> dict[str, Any]:
        return {name: fields[name] for name in self.stages[0].reads}


def _from_its_first_step(stage: Stage, state: Any, step: jax.Array, fields: Any) -> StageOutput:
    """An update that leaves its state alone, and measures zeros, before its first step."""
    assert stage.updates and not stage.writes, stage.name

    def update(own: Any) -> tuple[Any, dict[str, Any]]:
        given = replace(state, own=own) if isinstance(state, Adapted) else own
        output = stage(given, step, **fields)
        return output.state, dict(output.metrics)

    own = own_of(state)
    _, shapes = jax.eval_shape(update, own)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    begun = step >= stage.first_step
    state, metrics = jax.lax.cond(begun, update, lambda own: (own, zeros), own)
    return StageOutput(metrics=metrics, state=state)


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


def _shown(names: Any) -> str:
    return ", ".join(sorted(names)) or "nothing"
