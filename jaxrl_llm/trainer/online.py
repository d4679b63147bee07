"""From a config to the planned programs of online RL, before any array exists."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxrl_llm.algorithms.alias import Algorithm
from jaxrl_llm.algorithms.fields import field_names
from jaxrl_llm.config import Config, FunctionConfig, ModelSettings
from jaxrl_llm.data.sources import load_attribute
from jaxrl_llm.distributed.mesh import num_replicas
from jaxrl_llm.distributed.sharding import batch_sharding, replicated
from jaxrl_llm.generation.sampler import SamplingParams
from jaxrl_llm.learner.micro_batches import Packed, Padded
from jaxrl_llm.tokenizer import Tokenizer
from jaxrl_llm.trainer import stages
from jaxrl_llm.trainer.dataflow import Segment, Stage, plan, segments
from jaxrl_llm.trainer.dynamic_sampling import SCORE
from jaxrl_llm.trainer.initialise import ModelSource, find_model, spec_of
from jaxrl_llm.trainer.program import Program, States
from jaxrl_llm.trainer.reward_stages import reward_stages
from jaxrl_llm.trainer.roles import Role, make_role
from jaxrl_llm.trainer.teacher import TEACHER, check_teacher, teacher_role, teacher_stages
from jaxrl_llm.types import RolloutBatch


@dataclass(frozen=True, kw_only=True)
class Iteration:
    """One iteration of RL, planned: the roles that it needs and the programs that run it."""

    config: Config
    algorithm: Algorithm
    roles: dict[str, Role]
    sources: dict[str, ModelSource]  # where each role's weights come from, if not from the actor
    stages: tuple[Stage, ...]
    program: Program
    # The program's first segments, which dynamic sampling repeats; none without it.
    collecting: tuple[Segment, ...]
    filter_column: int | None  # of reward_parts, by which groups are filtered; None for the score
    sampling: SamplingParams
    mesh: Mesh

    def abstract_states(self) -> States:
        """Shapes and shardings of everything that the roles keep."""
        states = {name: role.abstract() for name, role in self.roles.items()}
        return states | {stages.KL_CONTROLLER: self._abstract_controller()}

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

    def trace(self) -> RolloutBatch:
        """Trace every program on abstract arrays: shapes and fields that do not fit fail here."""
        return self.program.trace(self.abstract_states(), self.abstract_batch())

    def controller_state(self) -> Any:
        """The KL controller's first state."""
        init = self.algorithm.kl_controller.init
        return jax.jit(init, out_shardings=replicated(self.mesh))()

    def _abstract_controller(self) -> Any:
        shape = jax.eval_shape(self.algorithm.kl_controller.init)
        return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=replicated(self.mesh))


def plan_iteration(
    config: Config,
    tokenizer: Tokenizer,
    mesh: Mesh,
    reward: stages.HostReward | None,
) -> Iteration:
    """Roles, stages and programs of `config`. `reward` scores on the host, if anything does.

    Raises ValueError where the algorithm needs a field that no stage writes, a dim does not divide
    its mesh axes, or the KL controller refuses so many samples.
    """
    algorithm = build_algorithm(config.algorithm)
    _check_controller(config, algorithm)
    if config.rollout.n == 1 and "group_ids" in field_names(algorithm.advantage):
        raise ValueError(
            f"{config.algorithm.path} compares the samples of a prompt with each other, and "
            "config.rollout.n=1 makes one: config.rollout.n=8 is usual"
        )
    sources = {"actor": find_model(config.actor, tokenizer)}
    roles = {"actor": _actor(config, sources["actor"], mesh)}
    scalar = partial(_add_scalar_role, tokenizer, sources, roles, mesh, config.exact)
    scalar("critic", config.critic)
    if config.reward.model is not None:
        scalar("reward", config.reward.model)
    elif reward is None:
        raise ValueError(
            "reward.functions and reward.model are both empty: name a reward function, or a "
            "reward model"
        )
    steps = config.total_steps * update_sizes(config, "actor", mesh).num_mini_batches
    critic_steps = steps * config.critic.ppo_epochs
    roles["actor"] = roles["actor"].with_optimizer(
        config.actor.optimizer, steps * config.actor.ppo_epochs
    )
    roles["critic"] = roles["critic"].with_optimizer(config.critic.optimizer, critic_steps)
    roles["reference"] = reference_role(config, sources["actor"], mesh)
    check_teacher(config, algorithm)
    if config.teacher is not None:
        made = teacher_role(config, sources["actor"], tokenizer, mesh)
        roles[TEACHER], sources[TEACHER] = made
    sampling = train_sampling(config, tokenizer)
    catalogue = partial(_catalogue, config, algorithm, roles, sampling, tokenizer, reward)
    planned = _planned(config, algorithm, update_sizes(config, "actor", mesh), catalogue)
    collected, column = _collected(config, planned, reward)
    rest = [stage for stage in planned if stage not in collected]
    collecting = segments(collected, fuse=config.fuse_stages)
    used = {stage.role for stage in planned}
    roles = {name: role for name, role in roles.items() if name in used}
    shardings = {name: role.shardings for name, role in roles.items()}
    shardings[stages.KL_CONTROLLER] = replicated(mesh)
    return Iteration(
        config=config,
        algorithm=algorithm,
        roles=roles,
        sources=sources,
        stages=planned,
        program=Program(
            (*collecting, *segments(rest, fuse=config.fuse_stages)),
            mesh=mesh,
            state_shardings=shardings,
            overlap=config.fuse_stages,
        ),
        collecting=collecting,
        filter_column=column,
        sampling=sampling,
        mesh=mesh,
    )


