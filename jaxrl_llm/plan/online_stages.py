"""Which stages an iteration of online RL has, and which of them the source of batches runs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jax.sharding import Mesh
from jax.tree_util import Partial

from jaxrl_llm.agents.setup import has_turns
from jaxrl_llm.algorithms.algorithm import Algorithm
from jaxrl_llm.algorithms.fields import field_names
from jaxrl_llm.algorithms.kl import with_steps
from jaxrl_llm.arguments import seed_of
from jaxrl_llm.config import Config, ConfigError, ExtraModelConfig
from jaxrl_llm.generation.memory import GB, fitted
from jaxrl_llm.generation.sampler import SamplingParams
from jaxrl_llm.generation.settings import GenerationSettings
from jaxrl_llm.learner.losses import OwnLoss, PolicyLoss, ValueLoss
from jaxrl_llm.learner.ratios import log_ratios
from jaxrl_llm.learner.rows import KEPT, ROUTES, ROW_STARTS
from jaxrl_llm.learner.train_step import Measure
from jaxrl_llm.models.media import media_fields
from jaxrl_llm.plan import stages
from jaxrl_llm.plan.conversing import Conversations, Converse, check_turns
from jaxrl_llm.plan.dataflow import ROLLOUT, TURNS, plan
from jaxrl_llm.plan.generating import Generate, GenerateGreedily, Generation, replica_of
from jaxrl_llm.plan.in_graph import BeginTurns, GenerateTurns, TokenTurns, TurnScores
from jaxrl_llm.plan.parts import GenerateInParts
from jaxrl_llm.plan.roles import (
    TEACHER,
    Role,
    UpdateSizes,
    replays_routes,
    router_loss,
    update_sizes,
)
from jaxrl_llm.plan.scores import (
    LEFT_OUT,
    STEP_REWARDS,
    HostReward,
    ModelScores,
    ModelTokenScores,
    StepTokenRewards,
    WeightedModel,
    score_stages,
)
from jaxrl_llm.plan.sessions import Sessions, check_sessions
from jaxrl_llm.plan.stages import correction
from jaxrl_llm.program.stage import DEVICE, HOST, Stage
from jaxrl_llm.references import call, check_settings, load, nearest
from jaxrl_llm.types import INPUT_FIELDS

SCORE = "score"  # filters groups where no part of the reward is named


def own_stages(config: Config) -> tuple[Stage, ...]:
    """The stages of the user's files. ConfigError where a path gives none."""
    stages = []
    for entry in config.stages:
        make = load(entry.path)
        check_settings(entry.path, make, entry.settings)
        stage = call(entry.path, make, **entry.settings)
        if not isinstance(stage, Stage):
            raise ConfigError(
                f"config.stages: {entry.path} gave {type(stage).__name__}, not a Stage "
                "(jaxrl_llm.program.stage); see docs/add-a-stage.md"
            )
        stages.append(stage)
    return tuple(stages)


