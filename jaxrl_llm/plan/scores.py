"""The stages that score samples: Python reward functions, scalar models, and sums of both."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.agents.setup import has_turns
from jaxrl_llm.algorithms.advantages import score_to_rewards, spread_to_steps
from jaxrl_llm.config import Config
from jaxrl_llm.distributed.multihost import gather_objects
from jaxrl_llm.learner.forward import response_scores, response_token_scores
from jaxrl_llm.learner.micro_batches import MicroBatches
from jaxrl_llm.learner.rows import Fields, rows_of, sample_fields
from jaxrl_llm.learner.train_state import Metrics, params_of
from jaxrl_llm.numerics import masked_mean
from jaxrl_llm.plan.roles import Role
from jaxrl_llm.plan.stages import ModelStage
from jaxrl_llm.program.stage import HOST, Stage, StageOutput, StepContext
from jaxrl_llm.rewards.graders import path_and_settings
from jaxrl_llm.rewards.manager import unique_names

STEP_REWARDS, LEFT_OUT = "step_rewards", "left_out"
ENVIRONMENT = "environment"  # the part of the score that an environment gives
GREEDY_SCORE = "critic/greedy_score/mean"
GREEDY_FIELD = "greedy_scores"


@dataclass(frozen=True, kw_only=True)
class WeightedModel:
    """A further scalar model, whose score times `weight` is a part of the reward.

    Its stage writes `<name>_scores`.
    """

    role: Role
    weight: float
    micro_batches: MicroBatches

    @property
    def field(self) -> str:
        """Where its scores stand in a batch."""
        return f"{self.role.name}_scores"


def score_stages(
    model: Role | None,
    reward: "HostReward | None",
    *,
    group: int,
    weight: float,
    micro_batches: MicroBatches,
    others: Sequence[WeightedModel] = (),
    by_user: tuple[Stage, ...] = (),
    steps: int = 0,
    replays: tuple[str, ...] = (),
) -> list[Stage]:
    """Stages that write the scores of the samples and of the greedy answers.

    One source, `model` or `reward`, writes the score itself. Of several sources each writes its
    part, and a sum adds `weight` times the model's, and the scores of `others` with their weights.
    A stage of the user's that writes the score gets the parts in any case, and there is no sum.
    `steps` is the response length where functions also give rewards of steps; 0 is off. `replays`
    are the fields of a rollout that the model's pass repeats.
    """
    taken = {name for stage in by_user for name in stage.writes}
    several = (reward is not None) + (model is not None) + len(others) > 1
    end, stages = "_model" if several and reward is not None else "", []
    for greedy, name in (("", "reward"), ("greedy_", "reward_max")):
        score = f"{greedy}scores"
        parts = several or score in taken
        function_scores = f"{greedy}function_scores" if parts else score
        writes = (f"{greedy}model_scores" if parts else score,)
        if reward is not None and greedy:
            stages.append(
                FunctionScoresOfGreedy(reward=reward, writes=(function_scores,), group=group)
            )
        elif reward is not None:
            own = (function_scores, "reward_parts", *((STEP_REWARDS,) if steps else ()))
            own = (*own, LEFT_OUT) if reward.masks else own
            stages.append(FunctionScores(reward=reward, writes=own, response_length=steps))
        if model is not None and greedy:
            stages.append(
                ModelScoresOfGreedy(
                    model=model,
                    name=name + end,
                    writes=writes,
                    micro_batches=micro_batches,
                    group=group,
                )
            )
        elif model is not None:
            stages.append(
                ModelScores(
                    model=model,
                    name=name + end,
                    writes=writes,
                    micro_batches=micro_batches,
                    replays=replays,
                )
            )
        stages += [_greedy_scores(one, group) for one in others if greedy]
        if several and score not in taken:
            weights = {function_scores: 1.0} if reward is not None else {}
            weights |= {writes[0]: weight} if model is not None else {}
            weights |= {f"{greedy}{one.field}": one.weight for one in others}
            stages.append(GreedyScoreSum(weights=weights) if greedy else ScoreSum(weights=weights))
    return stages


def _greedy_scores(one: WeightedModel, group: int) -> Stage:
    """The scores that a further model gives to the greedy answers."""
    return ModelScoresOfGreedy(
        model=one.role,
        name=f"{one.role.name}_max",
        writes=(f"greedy_{one.field}",),
        micro_batches=one.micro_batches,
        group=group,
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class ModelScores(ModelStage):
    """A scalar model's score of each sample, on the device."""

    name: str = "reward"
    writes: tuple[str, ...] = ("scores",)
    micro_batches: MicroBatches
    measured: bool = False  # the mean and deviation of the scores become metrics

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
        samples = sample_fields(prompts, prompt_lengths, responses, response_lengths) | replayed
        scores, parts = _model_scores(self.model, state, self.micro_batches, samples)
        metrics = score_metrics(self.model.name, scores) if self.measured else {}
        (field,) = self.writes
        return StageOutput({field: scores}, metrics | self.count(parts))


