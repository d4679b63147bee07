"""From a config to the plan of online RL."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxrl_llm.agents.setup import has_turns
from jaxrl_llm.algorithms.algorithm import Algorithm, corrected_for_staleness
from jaxrl_llm.algorithms.build import build_online
from jaxrl_llm.algorithms.fields import field_names
from jaxrl_llm.algorithms.importance import weights_of_stale_samples
from jaxrl_llm.config import AlgorithmSettings, Config, ConfigError
from jaxrl_llm.distributed.sharding import batch_sharding, replicated
from jaxrl_llm.generation.sampler import SamplingParams
from jaxrl_llm.models.config import QwenVision, Vision
from jaxrl_llm.plan.conversing import Conversations
from jaxrl_llm.plan.dataflow import ROLLOUT, TURNS, segments
from jaxrl_llm.plan.in_graph import TokenTurns, open_token_turns
from jaxrl_llm.plan.model_rules import check_roles
from jaxrl_llm.plan.models import image_fields, stops_of
from jaxrl_llm.plan.online_stages import (
    OnlineStages,
    collected_stages,
    own_stages,
    rollout_dtype,
)
from jaxrl_llm.plan.plan import Phase, Plan, check_reference
from jaxrl_llm.plan.roles import ROLLOUT_ROLE, Role, roles_of, rollout_role
from jaxrl_llm.plan.scores import HostReward
from jaxrl_llm.plan.stages import KL_CONTROLLER, Update
from jaxrl_llm.program.followers import Follower
from jaxrl_llm.program.program import Program, by_mesh
from jaxrl_llm.program.stage import Stage
from jaxrl_llm.tokenizer import Tokenizer
from jaxrl_llm.types import RolloutBatch


def plan_online(
    config: Config,
    tokenizer: Tokenizer,
    mesh: Mesh,
    reward: HostReward | None,
    *,
    role_meshes: Mapping[str, Mesh] | None = None,
    turns: Conversations | None = None,
) -> Plan:
    """The plan of online RL. `reward` scores on the host, if anything does. With an environment in
    the generation program nothing does.

    `turns` answers prompts where the run has tools or environments; None in a run that is only
    planned.
    `role_meshes` has the mesh of each role on devices of its own; `mesh` is for all others.

    Raises ValueError where the algorithm needs a field that no stage writes, or a dim does not
    divide its mesh axes.
    """
    role_meshes = {} if role_meshes is None else role_meshes
    algorithms = [phase.algorithm for phase in config.phases] + [config.algorithm]
    first_steps = list(accumulate((phase.steps for phase in config.phases), initial=1))
    warmup, learning = _learning(config, algorithms, first_steps)
    # Steps count from the run's first.
    config = replace(config, critic=replace(config.critic, warmup_steps=warmup))
    roles, sources = roles_of(config, tokenizer, mesh, learning, role_meshes)
    token_turns = open_token_turns(config, tokenizer)
    planner = _Planner(
        roles=roles,
        mesh=mesh,
        role_meshes=role_meshes,
        reward=None if token_turns else reward,
        turns=turns,
        token_turns=token_turns,
        sampling=train_sampling(config, tokenizer),
        pad_id=tokenizer.pad_id,
        own_stages=own_stages(config),
    )
    phases = [
        planner.phase(replace(config, algorithm=algorithm), first_step)
        for algorithm, first_step in zip(algorithms, first_steps, strict=True)
    ]
    plan = Plan(
        config=config,
        phases=tuple(phases),
        learner=roles["actor"],
        sources=sources,
        vocabulary=TURNS if has_turns(config) else ROLLOUT,
    )
    check_roles(config, plan.roles)
    check_reference(config, plan)
    for role in role_meshes:
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

    A critic warms up in the first phase that has one. Without a critic the actor learns. Models of
    the user's learn in all steps.

    Raises: ConfigError where the actor learns in no step.
    """
    ends = [*first_steps[1:], config.total_steps + 1]
    has_critic = [build_online(each).value_loss is not None for each in algorithms]
    phases = [
        (first, end) for first, end, has in zip(first_steps, ends, has_critic, strict=True) if has
    ]
    warmup = config.critic.warmup_steps
    last = warmup + (phases[0][0] - 1 if phases else 0) if warmup else 0
    waits = sum(max(min(last + 1, end) - first, 0) for first, end in phases)
    if 0 < config.total_steps == waits:
        raise ConfigError(
            f"config.critic.warmup_steps={warmup}: the critic learns alone in all "
            f"{config.total_steps} steps, and the actor in none; --config.total_steps={last + 1} "
            "works"
        )
    return last, {
        "actor": config.total_steps - waits,
        "critic": sum(end - first for first, end in phases),
        **{model.name: config.total_steps for model in config.models if model.update},
    }


