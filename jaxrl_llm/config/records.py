"""What the records of a config are made of: their base, bounded types, errors in our words.

Values given in Python are checked strictly. Text of a command line is read by the field's type.
"""

import ast
import math
import sys
import typing
from collections.abc import Mapping
from dataclasses import field
from types import NoneType
from typing import Annotated, Any, ClassVar, TypeVar, dataclass_transform

from annotated_types import Ge, Gt, Le, Lt
from pydantic import (
    AllowInfNan,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    Strict,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic.dataclasses import dataclass
from pydantic.fields import FieldInfo
from pydantic_core import ArgsKwargs, PydanticCustomError

from jaxrl_llm.references import nearest

__all__ = ["ConfigError", "Custom", "Kind", "Record", "UnknownKeyError"]


class ConfigError(ValueError):
    """A user's mistake; the message says what is wrong and what would work.

    Commands print it without a traceback and end with exit code 2.
    """


class UnknownKeyError(ConfigError):
    """A key that no record has; `key` is the dotted one, without "config."."""

    def __init__(self, message: str, key: str, value: str) -> None:
        super().__init__(message)
        self.key, self.value = key, value


class Text(str):
    """A value as typed on a command line, without quotes around it."""


C = TypeVar("C")
T = TypeVar("T")


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
    if value is None:
        return ()
    if isinstance(value, str):
        return (value,) if value else ()
    return value


def none_word(value: Any) -> Any:
    """None for the words of a command line that mean it."""
    return None if isinstance(value, Text) and value.lower() in ("none", "null") else value


SMALLEST, LARGEST = 2.0**-126, 2.0**127  # of float32
MOST = 2**31 - 1  # of an integer: arrays on the devices count in int32
Count = Annotated[int, Ge(1), Le(MOST)]
Whole = Annotated[int, Ge(0), Le(MOST)]
NotNegative = Annotated[float, Ge(0)]
Positive = Annotated[float, Gt(0)]
Fraction = Annotated[float, Ge(0), Le(1)]
BelowOne = Annotated[float, Ge(0), Lt(1)]
Probability = Annotated[float, Gt(0), Le(1)]
# A bound that infinity switches off. Every other number of a record is finite.
Unbounded = Annotated[float, Gt(0), AllowInfNan(True)]
Seconds = Annotated[float, Gt(0), Le(1e9)]  # timers of Python take no more
Gigabytes = Annotated[float, Gt(0), Le(1e9)]  # limits of a process take no more
Processes = Annotated[int, Ge(1), Le(1024)]
Many = Annotated[tuple[T, ...], Strict(False), BeforeValidator(_alone)]
Maybe = Annotated[T | None, BeforeValidator(none_word)]
FreeDict = Annotated[dict[str, Any], BeforeValidator(guess)]


# ------------------------------------------------------------------------- records

UNKNOWN, LACKS = "unknown_key", "lacks_key"  # types of our own errors


def _checked(cls: type[C]) -> type[C]:
    """A frozen dataclass with keyword arguments, built when first used: a run needs few of them."""
    rules = ConfigDict(extra="forbid", strict=True, defer_build=True, allow_inf_nan=False)
    made: Any = dataclass(frozen=True, kw_only=True, config=rules)(cls)
    return made


@_checked
@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(field, Field))
class Record:
    """The base of all records. A subclass is a frozen dataclass, whose values pydantic checks."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        _checked(cls)

    @model_validator(mode="before")
    @classmethod
    def _known_keys(cls, given: Any) -> Any:
        values = given.kwargs if isinstance(given, ArgsKwargs) else given
        known = field_names(cls)
        for name in map(str, values) if isinstance(values, dict) else ():
            if name not in known:
                context = {"name": name, "hint": nearest(name, known), "known": ", ".join(known)}
                raise PydanticCustomError(UNKNOWN, "unknown key {name}{hint}; {known}", context)
        return given

    @field_validator("*", mode="before")
    @classmethod
    def _no_switch_for_a_number(cls, given: Any, field: ValidationInfo) -> Any:
        """Pydantic reads True as 1 where it reads text."""
        entries = given if isinstance(given, list | tuple) else (given,)
        if any(isinstance(entry, bool) for entry in entries):
            kinds = set(classes_in(fields_of(cls)[str(field.field_name)].annotation)) - {NoneType}
            if kinds and kinds <= {int, float}:
                raise ValueError(f"expected {_EXPECTED[kinds.pop().__name__]}")
        return given

    @field_validator("*", mode="after")
    @classmethod
    def _fits_float32(cls, value: Any) -> Any:
        """Devices compute in float32, where larger numbers are infinite and smaller ones 0."""
        if isinstance(value, float) and value and math.isfinite(value):
            if not SMALLEST <= abs(value) <= LARGEST:
                raise ValueError(f"beyond float32: give 0, or from {SMALLEST:g} to {LARGEST:g}")
        return value


def classes_in(annotation: Any) -> list[type]:
    """The classes that a field's type names."""
    if isinstance(annotation, type):
        return [annotation]
    return [cls for part in typing.get_args(annotation) for cls in classes_in(part)]


