"""Rewards of answers of several turns: the environment's, and the reward functions'."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jaxrl_llm.agents.trajectory import Trajectory
from jaxrl_llm.config import Config
from jaxrl_llm.distributed.multihost import gather_objects
from jaxrl_llm.observability.moments import Moments
from jaxrl_llm.plan.conversing import completions_of_turns
from jaxrl_llm.plan.scores import ENVIRONMENT, HostResponses, HostReward
from jaxrl_llm.program.stage import StepContext
from jaxrl_llm.rewards.manager import RewardFailure, RewardResult
from jaxrl_llm.rewards.statistics import RewardStatistics, merge
from jaxrl_llm.trainer.rewarding import RewardFunctions
from jaxrl_llm.types import Prompt


@dataclass(frozen=True, kw_only=True)
class TurnRewards(HostReward):
    """The score of a sample: its functions' weighted sum, and what its environment gave.

    Functions get the last turn as the completion. They may ask for the columns of `turn_columns`.
    """

    functions: RewardFunctions | None
    masks_failed: bool
    masks_truncated: bool
    failure_value: float

    @property
    def names(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The functions' names, then `environment`."""
        return (*(() if self.functions is None else self.functions.names), ENVIRONMENT)

    @property
    def masks(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """True where some samples may be left out."""
        return self.masks_failed or self.masks_truncated

    def check(self, config: Config, prompts: Sequence[Prompt]) -> None:
        """See `RewardFunctions.check`."""
        if self.functions is not None:
            with_turns = [replace(p, columns=p.columns | turn_columns(NO_TURNS)) for p in prompts]
            self.functions.check(config, with_turns)

    def score(
        self, context: StepContext, step: int, answers: HostResponses
    ) -> tuple[np.ndarray, np.ndarray, dict[str, float]]:
        """Scores [N] and their parts [N, K], float32, of the owned rows; metrics of all rows."""
        trajectories = context.trajectories
        given = [np.nan if t.reward is None else t.reward for t in trajectories]
        environment = np.array(given, np.float32)
        completions = completions_of_turns(trajectories)
        if self.functions is None:
            context.completions, metrics = completions, {}
            scores, columns = np.zeros(len(given), np.float32), np.zeros((len(given), 0))
            empty: list[dict[str, Any]] = [{} for _ in given]
            none = RewardStatistics()
            result = RewardResult(scores=scores, parts={}, statistics=none, extras=empty)
        else:
            prompts = [
                replace(prompt, columns=prompt.columns | turn_columns(trajectory))
                for prompt, trajectory in zip(
                    context.prompts_of(context.rows.owned), trajectories, strict=True
                )
            ]
            scores, columns, metrics = self.functions.score_of(context, step, prompts, completions)
            assert context.reward is not None
            result = context.reward
        failed = np.array([t.failed for t in trajectories])
        scores = scores + np.nan_to_num(environment)
        if not self.masks_failed:
            scores = np.where(failed, np.float32(self.failure_value), scores)
        failures = [
            RewardFailure(
                function=ENVIRONMENT,
                index=i,
                kind=trajectory.stop_reason,
                message=trajectory.failure,
                prompt=prompt.text,
                completion=trajectory.text,
            )
            for i, (prompt, trajectory) in enumerate(
                zip(context.prompts_of(context.rows.owned), trajectories, strict=True)
            )
            if trajectory.failed
        ]
        context.reward = replace(
            result,
            scores=scores.astype(np.float32),
            parts=result.parts | {ENVIRONMENT: environment},
            extras=[
                extra | _traced(trajectory)
                for extra, trajectory in zip(result.extras, trajectories, strict=True)
            ],
            failures=[*result.failures, *failures],
        )
        own = RewardStatistics(
            parts={ENVIRONMENT: Moments.of(environment[~np.isnan(environment)].tolist())},
            failures={ENVIRONMENT: len(failures)},
            num_failed=len(failures),
        )
        mine = merge(gather_objects(own.to_json(), "environment")).metrics()
        mine["rewards/failures"] += metrics.get("rewards/failures", 0.0)
        columns = np.concatenate([columns, environment[:, None]], axis=1).astype(np.float32)
        return context.reward.scores, columns, metrics | mine

    def step_rewards(self, context: StepContext, shape: tuple[int, int]) -> np.ndarray:
        """The rewards of turns at their last tokens, and the functions' of steps, [N, R]."""
        rewards = np.zeros(shape, np.float32)
        for row, trajectory in enumerate(context.trajectories):
            for turn in trajectory.turns:
                if turn.reward is not None and turn.end > turn.start:
                    rewards[row, turn.end - 1] += turn.reward
        return rewards

    def left_out(self, context: StepContext, rows: int) -> np.ndarray:
        """1 for each sample that failed, or was truncated, and is masked."""
        assert context.reward is not None
        left_out = np.zeros(rows, np.float32)
        if self.masks_failed:
            left_out = context.reward.failed
        if self.masks_truncated:
            truncated = np.array([t.truncated for t in context.trajectories])
            left_out = np.where(truncated, np.float32(1.0), left_out)
        return left_out

    def greedy(self, context: StepContext, step: int, answers: HostResponses) -> np.ndarray:
        """No answer of several turns is greedy in training: the plan refuses such algorithms."""
        raise NotImplementedError


def with_environment(config: Config, functions: RewardFunctions | None) -> TurnRewards:
    """The rewards of a run with tools or environments; `functions` None: it has no function."""
    return TurnRewards(
        functions=functions,
        masks_failed=config.reward.on_failure == "mask",
        masks_truncated=config.rollout.mask_truncated,
        failure_value=config.reward.failure_value,
    )


NO_TURNS = Trajectory(id="", sample=0, group=0, prompt_ids=())


def turn_columns(trajectory: Trajectory) -> dict[str, Any]:
    """What a reward function may ask for by these names."""
    return {
        "messages": [*trajectory.messages],
        "num_turns": len(trajectory.turns),
        "num_tool_calls": sum(len(turn.calls) for turn in trajectory.turns),
        "stop_reason": trajectory.stop_reason,
        "environment_reward": trajectory.reward,
    }


def _traced(trajectory: Trajectory) -> dict[str, Any]:
    """The part of the trace that only answers of several turns have."""
    turns = [
        {"start": turn.start, "end": turn.end, "reward": turn.reward, "failed": turn.num_failed}
        for turn in trajectory.turns
    ]
    return {
        "trajectory": trajectory.id,
        "stop_reason": trajectory.stop_reason,
        "turns": turns,
        "messages": [*trajectory.messages],
        "tool_s": round(trajectory.tool_s, 3),
    }
