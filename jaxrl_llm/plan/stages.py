"""The stages: what each reads, writes, and which role runs it.

Nothing here knows an algorithm's name. Which fields a stage reads comes from its own signature, and
from the signatures of the functions that the `Algorithm` holds.
"""

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from jaxrl_llm.algorithms.advantages import score_to_rewards
from jaxrl_llm.algorithms.fields import field_names
from jaxrl_llm.algorithms.kl import KLController, batch_kl
from jaxrl_llm.algorithms.mismatch import mismatch_metrics
from jaxrl_llm.config import Config
from jaxrl_llm.distributed.communication import DECODE_STEPS, MICRO_BATCHES, PREFILLS
from jaxrl_llm.distributed.layout import Layout
from jaxrl_llm.generation.engine import (
    GenerationOutput,
    Rows,
    compiler_options,
    generate_on_mesh,
)
from jaxrl_llm.generation.partial_responses import (
    Parts,
    Responses,
    are_unfinished,
    versions_of,
)
from jaxrl_llm.generation.settings import GenerationSettings
from jaxrl_llm.learner.forward import (
    response_logprobs,
    response_statistics,
    response_values,
)
from jaxrl_llm.learner.micro_batches import MicroBatches, Packed, Padded
from jaxrl_llm.learner.ratios import LOG_RATIOS, ratio_quantiles
from jaxrl_llm.learner.rows import ROUTES, Fields, rows_of, sample_fields
from jaxrl_llm.learner.train_state import (
    Adapted,
    Metrics,
    TrainState,
    own_of,
    params_of,
)
from jaxrl_llm.learner.train_step import (
    BUBBLE,
    NONFINITE,
    STEP_METRICS,
    Base,
    Loss,
    Measure,
    mini_batches,
    train_step,
)
from jaxrl_llm.numerics import masked_mean
from jaxrl_llm.observability.metrics import batch_metrics
from jaxrl_llm.plan.dataflow import Stage, StageOutput, States
from jaxrl_llm.plan.roles import Role, pass_model, sampling_model

KL_CONTROLLER = "kl_controller"
UNFINISHED = "rollout/unfinished"  # responses that go on under the next policy


