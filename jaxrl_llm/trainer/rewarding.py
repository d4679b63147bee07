"""Python reward functions, as the host stages call them: each process grades the rows it owns."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import numpy as np

from jaxrl_llm.config import Config
from jaxrl_llm.data.run_data import columns_by_source
from jaxrl_llm.data.share import own_indices
from jaxrl_llm.distributed.multihost import gather_objects
from jaxrl_llm.generation.completions import completions_of
from jaxrl_llm.generation.stop_strings import Stops
from jaxrl_llm.plan.models import stops_of
from jaxrl_llm.plan.scores import HostResponses, HostReward
from jaxrl_llm.program.stage import StepContext
from jaxrl_llm.rewards.graders import worker_limits
from jaxrl_llm.rewards.manager import RewardManager, refuse_unreadable
from jaxrl_llm.rewards.statistics import merge
from jaxrl_llm.rewards.steps import last_tokens
from jaxrl_llm.supervision.masked_steps import MOST_STEPS, named_steps
from jaxrl_llm.supervision.signals import host_work
from jaxrl_llm.tokenizer import Tokenizer
from jaxrl_llm.types import Completion, Prompt


@dataclass
class FailedSteps:
    """Counts the last steps in which all samples failed, and ends a run of `most` of them."""

    most: int
    _steps: list[tuple[int, str]] = field(default_factory=list, init=False)  # with first failures

    def count(self, step: int, num_failed: int, number: int, first: Sequence[str]) -> None:
        """Take in a step with `number` samples; `first` has the first failure of each process.

        Raises: ValueError at the `most`-th failed step in a row.
        """
        if num_failed < number:
            self._steps.clear()
        elif number:
            self._steps.append((step, next(text for text in first if text)))
        if len(self._steps) == self.most:
            named = named_steps([step for step, _ in self._steps])
            raise ValueError(
                f"every reward of {named} failed, so nothing is learned. The first: "
                f"{self._steps[0][1]}. Fix the reward function, the tool or the environment; the "
                "same command then goes on from the last checkpoint"
            )


@dataclass(frozen=True, kw_only=True)
class RewardFunctions(HostReward):
    """The reward functions of a run, on text."""

    manager: RewardManager
    tokenizer: Tokenizer
    stops: Stops
    process_rewards: bool = False  # rewards of steps go to the tokens that end them
    masks_failed: bool = False  # failed samples are left out
    masks_truncated: bool = False  # samples that were cut at the maximum length are left out
    failing: "FailedSteps" = field(default_factory=lambda: FailedSteps(MOST_STEPS))

    def check(self, config: Config, prompts: Sequence[Prompt]) -> None:
        """Refuse functions that ask for a column that no prompt has, or can read no right answer.

        Raises ValueError. Of streamed prompts, right answers are read when they come.
        """
        sources = columns_by_source(prompts).values()
        self.manager.check(
            sorted({name for columns in sources for name in columns}),
            config.data.columns,
            all_rows=not config.data.streaming,
        )
        if not config.data.streaming:
            truths = [prompts[index].ground_truth for index in own_indices(prompts)]
            refuse_unreadable(
                gather_objects(self.manager.unreadable(truths), "right answers"), "training"
            )

    @property
    def names(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The names of the functions, in the order of the columns of `reward_parts`."""
        return self.manager.names

    def score(
        self, context: StepContext, step: int, answers: HostResponses
    ) -> tuple[np.ndarray, np.ndarray, dict[str, float]]:
        """Scores [N] and their parts [N, K], float32, of the owned rows; metrics of all rows.

        Raises: ValueError when all rewards of all processes failed, as `failing` says.
        """
        prompts = context.prompts_of(context.rows.owned)
        return self.score_of(context, step, prompts, self._completions(answers))

    def score_of(
        self,
        context: StepContext,
        step: int,
        prompts: Sequence[Prompt],
        completions: list[Completion],
    ) -> tuple[np.ndarray, np.ndarray, dict[str, float]]:
        """`score` of answers that are text already."""
        context.completions = completions
        with host_work():
            reward = context.reward = self.manager.score(prompts, completions, step)
        if any(reward.steps) and not self.process_rewards:
            raise ValueError(
                "a reward function gives rewards of steps (step_scores), and nothing would read "
                "where they end: set --config.reward.process_rewards=true"
            )
        columns = np.stack([reward.parts[name] for name in self.names], axis=1)
        first = reward.failures[0].describe() if reward.failures else ""
        own = [reward.statistics.to_json(), len(reward.scores), first]
        everyone = gather_objects(own, "rewards")
        statistics = merge(counts for counts, _, _ in everyone)
        number = sum(number for _, number, _ in everyone)
        self.failing.count(step, statistics.num_failed, number, [first for *_, first in everyone])
        return reward.scores, columns, statistics.metrics()

    def greedy(self, context: StepContext, step: int, answers: HostResponses) -> np.ndarray:
        """Scores of the greedy answers to the prompts whose first sample is owned, float32."""
        owned = context.rows.owned
        prompts = context.prompts_of(owned[owned % context.n == 0])
        completions = self._completions(answers)
        with host_work():
            result = self.manager.score(prompts, completions, step)
        if not self.masks_failed:
            return result.scores
        return np.where(result.failed != 0, np.float32(np.nan), result.scores)

    @property
    def masks(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """True where some samples may be left out."""
        return self.masks_failed or self.masks_truncated

    def left_out(self, context: StepContext, rows: int) -> np.ndarray:
        """1 for each of the samples just scored that failed, or was truncated, and is masked."""
        assert context.reward is not None
        left_out = np.zeros(rows, np.float32)
        if self.masks_failed:
            left_out = context.reward.failed
        if self.masks_truncated:
            finished = [completion.finished for completion in context.completions]
            left_out = np.where(finished, left_out, np.float32(1.0))
        return left_out

    def step_rewards(self, context: StepContext, shape: tuple[int, int]) -> np.ndarray:
        """The rewards of steps at their last tokens, weighted: float32 [N, R]."""
        assert context.reward is not None
        rewards = np.zeros(shape, np.float32)
        samples = zip(context.completions, context.reward.steps, strict=True)
        for row, (completion, given) in enumerate(samples):
            for weight, steps in given:
                places = last_tokens(steps, completion, self.tokenizer)
                np.add.at(rewards[row], places, weight * np.array(steps.scores, np.float32))
        return rewards

    def _completions(self, answers: HostResponses) -> list[Completion]:
        return completions_of(self.tokenizer, self.stops, *answers)


def open_reward(config: Config, tokenizer: Tokenizer, stack: ExitStack) -> RewardFunctions | None:
    """The Python reward functions; None when a model gives the reward. `stack` closes them."""
    if not config.reward.functions:
        return None
    rewards = config.reward
    manager = RewardManager(
        rewards.functions,
        weights=rewards.weights or None,
        max_retries=rewards.max_retries,
        on_failure=rewards.on_failure,
        failure_value=rewards.failure_value,
        timeout=rewards.timeout_s,
        num_workers=rewards.num_workers,
        total_steps=config.total_steps,
        limits=worker_limits(rewards),
    )
    return RewardFunctions(
        manager=stack.enter_context(manager),
        tokenizer=tokenizer,
        stops=stops_of(config, tokenizer),
        process_rewards=rewards.process_rewards,
        masks_failed=rewards.on_failure == "mask",
        masks_truncated=config.rollout.mask_truncated,
        failing=FailedSteps(min(MOST_STEPS, config.total_steps)),
    )
