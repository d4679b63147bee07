"""A worker process for tools and environments. It never imports jax."""

import asyncio
import threading
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from jaxrl_llm.agents.sessions import Host
from jaxrl_llm.rewards.calling import printable
from jaxrl_llm.rewards.workers.worker import begin


def main(settings: dict[str, Any]) -> None:
    """Answer requests until the trainer closes its end."""
    with suppress(EOFError, BrokenPipeError):
        asyncio.run(_serve(begin(settings)))


async def _serve(connection: Connection) -> None:
    """Answer requests, at the same time where they wait for something.

    The first message is the Setup. The second asks for the Description with True; its answer is
    that, None, or why the setup cannot be loaded.

    A request is (number, session, history, action, seconds); its answer (number, Answer). Without
    an action the session ends, and nothing is answered.
    """
    setup, describes = connection.recv(), connection.recv()
    try:
        host = Host(setup)
        description = host.describe() if describes else None
    except ValueError as error:
        connection.send(printable(str(error)))
        return
    connection.send(description)
    requests: asyncio.Queue[Any] = asyncio.Queue()
    loop = asyncio.get_running_loop()

    def read() -> None:
        with suppress(EOFError, OSError, RuntimeError):  # the loop may have ended
            while True:
                loop.call_soon_threadsafe(requests.put_nowait, connection.recv())
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(requests.put_nowait, None)

    async def answer(number: int, session: int, history: Any, action: Any, limit: float) -> None:
        if action is None:
            await host.end(session)
            return
        connection.send((number, await host.answer(session, history, action, limit)))

    threading.Thread(target=read, daemon=True).start()
    running: set[asyncio.Task[None]] = set()  # a task that nothing holds may vanish
    while (request := await requests.get()) is not None:
        task = asyncio.create_task(answer(*request))
        running.add(task)
        task.add_done_callback(running.discard)