_KINDS: list[type["Kind"]] = []  # in the order of the source


class Kind(Record):
    """A record that is one of several; `kind` is its name in JSON and on a command line."""

    kind: ClassVar[str] = ""

    def __init_subclass__(cls, kind: str = "") -> None:
        cls.kind = kind
        super().__init_subclass__()
        if kind:
            _KINDS.append(cls)

    @property
    def label(self) -> str:
        """The name for messages and model cards."""
        return self.kind

    @classmethod
    def of_object(cls, value: Any) -> "Kind | None":
        """The record of an object of a Python program, for a kind that holds one."""
        return None


def kinds_of(*bases: type[Kind]) -> tuple[type[Kind], ...]:
    """The kinds that inherit from one of `bases`, in the order of the source."""
    return tuple(cls for cls in _KINDS if issubclass(cls, bases))


def records_in(module: str, *others: str) -> list[str]:
    """The names of the records that a module defines, and `others`: what it exports."""
    named = vars(sys.modules[module]).items()
    own = [n for n, v in named if isinstance(v, type) and v.__module__ == module and n[0] != "_"]
    return [*own, *others]


class Custom(Kind, kind="custom"):
    """A function of yours by path, `file.py:name` or `package.module:name`, and its settings.

    Settings are the function's keyword-only parameters. They are checked when it is loaded.
    """

    path: str
    settings: FreeDict = field(default_factory=dict)
    offline: bool = False  # for an algorithm: it returns an OfflineAlgorithm

    @property
    def label(self) -> str:
        return self.path


def one_of(*kinds: type[Kind]) -> PlainValidator:
    """The validator of a field that holds one of these records, its kind's name, or its dict."""
    table = {cls.kind: cls for cls in kinds}
    known = ", ".join(table)

    def read(value: Any) -> Any:
        if isinstance(value, kinds):
            return value
        for made in filter(None, (cls.of_object(value) for cls in kinds)):
            return made
        if isinstance(value, str):
            is_path = ":" in value and Custom in kinds and not value.startswith("jaxrl_llm.")
            value = {"kind": "custom", "path": str(value)} if is_path else {"kind": value}
        if not isinstance(value, Mapping):
            raise ValueError(f"expected one of {known}")
        kind = str(value.get("kind", ""))[:MOST_SHOWN]
        # Older forms named a function of ours by its path.
        old = (kind or str(value.get("path", value.get("name", "")))).rpartition(":")[2]
        if not kind:
            form = f"{{kind: {_kind_for(value, old, table)}, …}}"
            raise ValueError(f"expected a record with the key kind: write {form}")
        if kind not in table:
            hint = f": write {old}" if old in table else nearest(kind, table)
            raise ValueError(f"there is no {kind}{hint}\nthere are: {known}")
        return _of_kind(table[kind], {name: value[name] for name in value if name != "kind"})

    return PlainValidator(read)


def _kind_for(value: Mapping[str, Any], old: str, table: Mapping[str, Any]) -> str:
    """What a record that lacks the key kind can have there, as far as its other keys say."""
    if old in table:
        return old
    is_path = Custom.kind in table and ("path" in value or len(table) == 1)
    return f"{Custom.kind}, path: {value.get('path', 'FILE.py:NAME')}" if is_path else "NAME"


