"""The stages of passes, advantages and updates: what each reads, writes, and which role runs it.

Nothing here knows an algorithm's name. Which fields a stage reads comes from its own signature, and
from the signatures of the functions that the `Algorithm` holds.
"""

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_llm.algorithms.advantages import score_to_rewards
from jaxrl_llm.algorithms.algorithm import Algorithm
from jaxrl_llm.algorithms.fields import field_names, pair_of
from jaxrl_llm.algorithms.kl import KLController, batch_kl
from jaxrl_llm.algorithms.mismatch import mismatch_metrics
from jaxrl_llm.algorithms.sample_masks import learned_tokens, without_left_out
from jaxrl_llm.arguments import Seed
from jaxrl_llm.distributed.communication import MICRO_BATCHES
from jaxrl_llm.distributed.layout import shard_stacked
from jaxrl_llm.generation.sampler import SamplingParams
from jaxrl_llm.learner.data_groups import Loss
from jaxrl_llm.learner.forward import (
    response_logprobs,
    response_statistics,
    response_values,
)
from jaxrl_llm.learner.losses import BUBBLE, NONFINITE, STEP_METRICS, OwnLoss
from jaxrl_llm.learner.micro_batches import MicroBatches
from jaxrl_llm.learner.optimizer import Optimizer
from jaxrl_llm.learner.ratios import LOG_RATIOS, ratio_quantiles
from jaxrl_llm.learner.rows import KEPT, Fields, rows_of, sample_fields
from jaxrl_llm.learner.train_state import (
    Adapted,
    Metrics,
    TrainState,
    own_of,
    params_of,
)
from jaxrl_llm.learner.train_step import (
    Base,
    Measure,
    mini_batches,
    train_step,
)
from jaxrl_llm.models.media import media_fields
from jaxrl_llm.numerics import masked_mean
from jaxrl_llm.observability.metrics import batch_metrics
from jaxrl_llm.plan.roles import Role, UpdateSizes, pass_model
from jaxrl_llm.program.stage import Stage, StageOutput, States

KL_CONTROLLER = "kl_controller"
MASKED_FRACTION = "reward/masked_frac"


