"""Consecutive stages as one function, which `Program` compiles."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.learner.train_state import Adapted, own_of
from jaxrl_llm.program.stage import HOST, Pieces, Stage, StageOutput, States

MORE_DEVICES = "more devices on config.mesh.fsdp"  # with which every program needs less memory


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
        settings = []
        if self.generates:
            settings += [
                "smaller config.rollout.cache_tokens or num_slots",
                "config.rollout.quantization=float8 with algorithm.rollout_is=token",
            ]
        if self.updated:
            settings.append(
                "remat=projections or full of that model (config.actor, config.critic, ...)"
            )
        if not all(stage.generates for stage in self.stages):
            settings.append(
                "smaller micro_batch_tokens or micro_batch_size there, or in config.warmup"
            )
        if self.updated:
            settings.append("optimizer.moment_dtype=bfloat16 or optimizer.offload=true there")
        return [*settings, MORE_DEVICES]

    @property
    def reads(self) -> tuple[str, ...]:
        """The fields that enter the segment from outside."""
        written: set[str] = set()
        reads: dict[str, None] = {}
        for stage in self.stages:
            reads |= dict.fromkeys(name for name in stage.reads if name not in written)
            written |= set(stage.writes)
        return tuple(reads)

    @property
    def arguments(self) -> list[list[np.ndarray]]:
        """The numbers of each stage that are arguments of the program."""
        return [stage.arguments for stage in self.stages]

    def _stages(self, arguments: Sequence[Any]) -> list[Stage]:
        pairs = zip(self.stages, arguments, strict=True)
        return [stage.with_arguments(own) for stage, own in pairs]

    def iteration(
        self,
        learning: States,
        fixed: States,
        fields: dict[str, Any],
        arguments: Sequence[Any],
        step: jax.Array,
        first: Callable[..., StageOutput] | None = None,
    ) -> tuple[States, dict[str, Any], dict[str, dict[str, Any]]]:
        """Every stage in turn. This is what `Program` compiles.

        `learning` are the states that the segment replaces, `fixed` those that it only reads.
        `arguments` are the numbers of the stages.
        `first` is called in place of the first stage, without a state: see `pieces`.
        Returns the new states, the fields that were written, and metrics by stage.
        """
        fields, metrics, states = dict(fields), {}, fixed | learning
        rows = jax.tree.leaves(fields)[0].shape[0]
        for number, stage in enumerate(self._stages(arguments)):
            inputs = {name: fields[name] for name in stage.reads}
            with jax.named_scope(stage.name):
                state = stage.state_of(states)
                if first is not None and number == 0:
                    output = first(step, **inputs)
                elif stage.first_step == 1:
                    output = stage(state, step, **inputs)
                else:
                    output = _from_its_first_step(stage, state, step, inputs)
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

    def pieces(
        self,
        learning: States,
        fixed: States,
        fields: dict[str, Any],
        arguments: Sequence[Any],
        step: jax.Array,
    ) -> Pieces:
        """`iteration` as a chain: the first stage is cut, and the last program does the rest."""
        stage = self.stages[0].with_arguments(arguments[0])
        own = {name: fields[name] for name in stage.reads}
        pieces = stage.pieces(stage.state_of(fixed | learning), step, **own)

        def rest(passed: Any) -> Any:
            def first(step: jax.Array, **fields: jax.Array) -> StageOutput:
                return pieces.end(passed)

            return self.iteration(learning, fixed, fields, arguments, step, first)

        return _SegmentPieces(stage.name, pieces, rest)


@dataclass(frozen=True)
class _SegmentPieces:
    """The pieces of a segment's first stage, with what ends them."""

    name: str
    first: Pieces
    rest: Callable[[Any], Any]

    def begin(self) -> tuple[Any, Any, Any]:
        with jax.named_scope(self.name):
            return self.first.begin()

    def go_on(self, number: int, kept: Any, passed: Any, moved: Any) -> tuple[Any, Any]:
        with jax.named_scope(self.name):
            return self.first.go_on(number, kept, passed, moved)

    def end(self, passed: Any) -> Any:
        return self.rest(passed)


def _from_its_first_step(stage: Stage, state: Any, step: jax.Array, fields: Any) -> StageOutput:
    """An update that keeps its state, and measures zeros, before its first step."""
    assert stage.updates and not stage.writes, stage.name

    def update(own: Any) -> tuple[Any, dict[str, Any]]:
        whole = replace(state, own=own) if isinstance(state, Adapted) else own
        output = stage(whole, step, **fields)
        return output.state, dict(output.metrics)

    own = own_of(state)
    _, shapes = jax.eval_shape(update, own)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    begun = step >= stage.first_step
    state, metrics = jax.lax.cond(begun, update, lambda own: (own, zeros), own)
    return StageOutput(metrics=metrics, state=state)
