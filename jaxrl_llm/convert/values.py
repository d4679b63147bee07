"""Values of other libraries' command lines as Python values."""

import ast
import math
import re
from typing import Any

from jaxrl_llm.config import ConfigError
from jaxrl_llm.typed_records.overrides import split_entries

WORDS = {
    "true": True,
    "false": False,
    "null": None,
    "none": None,
    "~": None,
    "inf": math.inf,
}


def value_of(text: str) -> Any:
    """A number, truth value, null, list or map where the text looks like one, else the text.

    Lists and maps may hold words without quotes, as Hydra's do.
    """
    text = text.strip()
    if text.lower() in WORDS:
        return WORDS[text.lower()]
    if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
        return text[1:-1]
    if text.startswith("[") and text.endswith("]"):
        return [value_of(entry) for entry in _entries(text[1:-1])]
    if text.startswith("{") and text.endswith("}"):
        pairs = (entry.partition(":") for entry in _entries(text[1:-1]))
        return {str(value_of(key)): value_of(value) for key, _, value in pairs}
    if re.fullmatch(r"[-+]?(\d+|\d*\.\d*(e[-+]?\d+)?|\d+e[-+]?\d+)", text, re.IGNORECASE):
        return ast.literal_eval(_plain_number(text)) if re.search(r"\d", text) else text
    return text


def _plain_number(text: str) -> str:
    """The number as Python writes it: 007 is 7."""
    sign = "-" if text.startswith("-") else ""
    digits = text.lstrip("+-")
    return sign + (digits.lstrip("0") or "0" if digits.isdigit() else digits)


def _entries(text: str) -> list[str]:
    entries = split_entries(text)
    if entries is None:
        raise ConfigError(f"{text}: a bracket or quote is not closed")
    return entries
