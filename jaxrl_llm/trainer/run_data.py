"""Data of a run: prompts for RL and validation, examples and pairs for supervised training."""

from functools import partial
from pathlib import Path
from typing import Any

from jaxrl_llm.config import Config, SupervisedConfig
from jaxrl_llm.data.dataset import Sources, load_examples, load_preferences, load_prompts
from jaxrl_llm.data.loader import ExampleLoader, PromptLoader
from jaxrl_llm.data.packing import collate_preferences, collate_tokens
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
    config: Config, sources: Sources, tokenizer: Tokenizer, run_dir: Path
) -> list[Prompt]:
    """Prompts of `sources` under the run's length limits; bad rows go to a file in `run_dir`."""
    data = config.data
    return load_prompts(
        sources,
        tokenizer,
        max_prompt_length=data.max_prompt_length,
        truncation=data.truncation,
        filter_overlong_prompts=data.filter_overlong_prompts,
        max_bad_fraction=data.max_bad_fraction,
        bad_rows_file=run_dir / BAD_ROWS,
    ).items


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
    config: Config, training: SupervisedConfig, tokenizer: Tokenizer
) -> ExampleLoader[TokenBatch]:
    """Endless padded batches of completions to learn, of the warm-up's data or the run's own."""
    length = config.data.max_prompt_length + config.data.max_response_length
    examples = load_examples(
        _sources(config, training), tokenizer, max_length=length, truncation=config.data.truncation
    ).items
    collate: Any = partial(collate_tokens, length=length, pad_id=tokenizer.pad_id)
    return _loader(config, training, examples, collate, SFT_STREAM)


def preference_data(
    config: Config, training: SupervisedConfig, tokenizer: Tokenizer
) -> tuple[ExampleLoader[PreferenceBatch], PreferenceBatch]:
    """Endless batches of training pairs, and all held-out pairs as one batch."""
    length = config.data.max_prompt_length + config.data.max_response_length
    load = partial(
        load_preferences, tokenizer=tokenizer, max_length=length, truncation=config.data.truncation
    )
    collate: Any = partial(collate_preferences, length=length, pad_id=tokenizer.pad_id)
    train = _loader(config, training, load(_sources(config, training)).items, collate, REWARD_STREAM)
    return train, collate(load(held_out_sources(config)).items)


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
) -> ExampleLoader[Any]:
    return ExampleLoader(
        items,
        collate,
        batch_size=training.batch_size,
        seed=config.seed * 3 + stream,
        num_workers=config.data.num_workers,
        prefetch=config.data.prefetch,
    )
