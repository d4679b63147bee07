"""A worker process of the reward pool: imports reward functions and answers the trainer's calls.

It is not a process of `multiprocessing`, which would import the user's main script again, and jax
with it. So a worker starts as fast as a bare Python and never sees an accelerator.
"""

import asyncio
import os
import resource
import sys
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from jaxrl_llm.rewards import calling, loading
from jaxrl_llm.sandbox import processes


def main(settings: dict[str, Any]) -> None:
    """Answer requests until the trainer closes its end."""
    connection = begin(settings)
    with suppress(EOFError, BrokenPipeError):
        _serve(connection)


def begin(settings: dict[str, Any]) -> Connection:
    """Set the limits of this process, and open its connection."""
    if sys.platform == "linux":
        processes.end_with_parent(settings["trainer"])
    for kind, value in (
        (resource.RLIMIT_DATA, settings["memory_bytes"]),
        (resource.RLIMIT_FSIZE, settings["file_bytes"]),
        (resource.RLIMIT_CORE, 0),
    ):
        processes.lower_limit(kind, value)
    os.set_inheritable(settings["socket"], False)  # not for what a function starts
    return Connection(settings["socket"])


def _serve(connection: Connection) -> None:
    """Answer requests.

    The first message is (references, max_concurrency). A request is the index of a function, to
    import it, or (index, seconds of a call, calls, whether they are awaited together).
    """
    references, max_concurrency = connection.recv()
    runner = asyncio.Runner()  # one event loop for all calls: user sessions and locks live on it
    functions: dict[int, tuple[Callable[..., Any], loading.FunctionInfo]] = {}
    while True:
        request = connection.recv()
        if isinstance(request, int):
            connection.send(_load(references, request, functions))
            continue
        index, limit, calls, together = request
        function, info = functions[index]
        if together:
            replies = calling.call_concurrently(function, info, calls, limit, max_concurrency)
            connection.send(runner.run(replies))
            continue
        for call in calls:
            if info.is_async:
                connection.send(runner.run(calling.call_async(function, info, call, limit)))
            else:
                connection.send(calling.call(function, info, call))


def _load(references: Any, index: int, functions: dict[int, Any]) -> loading.FunctionInfo | str:
    """Import a function: how it is called, or why that failed."""
    try:
        functions[index] = loading.load_bound(*references[index])
    except ValueError as error:
        return calling.printable(str(error))
    return functions[index][1]
