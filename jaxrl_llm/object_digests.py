"""Digests of a Python program's functions and rows, which are the same in another process."""

import functools
import hashlib
import inspect
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from jaxrl_llm.references import INSTALLED

MOST_DIGESTED = 100_000  # rows; of more, so many at equal distances


def rows_digest(rows: Sequence[Mapping[str, Any]]) -> str:
    """8 hex digits of the rows and their order. ValueError for what is no row."""
    found = hashlib.blake2b(str(len(rows)).encode(), digest_size=4)
    step = -(-len(rows) // MOST_DIGESTED)
    for place in range(0, len(rows), step):
        row = rows[place]
        if not isinstance(row, Mapping) or not all(isinstance(name, str) for name in row):
            raise ValueError(f"row {place} is no dict with names of columns: {repr(row)[:80]}")
        try:
            text = json.dumps(dict(row), sort_keys=True, default=_typed)
        except RecursionError:
            raise ValueError(f"row {place} is nested too deeply") from None
        found.update(text.encode(errors="surrogatepass"))
    return found.hexdigest()


def _typed(value: Any) -> str:
    """A value beyond JSON as text that is the same in another process."""
    text = repr(value)
    return f"a {type(value).__name__}" if re.search(r" at 0x[0-9a-f]+", text) else text


def function_digest(function: Any) -> str:
    """8 hex digits of what a function does: its code, constants, defaults and what it closes over.

    Functions that it calls and global constants belong to it, of the same module and of modules in
    its folder. Comments, its file and its lines do not. Another version of Python gives another
    digest.
    """
    found = hashlib.blake2b(digest_size=4)
    for part in _parts(function, set()):
        found.update(part.encode(errors="surrogatepass") + b"\0")
    return found.hexdigest()


def _parts(value: Any, seen: set[int]) -> Iterator[str]:
    """What a value consists of, as texts; the same in another process."""
    if id(value) in seen:
        return
    match value:
        case None | bool() | int() | float() | complex() | str() | bytes():
            yield repr(value)
        case ModuleType() | type():
            yield value.__name__
        case CodeType():
            seen.add(id(value))
            yield value.co_code.hex()
            yield repr((value.co_names, value.co_varnames, value.co_freevars))
            yield from _each(value.co_consts, seen)
        case FunctionType():
            seen.add(id(value))
            cells = [_content(cell) for cell in value.__closure__ or ()]
            own = (value.__code__, value.__defaults__, value.__kwdefaults__, *cells)
            yield from _each((*own, *_named(value)), seen)
        case MethodType():
            yield from _each((value.__func__, value.__self__), seen)
        case functools.partial():
            yield from _each((value.func, value.args, value.keywords), seen)
        case dict():
            yield from _each([part for pair in value.items() for part in pair], seen)
        case list() | tuple():
            yield from _each(value, seen)
        case set() | frozenset():
            yield repr(sorted(map(_typed, value)))
        case re.Pattern():
            yield repr(value)
        case _:
            seen.add(id(value))
            yield type(value).__qualname__
            call = inspect.getattr_static(type(value), "__call__", None)
            own = call if isinstance(call, FunctionType) else None
            yield from _each((own, getattr(value, "__dict__", None)), seen)
            if hasattr(value, "tobytes"):  # an array
                yield value.tobytes().hex()


def _each(values: Any, seen: set[int]) -> Iterator[str]:
    for value in values:
        yield from _parts(value, seen)
    yield f"{len(values)} parts"


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None


def _named(function: FunctionType) -> list[Any]:
    """The globals that the code names, also in its inner functions.

    These are functions of the same module and constants. Others may change while they are used.
    """
    names: set[str] = set()
    codes = [function.__code__]
    while codes:
        code = codes.pop()
        names.update(code.co_names)
        codes += [entry for entry in code.co_consts if isinstance(entry, CodeType)]
    found = [function.__globals__.get(name) for name in sorted(names)]
    modules = [value for value in found if isinstance(value, ModuleType) and _near(value, function)]
    found += [vars(module).get(name) for module in modules for name in sorted(names)]
    constants = (int, float, complex, str, bytes, tuple, re.Pattern)
    return [value for value in found if isinstance(value, constants) or _same(value, function)]


def _same(value: Any, function: FunctionType) -> bool:
    """Whether a value is a function of the same module, or of one in its folder."""
    if not isinstance(value, FunctionType):
        return False
    return value.__module__ == function.__module__ or _near(
        sys.modules.get(value.__module__), function
    )


def _near(module: ModuleType | None, function: FunctionType) -> bool:
    """Whether a module is a file of the user in the folder of the function's file or below it.

    A function of a notebook is in the working folder.
    """
    file, own = getattr(module, "__file__", None), function.__globals__.get("__file__")
    name = getattr(module, "__name__", "")
    if not file or name.partition(".")[0] in (__package__, *sys.stdlib_module_names):
        return False
    folder, place = Path(own).parent if own else Path(), Path(file).resolve()
    return place.is_relative_to(folder.resolve()) and not INSTALLED & {*place.parts}
