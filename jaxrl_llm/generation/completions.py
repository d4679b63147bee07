"""Generated tokens as text."""

from collections.abc import Sequence

import numpy as np

from jaxrl_llm.generation.stop_strings import REPLACEMENT, Stops
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


class TextStream:
    """The text of a response while its tokens arrive, in whole characters.

    Only the last tokens are decoded again, so a long response costs as much a token as a short one.

    Guarantees: all pieces, joined, are the text that `decode` gives of all ids.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []  # last tokens; the text of the first `_shown` is given already
        self._shown = 0

    def add(self, ids: Sequence[int]) -> str:
        """The further text of more tokens. A character may be made of several tokens."""
        self._ids += ids
        text = self._further()
        if not text or text.endswith(REPLACEMENT):
            return ""
        # The tokens before stay for one more piece: a text that begins with them has no blank lost.
        self._ids, self._shown = self._ids[self._shown :], len(self._ids) - self._shown
        return text

    def end(self) -> str:
        """The rest, where the last tokens are a part of a character."""
        text = self._further()
        self._ids, self._shown = [], 0
        return text

    def _further(self) -> str:
        shown = self._tokenizer.decode(self._ids[: self._shown])
        return self._tokenizer.decode(self._ids)[len(shown) :]
