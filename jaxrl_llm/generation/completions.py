"""Generated tokens as text."""

import numpy as np

from jaxrl_llm.generation.stop_strings import Stops
from jaxrl_llm.tokenizer import Tokenizer
from jaxrl_llm.types import Completion


def completions_of(
    tokenizer: Tokenizer,
    stops: Stops,
    responses: np.ndarray,
    lengths: np.ndarray,
    logprobs: np.ndarray,
) -> list[Completion]:
    """The responses [N, R] of `lengths` tokens [N] as text, without their stop tokens."""
    out = []
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