@dataclass(frozen=True, kw_only=True)
class _Planner:
    """The settings that all phases of a run share."""

    roles: dict[str, Role]
    mesh: Mesh
    role_meshes: Mapping[str, Mesh]
    reward: HostReward | None
    turns: Conversations | None
    token_turns: TokenTurns | None
    sampling: SamplingParams
    pad_id: int
    own_stages: tuple[Stage, ...]

    def phase(self, config: Config, first_step: int) -> Phase:
        """The phase of `config.algorithm`."""
        config = _corrected(config)
        algorithm = build_online(config.algorithm)
        if config.max_staleness and not hasattr(config.algorithm, "rollout_is"):
            algorithm = corrected_for_staleness(algorithm, *_weights_of_stale_samples(config))
        _check(config, algorithm)
        role_meshes, roles = self.role_meshes, self.roles
        sampler, followers = roles["actor"], []
        if ROLLOUT_ROLE in role_meshes:
            sampler = rollout_role(roles["actor"], role_meshes[ROLLOUT_ROLE], config.mesh)
            spec, places = sampler.spec, sampler.param_shardings
            dtype = rollout_dtype(config)
            base = roles["actor"].base
            follower = Follower(
                ROLLOUT_ROLE, "actor", dtype, spec=spec, shardings=places, base=base
            )
            followers.append(follower)
        stages = OnlineStages(
            config=config,
            algorithm=algorithm,
            roles=roles,
            sampler=sampler,
            sampling=self.sampling,
            pad_id=self.pad_id,
            reward=self.reward,
            turns=self.turns,
            token_turns=self.token_turns,
            own_stages=self.own_stages,
        ).planned()
        collected, column = collected_stages(config, stages, self.reward, role_meshes)
        rest = [stage for stage in stages if stage not in collected]
        group = partial(segments, fuse=config.fuse_stages, place=by_mesh(role_meshes))
        collecting = group(collected)
        used = {name for stage in stages for name in (stage.role, *stage.shares)}
        roles = {name: role for name, role in roles.items() if name in used}
        shardings = {name: role.shardings for name, role in roles.items()}
        make_program = partial(
            Program,
            mesh=self.mesh,
            role_meshes={name: own for name, own in role_meshes.items() if name in used},
            followers=followers,
            state_shardings=shardings | {KL_CONTROLLER: replicated(self.mesh)},
            overlap=config.fuse_stages,
            group=config.rollout.n,
        )
        return Phase(
            config=config,
            algorithm=algorithm,
            roles=roles,
            stages=stages,
            program=make_program((*collecting, *group(rest))),
            batch=_abstract_batch(config, self.mesh, self.roles["actor"].spec.config.vision),
            first_step=first_step,
            epochs={s.role: s.sizes.num_epochs for s in stages if isinstance(s, Update)},
            controller=algorithm.kl_controller,
            collecting=collecting,
            filter_column=column,
        )


def _abstract_batch(config: Config, mesh: Mesh, vision: Vision | QwenVision | None) -> RolloutBatch:
    """Shapes of the batch that a step begins with."""
    data, rows = config.data, config.data.train_batch_size * config.rollout.n
    sharding = batch_sharding(mesh)

    def array(dtype: Any, *shape: int) -> Any:
        return jax.ShapeDtypeStruct((rows, *shape), dtype, sharding=sharding)

    return RolloutBatch(
        prompts=array(jnp.int32, data.max_prompt_length),
        prompt_lengths=array(jnp.int32),
        sample_ids=array(jnp.uint32),
        group_ids=array(jnp.int32),
        **image_fields(config, vision, data.max_prompt_length, array),
    )


def _check(config: Config, algorithm: Algorithm) -> None:
    """ConfigError where an algorithm that compares answers would get equal ones, or one."""
    rollout, names = config.rollout, {*field_names(algorithm.advantage)}
    label = f"config.algorithm={config.algorithm.label}"
    if rollout.n == 1 and "group_ids" in names:
        raise ConfigError(
            f"{label} compares the samples of a prompt with each other, and config.rollout.n=1 "
            "makes one: config.rollout.n=8 is usual"
        )
    greedy = {"temperature": 0, "top_k": 1, "min_p": 1}
    for key, value in greedy.items():
        if getattr(rollout, key) == value and {"group_ids", "greedy_scores"} & names:
            raise ConfigError(
                f"config.rollout.{key}={value} is greedy: all answers to a prompt are the same, "
                f"and {label} compares them"
            )


def train_sampling(config: Config, tokenizer: Tokenizer) -> SamplingParams:
    """The sampling parameters of the rollout."""
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
