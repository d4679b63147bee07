"""Settings of `generate`, `stream` and their commands, for a trained model outside of a run.

Imports no jax, so that a command refuses a flag before the model is opened.
"""

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict, TypeVar

from pydantic import ValidationError

from jaxrl_llm.config.schema import StopTexts
from jaxrl_llm.typed_records.bounds import Count, NotNegative, Probability, TopK, Whole
from jaxrl_llm.typed_records.messages import ConfigError, explain
from jaxrl_llm.typed_records.record import Record, validate

S = TypeVar("S", bound=Record)


class StreamSettings(Record):
    """Settings of one answer."""

    max_new_tokens: Count = 256
    temperature: NotNegative = 1.0  # 0 is greedy
    top_p: Probability = 1.0
    top_k: TopK = 0  # 0 is off
    stop: StopTexts = ()
    seed: Whole = 0
    chat: bool | None = None  # True: a text is a user's message; None: with a chat template


class ChoiceSettings(StreamSettings):
    """Settings of the answers to one prompt."""

    n: Count = 1  # answers to each prompt


class AnswerSettings(ChoiceSettings):
    """Settings of many answers."""

    batch_size: Count = 64  # prompts at once


class StreamKeys(TypedDict, total=False):
    """The keyword arguments that make `StreamSettings`."""

    max_new_tokens: int
    temperature: float
    top_p: float
    top_k: int
    stop: str | Sequence[str]
    seed: int
    chat: bool | None


class ChoiceKeys(StreamKeys, total=False):
    """The keyword arguments that make `ChoiceSettings`."""

    n: int


class AnswerKeys(ChoiceKeys, total=False):
    """The keyword arguments that make `AnswerSettings`."""

    batch_size: int


def read_settings(cls: type[S], keywords: Mapping[str, Any], key: str) -> S:
    """The settings of keyword arguments; messages call them `key`.NAME, and --NAME for "--".

    Raises: ConfigError for an unknown one, and for a value of another type or out of bounds.
    """
    try:
        return validate(cls, dict(keywords))
    except ValidationError as error:
        raise ConfigError(str(explain(error, cls, key)).replace("--.", "--")) from None
