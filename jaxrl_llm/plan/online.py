"""From a config to the planned programs of online RL, before any array exists."""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxrl_llm.algorithms.algorithm import Algorithm, corrected_for_staleness
from jaxrl_llm.algorithms.build import build_online
from jaxrl_llm.algorithms.fields import field_names
from jaxrl_llm.algorithms.importance import weights_of_stale_samples
from jaxrl_llm.config import AlgorithmSettings, Config, ConfigError
from jaxrl_llm.distributed.crossing import call
from jaxrl_llm.distributed.reshard import switch_bytes
from jaxrl_llm.distributed.sharding import batch_sharding, replicated
from jaxrl_llm.generation.sampler import SamplingParams
from jaxrl_llm.plan.dataflow import segments
from jaxrl_llm.plan.generating import ASKED, older_fields
from jaxrl_llm.plan.model_rules import check_roles
from jaxrl_llm.plan.models import ModelSource, stops_of
from jaxrl_llm.plan.offline import OfflinePlan
from jaxrl_llm.plan.online_stages import (
    Planning,
    collected_stages,
    continuing_program,
    critic_warmup,
    own_stages,
    rollout_dtype,
)
from jaxrl_llm.plan.roles import BASE, CRITIC_BASE, ROLLOUT_ROLE, Role, roles_of, rollout_role
from jaxrl_llm.plan.scores import HostReward
from jaxrl_llm.plan.stages import KL_CONTROLLER
from jaxrl_llm.program.followers import Follower
from jaxrl_llm.program.program import Program, by_mesh
from jaxrl_llm.program.segment import Segment
from jaxrl_llm.program.stage import Stage, States
from jaxrl_llm.program.stored import Start
from jaxrl_llm.tokenizer import Tokenizer
from jaxrl_llm.types import RolloutBatch

AHEAD = "ahead"  # in a checkpoint: what was generated for the next steps


# ------------------------------------------------------------------------- what is planned


@dataclass(frozen=True, kw_only=True)
class Iteration:
    """One iteration of RL, planned: the roles that it needs and the programs that run it."""

    config: Config
    algorithm: Algorithm
    roles: dict[str, Role]
    sources: dict[str, ModelSource]  # where each role's weights come from, if not from the actor
    stages: tuple[Stage, ...]
    program: Program
    # The program's first segments, if the source of batches runs them: dynamic sampling repeats
    # them, and generating ahead runs them in earlier steps.
    collecting: tuple[Segment, ...]
    continuing: Program | None  # of partial rollouts: goes on with the responses that were cut
    filter_column: int | None  # of reward_parts, by which groups are filtered; None for the score
    sampling: SamplingParams
    mesh: Mesh

    def abstract_states(self) -> States:
        """Shapes and shardings of everything that the roles keep."""
        states = {name: role.abstract() for name, role in self.roles.items()}
        return states | {KL_CONTROLLER: self._abstract_controller()}

    def abstract_batch(self) -> RolloutBatch:
        """Shapes of the batch that an iteration begins with."""
        data, rows = self.config.data, self.config.data.train_batch_size * self.config.rollout.n
        sharding = batch_sharding(self.mesh)

        def array(shape: tuple[int, ...], dtype: Any) -> Any:
            return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

        return RolloutBatch(
            prompts=array((rows, data.max_prompt_length), jnp.int32),
            prompt_lengths=array((rows,), jnp.int32),
            sample_ids=array((rows,), jnp.uint32),
            group_ids=array((rows,), jnp.int32),
        )

    @property
    def learning(self) -> tuple[Segment, ...]:
        """The segments after those that are collected."""
        return self.program.segments[len(self.collecting) :]

    @property
    def epochs(self) -> dict[str, int]:
        """Passes of the updates over the samples, by role."""
        return {"actor": self.config.actor.ppo_epochs, "critic": self.config.critic.ppo_epochs}

    def trace(self, *, compiles_first: bool = False) -> RolloutBatch:
        """Trace every program on abstract arrays: shapes and fields that do not fit fail here.

        `compiles_first` is that of `Program.trace`.
        """
        states = self.abstract_states()
        batch = self.program.trace(states, self.abstract_batch(), compiles_first=compiles_first)
        if self.continuing is not None:
            older = [
                {name: batch[name] for name in self.continuing_reads}
            ] * self.config.max_staleness
            steps = jax.ShapeDtypeStruct((len(older),), jnp.int32)
            found = jax.eval_shape(older_fields, older, steps)
            sharding = batch_sharding(self.mesh)
            of_older = {
                name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
                for name, x in found.items()
            }
            self.continuing.trace(states, batch.replace(**of_older))
        return batch

    def begin_stored(self, start: Start) -> bool:
        """Begin to read the programs of a step that an earlier `start` kept; False without any."""
        states, batch = self.abstract_states(), self.abstract_batch()
        return self.program.begin_stored(states, batch, start)

    def compile_ahead(self) -> None:
        """Begin to compile the programs of a step in threads."""
        self.program.compile_ahead(self.abstract_states(), self.abstract_batch())

    @property
    def generating(self) -> tuple[Segment, ...]:
        """Of the segments that are collected, those on devices."""
        return tuple(segment for segment in self.collecting if not segment.is_host)

    @property
    def grading(self) -> tuple[Segment, ...]:
        """Of the segments that are collected, those on the host."""
        return tuple(segment for segment in self.collecting if segment.is_host)

    @property
    def generated(self) -> list[str]:
        """The fields that `generating` writes."""
        return [name for s in self.generating for stage in s.stages for name in stage.writes]

    @property
    def continuing_reads(self) -> tuple[str, ...]:
        """The fields of a batch whose responses go on."""
        return (*ASKED, *self.generated)

    def abstract_generated(self) -> dict[str, Any]:
        """Shapes of what a checkpoint keeps of a batch that was generated ahead."""
        batch = self.trace()
        return {name: batch[name] for name in self.generated}

    def controller_state(self) -> Any:
        """The KL controller's first state."""
        init = self.algorithm.kl_controller.init
        return call(jax.jit(init, out_shardings=replicated(self.mesh)), (), self.mesh)

    def _abstract_controller(self) -> Any:
        shape = jax.eval_shape(self.algorithm.kl_controller.init)
        return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=replicated(self.mesh))