@dataclass(frozen=True, kw_only=True, eq=False)
class ModelTokenScores(ModelStage):
    """A scalar model's score at each token of a response, which it has seen."""

    name: str
    writes: tuple[str, ...]  # one field
    micro_batches: MicroBatches

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
            how: Any = {"spec": self.model.spec, "settings": self.model.passes}
            return response_token_scores(params_of(state), rows_of(part), **how)

        samples = sample_fields(prompts, prompt_lengths, responses, response_lengths) | replayed
        scores, parts = self.micro_batches.join_counted(forward, samples)
        (field,) = self.writes
        inside = jnp.arange(scores.shape[1]) < response_lengths[:, None]
        return StageOutput({field: jnp.where(inside, scores, 0.0)}, self.count(parts))


@dataclass(frozen=True, kw_only=True, eq=False)
class ModelScoresOfGreedy(ModelStage):
    """A model's scores of the greedy answers, for every sample of a group."""

    name: str = "reward_max"
    writes: tuple[str, ...] = ("greedy_scores",)
    micro_batches: MicroBatches
    group: int

    def __call__(
        self,
        state: Any,
        step: jax.Array,
        *,
        prompts: jax.Array,
        prompt_lengths: jax.Array,
        greedy_responses: jax.Array,
        greedy_lengths: jax.Array,
        **media: jax.Array,
    ) -> StageOutput:
        samples = sample_fields(prompts, prompt_lengths, greedy_responses, greedy_lengths) | media
        scores, parts = _model_scores(self.model, state, self.micro_batches, samples)
        scores = scores[:: self.group]
        (field,) = self.writes
        # Of several sources, their sum has the metric.
        metrics = {GREEDY_SCORE: scores.mean()} if field == GREEDY_FIELD else {}
        metrics |= self.count(parts)
        return StageOutput({field: jnp.repeat(scores, self.group)}, metrics)


def _model_scores(
    role: Role, state: Any, micro_batches: MicroBatches, samples: Fields
) -> tuple[Any, int | jax.Array]:
    def forward(part: Fields) -> Any:
        return response_scores(
            params_of(state),
            rows_of(part),
            part["response_lengths"],
            spec=role.spec,
            settings=role.passes,
        )

    return micro_batches.join_counted(forward, samples)


class HostResponses(NamedTuple):
    """Generated responses on the host, one a row, as numpy arrays."""

    responses: np.ndarray  # [N, R]
    lengths: np.ndarray  # [N]
    logprobs: np.ndarray  # the sampler's, [N, R]


