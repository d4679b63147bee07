"""The base of all records, and of those that are one of several kinds.

Values given in Python are checked strictly. Text of a command line is read by the field's type.
"""

import sys
import typing
from collections.abc import Mapping
from dataclasses import field
from pathlib import PurePath
from typing import Any, ClassVar, TypeVar, dataclass_transform

from pydantic import (
    ConfigDict,
    Field,
    PlainValidator,
    field_validator,
    model_validator,
)
from pydantic.dataclasses import dataclass
from pydantic.fields import FieldInfo
from pydantic_core import ArgsKwargs, PydanticCustomError

from jaxrl_llm.references import nearest
from jaxrl_llm.typed_records.bounds import FreeDict
from jaxrl_llm.typed_records.messages import MOST_SHOWN, UNKNOWN
from jaxrl_llm.typed_records.other_words import answer

__all__ = ["Custom", "Kind", "Record"]

C = TypeVar("C")


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
    def _known_keys(cls, record: Any) -> Any:
        values = record.kwargs if isinstance(record, ArgsKwargs) else record
        known = fields_of(cls)
        for name in map(str, values) if isinstance(values, dict) else ():
            if name not in known:
                ours, keys = answer(name), ", ".join(known)
                hint = f": here it is {ours}" if ours else nearest(name, known)
                context = {"name": name, "known": list(known), "hint": hint, "keys": keys}
                raise PydanticCustomError(UNKNOWN, "unknown key {name}{hint}; {keys}", context)
        return record

    @field_validator("*", mode="before")
    @classmethod
    def _paths_are_text(cls, value: Any) -> Any:
        """A program may give a Path."""
        if isinstance(value, list | tuple) and not hasattr(value, "_fields"):  # no named tuple
            return [str(each) if isinstance(each, PurePath) else each for each in value]
        return str(value) if isinstance(value, PurePath) else value


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

    path: str  # file.py:name or package.module:name
    settings: FreeDict = field(default_factory=dict)  # keyword-only parameters of the function
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
        if isinstance(value, str):
            is_path = ":" in value and Custom in kinds
            value = {"kind": "custom", "path": str(value)} if is_path else {"kind": value}
        if not isinstance(value, Mapping):
            raise ValueError(f"expected one of {known}")
        kind = str(value.get("kind", ""))[:MOST_SHOWN]
        if not kind:
            own = Custom in kinds and ("path" in value or len(kinds) == 1)
            form = f"custom, path: {value.get('path', 'FILE.py:NAME')}" if own else "NAME"
            raise ValueError(f"expected a record with the key kind: write {{kind: {form}, …}}")
        if kind not in table:
            hint = nearest(kind, table)
            if kind.endswith(".py") and Custom in kinds:
                hint = f": write {kind}:NAME for a function of that file"
            raise ValueError(f"there is no {kind}{hint}\nthere are: {known}")
        return validate(table[kind], {key: value[key] for key in value if key != "kind"})

    return PlainValidator(read)


def validate(cls: type[C], values: Any) -> C:
    """A record of a dict of values, which may be text. Raises pydantic's ValidationError."""
    return cls.__pydantic_validator__.validate_python(values, strict=False)  # pyright: ignore


def fields_of(record: Any) -> dict[str, FieldInfo]:
    """The fields of a record or its class, by name."""
    return record.__pydantic_fields__
