"""Between text on the host and arrays on the mesh: prompts into a batch, responses out of it."""

from collections.abc import Sequence

import numpy as np

from jaxrl_llm.tokenizer import Tokenizer
from jaxrl_llm.types import Completion, Prompt, RolloutBatch


def prompt_batch(
    prompts: Sequence[Prompt], *, n: int, max_prompt_length: int, pad_id: int, num_prompts: int = 0
) -> RolloutBatch:
    """numpy batch of n samples a prompt, group after group.

    `num_prompts` pads with rows of length 0, which generate nothing, up to a fixed size.
    """
    rows = max(num_prompts, len(prompts))
    tokens = np.full((rows, max_prompt_length), pad_id, np.int32)
    lengths = np.zeros((rows,), np.int32)
    for i, prompt in enumerate(prompts):
        tokens[i, : len(prompt.token_ids)] = prompt.token_ids
        lengths[i] = len(prompt.token_ids)
    return RolloutBatch(
        prompts=tokens.repeat(n, axis=0),
        prompt_lengths=lengths.repeat(n),
        sample_ids=np.arange(rows * n, dtype=np.uint32),
    )


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
