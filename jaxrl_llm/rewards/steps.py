"""Rewards of the steps of a response: what a function returns, and the tokens that end a step.

In place of a sample's number a function returns {"step_scores": [0.5, 1], "step_ends": [12, 30]}:
characters of the completion's text up to the end of each step. "step_token_ends" counts tokens of
`completion_ids` instead. Like `calling.py`, this file imports no jax.
"""

import functools
import itertools
import math
import numbers
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # they import jax
    from jaxrl_llm.tokenizer import Tokenizer
    from jaxrl_llm.types import Completion

SCORES = "step_scores"
ENDS = {"step_ends": "characters", "step_token_ends": "tokens"}
KEYS = (SCORES, *ENDS)
FLOAT32_MAX = 3.4028234663852886e38


@dataclass(frozen=True, kw_only=True)
class Steps:
    """The score of each step of a response, and where it ends: 1 is after the first."""

    scores: tuple[float, ...]
    ends: tuple[int, ...]  # ascending
    unit: str  # characters | tokens

    @property
    def total(self) -> float:
        """The score of the response."""
        return math.fsum(self.scores)

    def check(self, completion: "Completion") -> None:
        """ValueError where a step ends behind the response."""
        parts = completion.text if self.unit == "characters" else completion.tokens
        if self.ends and self.ends[-1] > len(parts):
            raise ValueError(
                f"a step that ends after {self.ends[-1]} {self.unit} of a response of {len(parts)}"
            )


def has_steps(value: Any) -> bool:
    """True where a function's answer for a sample has rewards of steps."""
    return isinstance(value, Mapping) and any(name in value for name in KEYS)


def read_steps(value: Mapping[str, Any]) -> Steps:
    """The steps of a function's answer. ValueError says what is wrong with it."""
    units = [name for name in ENDS if name in value]
    if SCORES not in value or len(units) != 1:
        raise ValueError("rewards of steps need 'step_scores' and one of " + ", ".join(ENDS))
    if "score" in value:
        raise ValueError(
            "'score' and 'step_scores': the score is the sum of the steps; give the reward of the "
            "outcome in a function of its own"
        )
    scores, ends = _numbers(value[SCORES], SCORES), _numbers(value[units[0]], units[0])
    if len(scores) != len(ends):
        raise ValueError(f"{len(scores)} step_scores and {len(ends)} {units[0]}")
    whole = tuple(int(end) for end in ends)
    if whole != ends or list(whole) != sorted(set(whole)) or min(whole, default=1) < 1:
        raise ValueError(f"{units[0]} must be whole numbers from 1 on that ascend: {list(ends)}")
    return Steps(scores=scores, ends=whole, unit=ENDS[units[0]])


def _numbers(values: Any, name: str) -> tuple[float, ...]:
    finite: list[float] = []
    # Workers do not import numpy, which would cost each of them memory.
    values = values.tolist() if hasattr(values, "tolist") else values
    for value in values if isinstance(values, Sequence) else [None]:
        number = float(value) if isinstance(value, numbers.Real) else math.nan
        if not abs(number) <= FLOAT32_MAX:
            raise ValueError(f"{name} must be a list of finite numbers")
        finite.append(number)
    return tuple(finite)


def last_tokens(steps: Steps, completion: "Completion", tokenizer: "Tokenizer") -> list[int]:
    """The index of the token with which each step ends: the first with which its text is complete.

    Requires: `steps.check` passed.
    """
    if steps.unit == "tokens":
        return [end - 1 for end in steps.ends]
    lengths = _text_lengths(completion, tokenizer)
    if lengths is not None:
        sizes = [len(completion.text[:end].encode()) for end in steps.ends]
        return [bisect_left(lengths, size) for size in sizes]
    return [_first_with(completion, end, tokenizer) for end in steps.ends]


def _text_lengths(completion: "Completion", tokenizer: "Tokenizer") -> list[int] | None:
    """Bytes of the text after each token; None where tokens are not known as bytes of the text."""
    try:
        table = _token_bytes(tokenizer)
    except ValueError:
        return None
    parts = [table[token] if token < len(table) else b"" for token in completion.tokens]
    if b"".join(parts) != completion.text.encode():
        return None
    return list(itertools.accumulate(len(part) for part in parts))


@functools.lru_cache(maxsize=2)
def _token_bytes(tokenizer: "Tokenizer") -> list[bytes]:
    return tokenizer.token_bytes()


def _first_with(completion: "Completion", end: int, tokenizer: "Tokenizer") -> int:
    """The first token with which the decoded text has `end` characters."""
    low, high = 1, len(completion.tokens)
    while low < high:
        middle = (low + high) // 2
        text = tokenizer.decode(completion.tokens[:middle])
        if len(text.rstrip("\ufffd")) >= end:
            high = middle
        else:
            low = middle + 1
    return low - 1
