"""The program that has a model's code: it defines the code's names and answers calls of them.

It runs inside the sandbox. The code may change anything here. It gains nothing: neither the tests
nor the expected values are in this process, and whoever calls judges plain data.
"""

import json
import socket
import sys
from typing import Any

from jaxrl_llm.sandbox.library import RECURSION_LIMIT, library_names
from jaxrl_llm.sandbox.values import decode, encode, to_line

CHANNEL = 4


def main() -> None:
    """Requests are [operation, name or handle, arguments, named arguments]; the first is code."""
    channel = socket.socket(fileno=CHANNEL)
    sys.setrecursionlimit(RECURSION_LIMIT)
    objects: list[Any] = []
    namespace: dict[str, Any] = {"__name__": "solution"}
    for line in channel.makefile("rb"):
        request = json.loads(line)
        try:
            reply = _answer(request, namespace, objects)
        except BaseException as error:  # also SystemExit: the next test may succeed
            reply = ["error", type(error).__name__, str(error)[:200]]
        channel.sendall(to_line(reply))


def _answer(request: list[Any], namespace: dict[str, Any], objects: list[Any]) -> list[Any]:
    operation, target, arguments, named = request

    def keep(value: Any) -> list[Any]:
        objects.append(value)
        return ["object", len(objects) - 1, callable(value)]

    def fetch(data: list[Any]) -> Any:
        return objects[data[1]]

    if operation == "define":
        namespace.update(library_names(target))
        exec(compile(target, "solution.py", "exec"), namespace)
        return ["ok", None, []]
    if operation == "get":
        return ["ok", encode(_named(namespace, target), keep), []]
    if operation == "attribute":
        return ["ok", encode(getattr(objects[target], arguments), keep), []]
    function = _named(namespace, target) if isinstance(target, str) else objects[target]
    values = [decode(argument, fetch) for argument in arguments]
    result = function(*values, **{key: decode(value, fetch) for key, value in named.items()})
    # A function may have changed its arguments, as one that sorts in place does.
    after = [encode(value, keep) if isinstance(value, list | dict | set) else None
             for value in values]  # fmt: skip
    return ["ok", encode(result, keep), after]


def _named(namespace: dict[str, Any], name: str) -> Any:
    """A name of the code; a method of its class Solution, as LeetCode's problems have it."""
    if name in namespace:
        return namespace[name]
    if "Solution" not in namespace:
        raise NameError(f"the code does not define {name}")
    return getattr(namespace["Solution"](), name)


if __name__ == "__main__":
    main()
