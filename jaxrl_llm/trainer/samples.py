"""Between text on the host and arrays on the mesh: prompts into a batch, responses out of it."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxrl_llm.data.packing import collate_prompts
from jaxrl_llm.tokenizer import Tokenizer
from jaxrl_llm.types import Completion, Prompt, RolloutBatch


def prompt_batch(
    prompts: Sequence[Prompt],
    *,
    n: int,
    max_prompt_length: int,
    pad_id: int,
    num_prompts: int = 0,
    first_sample: int = 0,
) -> RolloutBatch:
    """numpy batch of n samples a prompt, group after group.

    `num_prompts` pads with rows of length 0, which generate nothing, up to a fixed size.
    `first_sample` is how many samples the step has had before.
    """
    tokens, lengths = collate_prompts(prompts, length=max_prompt_length, pad_id=pad_id)
    missing = max(num_prompts - len(prompts), 0)
    tokens = np.pad(tokens, ((0, missing), (0, 0)), constant_values=pad_id)
    lengths = np.pad(lengths, (0, missing))
    rows = len(lengths)
    # numpy until it is placed on the mesh, where the annotations of a batch come true.
    fields: dict[str, Any] = {
        "prompts": tokens.repeat(n, axis=0),
        "prompt_lengths": lengths.repeat(n),
        "sample_ids": np.arange(first_sample, first_sample + rows * n, dtype=np.uint32),
        "group_ids": np.arange(rows, dtype=np.int32).repeat(n),
    }
    return RolloutBatch(**fields)


def completions_of(
    tokenizer: Tokenizer,
    stop_ids: Sequence[int],
    responses: np.ndarray,
    mask: np.ndarray,
    logprobs: np.ndarray,
) -> list[Completion]:
    """The responses [N, R] as text, each cut at its own length."""
    out = []
    for row, length, row_logprobs in zip(
        responses.tolist(), mask.sum(axis=1).astype(int).tolist(), logprobs.tolist(), strict=True
    ):
        tokens = tuple(row[:length])
        finished = bool(tokens) and tokens[-1] in stop_ids
        text_ids = tokens[:-1] if finished else tokens
        out.append(
            Completion(
                tokens=tokens,
                text=tokenizer.decode(text_ids),
                logprobs=tuple(row_logprobs[:length]),
                finished=finished,
            )
        )
    return out