class HostReward(ABC):
    """Rewards that Python computes, on the host; arrays are numpy.

    Each process scores the rows that it owns. Metrics are of the rows of all processes.
    """

    names: tuple[str, ...]  # parts of the score
    masks: bool = False  # some samples are left out of the loss and of their group

    @abstractmethod
    def score(
        self, context: StepContext, step: int, answers: HostResponses
    ) -> tuple[np.ndarray, np.ndarray, dict[str, float]]:
        """The scores of rows [N], the parts [N, K] and metrics."""

    def step_rewards(self, context: StepContext, shape: tuple[int, int]) -> np.ndarray:
        """The part of the last scores that belongs to steps, at their last tokens [N, R]."""
        return np.zeros(shape, np.float32)

    def left_out(self, context: StepContext, rows: int) -> np.ndarray:
        """1 for each of the `rows` just scored that is not learned from, float32."""
        return np.zeros(rows, np.float32)

    @abstractmethod
    def greedy(self, context: StepContext, step: int, answers: HostResponses) -> np.ndarray:
        """Scores [N] of greedy answers, one for each prompt whose first sample is here.

        With `masks`, the score of a failed one is NaN.
        """


@dataclass(frozen=True)
class ArrayReward(HostReward):
    """A reward of arrays: fn(responses, lengths) -> scores. For use without text to grade."""

    fn: Callable[[np.ndarray, np.ndarray], np.ndarray]
    names: tuple[str, ...] = ("score",)
    masks: bool = False

    def score(
        self, context: StepContext, step: int, answers: HostResponses
    ) -> tuple[np.ndarray, np.ndarray, dict[str, float]]:
        """The scores, which are also the one part."""
        scores = self.fn(answers.responses, answers.lengths).astype(np.float32)
        return scores, scores[:, None], {}

    def greedy(self, context: StepContext, step: int, answers: HostResponses) -> np.ndarray:
        """Scores."""
        return self.fn(answers.responses, answers.lengths).astype(np.float32)


def planned_reward(config: Config) -> ArrayReward | None:
    """The reward functions of a run that is only planned: their names, and no worker."""
    if not config.reward.functions and not has_turns(config):
        return None
    names = unique_names([path_and_settings(function) for function in config.reward.functions])
    names = [*names, ENVIRONMENT] if has_turns(config) else names
    masks = config.reward.on_failure == "mask" or config.rollout.mask_truncated
    masks = masks or has_turns(config)
    return ArrayReward(lambda responses, lengths: lengths, names=tuple(names), masks=masks)


@dataclass(frozen=True, kw_only=True, eq=False)
class FunctionScores(Stage):
    """Python rewards of the samples, on the host: their score, and its parts."""

    reward: HostReward
    writes: tuple[str, ...] = ("scores", "reward_parts")  # and perhaps step_rewards, left_out
    response_length: int = 0  # R, for step_rewards

    name = "reward"
    role = HOST
    gathers = True

    def shapes(self, rows: int) -> dict[str, jax.ShapeDtypeStruct]:
        parts = jax.ShapeDtypeStruct((rows, len(self.reward.names)), jnp.float32)
        shapes = super().shapes(rows) | {"reward_parts": parts}
        if STEP_REWARDS in self.writes:
            shape = (rows, self.response_length)
            shapes[STEP_REWARDS] = jax.ShapeDtypeStruct(shape, jnp.float32)
        return shapes

    def __call__(
        self,
        context: StepContext,
        step: int,
        *,
        responses: np.ndarray,
        response_lengths: np.ndarray,
        rollout_logprobs: np.ndarray,
    ) -> StageOutput:
        answers = HostResponses(responses, response_lengths, rollout_logprobs)
        scores, parts, metrics = self.reward.score(context, step, answers)
        written = [scores, parts]
        if STEP_REWARDS in self.writes:
            written.append(self.reward.step_rewards(context, responses.shape))
        if LEFT_OUT in self.writes:
            written.append(self.reward.left_out(context, len(responses)))
        return StageOutput(dict(zip(self.writes, written, strict=True)), metrics)


