"""A worker process of the reward pool: answers the trainer's requests. Forked by `keeper.py`.

It is no process of `multiprocessing`, which would import the main script again, and jax with it.
So a worker starts as fast as a bare Python and never sees an accelerator.
"""

import asyncio
from typing import Any

from jaxrl_llm.rewards import calling, loading
from jaxrl_llm.rewards.workers import messages
from jaxrl_llm.rewards.workers.wire import MAX_ANSWER, Channel, pack_answer, unpack_request


def serve(channel: Channel) -> None:
    """Answer requests until the other end is closed.

    The first message is (functions, max_concurrency). Each further one is a request: (number,
    operation, function, limit of a call in seconds, calls). Requires: the first request of a
    function is "load".
    """
    references, max_concurrency = unpack_request(channel.receive())
    runner = asyncio.Runner()  # one event loop for all calls: user sessions and locks live on it
    functions: dict[int, Any] = {}
    while True:
        number, operation, index, limit, calls = unpack_request(channel.receive())
        if operation == "load":
            channel.send(_load(number, references[index], functions, index))
            continue
        function, info = functions[index]
        requests = [messages.call_of(request) for request in calls]
        if operation == "gather":
            together = calling.call_concurrently(function, info, requests, limit, max_concurrency)
            replies = runner.run(together)
            channel.send(messages.pack_replies(number, replies, MAX_ANSWER))
            continue
        for request in requests:
            if info.is_async:
                reply = runner.run(calling.call_async(function, info, request, limit))
            else:
                reply = calling.call(function, info, request)
            channel.send(messages.pack_replies(number, [reply], MAX_ANSWER))


def _load(number: int, reference: Any, functions: dict[int, Any], index: int) -> bytes:
    try:
        functions[index] = loading.load_bound(*reference)
    except ValueError as error:
        return pack_answer([number, calling.printable(str(error))])
    return messages.pack_info(number, functions[index][1])