@dataclass(frozen=True, kw_only=True, eq=False)
class ModelStage(Stage):
    """A stage of a model. Its state is what the model's role keeps."""

    model: Role
    # Fields that say how the rollout computed: experts, kept tokens, rows of trajectories.
    replays: tuple[str, ...] = ()

    @property
    def reads(self) -> tuple[str, ...]:
        media = media_fields(self.model.spec.config.vision)
        return (*super().reads, *self.replays, *media)

    @property
    def role(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.model.name

    @property
    def shares(self) -> tuple[str, ...]:
        return (self.model.base,) if self.model.base else ()

    def state_of(self, states: States) -> Any:
        """The state of the model; adapters are joined to their base."""
        return self.model.state_of(states)

    @property
    def loop_metrics(self) -> Mapping[str, str]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return {MICRO_BATCHES: f"{self.name}/micro_batches"}

    def count(self, parts: int | jax.Array) -> Metrics:
        """The number of parts of a pass, where it is data and, on a mesh, multiplies what moves."""
        if isinstance(parts, int) or self.model.mesh.size == 1:
            return {}
        return {f"{self.name}/micro_batches": parts.astype(jnp.float32)}


# ------------------------------------------------------------------------- forward passes


@dataclass(frozen=True, kw_only=True, eq=False)
class OldLogprobs(ModelStage):
    """Log-probs of the policy before its update, and how far the sampler's are from them.

    `writes` may also name `sum_pi_squared`, for which the head is computed twice.
    """

    writes: tuple[str, ...] = ("old_logprobs",)
    micro_batches: MicroBatches
    temperature: float

    name = "old_log_prob"

    def __call__(
        self,
        state: Any,
        step: jax.Array,
        *,
        prompts: jax.Array,
        prompt_lengths: jax.Array,
        responses: jax.Array,
        response_lengths: jax.Array,
        mask: jax.Array,
        rollout_logprobs: jax.Array,
        **replayed: jax.Array,
    ) -> StageOutput:
        with_squares = "sum_pi_squared" in self.writes
        spec, params = pass_model(self.model, state)

        def forward(part: Fields) -> Any:
            statistics = response_statistics(
                params,
                rows_of(part, self.model.passes.align),
                spec=spec,
                settings=self.model.passes,
                temperature=self.temperature,
                with_entropy=True,
                with_squares=with_squares,
                kept=part.get(KEPT),
            )
            return statistics.logprobs, statistics.entropy, statistics.sum_squares

        samples = sample_fields(prompts, prompt_lengths, responses, response_lengths) | replayed
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
    """Log-probs of the samples under another model: the reference, a teacher, one of a user's."""

    name: str
    writes: tuple[str, ...]  # one field
    micro_batches: MicroBatches
    temperature: float

    def __call__(
        self,
        state: Any,
        step: jax.Array,
        *,
        prompts: jax.Array,
        prompt_lengths: jax.Array,
        responses: jax.Array,
        response_lengths: jax.Array,
        **replayed: jax.Array,
    ) -> StageOutput:
        def forward(part: Fields) -> Any:
            return response_logprobs(
                params_of(state),
                rows_of(part, self.model.passes.align),
                spec=self.model.spec,
                settings=self.model.passes,
                temperature=self.temperature,
                kept=part.get(KEPT),
            )[0]

        samples = sample_fields(prompts, prompt_lengths, responses, response_lengths) | replayed
        (field,) = self.writes
        logprobs, parts = self.micro_batches.join_counted(forward, samples)
        return StageOutput({field: logprobs}, self.count(parts))


@dataclass(frozen=True, kw_only=True, eq=False)
class MeanOfTeachers(Stage):
    """The weighted mean of several teachers' log-probs.

    KL(pi || .) to it is the weighted mean of the KLs to the teachers.
    """

    weights: Mapping[str, float]  # by field

    name = "teachers"
    writes = ("teacher_logprobs",)
    numbers = ("weights",)

    @property
    def reads(self) -> tuple[str, ...]:
        return tuple(self.weights)

    def __call__(self, state: Any, step: jax.Array, **fields: jax.Array) -> StageOutput:
        total = sum(weight * fields[name] for name, weight in self.weights.items())
        return StageOutput({"teacher_logprobs": total / sum(self.weights.values())})


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
        step: jax.Array,
        *,
        prompts: jax.Array,
        prompt_lengths: jax.Array,
        responses: jax.Array,
        response_lengths: jax.Array,
        **replayed: jax.Array,
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

        samples = sample_fields(prompts, prompt_lengths, responses, response_lengths) | replayed
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
        step: jax.Array,
        *,
        prompts: jax.Array,
        prompt_lengths: jax.Array,
        responses: jax.Array,
        response_lengths: jax.Array,
        **replayed: jax.Array,
    ) -> StageOutput:
        spec, params = pass_model(self.model, state)

        def forward(part: Fields) -> Any:
            return response_values(params, rows_of(part), spec=spec, settings=self.model.passes)

        samples = sample_fields(prompts, prompt_lengths, responses, response_lengths) | replayed
        values, parts = self.micro_batches.join_counted(forward, samples)
        return StageOutput({"values": values}, self.count(parts))


# ------------------------------------------------------------------------- the algorithm's


@dataclass(frozen=True, kw_only=True, eq=False)
class SampleMask(Stage):
    """Which samples are learned from: those that did not fail and, by choice, were not truncated.

    A failed greedy answer has the score NaN; then no sample of its prompt can be compared with it.
    """

    by_host: bool  # the stage of rewards leaves samples out
    greedy: bool = False  # the host scores greedy answers, too
    sampling: SamplingParams | None = None  # sampling whose truncated responses are left out

    name = "mask"
    writes = ("sample_mask",)

    @property
    def reads(self) -> tuple[str, ...]:
        failures = ("left_out", "greedy_scores") if self.greedy else ("left_out",)
        return (
            "prompt_lengths",
            *(failures if self.by_host else ()),
            *(("responses", "response_lengths") if self.sampling is not None else ()),
        )

    def __call__(
        self,
        state: Any,
        step: jax.Array,
        *,
        prompt_lengths: jax.Array,
        left_out: jax.Array | None = None,
        greedy_scores: jax.Array | None = None,
        responses: jax.Array | None = None,
        response_lengths: jax.Array | None = None,
    ) -> StageOutput:
        kept = jnp.ones(prompt_lengths.shape, bool)
        if left_out is not None:
            kept &= left_out == 0
        if greedy_scores is not None:
            kept &= ~jnp.isnan(greedy_scores)
        if self.sampling is not None:
            assert responses is not None and response_lengths is not None
            ended = self.sampling.have_ended(responses, response_lengths)
            kept &= ended | (response_lengths == 0)
        masked = masked_mean(~kept, prompt_lengths > 0)
        return StageOutput({"sample_mask": kept.astype(jnp.float32)}, {MASKED_FRACTION: masked})