@dataclass(frozen=True, kw_only=True)
class OnlineStages:
    """The stages of a step, and what they are made of."""

    config: Config
    algorithm: Algorithm
    roles: dict[str, Role]
    sampler: Role  # the actor, or what follows it on devices of its own
    sampling: SamplingParams
    pad_id: int
    reward: HostReward | None
    turns: Conversations | None
    token_turns: TokenTurns | None
    own_stages: tuple[Stage, ...]

    def planned(self) -> tuple[Stage, ...]:
        """The stages of an iteration, in order.

        A single optimizer step of the actor computes the old log-probs itself, in its forward pass.
        Then no pass of their own does, unless something else reads them. There is one where the
        critic warms up: no such step gives the metrics meanwhile. And there is one with dropout,
        which the sampler does not have: entropy and mismatch would be of another policy.
        """
        sizes, lora = update_sizes(self.config, self.roles["actor"]), self.roles["actor"].spec.lora
        single = (
            sizes.num_mini_batches == sizes.num_epochs == 1
            and "old_logprobs" in field_names(self.algorithm.policy_loss)
            and not critic_warmup(self.config, self.algorithm)
            and not (lora and lora.dropout)
        )
        known = (DEVICE, HOST, stages.KL_CONTROLLER, *self.roles)
        for stage in self.own_stages:
            if stage.role not in known:
                hint = nearest(stage.role, known)
                raise ConfigError(
                    f"config.stages: the stage {stage.name!r} has the role {stage.role!r}, and "
                    f"this run has {', '.join(known)}{hint}; see docs/add-a-stage.md"
                )
        # The metrics of a batch need its advantages, also where no loss reads them.
        goals = ("advantages",)
        fields = TURNS if has_turns(self.config) else ROLLOUT
        planned = plan(self.catalogue(own_logprobs=single), goals, fields)
        if single and any("old_logprobs" in stage.writes for stage in planned):
            planned = plan(self.catalogue(own_logprobs=False), goals, fields)
        teachers = [model.name for model in self.config.models if model.teacher_weight]
        if teachers and not any(isinstance(s, stages.MeanOfTeachers) for s in planned):
            raise ConfigError(
                f"config.models: {', '.join(teachers)} has a teacher_weight, and config.algorithm="
                f"{self.config.algorithm.label} does not read teacher_logprobs; "
                "--config.algorithm=distillation does"
            )
        for stage in self.own_stages:
            if stage not in planned:
                raise ConfigError(
                    f"config.stages: nothing reads what the stage {stage.name!r} writes "
                    f"({', '.join(stage.writes) or 'nothing'}); the stages that run are "
                    f"{', '.join(s.name for s in planned)}"
                )
        return planned

    def catalogue(self, *, own_logprobs: bool) -> list[Stage]:
        """Every stage that might be needed; `plan` keeps those that are."""
        config, algorithm, roles = self.config, self.algorithm, self.roles
        sizes = update_sizes(config, roles["actor"])
        temperature = config.rollout.temperature

        def passes(name: str) -> dict[str, Any]:
            parts = update_sizes(config, roles[name]).passes
            return {"model": roles[name], "micro_batches": parts, "temperature": temperature}

        squares = "sum_pi_squared" in field_names(algorithm.advantage)
        old = ("old_logprobs", "sum_pi_squared") if squares else ("old_logprobs",)
        catalogue: list[Stage] = [
            *self._generation(),
            stages.OldLogprobs(writes=old, replays=self._replays, **passes("actor")),
            stages.FrozenLogprobs(
                name="ref",
                writes=("reference_logprobs",),
                replays=(*self._kept, *self._rows),
                **passes("reference"),
            ),
            stages.Values(
                model=roles["critic"],
                micro_batches=update_sizes(config, roles["critic"]).passes,
                replays=self._rows,
            ),
            *self._rewards_and_advantages(),
        ]
        teachers = {f"{m.name}_logprobs": m.teacher_weight for m in config.models}
        teachers = {name: weight for name, weight in teachers.items() if weight}
        if config.teacher is not None:
            field = "teacher_model_logprobs" if teachers else "teacher_logprobs"
            catalogue += [
                stages.FrozenLogprobs(
                    name=TEACHER,
                    writes=(field,),
                    replays=(*self._kept, *self._rows),
                    **passes(TEACHER),
                ),
                stages.TeacherTop(
                    top_k=config.teacher.top_k, replays=self._rows, **passes(TEACHER)
                ),
            ]
            teachers |= {field: config.teacher.weight} if teachers else {}
        catalogue += [stages.MeanOfTeachers(weights=teachers)] if teachers else []
        correcting = correction(algorithm, masks=self.masks)
        catalogue += [] if correcting is None else [correcting]
        for model in config.models:
            catalogue += self._extra_model(model, passes(model.name))
        reward = roles.get("reward")
        catalogue += score_stages(
            reward,
            self.reward,
            group=config.rollout.n,
            weight=1.0 if config.reward.model is None else config.reward.model.weight,
            micro_batches=(update_sizes(config, reward) if reward else sizes).passes,
            others=[
                WeightedModel(
                    role=roles[model.name],
                    weight=model.weight,
                    micro_batches=update_sizes(config, roles[model.name]).passes,
                )
                for model in config.models
                if model.weight
            ],
            by_user=self.own_stages,
            steps=config.data.max_response_length if config.reward.process_rewards else 0,
            replays=self._rows,
        )
        catalogue += [] if self.token_turns is None else [self._turn_scores()]
        catalogue += self.own_stages
        return catalogue + self._updates(sizes, own_logprobs=own_logprobs)

    def _generation(self) -> list[Stage]:
        config, sampler, n = self.config, self.sampler, self.config.rollout.n
        samples = config.data.train_batch_size * n
        rows = samples // sampler.generation.num_replicas
        replica = replica_of(
            config, sampler.spec.config, rows=rows, tensor=sampler.generation.size("mlp")
        )
        memory = config.rollout.memory_gb * GB
        asked = GenerationSettings(
            sampling=self.sampling,
            group=n,
            num_slots=config.rollout.num_slots,
            cache_tokens=config.rollout.cache_tokens,
            drafts=config.rollout.drafts,
            pad_id=self.pad_id,
            quantization=config.rollout.quantization,
            record_routes=replays_routes(config, self.roles["actor"]),
            record_kept=bool(self._kept),
            attention=sampler.forward.attention,
            strict=sampler.forward.strict,
        )
        how = Generation(
            samples=samples,
            dtype=rollout_dtype(config),
            seed=seed_of(config.seed),
            settings=fitted(asked, replica, memory),
        )
        prompts = -(-rows // n)
        options = how.compiler_options(sampler)
        greedy = "greedy_scores" in field_names(self.algorithm.advantage)
        if has_turns(config):
            check_turns(config, sampler, greedy=greedy)
        if self.token_turns is not None:
            how = replace(how, settings=self.token_turns.settings(how.settings))
            generate = GenerateTurns(model=sampler, how=how, compiler_options=options)
            return [BeginTurns(turns=self.token_turns), generate]
        if has_turns(config):
            converse = Converse(
                model=sampler,
                how=how,
                turns=self.turns,
                several_rows=bool(self._rows),
                prompt=config.data.max_prompt_length,
                response=config.data.max_response_length,
                pad_id=self.pad_id,
            )
            return [converse]
        if config.partial_rollouts:
            check_sessions(sampler, "responses in parts (config.partial_rollouts)")
            if greedy:
                raise ConfigError(
                    f"config.partial_rollouts={config.partial_rollouts}: config.algorithm="
                    f"{config.algorithm.label} also needs a whole greedy answer to each prompt, "
                    "which is not cut; take another algorithm, or --config.partial_rollouts=0"
                )
            in_parts = GenerateInParts(
                model=sampler,
                how=how,
                sessions=Sessions(config),
                prompt=config.data.max_prompt_length,
                response=config.data.max_response_length,
                pad_id=self.pad_id,
            )
            return [in_parts]
        greedy = replace(asked, sampling=replace(self.sampling, temperature=0.0), group=1)
        greedy = fitted(greedy, replace(replica, live=prompts), memory)
        greedy = replace(greedy, num_slots=greedy.num_slots or prompts)
        return [
            Generate(model=sampler, how=how, compiler_options=options),
            GenerateGreedily(
                model=sampler,
                how=replace(how, settings=greedy),
                compiler_options=options,
                group=n,
            ),
        ]

    @property
    def sample_mask(self) -> stages.SampleMask | None:
        """The stage that leaves samples out; None where all are learned from."""
        truncated = self.config.rollout.mask_truncated
        by_host = truncated if self.token_turns else self.reward is not None and self.reward.masks
        on_device = truncated and not by_host
        if not by_host and not on_device:
            return None
        return stages.SampleMask(
            by_host=by_host,
            greedy="greedy_scores" in field_names(self.algorithm.advantage),
            sampling=self.sampling if on_device else None,
        )

    @property
    def masks(self) -> bool:
        """True where samples may be left out."""
        return self.sample_mask is not None

    @property
    def _kept(self) -> tuple[str, ...]:
        """The field of the tokens that filters keep, over which log-probs are taken."""
        vocab_size = self.roles["actor"].spec.config.vocab_size
        return (KEPT,) if self.sampling.num_kept(vocab_size) else ()

    @property
    def _replays(self) -> tuple[str, ...]:
        """The fields of a rollout that the actor's passes repeat."""
        routes = (ROUTES,) if replays_routes(self.config, self.roles["actor"]) else ()
        return (*routes, *self._kept, *self._rows)

    @property
    def _rows(self) -> tuple[str, ...]:
        """The field of the rows of trajectories, where they may have several."""
        several = has_turns(self.config) and self.token_turns is None
        return (ROW_STARTS,) if several and self.config.rollout.max_rows > 1 else ()

    def _turn_scores(self) -> Stage:
        config, writes = self.config, ("scores",)
        writes = (*writes, STEP_REWARDS) if config.reward.process_rewards else writes
        return TurnScores(writes=(*writes, LEFT_OUT) if config.rollout.mask_truncated else writes)

    def _extra_model(self, model: ExtraModelConfig, passes: dict[str, Any]) -> list[Stage]:
        """The passes of a user's model, which write `<name>_logprobs` or its scores."""
        role: Role = passes["model"]
        if role.spec.kind == "causal_lm":
            writes = (f"{role.name}_logprobs",)
            # A teacher is compared over the tokens that the sampler's filters kept.
            replays = (*(self._kept if model.teacher_weight else ()), *self._rows)
            return [stages.FrozenLogprobs(name=role.name, writes=writes, replays=replays, **passes)]
        how: dict[str, Any] = {
            "model": role,
            "micro_batches": passes["micro_batches"],
            "replays": self._rows,
        }
        scores, each = f"{role.name}_scores", f"{role.name}_token_scores"
        return [
            ModelScores(name=role.name, writes=(scores,), measured=True, **how),
            ModelTokenScores(name=each, writes=(each,), **how),
        ]

    def _own_update(self, model: ExtraModelConfig) -> Stage:
        """The update of a user's model that learns."""
        role, update = self.roles[model.name], model.update
        assert update is not None
        function = load(update.loss.path)
        check_settings(update.loss.path, function, update.loss.settings, takes_fields=True)
        loss = OwnLoss(
            function=Partial(function, **update.loss.settings),
            role=role.name,
            spec=role.spec,
            settings=role.forward,
            temperature=self.config.rollout.temperature,
            masks=self.masks,
            replays=self._rows,
        )
        return stages.Update(
            model=role,
            name=f"update_{role.name}",
            loss=loss,
            optimizer=role.learning,
            sizes=update_sizes(self.config, role),
            seed=seed_of(self.config.seed),
        )

    def _rewards_and_advantages(self) -> list[Stage]:
        algorithm = self.algorithm
        process, kl_reward = self.config.reward.process_rewards, algorithm.kl_reward
        rewards: Stage = StepTokenRewards() if process else stages.TokenRewards()
        if kl_reward is not None:
            kl_reward = with_steps(kl_reward) if process else kl_reward
            rewards = stages.PenalisedRewards(
                functions=(kl_reward,), controller=algorithm.kl_controller, masks=self.masks
            )
        advantages = stages.Advantages(
            functions=(algorithm.advantage,),
            masks=self.masks,
            max_response_length=self.config.data.max_response_length,
            media=media_fields(self.roles["actor"].spec.config.vision)[:2],
        )
        return [*([] if self.sample_mask is None else [self.sample_mask]), rewards, advantages]

    def _updates(self, sizes: UpdateSizes, *, own_logprobs: bool) -> list[Stage]:
        config, algorithm = self.config, self.algorithm
        actor, critic = self.roles["actor"], self.roles["critic"]
        critic_sizes = update_sizes(config, critic)
        updates: list[Stage] = []
        if algorithm.value_loss is not None:
            loss = ValueLoss(
                algorithm=algorithm,
                spec=critic.spec,
                settings=critic.forward,
                masks=self.masks,
                replays=self._rows,
            )
            update = stages.Update(
                model=critic,
                name="update_critic",
                loss=loss,
                optimizer=critic.learning,
                sizes=critic_sizes,
                seed=seed_of(config.seed),
            )
            updates.append(update)
        reads = field_names(algorithm.policy_loss)
        several = sizes.num_mini_batches * sizes.num_epochs > 1  # the ratio of a single one is 1
        with_ratios = "rollout_logprobs" in reads or ("old_logprobs" in reads and several)
        loss = PolicyLoss(
            algorithm=algorithm,
            spec=actor.spec,
            settings=actor.forward,
            temperature=config.rollout.temperature,
            own_logprobs=own_logprobs,
            with_log_ratios=with_ratios,
            router=router_loss(config, actor),
            replays=self._replays,
            masks=self.masks,
        )
        update = stages.Update(
            model=actor,
            name="update_actor",
            loss=loss,
            optimizer=actor.learning,
            sizes=sizes,
            first_step=critic_warmup(config, algorithm) + 1,
            measure=_measure(own_logprobs, with_ratios),
            seed=seed_of(config.seed),
        )
        return [*updates, update, *(self._own_update(m) for m in config.models if m.update)]


def _measure(own_logprobs: bool, with_ratios: bool) -> Measure | None:
    """The metrics that are made of the arrays of the actor's loss."""
    if own_logprobs:
        return stages.policy_metrics
    return log_ratios if with_ratios else None


def critic_warmup(config: Config, algorithm: Algorithm) -> int:
    """The first steps, in which only the critic learns; 0 without a critic."""
    return 0 if algorithm.value_loss is None else config.critic.warmup_steps


def rollout_dtype(config: Config) -> str:
    """The dtype of the weights that generate."""
    return config.rollout.dtype or config.actor.dtype


# ------------------------------------------------------------------------- of the source of batches


def collected_stages(
    config: Config,
    planned: tuple[Stage, ...],
    reward: HostReward | None,
    role_meshes: Mapping[str, Mesh],
) -> tuple[tuple[Stage, ...], int | None]:
    """The stages that the source of batches runs, and the column that must vary.

    Dynamic sampling repeats those up to the reward. What is ahead is generation, and what the host
    makes of its results.
    """
    chosen = config.rollout.filter_groups
    if not chosen.enable:
        ahead = _ahead(planned) if config.max_staleness else ()
        _check_shared_devices(config, ahead, role_meshes)
        return ahead, None
    names: Sequence[str] = () if reward is None else reward.names
    if chosen.metric != SCORE and chosen.metric not in names:
        raise ValueError(
            f"config.rollout.filter_groups.metric={chosen.metric}: groups can be filtered by "
            f"{', '.join((SCORE, *names))}"
        )
    column = None if chosen.metric == SCORE else names.index(chosen.metric)
    goals = ["scores" if column is None else "reward_parts"]
    if config.rollout.mask_truncated and not (reward is not None and reward.masks):
        goals.append("sample_mask")
    if config.data.priority is not None:
        goals.append("scores")  # priorities follow every round, whichever part filters groups
    # A host stage needs the prompts of its round.
    goals += [name for stage in planned if stage.role == HOST for name in stage.writes]
    fields = TURNS if has_turns(config) else ROLLOUT
    collected = plan([stage for stage in planned if not stage.updates], goals, fields), column
    if config.max_staleness:
        _check_learning_devices(config, collected[0], role_meshes)
        _check_shared_devices(config, collected[0], role_meshes)
    return collected


def _ahead(planned: tuple[Stage, ...]) -> tuple[Stage, ...]:
    """Generation, and the host stages that need nothing else."""
    ahead = [stage for stage in planned if stage.generates]
    known = {*INPUT_FIELDS, *(name for stage in ahead for name in stage.writes)}
    for stage in planned:
        if stage.role == HOST and stage not in ahead and set(stage.reads) <= known:
            ahead.append(stage)
            known |= set(stage.writes)
    return tuple(ahead)


def _check_shared_devices(
    config: Config, ahead: Sequence[Stage], role_meshes: Mapping[str, Mesh]
) -> None:
    """ConfigError where devices that work ahead are shared with a role that does not.

    Two threads dispatch to them then. One device takes programs in any order; several that wait for
    each other must get them in the same one.
    """
    roles = {stage.role for stage in ahead} & role_meshes.keys()
    for role in sorted(roles):
        devices = set(role_meshes[role].devices.flat)
        for other in sorted(role_meshes.keys() - roles):
            if len(devices & set(role_meshes[other].devices.flat)) > 1:
                raise ConfigError(
                    f"config.max_staleness={config.max_staleness}: {role} works ahead on its "
                    f"devices, and config.placement.{other} has the same ones; give {other} "
                    f"others, for example --config.placement.{other}=actor"
                )


def _check_learning_devices(
    config: Config, collected: Sequence[Stage], role_meshes: Mapping[str, Mesh]
) -> None:
    """ConfigError where a round of dynamic sampling would run ahead on devices that learn."""
    for stage in collected:
        if stage.role != HOST and stage.role not in role_meshes:
            raise ConfigError(
                f"config.max_staleness={config.max_staleness} with "
                f"config.rollout.filter_groups.enable: the stage {stage.name!r} decides which "
                "groups are kept, and runs on the devices that learn meanwhile; score with reward "
                "functions alone (--config.reward.model=null), or set --config.max_staleness=0"
            )
