"""Values that cross between programs as JSON: plain data, and handles of objects that stay.

What arrives is made of Python's own types, so an object whose `==` always says yes arrives as
data, or as a handle. Imports the standard library alone: programs in the sandbox use it.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Set
from itertools import islice
from typing import Any

LONGEST = 2**20  # entries of an iterator

# JSON has these itself. Others are a list whose first entry names the type.
_PLAIN = (type(None), bool, str, float)


class Foreign(TypeError):
    """A value that does not cross, such as a function of the test."""


def encode(value: Any, keep: Callable[[Any], Any]) -> Any:
    """`value` as JSON holds it. `keep(x)` gives what stands for an object that is no data."""
    if type(value) in _PLAIN:
        return value
    # Of a subclass, the value alone crosses.
    if isinstance(value, int):
        number = int.__int__(value)
        return number if abs(number) < 2**63 else ["int", hex(number)]
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, bytes | bytearray):
        return ["bytes", bytes(value).hex()]
    if isinstance(value, complex):
        return ["complex", value.real, value.imag]
    for name, kind in (("list", list), ("tuple", tuple), ("set", Set)):
        if isinstance(value, kind):
            return [name, *(encode(entry, keep) for entry in value)]
    if isinstance(value, Mapping):
        return ["dict", *([encode(k, keep), encode(v, keep)] for k, v in value.items())]
    if isinstance(value, range | Iterator) or type(value).__name__ == "deque":
        return ["list", *(encode(entry, keep) for entry in islice(value, LONGEST))]
    if hasattr(value, "tolist"):  # numpy
        return encode(value.tolist(), keep)
    return keep(value)


def decode(data: Any, fetch: Callable[[Any], Any]) -> Any:
    """The value of `encode`. `fetch` gives the object of what `keep` gave. Raises ValueError."""
    if type(data) in (*_PLAIN, int):
        return data
    if not isinstance(data, list) or not data:
        raise ValueError("no value")
    name, *parts = data
    match name:
        case "int":
            return int(parts[0], 16)
        case "bytes":
            return bytes.fromhex(parts[0])
        case "complex":
            return complex(*parts)
        case "list":
            return [decode(part, fetch) for part in parts]
        case "tuple":
            return tuple(decode(part, fetch) for part in parts)
        case "set":
            return {decode(part, fetch) for part in parts}
        case "dict":
            return {decode(key, fetch): decode(value, fetch) for key, value in parts}
        case _:
            return fetch(data)


def no_object(value: Any) -> Any:
    """For `encode` and `decode` where only data may cross."""
    raise Foreign(f"a {type(value).__name__} is no data")


def to_line(message: Any) -> bytes:
    """A message as a line of JSON."""
    return json.dumps(message).encode() + b"\n"


def comparable(value: Any) -> Any:
    """`value` with tuples as lists and keys as text: what a JSON ground truth can say."""
    if isinstance(value, list | tuple):
        return [comparable(entry) for entry in value]
    if isinstance(value, dict):
        return {str(key): comparable(entry) for key, entry in value.items()}
    return value
