"""Sources of batches: prompts for online RL, groups that vary, records for offline training.

A source returns the batch of each step, and receives the batch back after the step.

Dynamic sampling (DAPO) replaces groups whose samples all have the same reward. Such a group has no
signal for an estimator that compares the samples of a prompt. So the stages up to the reward run
again on the next prompts, until enough groups vary. The rest of the iteration then runs once, on
these groups. Surplus groups are dropped, as in verl. So the only state is the position of the
loader, which a checkpoint holds, and a resumed run generates the same rounds.

The samples stay on the devices: a host knows only which groups vary.

Yu et al. 2025, arXiv:2503.14476.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxrl_llm.algorithms.offline import groups_of
from jaxrl_llm.config import Config, FilterGroupsConfig
from jaxrl_llm.data.collating import OfflineRecord, prompt_batch
from jaxrl_llm.data.loader import Loader, PromptLoader
from jaxrl_llm.data.priority import PriorityLoader
from jaxrl_llm.data.run_data import (
    collate_with,
    held_groups,
    held_out_sources,
    load_held_out,
    load_records,
    train_sources,
)
from jaxrl_llm.data.share import digest
from jaxrl_llm.distributed.multihost import (
    HostRows,
    fetch,
    fetch_rows,
    gather_objects,
    make_global,
    place_held,
)
from jaxrl_llm.distributed.sharding import batch_sharding
from jaxrl_llm.distributed.transfer import call
from jaxrl_llm.images import ImageInput, images_of
from jaxrl_llm.observability.metrics import repeated_share
from jaxrl_llm.observability.timing import Timer
from jaxrl_llm.plan.offline_stages import HELD_OUT, TRAIN
from jaxrl_llm.plan.plan import Plan
from jaxrl_llm.program.program import MOVED
from jaxrl_llm.program.stage import States, StepContext
from jaxrl_llm.tokenizer import Tokenizer
from jaxrl_llm.trainer.output import RunOutput
from jaxrl_llm.types import OfflineBatch, RolloutBatch

MEASURED = 64  # responses of a batch whose repetition is measured
WAITING = "data"  # `timing_s/data`: until the loader has the prompts or records of a step
AnyLoader = PromptLoader | PriorityLoader | Loader[OfflineRecord, Any]


@dataclass(frozen=True, kw_only=True)
class StepTokens:
    """The tokens of the samples that a step learned from."""

    num_prompt: int
    num_response: int
    lengths: Sequence[int] = ()  # tokens of this process's samples; empty in offline training

    @classmethod
    def of_all(
        cls, *, num_prompt: int, num_response: int, lengths: Sequence[int] = ()
    ) -> "StepTokens":
        """From the numbers of this process's samples. Every process must call it."""
        everyone = gather_objects([num_prompt, num_response], "tokens")
        prompt, response = (sum(numbers) for numbers in zip(*everyone, strict=True))
        return cls(num_prompt=prompt, num_response=response, lengths=lengths)


class Batches(ABC):
    """A source of batches. Its position is its loader's, which is part of a checkpoint."""

    loader: Any
    saving_s = 0.0  # the longest call of `saved`

    @property
    @abstractmethod
    def epoch(self) -> int:
        """Passes over the data that are complete."""

    @abstractmethod
    def next(self, step: int, states: States, timer: Timer) -> tuple[Any, Any]:
        """The batch of `step` on the mesh, and the context that its host stages read."""

    @abstractmethod
    def finish(
        self, step: int, batch: Any, context: Any, metrics: dict[str, Any]
    ) -> dict[str, Any]:
        """Take in the batch that the program of `step` completed; the metrics of the step.

        `metrics` are the program's.
        """

    @abstractmethod
    def tokens(self, batch: Any) -> StepTokens:
        """The tokens of a batch that was completed."""

    def saved(self, step: int, states: States) -> tuple[dict[str, Any], States]:
        """The source's part of a checkpoint after `step`: JSON types, and arrays by name."""
        return {"data": self.loader.get_state()}, {}

    def close(self) -> None:  # noqa: B027
        """Give up what runs in other threads."""


# ------------------------------------------------------------------------- online


