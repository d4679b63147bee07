"""The host stage that scores responses with Python reward functions.

Several processes share the work by whole groups; every process ends with all scores.
"""

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
    completions: list[Completion] = field(default_factory=list)  # those that this process scored
    reward: RewardResult | None = None  # of `completions`
    first_group: int = 0  # index of the first prompt that this process scored


@dataclass(frozen=True, kw_only=True)
class RewardFunctions:
    """fn of the reward stage."""

    manager: RewardManager
    tokenizer: Tokenizer
    stop_ids: tuple[int, ...]

    def __call__(
        self,
        context: StepContext,
        step: int,
        responses: np.ndarray,
        mask: np.ndarray,
        logprobs: np.ndarray,
    ) -> StageOutput:
        """Scores [B]: float32, in the order of the samples."""
        share = group_share(len(context.prompts))
        rows = slice(share.start * context.n, share.stop * context.n)
        context.first_group = share.start
        context.completions = completions_of(
            self.tokenizer, self.stop_ids, responses[rows], mask[rows], logprobs[rows]
        )
        repeated = [p for p in context.prompts[share] for _ in range(context.n)]
        context.reward = self.manager.score(repeated, context.completions, step)
        scores = gather_rows(context.reward.scores)
        metrics = over_processes(context.reward.metrics)
        for name, part in context.reward.parts.items():
            metrics |= part_metrics(name, gather_rows(part))
        metrics["frac_reward_zero_std"] = frac_zero_std(scores, context.n)
        return StageOutput(writes=(scores,), metrics=metrics)


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


def frac_zero_std(scores: np.ndarray, n: int) -> float:
    """Share of the groups whose samples all got the same score: they teach nothing to GRPO."""
    groups: Any = scores.reshape(-1, n)
    return float((groups.max(axis=1) == groups.min(axis=1)).mean())