@dataclass(frozen=True, kw_only=True, eq=False)
class ModelStage(Stage):
    """A stage of a model. Its state is what the model's role keeps."""

    model: Role

    @property
    def role(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.model.name

    @property
    def shares(self) -> tuple[str, ...]:
        return (self.model.base,) if self.model.base else ()

    def state_of(self, states: States) -> Any:
        """The state of the model; with adapters, joined to that of its base."""
        return self.model.state_of(states)

    @property
    def loop_metrics(self) -> Mapping[str, str]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return {MICRO_BATCHES: f"{self.name}/micro_batches"}

    def count(self, parts: int | jax.Array) -> Metrics:
        """How many parts a pass had, where that is data and, on a mesh, multiplies what moves."""
        if isinstance(parts, int) or self.model.mesh.size == 1:
            return {}
        return {f"{self.name}/micro_batches": parts.astype(jnp.float32)}


def shard_stacked(layout: Layout) -> Callable[[Any], Any]:
    """Constrains stacked [M, B/M, ...] arrays so that every slice spreads over the replicas."""
    if layout.mesh.size == 1:
        return _unchanged
    return partial(_constrained, sharding=layout.sharding(None, "batch"))


def shard_rows(layout: Layout) -> Callable[[Any], Any]:
    """Constrains arrays of rows, one row a replica, to the devices of their replica."""
    if layout.mesh.size == 1:
        return _unchanged
    return partial(_constrained, sharding=layout.sharding("batch"))


def _unchanged(tree: Any) -> Any:
    return tree


def _constrained(tree: Any, *, sharding: NamedSharding) -> Any:
    return jax.lax.with_sharding_constraint(tree, sharding)


# ------------------------------------------------------------------------- generation


@dataclass(frozen=True, kw_only=True)
class Generation:
    """How the actor generates for training."""

    samples: int  # of a batch, over all replicas
    dtype: str
    seed: int
    settings: GenerationSettings

    def run(
        self,
        role: Role,
        state: Any,
        step: jax.Array,
        prompts: Any,
        lengths: Any,
        sample_ids: Any,
        settings: GenerationSettings,
        *,
        limits: Any = None,
        alone: Rows | None = None,
    ) -> GenerationOutput:
        """Responses of the actor, in its generation layout; `generate` says what they are."""
        spec, params = sampling_model(role.spec, params_of(state), self.dtype)
        return generate_on_mesh(
            spec,
            params,
            prompts,
            lengths,
            sample_ids,
            self.keys(step),
            settings,
            layout=role.generation,
            stored=role.layout,
            limits_N=limits,
            alone=alone,
        )

    def keys(self, steps: jax.Array) -> jax.Array:
        """The keys of steps, one or [N], from which those of their samples are made."""
        fold = partial(jax.random.fold_in, jax.random.key(self.seed))
        return jax.vmap(fold)(steps) if jnp.ndim(steps) else fold(steps)

    def compiler_options(self, role: Role) -> dict[str, int]:
        """XLA's, for a program that generates a batch, with greedy answers or without."""
        samples = self.samples // role.generation.num_replicas
        return compiler_options(samples, self.settings.num_slots)


SAMPLED = ("responses", "mask", "rollout_logprobs")


@dataclass(frozen=True, kw_only=True, eq=False)
class Generate(ModelStage):
    """Samples responses from the actor in its generation layout, `group` a prompt.

    With `parts` they are the first parts of the responses, and each token has a version.
    """

    how: Generation
    compiler_options: Mapping[str, int] | tuple[()]
    parts: Parts | None = None

    generates = True
    name = "gen"

    @property
    def writes(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        if self.how.settings.record_routes:
            return (*SAMPLED, ROUTES)
        return SAMPLED if self.parts is None else (*SAMPLED, "policy_versions")

    @property
    def loop_metrics(self) -> Mapping[str, str]:
        return {DECODE_STEPS: "rollout/decode_steps", PREFILLS: "rollout/prefills"}

    def __call__(
        self, state: Any, step: Any, *, prompts: Any, prompt_lengths: Any, sample_ids: Any
    ) -> StageOutput:
        settings, parts, limits = self.how.settings, self.parts, None
        if parts is not None:
            limit = parts.limit(parts.first_version(step), step, settings.sampling.max_new_tokens)
            limits = jnp.full(prompt_lengths.shape, limit)
        out = self.how.run(
            self.model, state, step, prompts, prompt_lengths, sample_ids, settings, limits=limits
        )
        metrics = loop_counts(out)
        if parts is None:
            found = (out.tokens, out.mask, out.logprobs)
            found += () if out.routes is None else (out.routes,)
            return StageOutput(dict(zip(self.writes, found, strict=True)), metrics)
        version = jnp.full(prompt_lengths.shape, parts.first_version(step))
        responses = Responses(out.tokens, out.mask, out.logprobs, versions_of(out.mask, version))
        left = are_unfinished(responses, prompt_lengths, settings.sampling)
        writes = dict(zip(self.writes, responses, strict=True))
        return StageOutput(writes, metrics | {UNFINISHED: left.sum()})


def loop_counts(out: GenerationOutput) -> dict[str, Any]:
    """Metrics of the engine's loops."""
    slot_steps = out.slot_steps.sum()
    return {
        "rollout/decode_steps": out.steps.max(),
        "rollout/prefills": out.prefills.max(),
        "rollout/slot_use": out.live_slot_steps.sum() / slot_steps,
        "rollout/slots_waiting": out.stalled_slot_steps.sum() / slot_steps,
    }


@dataclass(frozen=True, kw_only=True, eq=False)
class GenerateGreedily(ModelStage):
    """The actor's most likely answer to each prompt, on the first sample of its group."""

    how: Generation
    compiler_options: Mapping[str, int] | tuple[()]

    generates = True
    name = "gen_max"
    writes = ("greedy_responses", "greedy_mask", "greedy_logprobs")

    def __call__(
        self, state: Any, step: Any, *, prompts: Any, prompt_lengths: Any, sample_ids: Any
    ) -> StageOutput:
        settings = self.how.settings
        rows, group = prompt_lengths.shape[0], settings.group
        # The others of a group are rows without a prompt: they generate nothing and take no slot.
        lengths = jnp.where(jnp.arange(rows) % group == 0, prompt_lengths, 0)
        slots = settings.num_slots or -(-rows // (self.model.generation.num_replicas * group))
        greedy = replace(settings.sampling, temperature=0.0)
        settings = replace(settings, sampling=greedy, group=1, num_slots=slots)
        out = self.how.run(self.model, state, step, prompts, lengths, sample_ids, settings)
        return StageOutput(
            {
                "greedy_responses": out.tokens,
                "greedy_mask": out.mask,
                "greedy_logprobs": out.logprobs,
            }
        )


# ------------------------------------------------------------------------- forward passes


@dataclass(frozen=True, kw_only=True, eq=False)
class OldLogprobs(ModelStage):
    """Log-probs of the policy before its update, and how far the sampler's are from them.

    `writes` may also name `sum_pi_squared`, for which the head is computed twice.
    """

    writes: tuple[str, ...] = ("old_logprobs",)
    micro_batches: MicroBatches
    temperature: float
    replays_routes: bool = False  # tokens take the experts that they had in the rollout

    name = "old_log_prob"

    @property
    def reads(self) -> tuple[str, ...]:
        """The fields of the samples, and their experts where these are replayed."""
        return (*super().reads, ROUTES) if self.replays_routes else super().reads

    def __call__(
        self,
        state: Any,
        step: Any,
        *,
        prompts: Any,
        prompt_lengths: Any,
        responses: Any,
        mask: Any,
        rollout_logprobs: Any,
        **routes: Any,
    ) -> StageOutput:
        with_squares = "sum_pi_squared" in self.writes
        spec, params = pass_model(self.model, state)

        def forward(part: Fields) -> Any:
            found = response_statistics(
                params,
                rows_of(part, self.model.passes.align),
                spec=spec,
                settings=self.model.passes,
                temperature=self.temperature,
                with_entropy=True,
                with_squares=with_squares,
            )
            return found.logprobs, found.entropy, found.sum_squares

        samples = sample_fields(prompts, prompt_lengths, responses, mask) | routes
        (old, entropy, squares), parts = self.micro_batches.join_counted(forward, samples)
        rollout = {"rollout_logprobs": rollout_logprobs, "mask": mask}
        metrics = policy_metrics((old, entropy), rollout) | self.count(parts)
        writes = {"old_logprobs": old}
        if with_squares:
            writes["sum_pi_squared"] = squares
        return StageOutput(writes, metrics)


def policy_metrics(logprobs_and_entropy: Any, fields: Fields) -> Metrics:
    """The entropy of the policy before its update, and how far the sampler's log-probs are."""
    logprobs, entropy = logprobs_and_entropy
    metrics = mismatch_metrics(logprobs, fields["rollout_logprobs"], fields["mask"])
    return metrics | {"actor/entropy": masked_mean(entropy, fields["mask"])}


@dataclass(frozen=True, kw_only=True, eq=False)
class FrozenLogprobs(ModelStage):
    """Log-probs of the samples under a frozen model: the reference, a teacher, one of a user's."""

    name: str
    writes: tuple[str, ...]  # one field
    micro_batches: MicroBatches
    temperature: float

    def __call__(
        self,
        state: Any,
        step: Any,
        *,
        prompts: Any,
        prompt_lengths: Any,
        responses: Any,
        mask: Any,
    ) -> StageOutput:
        def forward(part: Fields) -> Any:
            return response_logprobs(
                params_of(state),
                rows_of(part, self.model.passes.align),
                spec=self.model.spec,
                settings=self.model.passes,
                temperature=self.temperature,
            )[0]

        samples = sample_fields(prompts, prompt_lengths, responses, mask)
        (field,) = self.writes
        logprobs, parts = self.micro_batches.join_counted(forward, samples)
        return StageOutput({field: logprobs}, self.count(parts))


@dataclass(frozen=True, kw_only=True, eq=False)
class TeacherTop(ModelStage):
    """The teacher's likeliest tokens at each position of the samples, and their log-probs."""

    micro_batches: MicroBatches
    temperature: float
    top_k: int

    name = "teacher_top"
    writes = ("teacher_top_ids", "teacher_top_logprobs")

    def __call__(
        self,
        state: Any,
        step: Any,
        *,
        prompts: Any,
        prompt_lengths: Any,
        responses: Any,
        mask: Any,
    ) -> StageOutput:
        def forward(part: Fields) -> Any:
            return response_statistics(
                params_of(state),
                rows_of(part, self.model.passes.align),
                spec=self.model.spec,
                settings=self.model.passes,
                temperature=self.temperature,
                top_k=self.top_k,
            ).top

        samples = sample_fields(prompts, prompt_lengths, responses, mask)
        (ids, logprobs), parts = self.micro_batches.join_counted(forward, samples)
        writes = {"teacher_top_ids": ids, "teacher_top_logprobs": logprobs}
        return StageOutput(writes, self.count(parts))


@dataclass(frozen=True, kw_only=True, eq=False)
class Values(ModelStage):
    """The critic's values before its update."""

    micro_batches: MicroBatches

    name = "values"
    writes = ("values",)

    def __call__(
        self,
        state: Any,
        step: Any,
        *,
        prompts: Any,
        prompt_lengths: Any,
        responses: Any,
        mask: Any,
    ) -> StageOutput:
        spec, params = pass_model(self.model, state)

        def forward(part: Fields) -> Any:
            return response_values(params, rows_of(part), spec=spec, settings=self.model.passes)

        samples = sample_fields(prompts, prompt_lengths, responses, mask)
        values, parts = self.micro_batches.join_counted(forward, samples)
        return StageOutput({"values": values}, self.count(parts))


# ------------------------------------------------------------------------- the algorithm's


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenRewards(Stage):
    """The score of a sample as the reward of its last token."""

    name = "kl"
    writes = ("rewards",)

    def __call__(self, state: Any, step: Any, *, scores: Any, mask: Any) -> StageOutput:
        return StageOutput({"rewards": score_to_rewards(scores, mask)})


@dataclass(frozen=True, kw_only=True, eq=False)
class PenalisedRewards(Stage):
    """Rewards of tokens less coef * KL. The coefficient is the state of the KL controller."""

    functions: Sequence[Callable[..., Any]]  # the algorithm's kl_reward
    controller: KLController

    name = "kl"
    role = KL_CONTROLLER
    writes = ("rewards",)
    updates = True

    def __call__(self, state: Any, step: Any, *, mask: Any, **fields: Any) -> StageOutput:
        known = fields | {"mask": mask}
        (kl_reward,) = self.functions
        rewards, kl = kl_reward(*(known[name] for name in field_names(kl_reward)), coef=state)
        current = batch_kl(kl, mask)
        metrics = {"actor/reward_kl_penalty": current, "actor/reward_kl_penalty_coeff": state}
        moved = self.controller.update(state, current, mask.shape[0])
        return StageOutput({"rewards": rewards}, metrics, moved)


@dataclass(frozen=True, kw_only=True, eq=False)
class Advantages(Stage):
    """Advantages and returns, and the metrics of the whole batch."""

    functions: Sequence[Callable[..., Any]]  # the algorithm's advantage
    max_response_length: int

    name = "adv"
    writes = ("advantages", "returns")

    def __call__(
        self,
        state: Any,
        step: Any,
        *,
        prompt_lengths: Any,
        group_ids: Any,
        mask: Any,
        scores: Any,
        rewards: Any,
        **fields: Any,
    ) -> StageOutput:
        known = fields | {
            "prompt_lengths": prompt_lengths,
            "group_ids": group_ids,
            "mask": mask,
            "scores": scores,
            "rewards": rewards,
        }
        (advantage,) = self.functions
        advantages, returns = advantage(*(known[name] for name in field_names(advantage)))
        writes = {"advantages": advantages, "returns": returns}
        metrics = batch_metrics(**known, **writes, max_response_length=self.max_response_length)
        return StageOutput(writes, metrics)


# ------------------------------------------------------------------------- updates


@dataclass(frozen=True, kw_only=True)
class UpdateSizes:
    """How a role's passes walk through the samples of an iteration; all counts are global."""

    num_mini_batches: int = 1
    num_epochs: int = 1
    update: MicroBatches  # parts of one mini-batch
    forward: MicroBatches  # parts of the whole batch, in passes without gradient
    shuffle_seed: int | None = None  # mini-batches take the samples in a random order


def update_sizes(config: Config, role: Role) -> UpdateSizes:
    """How the passes of `role` walk through an iteration's samples, as the critic's or the actor's.

    Shuffling spreads the samples of a prompt over mini-batches: no row has them together.
    """
    settings = config.critic if role.name == "critic" else config.actor
    samples = config.data.train_batch_size * config.rollout.n
    mini_batch = config.actor.ppo_mini_batch_size * config.rollout.n
    layout, of_passes = role.layout, role.passes.layout or role.layout
    if settings.micro_batch_tokens:
        update = Packed(
            row_tokens=settings.micro_batch_tokens,
            group=config.rollout.n if settings.share_prompts else 1,
            num_replicas=layout.num_replicas,
            rows=role.forward.rows_of_pass,
            align=role.forward.align,
            shard=shard_rows(layout),
        )
        forward = replace(
            update,
            num_replicas=of_passes.num_replicas,
            rows=role.passes.rows_of_pass,
            shard=shard_rows(of_passes),
        )
        if config.actor.shuffle:
            update = replace(update, group=1)
    else:
        micro_batch = settings.micro_batch_size * layout.num_replicas or mini_batch
        of_pass = settings.micro_batch_size * of_passes.num_replicas or mini_batch
        update = Padded(num=mini_batch // micro_batch, shard=shard_stacked(layout))
        forward = Padded(num=samples // of_pass, shard=shard_stacked(of_passes))
    return UpdateSizes(
        num_mini_batches=samples // mini_batch,
        num_epochs=settings.ppo_epochs,
        update=update,
        forward=forward,
        shuffle_seed=config.seed if config.actor.shuffle else None,
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class Update(ModelStage):
    """All optimizer steps of an iteration on one role: every epoch, every mini-batch.

    `measure` is for a loss that also gives arrays of samples; see `learner.train_step.accumulate`.
    """

    name: str
    loss: Loss
    sizes: UpdateSizes
    first_step: int = 1
    measure: Measure | None = None
    seed: int = 0  # of the run, for dropout

    updates = True

    @property
    def reads(self) -> tuple[str, ...]:
        return self.loss.reads

    @property
    def loop_metrics(self) -> Mapping[str, str]:
        return {MICRO_BATCHES: f"{self.role}/micro_batches"}

    def __call__(self, state: TrainState | Adapted, step: Any, **fields: Any) -> StageOutput:
        role, sizes = self.model, self.sizes
        base = None
        if isinstance(state, Adapted):
            assert role.spec.lora is not None
            base = Base(
                params=state.base,
                lora=role.spec.lora,
                dtype=role.forward.dtype,
                key=jax.random.fold_in(jax.random.key(self.seed), zlib.crc32(role.name.encode())),
            )
        own: TrainState = own_of(state)
        assert role.optimizer is not None and role.learning_rate is not None
        key = None
        if sizes.shuffle_seed is not None:
            key = jax.random.fold_in(jax.random.key(sizes.shuffle_seed), step)
        batches = mini_batches(
            fields,
            num_mini_batches=sizes.num_mini_batches,
            num_epochs=sizes.num_epochs,
            shard=shard_stacked(role.layout),
            shuffle_key=key,
        )
        optimizer_step = partial(
            train_step,
            batches=batches,
            loss=self.loss,
            optimizer=role.optimizer,
            learning_rate=role.learning_rate,
            max_grad_norm=role.max_grad_norm,
            base=base,
            cast_ahead=role.forward.cast_ahead,
            micro_batches=sizes.update,
            measure=self.measure,
        )
        num_steps = sizes.num_mini_batches * sizes.num_epochs
        if num_steps == 1:
            own, metrics = optimizer_step(own, 0)
            metrics = jax.tree.map(lambda x: x[None], metrics)
        else:
            own, metrics = jax.lax.scan(optimizer_step, own, jnp.arange(num_steps))
        if role.forward.pipeline is not None:
            metrics[BUBBLE] = jnp.full(num_steps, role.forward.pipeline.bubble, jnp.float32)
        ratios: Any = metrics.pop(LOG_RATIOS, None)
        found = self.summary(metrics)
        if ratios is not None:
            found |= ratio_quantiles(ratios)
        return StageOutput(metrics=found, state=own)

    def summary(self, steps: Metrics) -> Metrics:
        """Metrics [optimizer steps] averaged; those of the step itself are named for the role."""
        flags = steps.pop(NONFINITE).any(axis=0)
        steps.pop("loss")
        metrics = {
            f"{self.role}/{name}" if name in STEP_METRICS else name: x.astype(jnp.float32).mean()
            for name, x in steps.items()
        }
        return metrics | {f"{self.role}/{NONFINITE}": flags}
