"""Rewards of answers of several turns: the environment's, and the reward functions'."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jaxrl_llm.config import Config
from jaxrl_llm.distributed.multihost import gather_objects
from jaxrl_llm.observability.moments import Moments
from jaxrl_llm.plan.conversing import (
    completions_of_turns,
    environment_failures,
    traced,
    turn_columns,
    with_turns,
)
from jaxrl_llm.plan.scores import ENVIRONMENT, HostResponses, HostReward
from jaxrl_llm.program.stage import StepContext
from jaxrl_llm.rewards.manager import RewardResult
from jaxrl_llm.rewards.statistics import RewardStatistics, merge
from jaxrl_llm.rewards.steps import Steps
from jaxrl_llm.supervision.masked_steps import MOST_STEPS
from jaxrl_llm.trainer.rewarding import FailedSteps, RewardFunctions
from jaxrl_llm.types import Prompt

NONE = RewardStatistics()


@dataclass(frozen=True, kw_only=True)
class TurnRewards(HostReward):
    """The score of a sample: its functions' weighted sum, and what its environment gave.

    Functions get the last turn as the completion. They may ask for the columns of `turn_columns`.
    """

    functions: RewardFunctions | None
    masks_failed: bool
    masks_truncated: bool
    failure_value: float
    failing: FailedSteps

    masks = True

    @property
    def names(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The functions' names, then `environment`."""
        return (*(() if self.functions is None else self.functions.names), ENVIRONMENT)

    def check(self, config: Config, prompts: Sequence[Prompt]) -> None:
        """See `RewardFunctions.check`."""
        if self.functions is not None:
            self.functions.check(
                config, [replace(p, columns=p.columns | turn_columns()) for p in prompts]
            )

    def score(
        self, context: StepContext, step: int, answers: HostResponses
    ) -> tuple[np.ndarray, np.ndarray, dict[str, float]]:
        """Scores [N] and their parts [N, K], float32, of the owned rows; metrics of all rows.

        Functions do not grade a sample that failed.

        Raises: ValueError where all samples failed in as many steps as `failing` says.
        """
        trajectories = context.trajectories
        prompts = with_turns(context.prompts_of(context.rows.owned), trajectories)
        graded, metrics = self._graded(context, step, prompts)
        given = [np.nan if t.reward is None or t.failed else t.reward for t in trajectories]
        environment = np.array(given, np.float32)
        scores = graded.scores + np.nan_to_num(environment)
        if not self.masks_failed:
            failed = np.array([t.failed for t in trajectories])
            scores = np.where(failed, np.float32(self.failure_value), scores)
        own = environment_failures(prompts, trajectories)
        failures = [*own, *graded.failures]
        context.completions = completions_of_turns(trajectories)
        result = context.reward = replace(
            graded,
            scores=scores.astype(np.float32),
            parts=graded.parts | {ENVIRONMENT: environment},
            extras=[
                extra | traced(trajectory)
                for extra, trajectory in zip(graded.extras, trajectories, strict=True)
            ],
            failures=failures,
        )
        statistics = RewardStatistics(
            parts={ENVIRONMENT: Moments.of(environment[~np.isnan(environment)].tolist())},
            failures={ENVIRONMENT: len(own)},
            num_failed=int(result.failed.sum()),
        )
        first = failures[0].describe() if failures else ""
        everyone = gather_objects([statistics.to_json(), len(scores), first], ENVIRONMENT)
        merged = merge(counts for counts, _, _ in everyone)
        number = sum(number for _, number, _ in everyone)
        self.failing.count(step, merged.num_failed, number, [first for *_, first in everyone])
        columns = np.stack([result.parts[name] for name in self.names], axis=1)
        return result.scores, columns, metrics | merged.metrics()

    def _graded(
        self, context: StepContext, step: int, prompts: Sequence[Prompt]
    ) -> tuple[RewardResult, dict[str, float]]:
        """The functions' rewards of all samples; 0 and no part for samples that failed."""
        number, trajectories = len(prompts), context.trajectories
        rows = [i for i, trajectory in enumerate(trajectories) if not trajectory.failed]
        names, metrics = [], {}
        graded = RewardResult(scores=np.zeros(0), parts={}, statistics=NONE, extras=[])
        if self.functions is not None:
            names = self.functions.names
            asked = [prompts[i] for i in rows]
            completions = completions_of_turns([trajectories[i] for i in rows])
            *_, metrics = self.functions.score_of(context, step, asked, completions)
            assert context.reward is not None
            graded = context.reward
        scores = np.zeros(number, np.float32)
        parts = {name: np.full(number, np.nan, np.float32) for name in names}
        extras: list[dict[str, Any]] = [{} for _ in prompts]
        steps: list[list[tuple[float, Steps]]] = [[] for _ in prompts]
        for i, row in enumerate(rows if self.functions is not None else ()):
            scores[row], extras[row], steps[row] = (
                graded.scores[i],
                graded.extras[i],
                graded.steps[i],
            )
            for name in names:
                parts[name][row] = graded.parts[name][i]
        return RewardResult(
            scores=scores,
            parts=parts,
            statistics=graded.statistics,
            extras=extras,
            failures=[replace(failure, index=rows[failure.index]) for failure in graded.failures],
            steps=steps,
        ), metrics

    def step_rewards(self, context: StepContext, shape: tuple[int, int]) -> np.ndarray:
        """The rewards of turns at their last tokens, and the functions' of steps, [N, R]."""
        rewards = np.zeros(shape, np.float32)
        if self.functions is not None:
            assert context.reward is not None
            if any(steps.unit == "characters" for own in context.reward.steps for _, steps in own):
                raise ValueError(
                    "a reward function gives step_ends, and an answer of several turns has no one "
                    "text: give step_token_ends, which count the tokens of completion_ids"
                )
            rewards = self.functions.step_rewards(context, shape)
        for row, trajectory in enumerate(context.trajectories):
            for turn in () if trajectory.failed else trajectory.turns:
                if turn.reward is not None and turn.end > turn.start:
                    rewards[row, turn.end - 1] += turn.reward
        return rewards

    def left_out(self, context: StepContext, rows: int) -> np.ndarray:
        """1 for each sample that failed, or was truncated, and is masked.

        A sample without a sampled token has no token that could carry its score.
        """
        assert context.reward is not None
        left_out = np.array([0.0 if any(t.mask) else 1.0 for t in context.trajectories], np.float32)
        if self.masks_failed:
            left_out = np.maximum(left_out, context.reward.failed)
        if self.masks_truncated:
            truncated = np.array([t.truncated for t in context.trajectories])
            left_out = np.where(truncated, np.float32(1.0), left_out)
        return left_out

    def greedy(self, context: StepContext, step: int, answers: HostResponses) -> np.ndarray:
        """No answer of several turns is greedy in training: the plan refuses such algorithms."""
        raise AssertionError("the plan refuses algorithms with greedy answers")


def with_environment(config: Config, functions: RewardFunctions | None) -> TurnRewards:
    """The rewards of a run with tools or environments; `functions` None: it has no function."""
    return TurnRewards(
        functions=functions,
        masks_failed=config.reward.on_failure == "mask",
        masks_truncated=config.rollout.mask_truncated,
        failure_value=config.reward.failure_value,
        failing=FailedSteps(min(MOST_STEPS, config.total_steps)),
    )
