"""Errors of a config, in our words: what is wrong with a value, and one that works."""

import ast
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from jaxrl_llm.references import nearest, shown
from jaxrl_llm.typed_records.bounds import Text

__all__ = ["ConfigError", "UnknownKeyError"]


class ConfigError(ValueError):
    """A user's mistake; the message says what is wrong and what would work.

    Commands print it without a traceback and end with exit code 2.
    """


class UnknownKeyError(ConfigError):
    """A key that no record has; `key` is the dotted one, without "config."."""

    def __init__(self, message: str, key: str, value: str) -> None:
        super().__init__(message)
        self.key, self.value = key, value


UNKNOWN = "unknown_key"  # type of our own error
# A type -> what a message asks for.
EXPECTED = {
    "bool": "true or false",
    "dataclass": "{key: value, …}",
    "dict": "{key: value, …}",
    "float": "a number",
    "int": "an integer",
    "string": "text",
    "tuple": "a list [a,b,…]",
}
_BOUNDS = {"ge": "{} or more", "le": "at most {}", "gt": "above {}", "lt": "below {}"}
MOST_SHOWN = 200  # characters of a value in a message


def explain(error: ValidationError, holder: Any, key: str) -> ConfigError:
    """The first mistake of `error`, which came up in a record, or its class, that is at `key`."""
    first = error.errors(include_url=False)[0]
    place, kind, context = first["loc"], first["type"], first.get("ctx", {})
    here = ".".join([key, *map(str, place)])
    if kind == UNKNOWN:
        name, known = context["name"], context["known"]
        hint = nearest(name, known, prefix=f"{here}.")
        return ConfigError(f"unknown key {here}.{name}{hint}\nkeys of {here}: {', '.join(known)}")
    if kind.startswith("missing"):
        return ConfigError(f"{here} is missing: it has no default")
    value = first["input"]
    typed = isinstance(value, Text) and value.isprintable()
    text = value[:MOST_SHOWN] if typed else shown(value, MOST_SHOWN)
    works = getattr(holder, str(place[0]), None) if len(place) == 1 else None
    return ConfigError(f"{here}={text}: {_remedy(first, context, works)}")


def number_text(value: float) -> str:
    """A number in a message: integers with all digits."""
    return str(value) if isinstance(value, int) else f"{value:g}"


def _remedy(error: Any, context: Mapping[str, Any], works: Any) -> str:
    kind, value = error["type"], error["input"]
    number = isinstance(works, int | float) and not isinstance(works, bool)
    end = f"; {number_text(works)} works" if number else ""
    if kind == "literal_error":
        choices = ast.literal_eval(f"[{context['expected'].replace(' or ', ', ')}]")
        words = [str(choice) for choice in choices]
        return f"expected one of {', '.join(words)}{nearest(str(value), words)}"
    for name, words in _BOUNDS.items():
        if name in context:
            return f"must be {words.format(number_text(context[name]))}{end}"
    if kind == "finite_number":
        return f"must be a finite number{end}"
    if "min_length" in context or "max_length" in context:
        return error["msg"].replace("String should", "must").replace("Tuple should", "must")
    if kind == "string_unicode":
        return "expected text in UTF-8; set LC_ALL=C.UTF-8, or PYTHONUTF8=1, for other letters"
    if expected := EXPECTED.get(kind.partition("_")[0]):
        return f"expected {expected}{end}"
    return error["msg"].removeprefix("Value error, ")
