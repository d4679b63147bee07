"""Generated tokens as text."""

from collections.abc import Sequence

import numpy as np

from jaxrl_llm.generation.stop_strings import REPLACEMENT, Stops
from jaxrl_llm.tokenizer import Tokenizer
from jaxrl_llm.types import Completion

MOST_AGAIN = 32  # tokens that are decoded again with each new piece


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


class TextStream:
    """The text of a response while its tokens arrive, in whole characters.

    Only the last tokens are decoded again, so a long response costs as much a token as a short one.

    Guarantees: all pieces, joined, are the text that `decode` gives of all ids.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []  # last tokens
        self._done = 0  # number of these whose text was given
        self._text = ""  # their text

    def add(self, ids: Sequence[int]) -> str:
        """The further text of more tokens. A character may be made of several tokens."""
        self._ids += ids
        text = self._tokenizer.decode(self._ids)
        piece = text[len(self._text) :]
        if not piece or piece.endswith(REPLACEMENT):
            return ""
        before, self._done, self._text = self._done, len(self._ids), text
        if self._done > MOST_AGAIN:
            # The tokens of the piece stay: a text that begins with them has no blank lost.
            del self._ids[:before]
            self._done, self._text = len(self._ids), self._tokenizer.decode(self._ids)
        return piece

    def end(self) -> str:
        """The rest, where the last tokens are a part of a character."""
        return self._tokenizer.decode(self._ids)[len(self._text) :]
