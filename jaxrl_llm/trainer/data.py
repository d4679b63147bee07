"""Data of a run: prompts, examples and pairs from files; samples as arrays and as text again."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from jaxrl_llm.config import Config, ConfigError, GivenRows, SupervisedConfig
from jaxrl_llm.data.curriculum import ascending_batches, column_values
from jaxrl_llm.data.dataset import (
    RowRules,
    Sources,
    load_examples,
    load_preferences,
    load_prompts,
    load_ratings,
    load_unpaired,
)
from jaxrl_llm.data.formats import SERVES
from jaxrl_llm.data.loader import Loader, PromptLoader
from jaxrl_llm.data.packing import (
    OfflineRecord,
    collate_prompts,
    collate_records,
    offline_records,
)
from jaxrl_llm.data.priority import PriorityLoader, weight_function
from jaxrl_llm.data.shaping import Shape
from jaxrl_llm.data.share import Picked, Share, digest
from jaxrl_llm.distributed.multihost import HostRows, is_main
from jaxrl_llm.generation.stop_strings import Stops
from jaxrl_llm.plan.offline import HELD_OUT, TRAIN, OfflinePlan
from jaxrl_llm.tokenizer import Tokenizer
from jaxrl_llm.types import Completion, OfflineBatch, Prompt, RolloutBatch

SFT_STREAM, REWARD_STREAM = 1, 2  # streams of the shuffles of supervised trainings
BAD_ROWS = "bad_rows.jsonl"
LOADERS = {
    "examples": load_examples,
    "preferences": load_preferences,
    "unpaired": load_unpaired,
    "ratings": load_ratings,
}


def train_sources(config: Config) -> Sources:
    """The run's training data."""
    return Sources(
        rows=_rows_of(config.data.train_rows),
        files=config.data.train_files,
        tasks=config.data.train_tasks,
        split="train",
        prompt_style=config.data.prompt_style,
        shape=_shape(config),
        dataset_class=config.data.dataset_class,
    )


def held_out_sources(config: Config) -> Sources:
    """The run's validation data; tasks give the problems that training never sees."""
    return Sources(
        rows=_rows_of(config.data.val_rows),
        files=config.data.val_files,
        tasks=config.data.val_tasks,
        split="held_out",
        prompt_style=config.data.prompt_style,
        shape=_shape(config),
        dataset_class=config.data.dataset_class,
        train_files=config.data.train_files,
    )


def _rows_of(given: GivenRows | None) -> Sequence[Mapping[str, Any]] | None:
    return None if given is None else given.rows


def _shape(config: Config) -> Shape:
    data = config.data
    chat = data.prompt_style == "chat"
    return Shape(columns=data.columns, chat=chat, system_prompt=data.system_prompt)


def has_held_out(config: Config) -> bool:
    """Whether the config gives validation data."""
    return not held_out_sources(config).are_empty()


def load_run_prompts(
    config: Config, sources: Sources, tokenizer: Tokenizer, run_dir: Path | None
) -> Sequence[Prompt]:
    """Prompts of `sources` under the run's length limits; bad rows go to a file in `run_dir`."""
    rules = _rules(config, run_dir, config.data.max_prompt_length, sources)
    return load_prompts(sources, tokenizer, rules).items


def train_batches(
    config: Config, prompts: Sequence[Prompt], rows: HostRows | None = None
) -> PromptLoader | PriorityLoader:
    """Endless batches of training prompts: in epochs, after a curriculum, or by priority.

    In epochs only the prompts of `rows` are read, the samples that this process holds; None reads
    all.
    """
    data = config.data
    if data.num_workers and not any(training for _, training in _trainings(config)):
        raise ValueError(
            f"config.data.num_workers={data.num_workers}: the prompts of an online run are "
            "tokenised before the first step and stay in memory, so processes have nothing to "
            "do; set config.data.num_workers=0"
        )
    if data.priority is not None:
        return PriorityLoader(
            prompts,
            weight_function(data.priority, samples=config.rollout.n),
            batch_size=data.train_batch_size,
            seed=config.seed,
            uniform=data.priority_uniform,
        )
    return PromptLoader(
        prompts,
        batch_size=data.train_batch_size,
        seed=config.seed,
        shuffle=data.shuffle,
        prefetch=data.prefetch,
        groups=None if rows is None else held_groups(rows, config.rollout.n),
        first=_curriculum(config, prompts),
    )


def _curriculum(config: Config, prompts: Sequence[Prompt]) -> np.ndarray | None:
    """Places of the prompts that come first; None without a curriculum."""
    data = config.data
    if not data.curriculum:
        return None
    return ascending_batches(
        column_values(prompts, data.curriculum),
        batch_size=data.train_batch_size,
        steps=data.curriculum_steps,
        seed=config.seed,
        shuffle=data.shuffle,
    )


