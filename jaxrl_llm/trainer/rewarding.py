"""The host stage that scores responses with Python reward functions.

Several processes share the work by whole groups; every process ends with all scores.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from jaxrl_llm.distributed.multihost import gather_objects, gather_rows
from jaxrl_llm.rewards.combine import RewardManager, RewardResult
from jaxrl_llm.tokenizer import Tokenizer
from jaxrl_llm.trainer.dataflow import StageOutput
from jaxrl_llm.trainer.samples import completions_of
from jaxrl_llm.types import Completion, Prompt


@dataclass(kw_only=True)
class StepContext:
    """What the host knows of one iteration; host stages read it and leave their findings here."""

    prompts: list[Prompt]  # one a group
    n: int  # samples a prompt
    first_sample: int = 0  # samples of this step before these, where a step generates repeatedly
    completions: list[Completion] = field(default_factory=list)  # those that this process scored
    reward: RewardResult | None = None  # of `completions`
    first_group: int = 0  # index of the first prompt that this process scored


@dataclass(frozen=True, kw_only=True)
class RewardFunctions:
    """fn of the reward stages: of the samples (a call) and of the greedy answers (`greedy`)."""

    manager: RewardManager
    tokenizer: Tokenizer
    stop_ids: tuple[int, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """Of the functions, in the order of the columns of `reward_parts`."""
        return self.manager.names

    def __call__(
        self,
        context: StepContext,
        step: int,
        responses: np.ndarray,
        mask: np.ndarray,
        logprobs: np.ndarray,
    ) -> StageOutput:
        """Scores [B] and their parts [B, K]: float32, in the order of the samples."""
        share = group_share(len(context.prompts))
        rows = slice(share.start * context.n, share.stop * context.n)
        context.first_group = share.start
        context.completions = self._completions(responses[rows], mask[rows], logprobs[rows])
        repeated = [p for p in context.prompts[share] for _ in range(context.n)]
        context.reward = self.manager.score(repeated, context.completions, step)
        scores = gather_rows(context.reward.scores)
        metrics = over_processes(context.reward.metrics)
        parts = {name: gather_rows(part) for name, part in context.reward.parts.items()}
        for name, part in parts.items():
            metrics |= part_metrics(name, part)
        columns = np.stack([parts[name] for name in self.names], axis=1)
        return StageOutput(writes=(scores, columns), metrics=metrics)

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
        return gather_rows(self.manager.score(context.prompts[share], completions, step).scores)

    def _completions(
        self, responses: np.ndarray, mask: np.ndarray, logprobs: np.ndarray
    ) -> list[Completion]:
        return completions_of(self.tokenizer, self.stop_ids, responses, mask, logprobs)


@dataclass(frozen=True)
class ArrayReward:
    """A `HostReward` of arrays: fn(responses, mask) -> scores. Where there is no text to grade."""

    fn: Callable[[np.ndarray, np.ndarray], np.ndarray]
    names: tuple[str, ...] = ("score",)

    def __call__(
        self, context: Any, step: int, responses: np.ndarray, mask: np.ndarray, logprobs: np.ndarray
    ) -> StageOutput:
        """Scores and, of the one part, the same."""
        scores = self.fn(responses, mask).astype(np.float32)
        return StageOutput(writes=(scores, scores[:, None]), metrics={})

    def greedy(
        self, context: Any, step: int, responses: np.ndarray, mask: np.ndarray, logprobs: np.ndarray
    ) -> np.ndarray:
        """Scores."""
        return self.fn(responses, mask).astype(np.float32)


def group_share(num_groups: int) -> slice:
    """The groups that this process scores; all of them when they do not divide evenly."""
    count, index = jax.process_count(), jax.process_index()
    assert num_groups % count == 0, (num_groups, count)
    size = num_groups // count
    return slice(index * size, (index + 1) * size)


def over_processes(metrics: dict[str, float]) -> dict[str, float]:
    """One process's metrics combined with the others': failures are summed, the rest averaged.

    A name that some process did not log is averaged over those that did.
    """
    if jax.process_count() == 1:
        return dict(metrics)
    everyone = gather_objects(dict(metrics))
    out = {}
    for name in sorted({name for one in everyone for name in one}):
        values = [one[name] for one in everyone if name in one]
        out[name] = sum(values) if name.endswith("failures") else sum(values) / len(values)
    return out


def part_metrics(name: str, part: np.ndarray) -> dict[str, float]:
    """rewards/<function>/{mean,std} over the samples to which the function applied, unbiased."""
    valid = part[~np.isnan(part)].astype(np.float64)
    if valid.size == 0:
        return {}
    std = valid.std(ddof=1) if valid.size > 1 else 0.0
    return {f"rewards/{name}/mean": float(valid.mean()), f"rewards/{name}/std": float(std)}