@dataclass(kw_only=True)
class PromptBatches(Batches):
    """The next prompts, in epochs or by priority."""

    loader: PromptLoader | PriorityLoader
    plan: Plan
    tokenizer: Tokenizer
    output: RunOutput
    _repetition: "Repetition" = field(default_factory=lambda: Repetition())

    @property
    def epoch(self) -> int:
        return self.loader.epoch

    def next(self, step: int, states: States, timer: Timer) -> tuple[Any, Any]:
        return self._prompts(step, timer, first_sample=0)

    def finish(
        self, step: int, batch: Any, context: Any, metrics: dict[str, Any]
    ) -> dict[str, Any]:
        self._note(step, context, batch)
        return metrics | self._priorities(step) | self._repetition.take()

    def tokens(self, batch: Any) -> StepTokens:
        fields = (batch.prompt_lengths, batch.response_lengths)
        prompts, responses = fetch_rows(fields, self._rows)
        return StepTokens.of_all(
            num_prompt=int(prompts.sum()),
            num_response=int(responses.sum()),
            lengths=(prompts + responses).tolist(),
        )

    @cached_property
    def _rows(self) -> HostRows:
        """This process's rows of the samples of a batch."""
        config = self.plan.config
        return self.plan.at(1).program.host_rows(config.data.train_batch_size * config.rollout.n)

    def _prompts(self, step: int, timer: Timer, first_sample: int) -> tuple[Any, StepContext]:
        """The next prompts, after `first_sample` samples of the same step."""
        config, loader, rows = self.plan.config, self.loader, self._rows
        groups = held_groups(rows, config.rollout.n)
        with timer(WAITING):
            drawn = isinstance(loader, PriorityLoader)
            rows_read = loader.draw(step, groups) if drawn else next(loader)
        prompts = dict(zip(groups.tolist(), rows_read, strict=True))
        host_batch = prompt_batch(
            prompts,
            rows.held,
            n=config.rollout.n,
            max_prompt_length=config.data.max_prompt_length,
            pad_id=self.tokenizer.pad_id,
            first_sample=first_sample,
            images=images_of(self.tokenizer),
        )
        context = StepContext(
            prompts=prompts,
            n=config.rollout.n,
            rows=rows,
            policy_version=step - 1,
            first_sample=first_sample,
        )
        return place_held(host_batch, batch_sharding(self.plan.learner.mesh), rows), context

    def _note(self, step: int, context: StepContext, batch: Any) -> None:
        """Trace the samples. Priorities follow all scores, also of groups that are not kept."""
        self._trace(step, context, batch)
        self._prioritise(step, batch)

    def _trace(self, step: int, context: StepContext, batch: Any) -> None:
        self.output.rollout(step, context, batch)
        self._repetition.add(context)

    def _prioritise(self, step: int, batch: Any) -> None:
        if isinstance(self.loader, PriorityLoader):
            scores = fetch_rows(batch.scores, self._rows)
            if batch.left_out is not None:
                scores = np.where(fetch_rows(batch.left_out, self._rows) != 0, np.nan, scores)
            elif batch.sample_mask is not None:
                scores = np.where(fetch_rows(batch.sample_mask, self._rows) != 0, scores, np.nan)
            self.loader.update(step, scores, self._rows)

    def _priorities(self, step: int) -> dict[str, float]:
        return self.loader.metrics(step) if isinstance(self.loader, PriorityLoader) else {}


