"""The types of keys with their bounds, and how text of a command line becomes their values."""

import ast
import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any, TypeVar

from annotated_types import Ge, Gt, Le, Lt
from pydantic import AfterValidator, AllowInfNan, BeforeValidator, Strict

T = TypeVar("T")


class Text(str):
    """A value as typed on a command line, without quotes around it."""


def guess(value: Any) -> Any:
    """Text as the Python literal or JSON word that it looks like, inside lists and dicts too."""
    if isinstance(value, dict):
        return {str(key): guess(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [guess(entry) for entry in value]
    if not isinstance(value, Text):
        return value
    words = {"true": True, "false": False, "none": None, "null": None}
    if value.lower() in words:
        return words[value.lower()]
    try:
        return ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return str(value)


def _alone(value: Any) -> Any:
    """Text without brackets is the only entry of a list; null is the empty one."""
    value = none_word(value)
    if isinstance(value, str):
        return (value,) if value else ()
    return () if value is None else value


def none_word(value: Any) -> Any:
    """None for the words of a command line that mean it."""
    return None if isinstance(value, Text) and value.lower() in ("none", "null") else value


MOST = 2**31 - 1  # largest integer: arrays on the devices count in int32
Count = Annotated[int, Ge(1), Le(MOST)]
Whole = Annotated[int, Ge(0), Le(MOST)]
TopK = Annotated[int, Ge(0), Le(512)]  # generation/filters.py keeps no more tokens
NotNegative = Annotated[float, Ge(0)]
Positive = Annotated[float, Gt(0)]
Fraction = Annotated[float, Ge(0), Le(1)]
BelowOne = Annotated[float, Ge(0), Lt(1)]
Probability = Annotated[float, Gt(0), Le(1)]
# A bound that infinity switches off. Every other number of a record is finite.
Unbounded = Annotated[float, Gt(0), AllowInfNan(True)]
Seconds = Annotated[float, Gt(0), Le(1e9)]  # timers of Python take no more
Gigabytes = Annotated[float, Gt(0), Le(1e9)]  # limits of a process take no more
GigabytesOrZero = Annotated[float, Ge(0), Le(1e9)]
Processes = Annotated[int, Ge(1), Le(1024)]


def tested(test: Callable[[Any], object], why: str = "") -> AfterValidator:
    """For `Annotated`: `why` is the error where the test is False; it may also raise ValueError."""

    def read(value: T) -> T:
        if test(value) is False:
            raise ValueError(why)
        return value

    return AfterValidator(read)


@dataclass(frozen=True)
class UpTo:
    """For `Annotated`: an upper bound, which is the value of another key of the record."""

    key: str
    itself: bool = True  # whether the value may be equal to the key's


Many = Annotated[tuple[T, ...], Strict(False), BeforeValidator(_alone)]
Maybe = Annotated[T | None, BeforeValidator(none_word)]
FreeDict = Annotated[dict[str, Any], BeforeValidator(guess)]


# ------------------------------------------------------------------------- points in time

_AFTER = re.compile(r"\+(?=\d)(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?")
_UNITS_S = (86400, 3600, 60, 1)


def end_time(text: str, started: float) -> float:
    """Epoch seconds of `text`: a time as ISO 8601 or epoch seconds, or `+3h50m` after `started`.

    A time without a zone is of this machine's.

    Raises: ValueError for anything else.
    """
    if match := _AFTER.fullmatch(text):
        parts = zip(match.groups(), _UNITS_S, strict=True)
        return started + sum(int(number) * unit for number, unit in parts if number)
    if text.isdecimal() and len(text) == 10:
        return float(text)
    try:
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError):
        raise ValueError(
            "expected a time such as 2026-11-25T18:00, +3h50m after the start, or epoch seconds "
            "such as $SLURM_JOB_END_TIME"
        ) from None


EndTime = Annotated[str, tested(lambda text: not text or end_time(text, started=0.0))]