def _planned(
    config: Config,
    algorithm: Algorithm,
    sizes: stages.UpdateSizes,  # of the actor
    catalogue: Callable[..., list[Stage]],
) -> tuple[Stage, ...]:
    """The stages of an iteration.

    A single step of the actor computes the old log-probs itself, in its forward pass; so where
    nothing else reads them, no pass of their own does. While only the critic warms up there is no
    such step, and the metrics would have to wait.
    """
    own = (
        sizes.num_mini_batches == sizes.num_epochs == 1
        and "old_logprobs" in field_names(algorithm.policy_loss)
        and not _critic_warmup(config, algorithm)
    )
    # The metrics of a batch are those of its advantages, also where no loss reads them.
    goals = ("advantages",)
    planned = plan(catalogue(own_logprobs=own), goals)
    if own and any("old_logprobs" in stage.writes for stage in planned):
        planned = plan(catalogue(own_logprobs=False), goals)
    return planned


def _critic_warmup(config: Config, algorithm: Algorithm) -> int:
    """Iterations of the critic alone. Without a critic nothing would learn meanwhile."""
    return 0 if algorithm.value_loss is None else config.critic.warmup_steps


def _collected(
    config: Config, planned: tuple[Stage, ...], reward: stages.HostReward | None
) -> tuple[tuple[Stage, ...], int | None]:
    """The stages that dynamic sampling repeats, none without it, and the column that must vary."""
    chosen = config.rollout.filter_groups
    if not chosen.enable:
        return (), None
    names = () if reward is None else reward.names
    if chosen.metric != SCORE and chosen.metric not in names:
        raise ValueError(
            f"config.rollout.filter_groups.metric={chosen.metric}: groups can be filtered by "
            f"{', '.join((SCORE, *names))}"
        )
    column = None if chosen.metric == SCORE else names.index(chosen.metric)
    rollout = [stage for stage in planned if not stage.updates]
    goals = ["scores" if column is None else "reward_parts"]
    if config.data.priority is not None:
        goals.append("scores")  # of every round, also where a part decides who is kept
    return plan(rollout, goals), column


def build_algorithm(config: FunctionConfig) -> Algorithm:
    """Call the function that the config names. ValueError when it gives no Algorithm."""
    algorithm = load_attribute(config.path)(**config.settings)
    if not isinstance(algorithm, Algorithm):
        raise ValueError(
            f"{config.path} returned {type(algorithm).__name__}, not an Algorithm "
            "(jaxrl_llm.algorithms.alias)"
        )
    return algorithm


def _check_controller(config: Config, algorithm: Algorithm) -> None:
    """Trace a step of the KL controller: its own stage is traced after the warm-up only."""
    if algorithm.kl_reward is None:
        return
    controller, samples = algorithm.kl_controller, config.data.train_batch_size * config.rollout.n
    kl = jax.ShapeDtypeStruct((), jnp.float32)
    state = jax.eval_shape(controller.init)
    jax.eval_shape(lambda state, kl: controller.update(state, kl, samples), state, kl)


def train_sampling(config: Config, tokenizer: Tokenizer) -> SamplingParams:
    """How the rollout samples."""
    rollout = config.rollout
    return SamplingParams(
        max_new_tokens=config.data.max_response_length,
        temperature=rollout.temperature,
        top_k=rollout.top_k,
        top_p=rollout.top_p,
        min_p=rollout.min_p,
        stop_token_ids=stop_ids(config, tokenizer),
    )