@dataclass(kw_only=True)
class Repetition:
    """Repeated 4-grams of some responses of a step, where they reach the host."""

    _shares: list[float] = field(default_factory=list)
    _any: bool = False

    def add(self, context: StepContext) -> None:
        """Measure every few rows of the batch, whatever the processes; MEASURED in all."""
        if not context.completions:
            return
        self._any = True
        every = -(-context.rows.num_rows // MEASURED)
        for row, completion in zip(context.rows.owned.tolist(), context.completions, strict=True):
            share = repeated_share(completion.tokens) if row % every == 0 else None
            if share is not None:
                self._shares.append(share)

    def take(self) -> dict[str, float]:
        """The mean over all processes, which must all call it; 0 where all are too short."""
        everyone = gather_objects([sum(self._shares), len(self._shares), self._any], "repetition")
        total, count = (sum(process[i] for process in everyone) for i in (0, 1))
        known = any(process[2] for process in everyone)
        self._shares, self._any = [], False
        return {"rollout/repetition": total / max(count, 1)} if known else {}


@dataclass(kw_only=True)
class FilteredBatches(PromptBatches):
    """Dynamic sampling: the rollout runs until there are enough groups that vary.

    What a round measures is averaged over the rounds, and failures are added up; the rest is of the
    batch learned from.
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
            sharding=batch_sharding(iteration.mesh),
        )
        samples = config.data.train_batch_size * config.rollout.n
        self._groups, self._rounds = groups, []
        while not groups.complete:
            batch, context = self._prompts(step, timer, groups.rounds * samples)
            _, batch, metrics = iteration.program.run(
                states, batch, step, context, timer, iteration.collecting
            )
            groups.add(batch)
            self._note(step, context, batch)
            self._rounds.append(fetch(metrics))
        return groups.batch(), None

    def finish(
        self, step: int, batch: Any, context: Any, metrics: dict[str, Any]
    ) -> dict[str, Any]:
        assert self._groups is not None
        rounds = self._rounds
        metrics = metrics | moved_metric(*rounds, metrics)
        own = self._groups.metrics() | self._priorities(step) | self._repetition.take()
        return means_of(rounds) | metrics | own


def means_of(rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The mean of each metric over the rounds that have it. Samples that failed are added up."""
    means: dict[str, Any] = {}
    for name in sorted({name for metrics in rounds for name in metrics}):
        counts = name.startswith("rewards/") and name.endswith("/failures")
        means[name] = (np.sum if counts else np.mean)([r[name] for r in rounds if name in r])
    return means


def moved_metric(*calls: dict[str, Any]) -> dict[str, float]:
    """Gigabytes that moved between groups of devices in a step; nothing on one group."""
    sizes = [metrics[MOVED] for metrics in calls if MOVED in metrics]
    return {MOVED: float(sum(sizes))} if sizes else {}


@dataclass(kw_only=True)
class GroupFilter:
    """Takes in the rounds of one iteration and gives its batch; the samples stay on the devices.

    `column` is the column of `reward_parts` that must vary; None stands for the score.
    `sharding` is the batches'. Without it they are NumPy arrays, and no device is touched.
    """

    config: FilterGroupsConfig
    num_groups: int  # wanted
    group: int  # samples of each
    column: int | None = None
    sharding: NamedSharding | None = None
    # The first `num_groups` groups: those that vary, then the others, each in their order.
    _kept: RolloutBatch | None = None
    _kept_vary: np.ndarray = field(default_factory=lambda: np.zeros(0, bool))
    _varied: int = 0  # groups, also those that were one too many
    _constant: int = 0
    _rounds: int = 0

    @property
    def rounds(self) -> int:
        """The number of rounds that were taken in."""
        return self._rounds

    @property
    def complete(self) -> bool:
        """True when no other round is to be generated."""
        return self._varied >= self.num_groups or (self._rounds >= self.config.max_num_gen_batches)

    def add(self, batch: RolloutBatch) -> None:
        """Take in a round: whole groups, the samples of a group one after the other."""
        values = batch.scores if self.column is None else batch.reward_parts
        assert values is not None
        varies = self._varies(values, batch.left_out, batch.sample_mask)
        candidates = np.concatenate([self._kept_vary, varies])
        order = np.argsort(~candidates, kind="stable")[: self.num_groups]
        rows = (order[:, None] * self.group + np.arange(self.group)).reshape(-1)
        select, kept = self._select, self._kept
        if kept is None:
            self._kept = jax.tree.map(lambda new: select(None, new, rows), batch)
        else:
            self._kept = jax.tree.map(lambda old, new: select(old, new, rows), kept, batch)
        self._kept_vary = candidates[order]
        self._varied += int(varies.sum())
        self._constant += int((~varies).sum())
        self._rounds += 1

    def _varies(self, values: Any, left_out: Any, sample_mask: Any) -> np.ndarray:
        if self.sharding is None:
            return _varies(values, left_out, sample_mask, self.group, self.column, np)
        program = _variation(self.sharding, self.group, self.column)
        return fetch(call(program, (values, left_out, sample_mask), self._mesh))

    def _select(self, kept: Any, new: Any, rows: np.ndarray) -> Any:
        if self.sharding is None:
            return _rows_of(kept, new, rows, np)
        return call(_selection(self.sharding), (kept, new, rows), self._mesh)

    @property
    def _mesh(self) -> Any:
        assert self.sharding is not None
        return self.sharding.mesh

    def batch(self) -> RolloutBatch:
        """The groups to learn from, in the order in which they were generated.

        Raises ValueError when there are too few, unless the config fills up with groups that do
        not vary; those come last.
        """
        assert self._kept is not None
        if self._varied < self.num_groups and self.config.shortage == "error":
            raise ValueError(
                f"after {self._rounds} rounds of generation only {self._varied} of "
                f"{self.num_groups} groups vary in "
                f"{self.config.metric!r}: the prompts are too easy or too hard by now. Raise "
                "config.rollout.filter_groups.max_num_gen_batches or config.rollout.n, lower "
                "config.data.train_batch_size, or go on with the groups there are by "
                "config.rollout.filter_groups.shortage=fill"
            )
        ids: Any = np.arange(self.num_groups, dtype=np.int32).repeat(self.group)
        if self.sharding is not None:
            ids = make_global(ids, self.sharding)
        return self._kept.replace(group_ids=ids)

    def metrics(self) -> dict[str, float]:
        """Counts of the groups that were generated, that vary, and that replace others."""
        varied, constant = self._varied, self._constant
        return {
            "train/num_gen_batches": float(self._rounds),
            "rollout/groups_generated": float(varied + constant),
            "rollout/groups_varied": float(varied),
            "rollout/groups_filled": float(max(self.num_groups - varied, 0)),
            "frac_reward_zero_std": constant / (varied + constant),
        }


def _varies(
    values: Any, left_out: Any, sample_mask: Any, group: int, column: int | None, numeric: Any
) -> Any:
    """True for each group, [B / group], whose scores or column of the parts differ.

    Samples that are left out do not count. `numeric` is NumPy or its namesake of jax.
    """
    if column is not None:
        values = numeric.nan_to_num(values[:, column])  # None adds 0
    kept = numeric.ones(values.shape, bool)
    if left_out is not None:
        kept &= left_out == 0
    if sample_mask is not None:
        kept &= sample_mask != 0
    highest = numeric.where(kept, values, -numeric.inf).reshape(-1, group).max(axis=1)
    lowest = numeric.where(kept, values, numeric.inf).reshape(-1, group).min(axis=1)
    return highest > lowest


def _rows_of(kept: Any, new: Any, rows: Any, numeric: Any) -> Any:
    """Rows of two arrays of samples, one behind the other; the first may be None."""
    return numeric.take(new if kept is None else numeric.concatenate([kept, new]), rows, axis=0)


@lru_cache
def _variation(sharding: NamedSharding, group: int, column: int | None) -> Callable[[Any], Any]:
    """`_varies` on the devices."""
    program = partial(_varies, group=group, column=column, numeric=jnp)
    return jax.jit(program, out_shardings=NamedSharding(sharding.mesh, PartitionSpec()))


@lru_cache
def _selection(sharding: NamedSharding) -> Callable[[Any, Any, np.ndarray], jax.Array]:
    """`_rows_of` on the devices."""
    program = partial(_rows_of, numeric=jnp)
    return jax.jit(program, out_shardings=sharding, donate_argnums=0)


# ------------------------------------------------------------------------- offline


def records_held(plan: Plan) -> HostRows:
    """This process's records of a batch."""
    phase = plan.at(1)
    return phase.program.host_rows(phase.batch.index.shape[0])


@dataclass(kw_only=True)
class RecordBatches(Batches):
    """The next records of offline training."""

    loader: Loader[OfflineRecord, Any]
    plan: Plan
    _on_host: Any = None  # the rows that this process holds

    @cached_property
    def _rows(self) -> HostRows:
        """This process's records of a batch."""
        return records_held(self.plan)

    @property
    def epoch(self) -> int:
        return self.loader.epoch

    def next(self, step: int, states: States, timer: Timer) -> tuple[Any, Any]:
        with timer(WAITING):
            self._on_host = next(self.loader)
        return place_held(self._on_host, batch_sharding(self.plan.learner.mesh), self._rows), None

    def finish(
        self, step: int, batch: Any, context: Any, metrics: dict[str, Any]
    ) -> dict[str, Any]:
        return metrics

    def tokens(self, batch: Any) -> StepTokens:
        groups = [self._on_host[name] for name in self.plan.record_algorithm.records.groups]
        owned = np.isin(self._rows.read, self._rows.owned)
        groups = [group for group in groups if group is not None]
        total = sum(int(group.lengths[owned].sum()) for group in groups)
        answers = sum(int(group.loss_mask[owned].sum()) for group in groups)
        return StepTokens.of_all(num_prompt=total - answers, num_response=answers)


# ------------------------------------------------------------------------- records


@dataclass(frozen=True, kw_only=True)
class OfflineRecords:
    """The records of an offline run, and how batches are made of them."""

    config: Config
    pad_id: int
    mismatched: bool  # the algorithm also gives a prompt the completion of another record
    precomputed: bool  # log-probs of the reference are tables over these records
    rows: HostRows  # rows of a batch
    train: Sequence[OfflineRecord]
    held_out: Sequence[OfflineRecord]
    held_out_pairs: Sequence[OfflineRecord]  # pairs for an algorithm that judges them
    images: ImageInput | None = None

    @property
    def sizes(self) -> dict[str, int]:
        """The number of records in each table of log-probs."""
        return {TRAIN: len(self.train), HELD_OUT: len(self.held_out)}

    def loader(self) -> Loader[OfflineRecord, Any]:
        """Endless batches of training records."""
        data = self.config.data
        # Tables of log-probs are of these held-out records too.
        unchanged = {"held_out_digest": digest(self.held_out)} if self.precomputed else {}
        return Loader(
            self.train,
            self._collate(mismatched=self.mismatched),
            batch_size=data.train_batch_size,
            seed=self.config.seed,
            shuffle=data.shuffle,
            num_workers=data.num_workers,
            prefetch=data.prefetch,
            unchanged=unchanged,
        )

    def train_batches(self) -> Iterator[OfflineBatch]:
        """All training records in order, in batches of one size: the rows of this process."""
        return self._padded(self.train, mismatched=self.mismatched)

    def held_out_batches(self) -> Iterator[OfflineBatch]:
        """All held-out records in order, in batches of one size: the rows of this process."""
        return self._padded(self.held_out, mismatched=self.mismatched)

    def held_out_pair_batches(self) -> Iterator[OfflineBatch]:
        """All held-out pairs in order, in batches of one size: the rows of this process."""
        return self._padded(self.held_out_pairs, mismatched=False)

    def _collate(self, *, mismatched: bool) -> Any:
        how = {"mismatched": mismatched, "images": self.images}
        return collate_with(self.config, self.pad_id, self.rows, **how)

    def _padded(
        self, records: Sequence[OfflineRecord], *, mismatched: bool
    ) -> Iterator[OfflineBatch]:
        size, collate = self.config.data.train_batch_size, self._collate(mismatched=mismatched)
        for start in range(0, len(records), size):
            part = records[start : start + size]
            # A single record in the last batch has no other to be mismatched with.
            before = records[start - 1] if start and len(part) == 1 else None
            yield collate(part, size=size, before=before)


def load_offline_records(
    config: Config, plan: Plan, tokenizer: Tokenizer, run_dir: Path | None
) -> OfflineRecords:
    """The records that the plan's algorithm learns from.

    Raises ValueError for a split of one record whose prompt needs the completion of another.
    """
    algorithm = plan.record_algorithm
    kind = algorithm.records.name
    groups = partial(groups_of, algorithm.reads, algorithm.records)
    mismatched = "mismatched" in (*groups(), *groups(reference=True))
    records = load_records(config, train_sources(config), kind, tokenizer, run_dir)
    held_out, are_pairs = load_held_out(config, kind, tokenizer, run_dir)
    if mismatched:
        _refuse_one_record("train", records, "2 records or more work")
        _refuse_one_record("val", held_out, "2 records or more work, or none")
    pairs: Sequence[OfflineRecord] = []
    if are_pairs and algorithm.judge_pairs is not None:
        pairs = load_records(config, held_out_sources(config), "preferences", tokenizer, run_dir)
    return OfflineRecords(
        config=config,
        pad_id=tokenizer.pad_id,
        mismatched=mismatched,
        precomputed=plan.tables is not None,
        rows=records_held(plan),
        train=records,
        held_out=held_out,
        held_out_pairs=pairs,
        images=images_of(tokenizer),
    )


def _refuse_one_record(split: str, records: Sequence[OfflineRecord], remedy: str) -> None:
    if len(records) == 1:
        raise ValueError(
            f"config.data.{split}_files and {split}_tasks give one record, whose prompt no other "
            f"completion can be given to; {remedy}"
        )
