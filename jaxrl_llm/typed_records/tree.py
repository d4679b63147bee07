"""A config as a tree: its values by their dotted keys, as plain JSON types, and compared."""

from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from jaxrl_llm.typed_records.messages import MOST_SHOWN
from jaxrl_llm.typed_records.record import Custom, Kind, Record, fields_of

__all__ = ["as_dict", "differences"]

R = TypeVar("R", bound=Record)


def entries(node: Any) -> Iterable[tuple[Any, Any]]:
    """(key, value) of what a record, dict or list holds; objects of a program are left out."""
    if isinstance(node, Record):
        kept = (name for name, entry in fields_of(node).items() if not entry.exclude)
        return [(name, getattr(node, name)) for name in kept]
    return enumerate(node) if isinstance(node, tuple | list) else getattr(node, "items", tuple)()


def value_at(node: Any, key: str) -> Any:
    """The value at a dotted key; None where there is none."""
    for part in key.split("."):
        node = next((value for name, value in entries(node) if str(name) == part), None)
    return node


def default_at(config: Record, key: str) -> Any:
    """The default of a dotted key; None where its record is not set."""
    holder, _, name = key.rpartition(".")
    record = value_at(config, holder) if holder else config
    return record and fields_of(record)[name].get_default(call_default_factory=True)


def as_text(value: Any) -> str:
    """A value as a command line takes it; … stands for what a record or a dict holds."""
    if isinstance(value, Kind):
        return value.label
    if isinstance(value, tuple | list):
        return f"[{','.join(map(as_text, value))}]"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, bool | None):
        return "null" if value is None else str(value).lower()
    if isinstance(value, int | str):
        return str(value)[:MOST_SHOWN] or "''"
    return "{}" if is_empty(value) else "{…}"


def described(record: Kind) -> str:
    """The name of a record, with the settings that are not their defaults."""
    fields, of_label = fields_of(record), "path" if isinstance(record, Custom) else None
    changed = [
        f"{name}={as_text(value)}"
        for name, value in entries(record)
        if name != of_label and value != fields[name].get_default(call_default_factory=True)
    ]
    return f"{record.label}({', '.join(changed)})" if changed else record.label


def is_empty(value: Any) -> bool:
    """True if a key holds nothing: null, or an empty text, list or dict."""
    return value in (None, "", (), [], {})


def every(node: Any, kind: type[R], key: str = "") -> Iterator[tuple[str, R]]:
    """(dotted key, record) of every record of a class in a config, in the order of its keys."""
    if isinstance(node, kind):
        yield key, node
    for name, value in entries(node):
        if isinstance(value, (Record, tuple, list, dict)):
            yield from every(value, kind, f"{key}.{name}" if key else str(name))


def as_dict(node: Any) -> Any:
    """A record as plain JSON types; one of several kinds begins with its `kind`."""
    if isinstance(node, tuple | list):
        return [as_dict(entry) for entry in node]
    if not isinstance(node, Record | dict):
        return node
    kind = {"kind": node.kind} if isinstance(node, Kind) else {}
    return kind | {name: as_dict(entry) for name, entry in entries(node)}


def differences(a: Any, b: Any, key: str = "") -> list[str]:
    """The dotted keys at which two configs differ."""
    a, b = as_dict(a), as_dict(b)
    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        a, b = ({str(i): entry for i, entry in enumerate(entries)} for entries in (a, b))
    if not (isinstance(a, dict) and isinstance(b, dict)):
        return [] if a == b and type(a) is type(b) else [key]
    keys = [
        differences(a.get(name), b.get(name), f"{key}.{name}" if key else name)
        for name in dict.fromkeys((*a, *b))
    ]
    return [name for names in keys for name in names]


def key_that_ends_in(name: str, config: Record) -> str:
    """The first dotted key that ends in `name`; empty where there is none."""
    holders = (key for key, record in every(config, Record) if name in fields_of(record))
    return next((f"{key}.{name}".removeprefix(".") for key in holders), "")