def stop_ids(config: Config, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Token ids that end a response: the tokenizer's and the config's own."""
    return tuple(dict.fromkeys((*tokenizer.stop_ids, *config.rollout.stop_token_ids)))


def update_sizes(config: Config, role: str, mesh: Mesh) -> stages.UpdateSizes:
    """How the passes of `role` (actor or critic) walk through an iteration's samples.

    Shuffled, the samples of a prompt are spread over mini-batches: no row has them together.
    """
    settings = config.critic if role == "critic" else config.actor
    samples = config.data.train_batch_size * config.rollout.n
    mini_batch = config.actor.ppo_mini_batch_size * config.rollout.n
    if settings.micro_batch_tokens:
        packed = Packed(
            row_tokens=settings.micro_batch_tokens,
            group=config.rollout.n if settings.share_prompts else 1,
            num_replicas=num_replicas(mesh),
            shard=stages.shard_rows(mesh),
        )
        update, forward = packed, packed
        if config.actor.shuffle:
            update = replace(packed, group=1)
    else:
        micro_batch = settings.micro_batch_size * config.mesh.num_replicas or mini_batch
        shard = stages.shard_stacked(mesh)
        update = Padded(num=mini_batch // micro_batch, shard=shard)
        forward = Padded(num=samples // micro_batch, shard=shard)
    return stages.UpdateSizes(
        num_mini_batches=samples // mini_batch,
        num_epochs=settings.ppo_epochs,
        update=update,
        forward=forward,
        shuffle_seed=config.seed if config.actor.shuffle else None,
    )


def _catalogue(
    config: Config,
    algorithm: Algorithm,
    roles: dict[str, Role],
    sampling: SamplingParams,
    tokenizer: Tokenizer,
    reward: stages.HostReward | None,
    *,
    own_logprobs: bool,
) -> list[Stage]:
    """Every stage that might be needed; the planner keeps those that are."""
    actor, critic = roles["actor"], roles["critic"]
    actor_sizes = update_sizes(config, "actor", actor.mesh)
    critic_sizes = update_sizes(config, "critic", actor.mesh)
    temperature = config.rollout.temperature
    generation = stages.Generation(
        samples=config.data.train_batch_size * config.rollout.n,
        group=config.rollout.n,
        num_slots=config.rollout.num_slots,
        cache_tokens=config.rollout.cache_tokens,
        dtype=config.rollout.dtype or config.actor.dtype,
        quantization=config.rollout.quantization,
        seed=config.seed,
        pad_id=tokenizer.pad_id,
    )
    catalogue = [
        stages.generate_stage(actor, generation, sampling=sampling),
        stages.greedy_stage(actor, generation, sampling=sampling),
        stages.old_logprob_stage(
            actor,
            actor_sizes,
            temperature=temperature,
            with_squares="sum_pi_squared" in field_names(algorithm.advantage),
        ),
        stages.frozen_logprobs_stage(
            roles["reference"],
            actor_sizes,
            name="ref",
            writes="reference_logprobs",
            temperature=temperature,
        ),
        stages.values_stage(critic, critic_sizes),
        stages.token_reward_stage(algorithm),
        stages.advantage_stage(algorithm, max_response_length=config.data.max_response_length),
    ]
    if config.teacher is not None:
        catalogue += teacher_stages(
            roles[TEACHER], actor_sizes, temperature=temperature, top_k=config.teacher.top_k
        )
    if algorithm.importance is not None or algorithm.rejection is not None:
        catalogue.append(stages.correction_stage(algorithm))
    catalogue += reward_stages(config, roles.get("reward"), reward, actor_sizes)
    if algorithm.value_loss is not None:
        catalogue.append(stages.update_critic_stage(critic, algorithm, critic_sizes))
    catalogue.append(
        stages.update_actor_stage(
            actor,
            algorithm,
            actor_sizes,
            temperature=temperature,
            critic_warmup=_critic_warmup(config, algorithm),
            own_logprobs=own_logprobs,
        )
    )
    return catalogue


def _actor(config: Config, source: ModelSource, mesh: Mesh) -> Role:
    spec = spec_of(source, "causal_lm", config.actor)
    return make_role("actor", spec, config.actor, mesh, exact=config.exact)


def reference_role(config: Config, source: ModelSource, mesh: Mesh) -> Role:
    """The actor as it was before training; frozen, so stored in the dtype that it computes in."""
    settings = ModelSettings(
        dtype=config.actor.dtype,
        param_dtype=config.actor.dtype,
        attention=config.actor.attention,
    )
    spec = spec_of(source, "causal_lm", settings)
    return make_role("reference", spec, settings, mesh, exact=config.exact)


def _add_scalar_role(
    tokenizer: Tokenizer,
    sources: dict[str, ModelSource],
    roles: dict[str, Role],
    mesh: Mesh,
    exact: bool,
    name: str,
    settings: ModelSettings,
) -> None:
    """A critic or reward model: its own model when the config gives one, else the actor's shape."""
    source = sources["actor"]
    if settings.path or settings.hf_config:
        source = sources[name] = find_model(settings, tokenizer)
    spec = spec_of(source, "scalar", settings)
    roles[name] = make_role(name, spec, settings, mesh, exact=exact)
