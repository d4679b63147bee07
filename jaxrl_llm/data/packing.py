"""Records to padded numpy arrays. Rows are padded on the right, one example a row."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxrl_llm.data.formats import PreferencePair, TokenExample
from jaxrl_llm.types import PreferenceBatch, Prompt, TokenBatch


def pad_rows(
    rows: Sequence[Sequence[int | float]], length: int, fill: int | float, dtype: Any = np.int32
) -> np.ndarray:
    """[B, length]: each row followed by `fill`. ValueError for a row that is longer."""
    padded = np.full((len(rows), length), fill, dtype)
    for i, row in enumerate(rows):
        if len(row) > length:
            raise ValueError(f"row {i} has {len(row)} tokens, more than {length}: truncate it")
        padded[i, : len(row)] = row
    return padded


def collate_prompts(
    prompts: Sequence[Prompt], *, length: int, pad_id: int
) -> tuple[np.ndarray, np.ndarray]:
    """(prompts [B, length] int32, prompt_lengths [B] int32)."""
    rows = [prompt.token_ids for prompt in prompts]
    return pad_rows(rows, length, pad_id), np.array([len(row) for row in rows], np.int32)


def collate_tokens(examples: Sequence[TokenExample], *, length: int, pad_id: int) -> TokenBatch:
    """A TokenBatch of numpy arrays, [B, length]; the loss mask is 0 at position 0."""
    rows = [example.token_ids for example in examples]
    mask = pad_rows([example.loss_mask for example in examples], length, 0, np.float32)
    mask[:, 0] = 0
    arrays: dict[str, Any] = {
        "tokens": pad_rows(rows, length, pad_id),
        "lengths": np.array([len(row) for row in rows], np.int32),
        "loss_mask": mask,
    }
    return TokenBatch(**arrays)


def collate_preferences(
    pairs: Sequence[PreferencePair], *, length: int, pad_id: int
) -> PreferenceBatch:
    """A PreferenceBatch of numpy arrays; both halves are [B, length]."""
    margin: Any = np.array([pair.margin for pair in pairs], np.float32)
    return PreferenceBatch(
        chosen=collate_tokens([pair.chosen for pair in pairs], length=length, pad_id=pad_id),
        rejected=collate_tokens([pair.rejected for pair in pairs], length=length, pad_id=pad_id),
        margin=margin,
    )