@dataclass(frozen=True, kw_only=True)
class OnlinePlan:
    """The iterations of a run, one a phase, and the step (1-based) with which each begins."""

    config: Config
    iterations: tuple[Iteration, ...]
    first_steps: tuple[int, ...]

    def at(self, step: int) -> Iteration:
        """The iteration of `step`."""
        return self.iterations[bisect_right(self.first_steps, step) - 1]

    def begins_program(self, step: int) -> bool:
        """Whether `step` is the first that runs a program, and so may compile."""
        return step in self.first_steps

    def enter(self, step: int, states: States) -> States:
        """The states that `step` begins with: the KL controller of a phase starts with it."""
        if len(self.iterations) == 1 or not self.begins_program(step):
            return states
        return states | {KL_CONTROLLER: self.at(step).controller_state()}

    @cached_property
    def roles(self) -> dict[str, Role]:
        """The roles of all iterations."""
        return {name: role for it in self.iterations for name, role in it.roles.items()}

    @cached_property
    def sources(self) -> dict[str, ModelSource]:
        """Where the weights of each role come from, if not from the actor."""
        return {name: source for it in self.iterations for name, source in it.sources.items()}

    @property
    def learner(self) -> Role:
        """The role whose weights are the run's result."""
        return self.roles["actor"]

    @property
    def frozen(self) -> list[str]:
        """The roles that no step changes: saved once a run."""
        fixed = [name for name, role in self.roles.items() if role.optimizer is None]
        return [name for name in fixed if name not in self.reloaded]

    @property
    def bases(self) -> dict[str, Role]:
        """The frozen weights below adapters."""
        return {name: self.roles[name] for name in (BASE, CRITIC_BASE) if name in self.roles}

    @property
    def reloaded(self) -> dict[str, ModelSource]:
        """The roles that no step changes and that a run reads again, where it began with them."""
        if self.config.warmup is not None:
            return {}
        found = {BASE: self.sources.get("actor"), CRITIC_BASE: self.sources.get("critic")}
        return {name: s for name, s in found.items() if s is not None and name in self.roles}

    @property
    def num_devices(self) -> int:
        """The devices of all groups."""
        return self.iterations[-1].program.num_devices

    @property
    def layout_switch_bytes(self) -> int:
        """Bytes that the busiest device receives when the actor goes to its generation layout.

        They are counted in the dtype of generation, as the program casts before it moves.
        """
        if ROLLOUT_ROLE in self.config.placement:
            return 0  # they go to other devices: perf/rollout_weights_gb
        dtype = jnp.dtype(rollout_dtype(self.config))
        role = self.learner
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, dtype), role.spec.params)
        return switch_bytes(shapes, role.param_shardings, role.generation_shardings)

    def abstract_states(self, ahead: Sequence[tuple[int, int]] = ()) -> States:
        """Shapes and shardings of everything that the roles keep from start to end.

        `ahead` has the step and the rounds of generation of each batch that was generated ahead.
        """
        states = {name: role.abstract() for name, role in self.roles.items()}
        if ahead:
            states[AHEAD] = [
                [self.at(step).abstract_generated()] * rounds for step, rounds in ahead
            ]
        return self.iterations[-1].abstract_states() | states

    def controller_state(self) -> Any:
        """The first state of the last phase's KL controller."""
        return self.iterations[-1].controller_state()

    def trace(self, start: Start | None = None) -> None:
        """Trace every program on abstract arrays; a run does not trace them again.

        With the `start` of a run of one phase, programs that an earlier one kept are read, and
        traced in the first step. Without them the first program begins to be compiled.
        """
        first, *phases = self.iterations
        if start is not None and not phases and first.begin_stored(start):
            return
        for iteration in self.iterations:
            iteration.trace(compiles_first=start is not None and not phases)