@dataclass(frozen=True, kw_only=True, eq=False)
class StepTokenRewards(Stage):
    """The rewards of steps at their last tokens, and the rest of the score at the last of all."""

    name = "kl"
    writes = ("rewards",)

    def __call__(
        self,
        state: Any,
        step: jax.Array,
        *,
        scores: jax.Array,
        mask: jax.Array,
        step_rewards: jax.Array,
    ) -> StageOutput:
        rewards = spread_to_steps(score_to_rewards(scores, mask), step_rewards, mask)
        return StageOutput({"rewards": rewards})


@dataclass(frozen=True, kw_only=True, eq=False)
class FunctionScoresOfGreedy(Stage):
    """Python rewards of the greedy answers, on the host, for every sample of a group."""

    reward: HostReward
    writes: tuple[str, ...] = ("greedy_scores",)
    group: int

    name = "reward_max"
    role = HOST
    gathers = True

    def __call__(
        self,
        context: StepContext,
        step: int,
        *,
        sample_ids: np.ndarray,
        group_ids: np.ndarray,
        greedy_responses: np.ndarray,
        greedy_lengths: np.ndarray,
        greedy_logprobs: np.ndarray,
    ) -> StageOutput:
        first = sample_ids % self.group == 0  # the answer stands on the first sample of a group
        answers = HostResponses(
            greedy_responses[first], greedy_lengths[first], greedy_logprobs[first]
        )
        scores = self.reward.greedy(context, step, answers)
        # One number a prompt. The other samples of a group may lie on another host.
        pairs = list(zip(group_ids[first].tolist(), scores.tolist(), strict=True))
        every = dict(sorted(pair for one in gather_objects(pairs, "greedy") for pair in one))
        row_scores = np.array([every[group] for group in group_ids.tolist()], np.float32)
        known = np.array([score for score in every.values() if score == score], np.float32)
        mean = float(known.mean()) if known.size else 0.0
        (field,) = self.writes
        metrics = {GREEDY_SCORE: mean} if field == GREEDY_FIELD else {}
        return StageOutput({field: row_scores}, metrics)


@dataclass(frozen=True, kw_only=True, eq=False)
class ScoreSum(Stage):
    """The scores of functions and of models as one: the sum of weight times field."""

    weights: Mapping[str, float]  # by field

    name = "reward_sum"
    writes = ("scores",)

    @property
    def reads(self) -> tuple[str, ...]:
        return tuple(self.weights)

    def __call__(self, state: Any, step: jax.Array, **fields: jax.Array) -> StageOutput:
        total = weighted_sum(self.weights, fields)
        model_scores = fields.get("model_scores")
        metrics = {} if model_scores is None else score_metrics("model", model_scores)
        return StageOutput({"scores": total}, metrics)


@dataclass(frozen=True, kw_only=True, eq=False)
class GreedyScoreSum(Stage):
    """`ScoreSum` of the greedy answers."""

    weights: Mapping[str, float]

    name = "reward_max_sum"
    writes = ("greedy_scores",)

    @property
    def reads(self) -> tuple[str, ...]:
        return tuple(self.weights)

    def __call__(self, state: Any, step: jax.Array, **fields: jax.Array) -> StageOutput:
        total = weighted_sum(self.weights, fields)
        return StageOutput(
            {"greedy_scores": total}, {GREEDY_SCORE: masked_mean(total, ~jnp.isnan(total))}
        )


def weighted_sum(weights: Mapping[str, float], fields: Mapping[str, Any]) -> Any:
    """The sum of weight times field, in the order of the weights."""
    return sum(weight * fields[name] for name, weight in weights.items())


def score_metrics(name: str, scores: jax.Array) -> Metrics:
    """rewards/<name>/{mean,std} of a model's scores."""
    deviation = scores.std(ddof=1) if scores.size > 1 else jnp.float32(0)
    return {f"rewards/{name}/mean": scores.mean(), f"rewards/{name}/std": deviation}
