"""A worker process of the reward pool. Started as a script by `pool.py`, never imported.

It is a plain subprocess. One of `multiprocessing` would import the main script again, and jax with
it. So a worker starts as fast as a bare Python and never sees an accelerator.
"""

import os
import queue
import signal
import sys
import threading
from multiprocessing.connection import Connection
from typing import Any

MARGIN = 5.0  # seconds


def _listen(connection: Connection, inbox: "queue.SimpleQueue[Any]") -> None:
    """Receive requests. When the trainer is gone, also by kill -9, end the whole session.

    This is a thread of its own, so that a user function that hangs ends too.
    """
    while True:
        try:
            inbox.put(connection.recv())
        except (EOFError, OSError):
            os.killpg(0, signal.SIGKILL)


def _end_after(seconds: float) -> None:
    """Have the kernel end this process `MARGIN` after its limit; 0 cancels that.

    The trainer kills a worker that is late. If the trainer was killed while a user function holds
    the interpreter lock (a regular expression), no thread can run, and this alarm ends the worker.
    """
    signal.setitimer(signal.ITIMER_REAL, seconds + MARGIN if seconds else 0.0)


def serve(connection: Connection) -> None:
    """Answer requests for ever.

    The first message is sys.path, the second (functions, max_concurrency). Each further one is a
    request (operation, function index, calls, limit of a call, limit of an answer), limits in
    seconds. Requires: the first request of an index is "load".
    """
    inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(connection, inbox), daemon=True).start()
    sys.path[:] = inbox.get()
    # These are importable only now that the path is the trainer's.
    import asyncio

    from jaxrl_llm.rewards import calling, loading

    references, max_concurrency = inbox.get()
    runner = asyncio.Runner()  # one event loop for all calls: user sessions and locks live on it
    functions: dict[int, Any] = {}
    while True:
        operation, index, requests, limit, allowed = inbox.get()
        _end_after(allowed)
        if operation == "load":
            try:
                functions[index] = loading.load_bound(*references[index])
            except ValueError as error:
                connection.send(str(error))
            else:
                connection.send(functions[index][1])
            _end_after(0.0)
            continue
        function, info = functions[index]
        if operation == "gather":
            calls = calling.call_concurrently(function, info, requests, limit, max_concurrency)
            connection.send(runner.run(calls))
            _end_after(0.0)
            continue
        for request in requests:
            _end_after(allowed)
            if info.is_async:
                reply = runner.run(calling.call_async(function, info, request, limit))
            else:
                reply = calling.call(function, info, request)
            connection.send(reply)
        _end_after(0.0)


if __name__ == "__main__":
    descriptor = int(sys.argv[1])
    os.set_inheritable(descriptor, False)  # not for the processes that a user function starts
    serve(Connection(descriptor))