Plan = OnlinePlan | OfflinePlan  # of a training


# ------------------------------------------------------------------------- planning


def plan_online(
    config: Config,
    tokenizer: Tokenizer,
    mesh: Mesh,
    reward: HostReward | None,
    *,
    own_meshes: Mapping[str, Mesh] | None = None,
) -> OnlinePlan:
    """Every phase planned as a run of its own would be. Raises what `plan_iteration` raises.

    `own_meshes` are those of roles on devices of their own; `mesh` is of all others.
    """
    algorithms = [phase.algorithm for phase in config.phases] + [config.algorithm]
    first_steps = [1]
    for phase in config.phases:
        first_steps.append(first_steps[-1] + phase.steps)
    last, learning = _learning(config, algorithms, first_steps)
    iterations = []
    for algorithm in algorithms:
        # Steps count from the run's first.
        critic = replace(config.critic, warmup_steps=last)
        phase = replace(config, algorithm=algorithm, critic=critic)
        iteration = plan_iteration(
            phase, tokenizer, mesh, reward, own_meshes=own_meshes, learning=learning
        )
        iterations.append(iteration)
    plan = OnlinePlan(config=config, iterations=tuple(iterations), first_steps=tuple(first_steps))
    for role in own_meshes or ():
        if role not in plan.roles and role != ROLLOUT_ROLE:
            raise ConfigError(
                f"config.placement.{role}: config.algorithm={config.algorithm.label} with these "
                f"settings has no use for that role, and its devices would be idle; leave it out"
            )
    return plan


def _learning(
    config: Config, algorithms: Sequence[AlgorithmSettings], first_steps: Sequence[int]
) -> tuple[int, dict[str, int]]:
    """The last step in which only the critic learns, and in how many steps each role learns.

    A critic warms up in the first phase that has one. Without a critic the actor learns.

    Raises: ConfigError where the actor learns in no step.
    """
    ends = [*first_steps[1:], config.total_steps + 1]
    has_critic = [build_online(each).value_loss is not None for each in algorithms]
    phases = [
        (first, end) for first, end, has in zip(first_steps, ends, has_critic, strict=True) if has
    ]
    warmup, of_critic = config.critic.warmup_steps, sum(end - first for first, end in phases)
    last = warmup + (phases[0][0] - 1 if phases else 0) if warmup else 0
    waits = sum(max(min(last + 1, end) - first, 0) for first, end in phases)
    if 0 < config.total_steps == waits:
        raise ConfigError(
            f"config.critic.warmup_steps={warmup}: the critic learns alone in all "
            f"{config.total_steps} steps, and the actor in none; --config.total_steps={last + 1} "
            "works"
        )
    return last, {"actor": config.total_steps - waits, "critic": of_critic}