def held_groups(rows: HostRows, n: int) -> np.ndarray:
    """The prompts of a batch, n samples each, that this process holds samples of."""
    return np.unique(rows.held // n)


def load_records(
    config: Config, sources: Sources, kind: str, tokenizer: Tokenizer, run_dir: Path | None
) -> Sequence[OfflineRecord]:
    """Records of a kind (examples, preferences, unpaired, ratings) for offline training."""
    return _load(config, sources, kind, tokenizer, run_dir)[0]


def load_held_out(
    config: Config, kind: str, tokenizer: Tokenizer, run_dir: Path | None
) -> tuple[Sequence[OfflineRecord], bool]:
    """Held-out records of a kind, and whether the rows that they are made of are all pairs.

    No records, of a config without validation data.
    """
    if not has_held_out(config):
        return [], False
    records, formats = _load(config, held_out_sources(config), kind, tokenizer, run_dir)
    return records, all("preferences" in SERVES[found] for found in formats)


def _load(
    config: Config, sources: Sources, kind: str, tokenizer: Tokenizer, run_dir: Path | None
) -> tuple[Sequence[OfflineRecord], set[str]]:
    """Records of a kind, and the formats of their sources."""
    rules = _rules(config, run_dir, config.data.max_row_length, sources)
    loaded = LOADERS[kind](sources, tokenizer, rules)
    items: Any = loaded.items
    if kind == "unpaired":
        # A pair gives two records of one prompt, and neighbours in a batch exchange their
        # completions: in order, these would not be mismatched.
        order = list(range(len(items)))
        Random(config.seed).shuffle(order)
        items = Picked(items, order) if isinstance(items, Share) else [items[i] for i in order]
    records = offline_records(items, number=kind if kind == "ratings" else "labels")
    return records, set(loaded.formats.values())


@dataclass(frozen=True, kw_only=True)
class OfflineRecords:
    """The records of an offline run, and how batches are made of them."""

    config: Config
    pad_id: int
    mismatched: bool  # the algorithm also gives a prompt the completion of another record
    precomputed: bool  # log-probs of the reference are tables over these records
    rows: HostRows  # of a batch
    train: Sequence[OfflineRecord]
    held_out: Sequence[OfflineRecord]
    held_out_pairs: Sequence[OfflineRecord]  # of an algorithm that judges pairs

    @property
    def sizes(self) -> dict[str, int]:
        """How many there are of each table of log-probs."""
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
        return _collate(self.config, self.pad_id, self.rows, mismatched=mismatched)

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
    config: Config, plan: OfflinePlan, tokenizer: Tokenizer, run_dir: Path | None
) -> OfflineRecords:
    """The records that the plan's algorithm learns from.

    Raises ValueError for a split of one record whose prompt needs the completion of another.
    """
    kind = plan.algorithm.records.name
    mismatched = "mismatched" in plan.reads_groups
    records = load_records(config, train_sources(config), kind, tokenizer, run_dir)
    held_out, are_pairs = load_held_out(config, kind, tokenizer, run_dir)
    if mismatched:
        _refuse_one_record("train", records, "2 records or more work")
        _refuse_one_record("val", held_out, "2 records or more work, or none")
    pairs: Sequence[OfflineRecord] = []
    if are_pairs and plan.algorithm.judge_pairs is not None:
        pairs = load_records(config, held_out_sources(config), "preferences", tokenizer, run_dir)
    return OfflineRecords(
        config=config,
        pad_id=tokenizer.pad_id,
        mismatched=mismatched,
        precomputed=plan.precomputed,
        rows=plan.program.host_rows(plan.batch_size),
        train=records,
        held_out=held_out,
        held_out_pairs=pairs,
    )


def _refuse_one_record(split: str, records: Sequence[OfflineRecord], remedy: str) -> None:
    if len(records) == 1:
        raise ValueError(
            f"config.data.{split}_files and {split}_tasks give one record, whose prompt no other "
            f"completion can be given to; {remedy}"
        )


def sft_batches(
    config: Config,
    training: SupervisedConfig,
    tokenizer: Tokenizer,
    run_dir: Path,
    rows: HostRows,
) -> Loader[Any, OfflineBatch]:
    """Endless padded batches of completions to learn: the training's own data, or the run's.

    Of each batch, the `rows` of this process.

    Raises: ValueError for data that give no completions, with the key that leaves the training out.
    """
    sources = _sources(config, training)
    try:
        examples = load_records(config, sources, "examples", tokenizer, run_dir)
    except ValueError as error:
        if training.files or training.tasks:
            raise
        key = "warmup" if training is config.warmup else "teacher.training"
        raise ConfigError(
            f"{error}. config.{key} has no data of its own and takes the run's; "
            f"--config.{key}=null leaves this training out"
        ) from None
    collate = _collate(config, tokenizer.pad_id, rows)
    return _loader(config, training, examples, collate, SFT_STREAM)


