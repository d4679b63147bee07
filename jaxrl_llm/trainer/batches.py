"""Sources of batches: prompts for online RL, groups that vary, records for offline training.

A source gives the arrays of each step, and takes back what the step made of them.

Dynamic sampling (DAPO) replaces groups whose samples all got one reward. Such a group teaches
nothing to an estimator that compares the samples of a prompt. So the stages up to the reward run
again, on the loader's next prompts, until enough groups vary. The rest of the iteration then runs
once, on those. Groups that are too many are dropped, as in verl. So the only state is the loader's
position, which a checkpoint holds, and a resumed run generates the same rounds.

Yu et al. 2025, arXiv:2503.14476.
"""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxrl_llm.config import FilterGroupsConfig
from jaxrl_llm.data.loader import Loader, PromptLoader
from jaxrl_llm.data.packing import OfflineRecord
from jaxrl_llm.data.priority import PriorityLoader
from jaxrl_llm.distributed.multihost import fetch, make_global
from jaxrl_llm.distributed.sharding import batch_sharding
from jaxrl_llm.observability.timing import Timer
from jaxrl_llm.plan.dataflow import States
from jaxrl_llm.plan.offline import OfflinePlan
from jaxrl_llm.plan.online import OnlinePlan
from jaxrl_llm.tokenizer import Tokenizer
from jaxrl_llm.trainer.data import prompt_batch
from jaxrl_llm.trainer.output import RunOutput
from jaxrl_llm.trainer.progress import StepTokens
from jaxrl_llm.trainer.rewarding import StepContext
from jaxrl_llm.types import RolloutBatch

WAITING = "data"  # `timing_s/data`: until the loader has the prompts or records of a step
AnyLoader = PromptLoader | PriorityLoader | Loader[OfflineRecord, Any]


class Batches(ABC):
    """A source of batches. Its position is its loader's, which is part of a checkpoint."""

    @property
    @abstractmethod
    def epoch(self) -> int:
        """Passes over the data that are complete."""

    @abstractmethod
    def next(self, step: int, states: States, timer: Timer) -> tuple[Any, Any]:
        """The batch of `step` on the mesh, and the context that its host stages read."""

    @abstractmethod
    def finish(self, step: int, batch: Any, context: Any, found: dict[str, Any]) -> dict[str, Any]:
        """Take in the batch that the program of `step` completed; the metrics of the step.

        `found` are those that the program measured.
        """

    @abstractmethod
    def tokens(self, batch: Any) -> StepTokens:
        """The tokens of a batch that was completed."""


# ------------------------------------------------------------------------- online


@dataclass(kw_only=True)
class PromptBatches(Batches):
    """The next prompts, in epochs or by priority."""

    loader: PromptLoader | PriorityLoader
    plan: OnlinePlan
    tokenizer: Tokenizer
    output: RunOutput

    @property
    def epoch(self) -> int:
        return self.loader.epoch

    def next(self, step: int, states: States, timer: Timer) -> tuple[Any, Any]:
        return self._prompts(step, timer, first_sample=0)

    def finish(self, step: int, batch: Any, context: Any, found: dict[str, Any]) -> dict[str, Any]:
        self._note(step, context, batch)
        return found | self._priorities(step)

    def tokens(self, batch: Any) -> StepTokens:
        prompts, mask = fetch((batch.prompt_lengths, batch.mask))
        return StepTokens(
            num_prompt=int(prompts.sum()),
            num_response=int(mask.sum()),
            lengths=(prompts + mask.sum(axis=1)).astype(int).tolist(),
        )

    def _prompts(self, step: int, timer: Timer, first_sample: int) -> tuple[Any, StepContext]:
        """The next prompts, after `first_sample` samples of the same step."""
        config, loader = self.plan.config, self.loader
        with timer(WAITING):
            prompts = loader.draw(step) if isinstance(loader, PriorityLoader) else next(loader)
        host_batch = prompt_batch(
            prompts,
            n=config.rollout.n,
            max_prompt_length=config.data.max_prompt_length,
            pad_id=self.tokenizer.pad_id,
            first_sample=first_sample,
        )
        context = StepContext(prompts=prompts, n=config.rollout.n, first_sample=first_sample)
        return make_global(host_batch, batch_sharding(self.plan.learner.mesh)), context

    def _note(self, step: int, context: StepContext, batch: Any) -> None:
        """Trace the samples. Priorities follow all scores, also of groups that are not kept."""
        self.output.rollout(step, context, batch)
        if isinstance(self.loader, PriorityLoader):
            self.loader.update(step, fetch(batch.scores))

    def _priorities(self, step: int) -> dict[str, float]:
        return self.loader.metrics(step) if isinstance(self.loader, PriorityLoader) else {}


@dataclass(kw_only=True)
class FilteredBatches(PromptBatches):
    """Dynamic sampling: the rollout runs until there are enough groups that vary.

    What a round measures is averaged over the rounds; the rest is of the batch learned from.
    """

    _groups: "GroupFilter | None" = None
    _rounds: list[dict[str, Any]] = field(default_factory=list)

    def next(self, step: int, states: States, timer: Timer) -> tuple[Any, Any]:
        config, iteration = self.plan.config, self.plan.at(step)
        groups = GroupFilter(
            config=config.rollout.filter_groups,
            num_groups=config.data.train_batch_size,
            group=config.rollout.n,
            column=iteration.filter_column,
        )
        samples = config.data.train_batch_size * config.rollout.n
        self._groups, self._rounds = groups, []
        while not groups.complete:
            batch, context = self._prompts(step, timer, groups.rounds * samples)
            _, batch, found = iteration.program.run(
                states, batch, step, context, timer, iteration.collecting
            )
            groups.add(fetch(batch))
            self._note(step, context, batch)
            self._rounds.append(fetch(found))
        return make_global(groups.batch(), batch_sharding(iteration.mesh)), None

    def finish(self, step: int, batch: Any, context: Any, found: dict[str, Any]) -> dict[str, Any]:
        assert self._groups is not None
        rounds = self._rounds
        every = {name for round_metrics in rounds for name in round_metrics}
        means = {name: np.mean([r[name] for r in rounds if name in r]) for name in sorted(every)}
        return means | found | self._groups.metrics() | self._priorities(step)