def plan_iteration(
    config: Config,
    tokenizer: Tokenizer,
    mesh: Mesh,
    reward: HostReward | None,
    *,
    own_meshes: Mapping[str, Mesh] | None = None,
    learning: Mapping[str, int] | None = None,
) -> Iteration:
    """Roles, stages and programs of `config`. `reward` scores on the host, if anything does.

    `own_meshes` are those of roles on devices of their own; `mesh` is of all others.
    `learning` has the number of steps of the whole run in which actor and critic learn; None counts
    those of `config` alone.

    Raises ValueError where the algorithm needs a field that no stage writes, a dim does not divide
    its mesh axes, or the KL controller refuses so many samples.
    """
    config = _corrected(config)
    algorithm = build_online(config.algorithm)
    if config.max_staleness and not hasattr(config.algorithm, "rollout_is"):
        algorithm = corrected_for_staleness(algorithm, *_weights_of_stale_samples(config))
    _check(config, algorithm)
    if learning is None:
        waits = min(critic_warmup(config, algorithm), config.total_steps)
        learning = {"actor": config.total_steps - waits, "critic": config.total_steps}
    own_meshes = {} if own_meshes is None else own_meshes
    roles, sources = roles_of(config, tokenizer, mesh, learning, own_meshes)
    sampler, followers = roles["actor"], []
    if ROLLOUT_ROLE in own_meshes:
        sampler = rollout_role(roles["actor"], own_meshes[ROLLOUT_ROLE], config.mesh)
        shapes, places = sampler.spec.params, sampler.param_shardings
        dtype = rollout_dtype(config)
        followers.append(Follower(ROLLOUT_ROLE, "actor", dtype, shapes=shapes, shardings=places))
    planning = Planning(
        config=config,
        algorithm=algorithm,
        roles=roles,
        sampler=sampler,
        sampling=train_sampling(config, tokenizer),
        pad_id=tokenizer.pad_id,
        reward=reward,
        own_stages=own_stages(config),
    )
    planned = planning.stages()
    collected, column = collected_stages(config, planned, reward, own_meshes)
    rest = [stage for stage in planned if stage not in collected]
    group = partial(segments, fuse=config.fuse_stages, place=by_mesh(own_meshes))
    collecting = group(collected)
    used = {name for stage in planned for name in (stage.role, *stage.shares)}
    roles = {name: role for name, role in roles.items() if name in used}
    check_roles(config, roles)
    shardings = {name: role.shardings for name, role in roles.items()}
    make_program = partial(
        Program,
        mesh=mesh,
        own_meshes={name: own for name, own in own_meshes.items() if name in used},
        followers=followers,
        state_shardings=shardings | {KL_CONTROLLER: replicated(mesh)},
        overlap=config.fuse_stages,
        group=config.rollout.n,
    )
    return Iteration(
        config=config,
        algorithm=algorithm,
        roles=roles,
        sources=sources,
        stages=planned,
        program=make_program((*collecting, *group(rest))),
        collecting=collecting,
        continuing=continuing_program(config, planned, make_program),
        filter_column=column,
        sampling=planning.sampling,
        mesh=mesh,
    )


def _check(config: Config, algorithm: Algorithm) -> None:
    """What only the algorithm's functions can say about the config."""
    if algorithm.kl_reward is not None:
        controller = algorithm.kl_controller
        samples = config.data.train_batch_size * config.rollout.n
        kl = jax.ShapeDtypeStruct((), jnp.float32)
        state = jax.eval_shape(controller.init)
        jax.eval_shape(lambda state, kl: controller.update(state, kl, samples), state, kl)
    if config.rollout.n == 1 and "group_ids" in field_names(algorithm.advantage):
        raise ValueError(
            f"config.algorithm={config.algorithm.label} compares the samples of a prompt with each "
            "other, and config.rollout.n=1 makes one: config.rollout.n=8 is usual"
        )
    greedy, usual = next(
        (
            (f"{key}={value}", f"{key}={usual}")
            for key, value, usual in (("temperature", 0, 1), ("top_k", 1, 0), ("min_p", 1, 0))
            if getattr(config.rollout, key) == value
        ),
        ("", ""),
    )
    if greedy and {"group_ids", "greedy_scores"} & {*field_names(algorithm.advantage)}:
        raise ConfigError(
            f"config.rollout.{greedy} is greedy: all answers to a prompt are the same, and "
            f"config.algorithm={config.algorithm.label} compares them; "
            f"--config.rollout.{usual} is usual"
        )
    named = (*field_names(algorithm.advantage), *field_names(algorithm.policy_loss))
    asked = [name for name in named if name.startswith("teacher_")]
    if asked and config.teacher is None:
        raise ConfigError(
            f"config.algorithm={config.algorithm.label} reads {asked[0]}, and config.teacher is "
            "not set: name a model, --config.teacher.path=DIR, or train one in the run, as "
            "configs/distillation.py does"
        )


def train_sampling(config: Config, tokenizer: Tokenizer) -> SamplingParams:
    """How the rollout samples."""
    rollout, stops = config.rollout, stops_of(config, tokenizer)
    return SamplingParams(
        max_new_tokens=config.data.max_response_length,
        temperature=rollout.temperature,
        top_k=rollout.top_k,
        top_p=rollout.top_p,
        min_p=rollout.min_p,
        stop_token_ids=stops.token_ids,
        stop_strings=stops.strings,
    )


def _corrected(config: Config) -> Config:
    """`config` with importance weights for samples of an older policy, unless it has a correction.

    `corrected_for_staleness` does the same to an algorithm that has no such setting.
    """
    settings: Any = config.algorithm
    known = hasattr(settings, "rollout_is")
    if not config.max_staleness or not known or settings.rollout_is or settings.bypass_mode:
        return config
    level, upper = _weights_of_stale_samples(config)
    if settings.rollout_is_threshold is not None:
        upper = settings.rollout_is_threshold
    weighted = replace(settings, rollout_is=level, rollout_is_threshold=upper)
    return replace(config, algorithm=weighted)


def _weights_of_stale_samples(config: Config) -> tuple[str, float]:
    return weights_of_stale_samples(config.max_staleness, config.data.max_response_length)
