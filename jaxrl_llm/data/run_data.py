"""The data that a config names: prompts, examples and pairs, and the loaders of their batches."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from jaxrl_llm.config import Config, ConfigError, GivenRows, SupervisedConfig, Task
from jaxrl_llm.data.collating import OfflineRecord, collate_records, offline_records
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
from jaxrl_llm.data.priority import PriorityLoader, weight_function
from jaxrl_llm.data.shaping import Shape
from jaxrl_llm.data.share import Picked, Share, own_indices
from jaxrl_llm.distributed.multihost import HostRows, gather_objects, is_main
from jaxrl_llm.images import ImageInput, images_of
from jaxrl_llm.tokenizer import Tokenizer
from jaxrl_llm.types import OfflineBatch, Prompt

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
    data = config.data
    return _run_sources(config, "train", data.train_rows, data.train_files, data.train_tasks)


def held_out_sources(config: Config) -> Sources:
    """The run's validation data; tasks give the problems that training never sees."""
    data = config.data
    return _run_sources(config, "held_out", data.val_rows, data.val_files, data.val_tasks)


def _run_sources(
    config: Config,
    split: str,
    rows: GivenRows | None,
    files: tuple[str, ...],
    tasks: tuple[Task, ...],
) -> Sources:
    return Sources(
        rows=None if rows is None else rows.rows,
        files=files,
        tasks=tasks,
        split=split,
        prompt_style=config.data.prompt_style,
        shape=_shape(config),
        dataset_class=config.data.dataset_class,
    )


def _shape(config: Config) -> Shape:
    data = config.data
    chat = data.prompt_style == "chat"
    return Shape(columns=data.columns, chat=chat, system_prompt=data.system_prompt)


def has_held_out(config: Config) -> bool:
    """True if the config gives validation data."""
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
    if data.priority is not None:
        return PriorityLoader(
            prompts,
            weight_function(data.priority),
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
    return records, all("preferences" in SERVES[form] for form in formats)


def _load(
    config: Config, sources: Sources, kind: str, tokenizer: Tokenizer, run_dir: Path | None
) -> tuple[Sequence[OfflineRecord], set[str]]:
    """Records of a kind, and the formats of their sources."""
    rules = _rules(config, run_dir, config.data.max_row_length, sources)
    loaded = LOADERS[kind](sources, tokenizer, rules)
    items: Any = loaded.items
    if kind == "unpaired":
        # Neighbours in a batch exchange their completions. The two records of a pair have one
        # prompt, so in the order of the rows nothing would be exchanged.
        order = list(range(len(items)))
        if config.data.shuffle:
            Random(config.seed).shuffle(order)
        elif all("preferences" in SERVES[form] for form in loaded.formats.values()):
            order = [*order[::2], *order[1::2]]
        items = Picked(items, order) if isinstance(items, Share) else [items[i] for i in order]
    records = offline_records(items, number=kind if kind == "ratings" else "labels")
    return records, set(loaded.formats.values())


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
    collate = collate_with(config, tokenizer.pad_id, rows, images=images_of(tokenizer))
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
    collate, size = collate_with(config, tokenizer.pad_id, rows), training.batch_size
    pairs = load_records(config, _sources(config, training), "preferences", tokenizer, run_dir)
    held_out: Sequence[OfflineRecord] = []
    if has_held_out(config):
        sources = held_out_sources(config)
        held_out = load_records(config, sources, "preferences", tokenizer, run_dir)
    starts = range(0, len(held_out), size)
    batches = [collate(held_out[start : start + size], size=size) for start in starts]
    return _loader(config, training, pairs, collate, REWARD_STREAM), batches


def collate_with(
    config: Config,
    pad_id: int,
    rows: HostRows,
    *,
    mismatched: bool = False,
    images: ImageInput | None = None,
) -> Any:
    """Makes the rows of a batch that this process holds."""
    return partial(
        collate_records,
        length=config.data.max_row_length,
        pad_id=pad_id,
        mismatched=mismatched,
        rows=rows.read.tolist(),
        images=images,
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
        keep_thinking=data.keep_thinking,
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
        key=next((key for key, named in _trainings(config) if named is training), ""),
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


def columns_by_source(prompts: Sequence[Prompt]) -> dict[str, list[str]]:
    """The columns of the rows of each data source, over all processes, which all must call it."""
    own: dict[str, set[str]] = {}
    for index in own_indices(prompts):
        own.setdefault(prompts[index].data_source, set()).update(prompts[index].columns)
    everyone = gather_objects({source: sorted(x) for source, x in own.items()}, "columns")
    sources = sorted({source for columns in everyone for source in columns})
    return {
        source: sorted({name for columns in everyone for name in columns.get(source, ())})
        for source in sources
    }