@dataclass(kw_only=True)
class GroupFilter:
    """Takes in the rounds of one iteration and gives its batch; all in numpy.

    `column` is the column of `reward_parts` that must vary; None stands for the score.
    """

    config: FilterGroupsConfig
    num_groups: int  # wanted
    group: int  # samples of each
    column: int | None = None
    _varied: list[RolloutBatch] = field(default_factory=list)
    _constant: list[RolloutBatch] = field(default_factory=list)
    _rounds: int = 0

    @property
    def rounds(self) -> int:
        """How many were taken in."""
        return self._rounds

    @property
    def complete(self) -> bool:
        """True when no other round is to be generated."""
        return self._count(self._varied) >= self.num_groups or (
            self._rounds >= self.config.max_num_gen_batches
        )

    def add(self, batch: RolloutBatch) -> None:
        """Take in a round: whole groups, the samples of a group one after the other."""
        if self.column is None:
            assert batch.scores is not None
            values: Any = batch.scores
        else:
            assert batch.reward_parts is not None
            values = np.nan_to_num(np.asarray(batch.reward_parts)[:, self.column])  # None adds 0
        groups = np.asarray(values).reshape(-1, self.group)
        varies = (groups.max(axis=1) != groups.min(axis=1)).repeat(self.group)
        self._varied.append(_rows(batch, varies))
        self._constant.append(_rows(batch, ~varies))
        self._rounds += 1

    def batch(self) -> RolloutBatch:
        """The groups to learn from, in the order in which they were generated.

        Raises ValueError when there are too few, unless the config fills up with groups that do
        not vary; those come last.
        """
        missing = self.num_groups - self._count(self._varied)
        rounds = list(self._varied)
        if missing > 0:
            if self.config.shortage == "error":
                raise ValueError(
                    f"after {self._rounds} rounds of generation only "
                    f"{self._count(self._varied)} of {self.num_groups} groups vary in "
                    f"{self.config.metric!r}: the prompts are too easy or too hard by now. Raise "
                    "config.rollout.filter_groups.max_num_gen_batches or config.rollout.n, lower "
                    "config.data.train_batch_size, or go on with the groups there are by "
                    "config.rollout.filter_groups.shortage=fill"
                )
            rounds += self._constant
        whole = _join(rounds)
        whole = _rows(whole, np.arange(len(whole.sample_ids)) < self.num_groups * self.group)
        ids: Any = np.arange(self.num_groups, dtype=np.int32).repeat(self.group)
        return whole.replace(group_ids=ids)

    def metrics(self) -> dict[str, float]:
        """How many groups were generated, how many varied, how many replace others."""
        varied, constant = self._count(self._varied), self._count(self._constant)
        return {
            "train/num_gen_batches": float(self._rounds),
            "rollout/groups_generated": float(varied + constant),
            "rollout/groups_varied": float(varied),
            "rollout/groups_filled": float(max(self.num_groups - varied, 0)),
            "frac_reward_zero_std": constant / (varied + constant),
        }

    def _count(self, rounds: list[RolloutBatch]) -> int:
        return sum(len(batch.sample_ids) for batch in rounds) // self.group


def _rows(batch: RolloutBatch, chosen: np.ndarray) -> RolloutBatch:
    return batch.replace(**{name: x[chosen] for name, x in _written(batch).items()})


def _join(batches: list[RolloutBatch]) -> RolloutBatch:
    names = _written(batches[0])
    return batches[0].replace(
        **{name: np.concatenate([batch[name] for batch in batches]) for name in names}
    )


def _written(batch: RolloutBatch) -> Mapping[str, Any]:
    """The fields that were written."""
    every = {f.name: getattr(batch, f.name) for f in dataclasses.fields(batch)}
    extra = every.pop("extra")
    return {name: x for name, x in every.items() if x is not None} | extra


# ------------------------------------------------------------------------- offline


@dataclass(kw_only=True)
class RecordBatches(Batches):
    """The next records of offline training."""

    loader: Loader[OfflineRecord, Any]
    plan: OfflinePlan
    _on_host: Any = None

    @property
    def epoch(self) -> int:
        return self.loader.epoch

    def next(self, step: int, states: States, timer: Timer) -> tuple[Any, Any]:
        with timer(WAITING):
            self._on_host = next(self.loader)
        return make_global(self._on_host, batch_sharding(self.plan.learner.mesh)), None

    def finish(self, step: int, batch: Any, context: Any, found: dict[str, Any]) -> dict[str, Any]:
        return found

    def tokens(self, batch: Any) -> StepTokens:
        rows = [self._on_host[name] for name in self.plan.algorithm.records.groups]
        rows = [group for group in rows if group is not None]
        total = sum(int(group.lengths.sum()) for group in rows)
        answers = sum(int(group.loss_mask.sum()) for group in rows)
        return StepTokens(num_prompt=total - answers, num_response=answers)
