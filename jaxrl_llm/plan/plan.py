"""The plan of a training: its phases with their stages, and the roles whose states they change.

Online RL, offline training and the supervised trainings before them are plans of this one type.
They differ in the vocabulary of their batches, `ROLLOUT` or `OFFLINE`. No array exists yet.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxrl_llm.algorithms.algorithm import Algorithm
from jaxrl_llm.algorithms.kl import FixedKL, KLController
from jaxrl_llm.algorithms.offline import OfflineAlgorithm
from jaxrl_llm.config import Config, ConfigError
from jaxrl_llm.distributed.multihost import make_global
from jaxrl_llm.distributed.reshard import switch_bytes
from jaxrl_llm.distributed.sharding import replicated
from jaxrl_llm.plan.dataflow import BatchFields
from jaxrl_llm.plan.models import ModelSource
from jaxrl_llm.plan.offline_stages import HeldOut, HeldOutPairs, ReferenceTables
from jaxrl_llm.plan.parts import GenerateInParts
from jaxrl_llm.plan.reference import Refresh
from jaxrl_llm.plan.roles import BASE, CRITIC_BASE, REFERENCE, Role
from jaxrl_llm.plan.stages import KL_CONTROLLER
from jaxrl_llm.program.program import Program
from jaxrl_llm.program.segment import Segment
from jaxrl_llm.program.stage import Stage, States
from jaxrl_llm.program.stored import Start

AHEAD = "ahead"  # in a checkpoint: what was generated for the next steps


@dataclass(frozen=True, kw_only=True)
class Phase:
    """Steps with one algorithm: their stages, and the programs that run these."""

    config: Config  # with the algorithm of the phase
    algorithm: Algorithm | OfflineAlgorithm
    roles: dict[str, Role]  # models of the stages
    stages: tuple[Stage, ...]
    program: Program
    batch: Any  # abstract fields that a step begins with
    first_step: int = 1  # step of the run (1-based) with which the phase begins
    epochs: Mapping[str, int] = field(default_factory=dict)  # passes over the samples, by role
    controller: KLController | None = None  # coefficient of a KL penalty, kept between steps
    tables: ReferenceTables | None = None  # log-probs in place of a reference model
    # The program's first segments, if the source of batches runs them: dynamic sampling repeats
    # them, and generating ahead runs them in earlier steps.
    collecting: tuple[Segment, ...] = ()
    filter_column: int | None = None  # column of reward_parts that filters; None for the score

    @property
    def mesh(self) -> Mesh:
        """The mesh of all roles without devices of their own."""
        return self.program.mesh

    @property
    def learning(self) -> tuple[Segment, ...]:
        """The segments after those that are collected."""
        return self.program.segments[len(self.collecting) :]

    @property
    def generating(self) -> tuple[Segment, ...]:
        """The collected segments on devices, and the one that samples several turns."""
        return tuple(segment for segment in self.collecting if segment not in self.grading)

    @property
    def grading(self) -> tuple[Segment, ...]:
        """The collected segments on the host that grade."""
        return tuple(
            segment
            for segment in self.collecting
            if segment.is_host and not any(stage.generates for stage in segment.stages)
        )

    @property
    def generated(self) -> list[str]:
        """The fields that `generating` writes."""
        return [name for s in self.generating for stage in s.stages for name in stage.writes]

    @property
    def parts(self) -> GenerateInParts | None:
        """The stage that generates responses in parts, with partial rollouts."""
        return next((s for s in self.stages if isinstance(s, GenerateInParts)), None)

    def abstract_states(self) -> States:
        """Shapes and shardings of everything that the roles keep."""
        states: States = {name: role.abstract() for name, role in self.roles.items()}
        if self.tables is not None:
            states[self.tables.role] = self.tables.abstract()
        if self.controller is not None:
            shape = jax.eval_shape(self.controller.init)
            states[KL_CONTROLLER] = jax.ShapeDtypeStruct(
                shape.shape, shape.dtype, sharding=replicated(self.mesh)
            )
        return states

    def abstract_generated(self) -> dict[str, Any]:
        """Shapes of what a checkpoint keeps of a batch that was generated ahead."""
        batch = self.trace()
        return {name: batch[name] for name in self.generated}

    def controller_state(self) -> States:
        """The KL controller's first state, by its name; empty without one."""
        if self.controller is None:
            return {}
        first = np.asarray(self.controller.init())
        return {KL_CONTROLLER: make_global(first, replicated(self.mesh))}

    def trace(self, *, compiles_first: bool = False) -> Any:
        """Trace every program on abstract arrays: shapes and fields that do not fit fail here.

        `compiles_first` also compiles the first program: see `Program.trace`.
        """
        states = self.abstract_states()
        return self.program.trace(states, self.batch, compiles_first=compiles_first)

    def begin_stored(self, start: Start) -> bool:
        """Begin to read the programs of a step that an earlier `start` kept; False without any."""
        return self.program.begin_stored(self.abstract_states(), self.batch, start)

    def compile_ahead(self) -> None:
        """Begin to compile the programs of a step in threads."""
        self.program.compile_ahead(self.abstract_states(), self.batch)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A training, planned: its phases, its roles, and where their weights come from."""

    config: Config
    phases: tuple[Phase, ...]
    learner: Role  # role whose weights are the result
    # Where weights come from, by role. Other roles derive theirs from the learner.
    sources: dict[str, ModelSource]
    vocabulary: BatchFields
    held_out: HeldOut | None = None  # program for held-out records
    held_out_pairs: HeldOutPairs | None = None  # program for held-out pairs, judged as such

    def at(self, step: int) -> Phase:
        """The phase of `step`."""
        firsts = [phase.first_step for phase in self.phases]
        return self.phases[bisect_right(firsts, step) - 1]

    def begins_program(self, step: int) -> bool:
        """True if `step` is the first that runs a program, and so may compile."""
        return any(phase.first_step == step for phase in self.phases)

    def enter(self, step: int, states: States) -> States:
        """The states that `step` begins with.

        The KL controller of a phase starts with it, and the reference follows the policy every
        `reference.refresh_every` steps.
        """
        if len(self.phases) > 1 and self.begins_program(step):
            states = states | self.at(step).controller_state()
        if self._refresh is None or step == 1 or (step - 1) % self.config.reference.refresh_every:
            return states
        policy = self.learner.params_in(states)
        return states | {REFERENCE: self._refresh(states[REFERENCE], policy)}

    def resumed(self, step: int, states: States) -> States:
        """The states of a checkpoint of `step`; a fixed coefficient of the KL is the config's."""
        phase = self.at(step + 1)
        is_fixed = isinstance(phase.controller, FixedKL)
        return states | phase.controller_state() if is_fixed else states

    @cached_property
    def _refresh(self) -> Refresh | None:
        """The refresh of the reference; None where it never changes."""
        settings = self.config.reference
        if not settings.refresh_every or REFERENCE not in self.roles:
            return None
        return Refresh(self.roles[REFERENCE], settings.mixup_alpha)

    @cached_property
    def roles(self) -> dict[str, Role]:
        """The roles of all phases."""
        return {name: role for phase in self.phases for name, role in phase.roles.items()}

    @property
    def record_algorithm(self) -> OfflineAlgorithm:
        """The algorithm of a plan whose batches are records."""
        algorithm = self.phases[-1].algorithm
        assert isinstance(algorithm, OfflineAlgorithm)
        return algorithm

    @property
    def tables(self) -> ReferenceTables | None:
        """The log-probs that stand in place of a reference model."""
        return self.phases[-1].tables

    def with_records(self, sizes: Mapping[str, int]) -> "Plan":
        """The plan for these numbers of records, which are the sizes of its tables."""
        (phase,) = self.phases
        if phase.tables is None:
            return self
        tables = replace(phase.tables, sizes=dict(sizes))
        return replace(self, phases=(replace(phase, tables=tables),))

    @property
    def frozen(self) -> list[str]:
        """The states that no step changes and that a run saves once."""
        names = [name for name, role in self.roles.items() if role.optimizer is None]
        names += [] if self.tables is None else [self.tables.role]
        moving = {REFERENCE} if self._refresh is not None else set()
        return [n for n in dict.fromkeys(names) if n not in self.reloaded and n not in moving]

    @property
    def bases(self) -> dict[str, Role]:
        """The frozen weights below adapters."""
        return {name: self.roles[name] for name in (BASE, CRITIC_BASE) if name in self.roles}

    @property
    def reloaded(self) -> dict[str, ModelSource]:
        """The roles that no step changes and that a run reads again, where it began with them."""
        if self.config.warmup is not None:
            return {}
        learners = {BASE: self.learner.name, CRITIC_BASE: "critic"}
        sources = {base: self.sources.get(learners[base]) for base in self.bases}
        kept = {base: source for base, source in sources.items() if source is not None}
        return {base: source for base, source in kept.items() if source.params is None}

    @property
    def num_devices(self) -> int:
        """The devices of all groups."""
        return self.phases[-1].program.num_devices

    @property
    def layout_switch_bytes(self) -> int:
        """Bytes that the busiest device receives when the learner takes its generation layout.

        They are counted in the dtype of generation, as the program casts before it moves.
        """
        sampler = next((stage for stage in self.phases[-1].stages if stage.generates), None)
        if sampler is None or sampler.role != self.learner.name:
            return 0  # weights go to other devices: perf/rollout_weights_gb
        config, role = self.config, self.learner
        dtype = jnp.dtype(config.rollout.dtype or config.actor.dtype)
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, dtype), role.spec.params)
        return switch_bytes(shapes, role.param_shardings, role.generation_shardings)

    def abstract_states(self, ahead: Sequence[tuple[int, int]] = ()) -> States:
        """Shapes and shardings of everything that the roles keep from start to end.

        `ahead` has the step and the rounds of generation of each batch that was generated ahead.
        """
        states = {name: state for p in self.phases for name, state in p.abstract_states().items()}
        if ahead:
            states[AHEAD] = [
                [self.at(step).abstract_generated()] * rounds for step, rounds in ahead
            ]
        return states

    def trace(self, start: Start | None = None) -> None:
        """Trace every program on abstract arrays; a run does not trace them again.

        With the `start` of a run of one phase, programs that an earlier one kept are read, and
        traced in the first step. Without them the first program begins to be compiled.
        """
        first, *later = self.phases
        if start is not None and not later and first.begin_stored(start):
            return
        for phase in self.phases:
            phase.trace(compiles_first=start is not None and not later)


def check_reference(config: Config, plan: Plan) -> None:
    """ConfigError where the run has another reference model, and nothing reads it."""
    if config.reference.path and REFERENCE not in plan.roles:
        raise ConfigError(
            f"config.reference.path={config.reference.path}: config.algorithm="
            f"{config.algorithm.label} with these settings reads no reference; leave it out, or "
            "set a KL coefficient"
        )
