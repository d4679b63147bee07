"""Runs a user's program against a server, in a worker process: a function, or a command line.

async def agent(row, base_url, api_key):
    client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key)
"""

import asyncio
import functools
import inspect
import json
import math
import os
import shlex
import threading
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from typing import Any

Program = Callable[[Mapping[str, Any], str, str], Awaitable[float | None]]
HERE = "127.0.0.1"  # the server, which no proxy reaches


def open_program(reference: Any, load: Callable[..., Any]) -> Program:
    """A program that can be run. `reference` is a command line, or what `load` takes.

    Raises: ValueError, with the remedy, for what cannot be loaded.
    """
    for name in ("NO_PROXY", "no_proxy"):
        os.environ[name] = ",".join(filter(None, [os.environ.get(name), HERE]))
    if isinstance(reference, str):
        return functools.partial(_command, reference)
    path, settings, _ = reference
    function = load(*reference)
    try:
        inspect.signature(function).bind({}, "", "", **settings)
    except TypeError as error:
        raise ValueError(
            f"the program {path}: {error}; write def {function.__name__}(row, base_url, api_key)"
        ) from None
    return functools.partial(_function, functools.partial(function, **settings))


async def _function(function: Any, row: Mapping[str, Any], url: str, key: str) -> float | None:
    """Call a function; one that is not async has a thread of its own."""
    if inspect.iscoroutinefunction(function.func):
        return _number(await function(row, url, key))
    future: Future[Any] = Future()

    def call() -> None:
        try:
            future.set_result(function(row, url, key))
        except BaseException as error:  # user code may raise anything
            future.set_exception(RuntimeError(f"{type(error).__name__}: {error}"))

    threading.Thread(target=call, daemon=True).start()
    return _number(await asyncio.wrap_future(future))


def _number(value: Any) -> float | None:
    """A reward. ValueError for what is none."""
    if value is None:
        return None
    try:
        number = float(value) if not isinstance(value, str) else math.nan
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"the program returned {value!r:.100}; return a number, or None")
    return number


async def _command(line: str, row: Mapping[str, Any], url: str, key: str) -> None:
    """Run a command with the row as JSON on its standard input."""
    process = await asyncio.create_subprocess_exec(
        *shlex.split(line),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "OPENAI_BASE_URL": url, "OPENAI_API_KEY": key},
    )
    try:
        _, errors = await process.communicate(json.dumps(row, default=str).encode())
    finally:
        if process.returncode is None:
            process.kill()
    if process.returncode:
        last = errors.decode(errors="replace").strip().rpartition("\n")[2]
        raise RuntimeError(f"the command ended with exit code {process.returncode}: {last}")