def preference_data(
    config: Config,
    training: SupervisedConfig,
    tokenizer: Tokenizer,
    run_dir: Path,
    rows: HostRows,
) -> tuple[Loader[Any, OfflineBatch], list[OfflineBatch]]:
    """Endless batches of training pairs, and all held-out pairs in batches of one size.

    Of each batch, the `rows` of this process.
    """
    collate, size = _collate(config, tokenizer.pad_id, rows), training.batch_size
    pairs = load_records(config, _sources(config, training), "preferences", tokenizer, run_dir)
    held_out: Sequence[OfflineRecord] = []
    if has_held_out(config):
        sources = held_out_sources(config)
        held_out = load_records(config, sources, "preferences", tokenizer, run_dir)
    starts = range(0, len(held_out), size)
    batches = [collate(held_out[start : start + size], size=size) for start in starts]
    return _loader(config, training, pairs, collate, REWARD_STREAM), batches


def _collate(config: Config, pad_id: int, rows: HostRows, *, mismatched: bool = False) -> Any:
    """Makes the rows of a batch that this process holds."""
    return partial(
        collate_records,
        length=config.data.max_row_length,
        pad_id=pad_id,
        mismatched=mismatched,
        rows=rows.read.tolist(),
    )


def _rules(config: Config, run_dir: Path | None, max_length: int, sources: Sources) -> RowRules:
    data = config.data
    return RowRules(
        max_length=max_length,
        truncation=data.truncation,
        filter_overlong=data.filter_overlong_prompts,
        max_bad_fraction=data.max_bad_fraction,
        bad_rows_file=run_dir / BAD_ROWS if run_dir is not None and is_main() else None,
        streaming=data.streaming and sources.split == "train",
        shuffled=data.shuffle,
    )


def _sources(config: Config, training: SupervisedConfig) -> Sources:
    if not training.files and not training.tasks:
        return train_sources(config)
    return Sources(
        files=training.files,
        tasks=training.tasks,
        split="train",
        prompt_style=config.data.prompt_style,
        shape=_shape(config),
        key=next((key for key, found in _trainings(config) if found is training), ""),
    )


def _trainings(config: Config) -> list[tuple[str, SupervisedConfig | None]]:
    """(config key, settings) of each supervised training of an online run."""
    reward, teacher = config.reward.model, config.teacher
    return [
        ("config.warmup", config.warmup),
        ("config.reward.model.training", reward and reward.training),
        ("config.teacher.training", teacher and teacher.training),
    ]


def _loader(
    config: Config, training: SupervisedConfig, items: Any, collate: Any, stream: int
) -> Loader[Any, Any]:
    return Loader(
        items,
        collate,
        batch_size=training.batch_size,
        seed=config.seed * 3 + stream,
        num_workers=config.data.num_workers,
        prefetch=config.data.prefetch,
    )


# ------------------------------------------------------------------------- samples


def prompt_batch(
    prompts: Mapping[int, Prompt],
    rows: np.ndarray,
    *,
    n: int,
    max_prompt_length: int,
    pad_id: int,
    first_sample: int = 0,
) -> RolloutBatch:
    """numpy batch of these rows of n samples a prompt, group after group.

    `prompts` has those of the rows, by group. A group without one gets rows of length 0, which
    generate nothing. `first_sample` is the number of samples that the step has had before.
    """
    groups, group_of = np.unique(rows // n, return_inverse=True)
    none = Prompt(token_ids=(), text="")
    chosen = [prompts.get(group, none) for group in groups.tolist()]
    tokens, lengths = collate_prompts(chosen, length=max_prompt_length, pad_id=pad_id)
    # numpy arrays until the batch is placed on the mesh.
    fields: dict[str, Any] = {
        "prompts": tokens[group_of],
        "prompt_lengths": lengths[group_of],
        "sample_ids": (first_sample + rows).astype(np.uint32),
        "group_ids": groups[group_of].astype(np.int32),
    }
    return RolloutBatch(**fields)


def completions_of(
    tokenizer: Tokenizer,
    stops: Stops,
    responses: np.ndarray,
    mask: np.ndarray,
    logprobs: np.ndarray,
) -> list[Completion]:
    """The responses [N, R] as text, each cut at its length; a stop token is no text."""
    out, lengths = [], mask.sum(axis=1).astype(int)
    rows = (responses.tolist(), lengths.tolist(), logprobs.tolist())
    for row, length, row_logprobs, ended in zip(
        *rows, stops.are_in(responses, lengths).tolist(), strict=True
    ):
        tokens = tuple(row[:length])
        text_ids = tokens[:-1] if tokens and tokens[-1] in stops.token_ids else tokens
        out.append(
            Completion(
                tokens=tokens,
                text=tokenizer.decode(text_ids),
                logprobs=tuple(row_logprobs[:length]),
                finished=ended,
            )
        )
    return out
