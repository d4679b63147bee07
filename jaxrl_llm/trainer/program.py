"""Planned stages as compiled programs with donated state.

Consecutive device stages are one `jax.jit`: with a model reward the whole iteration is one
program. The states of roles that learn are donated, so an update needs no second copy.
"""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxrl_llm.distributed.multihost import fetch, make_global
from jaxrl_llm.distributed.sharding import batch_sharding, replicated
from jaxrl_llm.observability.timing import Timer
from jaxrl_llm.trainer.dataflow import Segment, Stage, StageOutput
from jaxrl_llm.trainer.guards import memory_guard, transfer_guard
from jaxrl_llm.types import RolloutBatch

PROGRAM = "iteration"  # name of the jitted functions, under which compilations are counted
States = dict[str, Any]


class Program:
    """One iteration of the dataflow on one mesh."""

    def __init__(
        self,
        segments: Sequence[Segment],
        *,
        mesh: Mesh,
        state_shardings: Mapping[str, Any],
        overlap: bool = True,
    ):
        """`state_shardings` has one entry for each role that keeps state.

        `overlap` lets a device segment run while a host stage does that reads nothing of it.
        Without, each segment has ended before the next begins, and its clock is its own.
        """
        self.segments = tuple(segments)
        self._overlap = overlap
        self._mesh = mesh
        self._batch_sharding = batch_sharding(mesh)
        self._shardings = dict(state_shardings)
        self._traced: set[str] = set()
        self._compiled = {s.name: self._compile(s) for s in self.segments if not s.is_host}

    def run(
        self,
        states: States,
        batch: RolloutBatch,
        step: int,
        context: Any,
        timer: Timer,
        segments: Sequence[Segment] | None = None,
    ) -> tuple[States, RolloutBatch, dict[str, Any]]:
        """Run every segment once, or those given. Returns new states, the full batch, and metrics
        on the device.

        At most one device segment is in flight, so their clocks do not overlap. Nothing is lost by
        that: two follow each other only where the host reads the first one's fields, and so waits
        for it. The donated `states` must not be used again.
        """
        device_step = make_global(jnp.int32(step), replicated(self._mesh))
        metrics: dict[str, Any] = {}
        pending: list[tuple[str, Any]] = []  # the segment in flight
        for segment in self.segments if segments is None else segments:
            if segment.is_host:
                with timer(segment.name):
                    out = self._run_host(segment.stages[0], batch, step, context)
                _wait(pending, timer)
                batch, metrics = batch.replace(**out[0]), metrics | out[1]
                continue
            # Before the clock starts: the dispatch of a program with loops may wait for the device.
            _wait(pending, timer)
            timer.start(segment.name)
            reads = {name: getattr(batch, name) for name in _segment_reads(segment)}
            learning, fixed = _split_states(states, segment)
            compiled = self._compiled[segment.name]
            guard = transfer_guard() if segment.name in self._traced else nullcontext()
            with guard, memory_guard(segment.name):
                new_states, writes, new_metrics = compiled(learning, fixed, reads, device_step)
            self._traced.add(segment.name)
            states = states | new_states
            batch, metrics = batch.replace(**writes), metrics | new_metrics
            pending.append((segment.name, writes or new_metrics))
            if self._feeds_host(segment) or not self._overlap:
                _wait(pending, timer)
        _wait(pending, timer)
        return states, batch, metrics

    def trace(self, states: States, batch: RolloutBatch) -> RolloutBatch:
        """Shapes of the whole iteration without computing: a config that is wrong fails here.

        `states` and `batch` are abstract, with the shardings of those that run.
        """
        for segment in self.segments:
            if segment.is_host:
                rows, stage = batch.sample_ids.shape[0], segment.stages[0]
                writes = {
                    name: jax.ShapeDtypeStruct((rows, *inner), jnp.float32)
                    for name, inner in zip(stage.writes, stage.inner_shapes, strict=True)
                }
            else:
                compiled = self._compiled[segment.name]
                _, writes, _ = compiled.eval_shape(*self._arguments(segment, states, batch))
            batch = batch.replace(**jax.tree.map(self._placed, writes))
        return batch

    def lower(self, segment: Segment, states: States, batch: RolloutBatch) -> jax.stages.Lowered:
        """The lowered program of a device segment, to look into or to compile elsewhere."""
        return self._compiled[segment.name].lower(*self._arguments(segment, states, batch))

    def _arguments(self, segment: Segment, states: States, batch: RolloutBatch) -> tuple[Any, ...]:
        """Abstract ones, placed as `run` places them: else `jit` would trace once more for it, and
        the compile cache would take it for another program."""
        reads = {name: getattr(batch, name) for name in _segment_reads(segment)}
        step = jax.ShapeDtypeStruct((), jnp.int32, sharding=replicated(self._mesh))
        return *_split_states(states, segment), reads, step

    def _placed(self, field: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(field.shape, field.dtype, sharding=self._batch_sharding)

    def _feeds_host(self, segment: Segment) -> bool:
        after = self.segments[self.segments.index(segment) + 1 :]
        host_reads = {n for s in after if s.is_host for stage in s.stages for n in stage.reads}
        return any(set(stage.writes) & host_reads for stage in segment.stages)

    def _run_host(
        self, stage: Stage, batch: RolloutBatch, step: int, context: Any
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        fields = fetch([getattr(batch, name) for name in stage.reads])
        out: StageOutput = stage.fn(context, step, *fields)
        writes = dict(zip(stage.writes, out.writes, strict=True))
        return make_global(writes, self._batch_sharding), out.metrics

    def _compile(self, segment: Segment) -> Any:
        def iteration(learning: States, fixed: States, fields: dict[str, Any], step: Any):
            fields, metrics, updated = dict(fields), {}, {}
            for stage in segment.stages:
                state = (fixed | learning | updated).get(stage.role)
                with jax.named_scope(stage.name):
                    out = stage.fn(state, step, *(fields[name] for name in stage.reads))
                fields |= dict(zip(stage.writes, out.writes, strict=True))
                metrics |= out.metrics
                if stage.updates:
                    updated[stage.role] = out.state
            writes = {n: fields[n] for stage in segment.stages for n in stage.writes}
            return learning | updated, writes, metrics

        options, *others = (dict(stage.compiler_options) for stage in segment.stages)
        learning_shardings = {role: self._shardings[role] for role in _learning_roles(segment)}
        return jax.jit(
            iteration,
            donate_argnums=(0,),
            out_shardings=(learning_shardings, self._batch_sharding, replicated(self._mesh)),
            compiler_options=options if all(other == options for other in others) else None,
        )


def _learning_roles(segment: Segment) -> set[str]:
    return {stage.role for stage in segment.stages if stage.updates}


def _split_states(states: States, segment: Segment) -> tuple[States, States]:
    """The states that the segment replaces (donated) and those that it only reads."""
    learning = _learning_roles(segment)
    used = {stage.role for stage in segment.stages if stage.role in states}
    return (
        {role: states[role] for role in sorted(used & learning)},
        {role: states[role] for role in sorted(used - learning)},
    )


def _segment_reads(segment: Segment) -> tuple[str, ...]:
    """The fields that enter the segment from outside."""
    written: set[str] = set()
    reads: dict[str, None] = {}
    for stage in segment.stages:
        reads |= dict.fromkeys(name for name in stage.reads if name not in written)
        written |= set(stage.writes)
    return tuple(reads)


def _wait(pending: list[tuple[str, Any]], timer: Timer) -> None:
    """Stop the clock of a dispatched segment when its results are there.

    One that ran beside a host stage is waited for after it, so its clock has the longer of the two.
    """
    while pending:
        name, results = pending.pop(0)
        with memory_guard(name):
            jax.block_until_ready(results)
        timer.stop(name)
