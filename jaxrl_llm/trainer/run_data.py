"""Data of a run: prompts for RL and validation, examples and pairs for supervised training."""

from functools import partial
from pathlib import Path
from typing import Any

from jaxrl_llm.config import Config, SupervisedConfig
from jaxrl_llm.data.dataset import (
    RowRules,
    Sources,
    load_examples,
    load_preferences,
    load_prompts,
)
from jaxrl_llm.data.loader import Loader, PromptLoader
from jaxrl_llm.data.packing import collate_preferences, collate_tokens
from jaxrl_llm.distributed.multihost import is_main
from jaxrl_llm.tokenizer import Tokenizer
from jaxrl_llm.types import PreferenceBatch, Prompt, TokenBatch

SFT_STREAM, REWARD_STREAM = 1, 2  # the shuffles of the warm-up and the reward model are their own
BAD_ROWS = "bad_rows.jsonl"


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


def train_batches(config: Config, prompts: list[Prompt]) -> PromptLoader:
    """Endless batches of training prompts."""
    data = config.data
    return PromptLoader(
        prompts,
        batch_size=data.train_batch_size,
        seed=config.seed,
        shuffle=data.shuffle,
        num_workers=data.num_workers,
        prefetch=data.prefetch,
    )


def sft_batches(
    config: Config, training: SupervisedConfig, tokenizer: Tokenizer, run_dir: Path
) -> Loader[Any, TokenBatch]:
    """Endless padded batches of completions to learn, of the warm-up's data or the run's own."""
    rules = _rules(config, run_dir, _row_length(config))
    examples = load_examples(_sources(config, training), tokenizer, rules).items
    collate: Any = partial(collate_tokens, length=rules.max_length, pad_id=tokenizer.pad_id)
    return _loader(config, training, examples, collate, SFT_STREAM)


def preference_data(
    config: Config, training: SupervisedConfig, tokenizer: Tokenizer, run_dir: Path
) -> tuple[Loader[Any, PreferenceBatch], PreferenceBatch]:
    """Endless batches of training pairs, and all held-out pairs as one batch."""
    rules = _rules(config, run_dir, _row_length(config))
    collate: Any = partial(collate_preferences, length=rules.max_length, pad_id=tokenizer.pad_id)
    pairs = load_preferences(_sources(config, training), tokenizer, rules).items
    held_out = load_preferences(held_out_sources(config), tokenizer, rules).items
    return _loader(config, training, pairs, collate, REWARD_STREAM), collate(held_out)


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