def _of_kind(cls: type[Kind], values: Any) -> Kind:
    """The record of one kind. A key that is missing is reported with the kind."""
    try:
        return validate(cls, values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        if not first["type"].startswith("missing") or len(first["loc"]) != 1:
            raise
        context = {"name": first["loc"][0], "kind": cls.kind}
        raise PydanticCustomError(LACKS, "{name} is missing", context) from None


def validate(cls: type[C], values: Any) -> C:
    """A record of a dict of values, which may be text. Raises pydantic's ValidationError."""
    try:
        return cls.__pydantic_validator__.validate_python(values, strict=False)  # pyright: ignore
    except UnicodeEncodeError as error:  # of bytes on a command line that are no UTF-8
        raise ConfigError(f"{error.object!r}: this text is no UTF-8; write it again") from None


def fields_of(record: Any) -> dict[str, FieldInfo]:
    """The fields of a record or its class, by name."""
    return record.__pydantic_fields__


def field_names(record: Any) -> tuple[str, ...]:
    """The keys of a record or its class."""
    return tuple(fields_of(record))


# ------------------------------------------------------------------------- errors

_EXPECTED = {
    "bool": "true or false",
    "dataclass": "{key: value, …}",
    "dict": "{key: value, …}",
    "float": "a number",
    "int": "an integer",
    "string": "text",
    "tuple": "a list [a,b,…]",
}
# A bound -> its words.
_BOUNDS = {"ge": "", "le": "at most ", "gt": "above ", "lt": "below "}
MOST_SHOWN = 200  # characters of a value in a message


def explain(error: ValidationError, holder: Any, key: str) -> ConfigError:
    """The first mistake of `error`, which came up in a record, or its class, that is at `key`."""
    first = error.errors(include_url=False)[0]
    place, kind, context = first["loc"], first["type"], first.get("ctx", {})
    here = ".".join([key, *map(str, place)])
    if kind == UNKNOWN:
        hint = context["hint"].replace("did you mean '", f"did you mean '{here}.")
        return ConfigError(
            f"unknown key {here}.{context['name']}{hint}\nkeys of {here}: {context['known']}"
        )
    if kind == LACKS:
        form = f"{{kind: {context['kind']}, {context['name']}: …}}"
        return ConfigError(f"{here}.{context['name']} is missing: it has no default; write {form}")
    if kind.startswith("missing"):
        return ConfigError(f"{here} is missing: it has no default; write {{{place[-1]}: …}}")
    shown = first["input"] if isinstance(first["input"], Text) else _short(first["input"])
    works = getattr(holder, str(place[0]), None) if len(place) == 1 else None
    return ConfigError(f"{here}={shown[:MOST_SHOWN]}: {_remedy(first, context, works)}")


def _short(value: Any) -> str:
    """A value in a message."""
    try:
        shown = repr(value)
    except ValueError:  # Python writes no integer of more than 4,300 digits
        shown = "an integer of many digits"
    return shown if len(shown) <= MOST_SHOWN else f"{shown[:MOST_SHOWN]}..."


def number_text(value: float) -> str:
    """A number in a message: integers with all digits."""
    return str(value) if isinstance(value, int) else f"{value:g}"


def _remedy(error: Any, context: Mapping[str, Any], works: Any) -> str:
    kind, given = error["type"], error["input"]
    if kind == "literal_error":
        choices = ast.literal_eval(f"[{context['expected'].replace(' or ', ', ')}]")
        words = [str(choice) for choice in choices]
        return f"expected one of {', '.join(words)}{nearest(str(given), words)}"
    for name, words in _BOUNDS.items():
        if name in context:
            bound = context[name]
            works = _within(name, bound) if works is None else works
            end = " or more" if name == "ge" else ""
            return f"must be {words}{number_text(bound)}{end}; {number_text(works)} works"
    if kind == "finite_number":
        return "must be a finite number" + (f"; {works:g} works" if works is not None else "")
    if "min_length" in context or "max_length" in context:
        return error["msg"].replace("String should", "must").replace("Tuple should", "must")
    expected = _EXPECTED.get(kind.partition("_")[0])
    return f"expected {expected}" if expected else error["msg"].removeprefix("Value error, ")


def _within(name: str, bound: float) -> float:
    """A value on the right side of a bound. Other bounds of the same field are on its far side."""
    if name == "gt":
        return bound + 1
    return bound if name != "lt" else bound / 2 if bound > 0 else bound - 1
