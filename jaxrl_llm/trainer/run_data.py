"""Data of a run: prompts for RL and validation, examples and pairs for supervised training."""

from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from jaxrl_llm.config import Config, SupervisedConfig
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
from jaxrl_llm.data.packing import OfflineRecord, collate_records, offline_records
from jaxrl_llm.data.priority import PriorityLoader
from jaxrl_llm.data.sources import load_attribute
from jaxrl_llm.distributed.multihost import is_main
from jaxrl_llm.tokenizer import Tokenizer
from jaxrl_llm.types import OfflineBatch, Prompt

SFT_STREAM, REWARD_STREAM = 1, 2  # the shuffles of the warm-up and the reward model are their own
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
        files=config.data.train_files,
        tasks=config.data.train_tasks,
        split="train",
        prompt_style=config.data.prompt_style,
        dataset_class=config.data.dataset_class,
    )


def held_out_sources(config: Config) -> Sources:
    """The run's validation data; tasks give the problems that training never sees."""
    return Sources(
        files=config.data.val_files,
        tasks=config.data.val_tasks,
        split="held_out",
        prompt_style=config.data.prompt_style,
        dataset_class=config.data.dataset_class,
    )


def load_run_prompts(
    config: Config, sources: Sources, tokenizer: Tokenizer, run_dir: Path | None
) -> list[Prompt]:
    """Prompts of `sources` under the run's length limits; bad rows go to a file in `run_dir`."""
    rules = _rules(config, run_dir, config.data.max_prompt_length)
    return load_prompts(sources, tokenizer, rules).items


def train_batches(config: Config, prompts: list[Prompt]) -> PromptLoader | PriorityLoader:
    """Endless batches of training prompts, in epochs or by priority."""
    data = config.data
    if data.priority is not None:
        return PriorityLoader(
            prompts,
            partial(load_attribute(data.priority.path), **data.priority.settings),
            batch_size=data.train_batch_size,
            seed=config.seed,
            uniform=data.priority_uniform,
        )
    return PromptLoader(
        prompts,
        batch_size=data.train_batch_size,
        seed=config.seed,
        shuffle=data.shuffle,
        num_workers=data.num_workers,
        prefetch=data.prefetch,
    )


def load_records(
    config: Config, sources: Sources, kind: str, tokenizer: Tokenizer, run_dir: Path | None
) -> list[OfflineRecord]:
    """Records of a kind (examples, preferences, unpaired, ratings) for offline training."""
    return _load(config, sources, kind, tokenizer, run_dir)[0]


def load_held_out(
    config: Config, kind: str, tokenizer: Tokenizer, run_dir: Path | None
) -> tuple[list[OfflineRecord], bool]:
    """Held-out records of a kind, and whether the rows that they are made of are all pairs.

    None, of a config without validation data.
    """
    sources = held_out_sources(config)
    if not sources.files and not sources.tasks:
        return [], False
    records, formats = _load(config, sources, kind, tokenizer, run_dir)
    return records, all("preferences" in SERVES[found] for found in formats)


def _load(
    config: Config, sources: Sources, kind: str, tokenizer: Tokenizer, run_dir: Path | None
) -> tuple[list[OfflineRecord], set[str]]:
    """Records of a kind, and the formats of their sources."""
    rules = _rules(config, run_dir, _row_length(config))
    loaded = LOADERS[kind](sources, tokenizer, rules)
    items: Any = loaded.items
    if kind == "unpaired":
        # A pair that is taken apart answers one prompt twice in a row, and neighbours of a batch
        # lend each other their completions: in order, they would not be mismatched.
        Random(config.seed).shuffle(items)
    records = offline_records(items, number=kind if kind == "ratings" else "labels")
    return records, set(loaded.formats.values())


def sft_batches(
    config: Config, training: SupervisedConfig, tokenizer: Tokenizer, run_dir: Path
) -> Loader[Any, OfflineBatch]:
    """Endless padded batches of completions to learn, of the warm-up's data or the run's own."""
    sources = _sources(config, training)
    examples = load_records(config, sources, "examples", tokenizer, run_dir)
    return _loader(config, training, examples, _collate(config, tokenizer), SFT_STREAM)


def preference_data(
    config: Config, training: SupervisedConfig, tokenizer: Tokenizer, run_dir: Path
) -> tuple[Loader[Any, OfflineBatch], list[OfflineBatch]]:
    """Endless batches of training pairs, and all held-out pairs in batches of one size."""
    collate, size = _collate(config, tokenizer), training.batch_size
    pairs = load_records(config, _sources(config, training), "preferences", tokenizer, run_dir)
    held_out = load_records(config, held_out_sources(config), "preferences", tokenizer, run_dir)
    starts = range(0, len(held_out), size)
    batches = [collate(held_out[start : start + size], size=size) for start in starts]
    return _loader(config, training, pairs, collate, REWARD_STREAM), batches


def _collate(config: Config, tokenizer: Tokenizer) -> Any:
    return partial(collate_records, length=_row_length(config), pad_id=tokenizer.pad_id)


def _row_length(config: Config) -> int:
    """Tokens of a whole row, prompt and completion."""
    return config.data.max_prompt_length + config.data.max_response_length


def _rules(config: Config, run_dir: Path | None, max_length: int) -> RowRules:
    data = config.data
    return RowRules(
        max_length=max_length,
        truncation=data.truncation,
        filter_overlong=data.filter_overlong_prompts,
        max_bad_fraction=data.max_bad_fraction,
        bad_rows_file=run_dir / BAD_ROWS if run_dir is not None and is_main() else None,
    )


def _sources(config: Config, training: SupervisedConfig) -> Sources:
    if not training.files and not training.tasks:
        return train_sources(config)
    return Sources(
        files=training.files,
        tasks=training.tasks,
        split="train",
        prompt_style=config.data.prompt_style,
    )


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
