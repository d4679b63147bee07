"""The program that has the tests: names of the model's code stand for calls of the candidate.

It runs in a sandbox of its own, since tests come with the data. The model's code is not here.
"""

import ast
import builtins
import importlib
import json
import os
import socket
import sys
from contextlib import suppress
from typing import Any

from jaxrl_llm.sandbox.library import find, missing_names
from jaxrl_llm.sandbox.values import Foreign, decode, encode, no_object, to_line

RESULT, CHANNEL = 3, 4


class Lost(BaseException):
    """The candidate did not answer. Not an Exception: a test must not catch it."""


class Candidate:
    """The other end of the channel."""

    def __init__(self, channel: socket.socket, seconds: float) -> None:
        channel.settimeout(seconds)
        self._channel = channel
        self._lines = channel.makefile("rb")

    def ask(self, operation: str, target: Any, arguments: Any = (), named: Any = None) -> Any:
        """The value and the arguments as they are afterwards. Raises what the code raised."""
        try:
            self._channel.sendall(to_line([operation, target, arguments, named or {}]))
            kind, value, rest = json.loads(self._lines.readline())
        except (OSError, ValueError, TypeError, RecursionError) as error:
            raise Lost from error
        if kind == "error":
            raise _exception(str(value), str(rest))
        return decode(value, self.fetch), rest

    def fetch(self, data: list[Any]) -> Any:
        """The stand-in of an object that stays with the candidate."""
        if data[0] != "object" or type(data[1]) is not int:
            raise ValueError("no value")
        return Remote(self, data[1])

    def call(self, target: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Call a function of the code; lists, maps and sets change as they did there."""
        sent = [encode(value, _handle) for value in arguments]
        value, after = self.ask(
            "call", target, sent, {k: encode(v, _handle) for k, v in named.items()}
        )
        for own, before, now in zip(arguments, sent, after, strict=True):
            if now is not None and now != before:
                _replace(own, decode(now, self.fetch))
        return value


class Remote:
    """Stands for a function or an object of the model's code. It equals itself alone."""

    def __init__(self, candidate: Candidate, target: Any) -> None:
        self.__dict__["_remote"] = (candidate, target)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Call it there."""
        candidate, target = self.__dict__["_remote"]
        return candidate.call(target, arguments, named)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        candidate, target = self.__dict__["_remote"]
        return candidate.ask("attribute", target, name)[0]


def _exception(name: str, text: str) -> Exception:
    """Python's exception of that name. Not one that ends a loop: `all(map(f, x))` would pass."""
    known = getattr(builtins, name, None)
    if isinstance(known, type) and issubclass(known, Exception) and "Stop" not in name:
        with suppress(TypeError):  # UnicodeDecodeError takes more than a text
            return known(text)
    return RuntimeError(f"{name}: {text}")


def _handle(value: Any) -> Any:
    if isinstance(value, Remote) and isinstance(value.__dict__["_remote"][1], int):
        return ["object", value.__dict__["_remote"][1]]
    raise Foreign(f"the test gives the code a {type(value).__name__}, which is no data")


def _replace(own: Any, now: Any) -> None:
    if isinstance(own, list) and isinstance(now, list):
        own[:] = now
    elif isinstance(own, dict | set) and isinstance(now, dict | set):
        own.clear()
        own.update(now)


class Names(dict[str, Any]):
    """The globals of a test. Names that neither it nor the library defines are the candidate's.

    So the code cannot replace `len`, `math` or `isclose` in a test. In a test without a name of
    the candidate, a call of a library name is the candidate's: `bisect(1)`, but not
    `bisect.insort(x, 1)`.
    """

    def __init__(self, candidate: Candidate, source: str, tree: ast.Module) -> None:
        super().__init__(__name__="__test__", __builtins__=builtins)
        self._candidate = candidate
        calls = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
        called = {function.id for function in calls if isinstance(function, ast.Name)}
        missing = missing_names(source)
        names_the_code = any(find(n) is None and n not in sys.stdlib_module_names for n in missing)
        self._library = {name: value for name in missing if (value := find(name)) is not None
                         and (names_the_code or name not in called)}  # fmt: skip
        self._modules = sys.stdlib_module_names - called
        self.of_code: set[str] = set()
        self.not_in_code: set[str] = set()  # names of calls that the library stands in for

    def __missing__(self, name: str) -> Any:
        if hasattr(builtins, name):
            raise KeyError(name)
        if name in self._library:
            return self._library[name]
        if name in self._modules:
            return importlib.import_module(name)
        try:
            value = self._candidate.ask("get", name)[0]
        except NameError:
            if (value := find(name)) is None:
                raise
            self.not_in_code.add(name)
        else:
            self.of_code.add(name)
        return value


def run(test: str, candidate: Candidate) -> str:
    """Why a test failed, or nothing. Raises Lost."""
    try:
        tree = ast.parse(test)
        names = Names(candidate, test, tree)
        exec(compile(tree, "test.py", "exec"), names)
        if names.not_in_code and not names.of_code:
            return f"NameError: the code does not define {', '.join(sorted(names.not_in_code))}"
    except AssertionError:
        return "an assert failed"
    except BaseException as error:
        if isinstance(error, Lost):
            raise
        return f"{type(error).__name__}: {str(error)[:200]}"
    return ""


def call(name: str, arguments: list[Any], candidate: Candidate) -> list[Any]:
    """["value", data] of a call, or ["failed", why]. Raises Lost."""
    try:
        value = candidate.call(name, tuple(arguments), {})
        return ["value", encode(value, no_object)]
    except Exception as error:
        return ["failed", f"{type(error).__name__}: {str(error)[:200]}"]


def main() -> None:
    """Answer each item of the request by a line of JSON on descriptor 3; stop at a lost one."""
    request = json.loads(sys.stdin.read())
    candidate = Candidate(socket.socket(fileno=CHANNEL), request["seconds"])
    try:
        candidate.ask("define", request["code"])
    except Exception as error:
        report(["broken", f"{type(error).__name__}: {str(error)[:200]}"])
        return
    except Lost:
        report(["broken", "the code ended or ran too long before any test"])
        return
    try:
        for kind, *item in request["items"]:
            if kind == "call":
                report(call(item[0], item[1], candidate))
            else:
                why = run(item[0], candidate)
                report(["failed", why] if why else ["passed"])
    except Lost:
        report(["lost", "the code ended or ran too long"])


def report(line: list[Any]) -> None:
    """Write one answer."""
    rest = memoryview(to_line(line))
    while rest:
        rest = rest[os.write(RESULT, rest) :]


if __name__ == "__main__":
    main()
