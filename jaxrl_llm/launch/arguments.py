"""Arguments of the library's functions: their types, before jax is imported.

Each function returns its argument, or raises a ConfigError that says what it must be.
"""

import functools
import inspect
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from jaxrl_llm.config import ConfigError
from jaxrl_llm.references import shown


def a_path(name: str, value: Any) -> Path:
    """A path, as text or a Path, that a file system takes. Empty text is none: it is a mistake."""
    if not isinstance(value, str | os.PathLike) or "\0" in os.fspath(value) or value == "":
        _refuse(name, value, "a path")
    try:
        Path(value).exists()
    except (OSError, ValueError) as error:
        _refuse(name, value, f"a path ({error.args[-1]})")
    return Path(value)


def a_list(name: str, value: Any, example: str) -> list[Any]:
    """The entries of a list, a tuple or another iterable, but not of a text or a dict."""
    if not isinstance(value, Iterable) or isinstance(value, str | bytes | Mapping):
        _refuse(name, value, f"a list such as {example}")
    return list(value)


def functions(name: str, value: Any, example: str) -> list[Callable[..., Any]]:
    """A list of what can be called with one argument."""
    found = a_list(name, value, example)
    for i, function in enumerate(found):
        if not callable(function):
            _refuse(f"{name}[{i}]", function, "a function")
        try:
            inspect.signature(function).bind(None)
        except ValueError:
            pass  # a builtin does not say what it takes
        except TypeError as error:
            _refuse(f"{name}[{i}]", function, f"a function of one argument ({error})")
        if _begins_only(function):
            _refuse(
                f"{name}[{i}]",
                function,
                "a plain function: no call of an async one, or of a generator, runs its body",
            )
    return found


def _begins_only(function: Callable[..., Any]) -> bool:
    """Whether a call returns a coroutine or a generator, and runs nothing of the function."""
    while isinstance(function, functools.partial):
        function = function.func
    kinds = (
        inspect.iscoroutinefunction,
        inspect.isgeneratorfunction,
        inspect.isasyncgenfunction,
    )
    return any(kind(found) for kind in kinds for found in (function, type(function).__call__))


def rows(name: str, value: Any, files: str) -> Any:
    """Rows of data. `files` is the key of the config for paths."""
    if isinstance(value, str | bytes | os.PathLike | Mapping):
        _refuse(name, value, f"a list of dicts, one a row; a file is named by {files}")
    return value


def a_whole_number(name: str, value: Any, *, least: int = 0) -> int:
    """An integer from `least` on."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        _refuse(name, value, f"a whole number, {least} or more")
    return value


def one_of(name: str, value: Any, *choices: Any) -> Any:
    """One of a few values."""
    if not any(type(value) is type(choice) and value == choice for choice in choices):
        _refuse(name, value, f"one of {', '.join(map(str, choices))}")
    return value


def _refuse(name: str, value: Any, wanted: str) -> NoReturn:
    raise ConfigError(f"{name}={shown(value)}: expected {wanted}")
