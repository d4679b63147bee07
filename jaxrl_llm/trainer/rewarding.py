"""Python reward functions, as the host stages call them.

Several processes share the work by whole groups; every process ends with all scores.
"""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from jaxrl_llm.config import Config
from jaxrl_llm.distributed.multihost import gather_objects, gather_rows
from jaxrl_llm.plan.online import stop_ids
from jaxrl_llm.plan.scores import HostReward
from jaxrl_llm.rewards.manager import RewardManager, RewardResult, part_metrics
from jaxrl_llm.tokenizer import Tokenizer
from jaxrl_llm.trainer.data import completions_of
from jaxrl_llm.trainer.signals import host_work
from jaxrl_llm.types import Completion, Prompt


@dataclass(kw_only=True)
class StepContext:
    """What the host knows of one iteration. Host stages read it and write their results here."""

    prompts: list[Prompt]  # one a group
    n: int  # samples a prompt
    first_sample: int = 0  # samples of this step before these, where a step generates repeatedly
    completions: list[Completion] = field(default_factory=list)  # those that this process scored
    reward: RewardResult | None = None  # of `completions`
    first_group: int = 0  # index of the first prompt that this process scored


@dataclass(frozen=True, kw_only=True)
class RewardFunctions(HostReward):
    """The reward functions of a run, on text."""

    manager: RewardManager
    tokenizer: Tokenizer
    stop_ids: tuple[int, ...]

    @property
    def names(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The names of the functions, in the order of the columns of `reward_parts`."""
        return self.manager.names

    def score(
        self,
        context: StepContext,
        step: int,
        responses: np.ndarray,
        mask: np.ndarray,
        logprobs: np.ndarray,
    ) -> tuple[np.ndarray, np.ndarray, dict[str, float]]:
        """Scores [B] and their parts [B, K], float32, in the order of the samples; metrics."""
        share = group_share(len(context.prompts))
        rows = slice(share.start * context.n, share.stop * context.n)
        context.first_group = share.start
        context.completions = self._completions(responses[rows], mask[rows], logprobs[rows])
        repeated = [p for p in context.prompts[share] for _ in range(context.n)]
        with host_work():
            context.reward = self.manager.score(repeated, context.completions, step)
        scores = gather_rows(context.reward.scores)
        metrics = over_processes(context.reward.metrics)
        parts = {name: gather_rows(part) for name, part in context.reward.parts.items()}
        for name, part in parts.items():
            metrics |= part_metrics(name, part)
        columns = np.stack([parts[name] for name in self.names], axis=1)
        return scores, columns, metrics

    def greedy(
        self,
        context: StepContext,
        step: int,
        responses: np.ndarray,
        mask: np.ndarray,
        logprobs: np.ndarray,
    ) -> np.ndarray:
        """Scores of one greedy answer to each prompt, float32."""
        share = group_share(len(context.prompts))
        completions = self._completions(responses[share], mask[share], logprobs[share])
        with host_work():
            found = self.manager.score(context.prompts[share], completions, step)
        return gather_rows(found.scores)

    def _completions(
        self, responses: np.ndarray, mask: np.ndarray, logprobs: np.ndarray
    ) -> list[Completion]:
        return completions_of(self.tokenizer, self.stop_ids, responses, mask, logprobs)


@dataclass(frozen=True)
class ArrayReward(HostReward):
    """A reward of arrays: fn(responses, mask) -> scores. For use without text to grade."""

    fn: Callable[[np.ndarray, np.ndarray], np.ndarray]
    names: tuple[str, ...] = ("score",)

    def score(
        self, context: Any, step: int, responses: np.ndarray, mask: np.ndarray, logprobs: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, dict[str, float]]:
        """The scores, which are also the one part."""
        scores = self.fn(responses, mask).astype(np.float32)
        return scores, scores[:, None], {}

    def greedy(
        self, context: Any, step: int, responses: np.ndarray, mask: np.ndarray, logprobs: np.ndarray
    ) -> np.ndarray:
        """Scores."""
        return self.fn(responses, mask).astype(np.float32)


def open_reward(config: Config, tokenizer: Tokenizer, stack: ExitStack) -> RewardFunctions | None:
    """The Python reward functions; None when a model gives the reward. `stack` closes them."""
    if not config.reward.functions:
        return None
    rewards = config.reward
    manager = RewardManager(
        rewards.functions,
        weights=rewards.weights or None,
        failure_value=rewards.failure_value,
        timeout=rewards.timeout_s,
        num_workers=rewards.num_workers,
        total_steps=config.total_steps,
    )
    return RewardFunctions(
        manager=stack.enter_context(manager),
        tokenizer=tokenizer,
        stop_ids=stop_ids(config, tokenizer),
    )


def group_share(num_groups: int) -> slice:
    """The groups that this process scores; all of them when they do not divide evenly."""
    count, index = jax.process_count(), jax.process_index()
    assert num_groups % count == 0, (num_groups, count)
    size = num_groups // count
    return slice(index * size, (index + 1) * size)


def over_processes(metrics: dict[str, float]) -> dict[str, float]:
    """Metrics of all processes as one: failures are summed, other metrics averaged.

    A name that some process did not log is averaged over the processes that did.
    """
    if jax.process_count() == 1:
        return dict(metrics)
    everyone = gather_objects(dict(metrics))
    out = {}
    for name in sorted({name for one in everyone for name in one}):
        values = [one[name] for one in everyone if name in one]
        out[name] = sum(values) if name.endswith("failures") else sum(values) / len(values)
    return out