@dataclass(frozen=True, kw_only=True, eq=False)
class OfLearnedSamples(Stage):
    """A stage that leaves samples out where `masks` is set."""

    masks: bool = False

    @property
    def reads(self) -> tuple[str, ...]:
        return (*super().reads, "sample_mask") if self.masks else super().reads

    def learned(self, fields: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """The fields with the mask of the tokens that are learned from."""
        if not self.masks:
            return fields
        return fields | {"mask": learned_tokens(fields["mask"], fields["sample_mask"])}


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenRewards(Stage):
    """The score of a sample as the reward of its last token."""

    name = "kl"
    writes = ("rewards",)

    def __call__(
        self, state: Any, step: jax.Array, *, scores: jax.Array, mask: jax.Array
    ) -> StageOutput:
        return StageOutput({"rewards": score_to_rewards(scores, mask)})


@dataclass(frozen=True, kw_only=True, eq=False)
class PenalisedRewards(OfLearnedSamples):
    """Rewards of tokens less coef * KL. The coefficient is the state of the KL controller."""

    functions: Sequence[Callable[..., Any]]  # the algorithm's kl_reward
    controller: KLController

    name = "kl"
    role = KL_CONTROLLER
    writes = ("rewards",)
    updates = True
    numbers = ("functions", "controller")

    def __call__(
        self, state: Any, step: jax.Array, *, mask: jax.Array, **fields: jax.Array
    ) -> StageOutput:
        known = self.learned(fields | {"mask": mask})
        mask = known["mask"]
        (kl_reward,) = self.functions
        rewards, kl = kl_reward(*(known[name] for name in field_names(kl_reward)), coef=state)
        current = batch_kl(kl, mask)
        metrics = {"actor/reward_kl_penalty": current, "actor/reward_kl_penalty_coeff": state}
        learned = jnp.mean(known["sample_mask"]) if self.masks else 1.0
        moved = self.controller.update(state, current, mask.shape[0], learned)
        return StageOutput({"rewards": rewards}, metrics, moved)


@dataclass(frozen=True, kw_only=True, eq=False)
class Advantages(OfLearnedSamples):
    """Advantages and returns, and the metrics of the whole batch."""

    functions: Sequence[Callable[..., Any]]  # the algorithm's advantage
    max_response_length: int
    media: tuple[str, ...] = ()  # fields of images, for metrics

    name = "adv"
    writes = ("advantages", "returns")
    numbers = ("functions",)

    @property
    def reads(self) -> tuple[str, ...]:
        return (*super().reads, *self.media)

    def __call__(
        self,
        state: Any,
        step: jax.Array,
        *,
        prompt_lengths: jax.Array,
        group_ids: jax.Array,
        response_lengths: jax.Array,
        mask: jax.Array,
        scores: jax.Array,
        rewards: jax.Array,
        **fields: jax.Array,
    ) -> StageOutput:
        known = fields | {
            "prompt_lengths": prompt_lengths,
            "group_ids": group_ids,
            "response_lengths": response_lengths,
            "mask": mask,
            "scores": scores,
            "rewards": rewards,
        }
        (advantage,) = self.functions
        names, seen = field_names(advantage), known
        if self.masks:
            seen = without_left_out(known, known["sample_mask"], compares="group_ids" in names)
        pair = advantage(*(seen[name] for name in names))
        advantages, returns = pair_of("the algorithm's advantage", pair, mask)
        if self.masks:
            advantages = jnp.where(seen["mask"] != 0, advantages, 0.0)
            returns = jnp.where(seen["mask"] != 0, returns, 0.0)
        writes = {"advantages": advantages, "returns": returns}
        metrics = batch_metrics(
            **known,
            **writes,
            max_response_length=self.max_response_length,
            max_prompt_length=None,
        )
        return StageOutput(writes, metrics)


# ------------------------------------------------------------------------- correction


def correction(algorithm: Algorithm, *, masks: bool) -> "Correction | None":
    """The stage of what the algorithm weighs and rejects; None where it does neither."""
    named = {"importance_weights": algorithm.importance, "loss_mask": algorithm.rejection}
    named = {name: fn for name, fn in named.items() if fn is not None}
    if not named:
        return None
    return Correction(writes=tuple(named), functions=tuple(named.values()), masks=masks)


@dataclass(frozen=True, kw_only=True, eq=False)
class Correction(OfLearnedSamples):
    """Rollout correction: the function that gives each field that is written."""

    writes: tuple[str, ...]
    functions: Sequence[Callable[..., Any]]

    name = "rollout_corr"
    numbers = ("functions",)

    def __call__(self, state: Any, step: jax.Array, **fields: jax.Array) -> StageOutput:
        writes, metrics, fields = {}, {}, self.learned(fields)
        for name, fn in zip(self.writes, self.functions, strict=True):
            writes[name], measured = fn(*(fields[field] for field in field_names(fn)))
            metrics |= measured
        return StageOutput(writes, metrics)


# ------------------------------------------------------------------------- updates


@dataclass(frozen=True, kw_only=True, eq=False)
class Update(ModelStage):
    """All optimizer steps of an iteration on one role: every epoch, every mini-batch.

    `measure` is for a loss that also gives arrays of samples; see `learner.train_step.accumulate`.
    """

    name: str
    loss: Loss
    optimizer: Optimizer
    sizes: UpdateSizes
    first_step: int = 1
    measure: Measure | None = None
    seed: Seed = Seed(0)  # seed of the run, for dropout and the order of samples

    updates = True
    numbers = ("loss", "optimizer", "seed")

    @property
    def reads(self) -> tuple[str, ...]:
        return self.loss.reads

    @property
    def loop_metrics(self) -> Mapping[str, str]:
        return {MICRO_BATCHES: f"{self.role}/micro_batches"}

    def __call__(
        self, state: TrainState | Adapted, step: jax.Array, **fields: jax.Array
    ) -> StageOutput:
        role, sizes = self.model, self.sizes
        base = None
        if isinstance(state, Adapted):
            assert role.spec.lora is not None
            base = Base(
                params=state.base,
                lora=role.spec.lora,
                dtype=role.forward.dtype,
                float32_head=role.spec.float32_head,
                key=jax.random.fold_in(jax.random.key(self.seed), zlib.crc32(role.name.encode())),
            )
        own: TrainState = own_of(state)
        key = None
        if sizes.shuffle:
            key = jax.random.fold_in(jax.random.key(self.seed), step)
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
            optimizer=self.optimizer,
            learning_rate=self.optimizer.learning_rate,
            max_grad_norm=self.optimizer.max_grad_norm,
            base=base,
            cast_ahead=role.forward.cast_ahead,
            micro_batches=sizes.update,
            groups=role.groups_for(self._by_sample),
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
        summary = self.summary(metrics)
        if ratios is not None:
            summary |= ratio_quantiles(ratios)
        return StageOutput(metrics=summary, state=own)

    @property
    def _by_sample(self) -> bool:
        """False for a loss that may compare the samples of a micro-batch, as a user's may."""
        return not isinstance(self.loss, OwnLoss) and self.loss.algorithm.by_sample

    def summary(self, steps: Metrics) -> Metrics:
        """Metrics [optimizer steps] averaged; step metrics are named for the role."""
        flags = steps.pop(NONFINITE).any(axis=0)
        steps.pop("loss")
        metrics = {
            f"{self.role}/{name}" if name in STEP_METRICS else name: x.astype(jnp.float32).mean()
            for name, x in steps.items()
        }
        return metrics | {f"{self.role}/{NONFINITE}": flags}
