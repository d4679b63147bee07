"""Digests of a Python program's functions and rows, which are the same in another process."""

import ast
import contextlib
import functools
import hashlib
import inspect
import json
import re
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

MOST_DIGESTED = 100_000  # rows, or numbers of an array; of more, so many at equal distances


def rows_digest(rows: Sequence[Mapping[str, Any]]) -> str:
    """8 hex digits of the rows and their order. ValueError for what is no row."""
    digest = hashlib.blake2b(str(len(rows)).encode(), digest_size=4)
    step = -(-len(rows) // MOST_DIGESTED)
    for place in range(0, len(rows), step):
        row = rows[place]
        if not isinstance(row, Mapping) or not all(isinstance(name, str) for name in row):
            raise ValueError(f"row {place} is no dict with names of columns: {repr(row)[:80]}")
        text = json.dumps(dict(row), sort_keys=True, default=_typed)
        digest.update(text.encode(errors="surrogatepass"))
    return digest.hexdigest()


def params_digest(tree: Mapping[str, Any]) -> tuple[int, str]:
    """The number of arrays in nested dicts, and 8 hex digits of them; of large ones, of a part."""
    import numpy as np

    digest, count = hashlib.blake2b(digest_size=4), 0

    def add(path: str, value: Any) -> None:
        nonlocal count
        if isinstance(value, Mapping):
            for name in sorted(value):
                add(f"{path}.{name}", value[name])
            return
        if not hasattr(value, "shape") or not hasattr(value, "dtype"):
            raise ValueError(f"{path[1:]} is of type {type(value).__name__}, not an array")
        count += 1
        step = -(-int(np.prod(value.shape)) // MOST_DIGESTED) or 1
        digest.update(f"{path} {tuple(value.shape)} {value.dtype}".encode())
        digest.update(np.asarray(value.reshape(-1)[::step]).tobytes())

    add("", tree)
    return count, digest.hexdigest()


def _typed(value: Any) -> str:
    """A value beyond JSON as text that is the same in another process."""
    text = repr(value)
    return f"a {type(value).__name__}" if re.search(r" at 0x[0-9a-f]+", text) else text


def source_object(function: Any) -> Any:
    """The function or class that has the source text of an object that can be called."""
    while isinstance(function, functools.partial):
        function = function.func
    is_source = inspect.isroutine(function) or isinstance(function, type)
    return function if is_source else type(function).__call__


def closure_digest(value: Any) -> str:
    """8 hex digits of functions in a tuple, with the values and functions that they close over.

    So two transformations of optax differ if one of their numbers does.
    """
    known: set[int] = set()

    def parts(value: Any) -> Any:
        if isinstance(value, tuple | list):
            return [parts(each) for each in value]
        if isinstance(value, Mapping):
            return {str(key): parts(each) for key, each in value.items()}
        if isinstance(value, functools.partial):
            return [parts(value.func), parts(value.args), parts(value.keywords)]
        if not callable(value) or isinstance(value, type):
            return _typed(value)
        own = inspect.unwrap(value)
        if id(own) in known or not inspect.isfunction(own):
            return getattr(own, "__qualname__", type(own).__name__)
        known.add(id(own))
        held = [parts(cell.cell_contents) for cell in own.__closure__ or () if not _empty(cell)]
        return [function_digest(own), held, parts(own.__defaults__ or ())]

    text = json.dumps(parts(value), sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=4).hexdigest()


def _empty(cell: Any) -> bool:
    """True for a variable of a closure that has no value."""
    try:
        return cell.cell_contents is cell
    except ValueError:
        return True


def function_digest(function: Any) -> str:
    """8 hex digits of a function's source text and the values that an object or a partial holds.

    Comments do not count. Functions that it calls and constants do not count either. A function
    without source text, such as one that was typed into a shell, has a digest of its name.
    """
    held: dict[str, Any] = dict(getattr(function, "__dict__", {}))
    if isinstance(function, functools.partial):
        held = {"args": function.args} | function.keywords
    own = source_object(function)
    try:
        text = textwrap.dedent(inspect.getsource(own))
    except (OSError, TypeError):
        text = own.__qualname__
    with contextlib.suppress(SyntaxError):  # lines around a lambda
        text = ast.unparse(ast.parse(text))
    parts = [text, repr({name: _typed(value) for name, value in held.items()})]
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=4).hexdigest()
