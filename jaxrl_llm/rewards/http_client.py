"""Requests to a grading server: JSON by POST, with time limits, retries and a rate limit.

The judge and the remote reward function share it.
"""

import http.client
import json
import os
import random
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeVar

T = TypeVar("T")

RETRIED = (408, 409, 429, 500, 502, 503, 504)
FATAL = (401, 403, 404)  # and redirects: no request can work
FIRST_WAIT_S, MOST_WAIT_S = 0.5, 30.0  # between two tries of a request
MOST_BYTES = 1 << 20  # most bytes of an answer
LEAST_S = 0.01  # shortest limit of a request: 0 would not block
UNANSWERED = (OSError, http.client.HTTPException)  # what a server that is away or broken raises
LATE = "not answered: total_s has passed"


class RequestError(Exception):
    """Why there is no answer; `fatal` when every other request would fail too."""

    def __init__(self, message: str, *, fatal: bool = False):
        super().__init__(message)
        self.fatal = fatal


def in_time(
    function: Callable[[int], T], number: int, late: T, *, concurrency: int, until: float
) -> list[T]:
    """`function(i)` of each i below `number`; `late` for those that take longer than `until`.

    A thread goes on to the end of its request.
    """
    threads = ThreadPoolExecutor(concurrency)
    futures = [threads.submit(function, i) for i in range(number)]
    answered = wait(futures, max(until - time.monotonic(), 0.0)).done
    threads.shutdown(wait=False)
    return [future.result() if future in answered else late for future in futures]


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirect would carry the key to another server."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


@dataclass(kw_only=True)
class Server:
    """Sends requests within the rate limit, and retries when the server is busy or unreachable."""

    url: str
    request_s: float
    retries: int
    per_minute: int  # 0 has no limit
    key_variable: str
    _next: float = 0.0  # when the next request may start
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def ask(self, body: Mapping[str, Any], until: float, read: Callable[[Any], T]) -> T:
        """`read` of the JSON that the server answers, before the monotonic time `until`.

        `read` raises ValueError, LookupError or TypeError for an answer of another form: it is
        asked again. Raises RequestError.
        """
        what = ""
        for attempt in range(self.retries + 1):
            self._wait_for_turn(until, what)
            try:
                return read(self._send(body, until))
            except urllib.error.HTTPError as error:
                with error:
                    what = f"HTTP {error.code}: {_text_of(error)}"
                if error.code not in RETRIED:
                    fatal = error.code in FATAL or error.code < 400
                    raise RequestError(self._explained(error.code, what), fatal=fatal) from None
                asked = error.headers.get("Retry-After", "")
            except (*UNANSWERED, ValueError, LookupError, TypeError) as error:
                what, asked = f"{type(error).__name__}: {error}", ""
            if attempt < self.retries:
                _sleep(_pause(attempt, asked), until, what)
        raise RequestError(f"{self.url} failed {self.retries + 1} times; the last time: {what}")

    def _send(self, body: Mapping[str, Any], until: float) -> Any:
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get(self.key_variable):
            headers["Authorization"] = f"Bearer {key}"
        request = urllib.request.Request(
            self.url, json.dumps(body).encode(), headers, method="POST"
        )
        opener = urllib.request.build_opener(_NoRedirect)
        limit = max(min(self.request_s, until - time.monotonic()), LEAST_S)
        with opener.open(request, timeout=limit) as answer:
            return json.loads(answer.read(MOST_BYTES), object_pairs_hook=_each_once)

    def _wait_for_turn(self, until: float, what: str) -> None:
        with self._lock:
            turn = max(self._next, time.monotonic()) if self.per_minute else time.monotonic()
            if turn < until and self.per_minute:  # a request that is not made takes no turn
                self._next = turn + 60.0 / self.per_minute
        _sleep(turn - time.monotonic(), until, what)

    def _explained(self, code: int, what: str) -> str:
        if code not in (401, 403):
            return what
        return f"{what}; the key is read from the variable {self.key_variable}"


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object. Of a key that stands twice Python takes the last value."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError(f"a key of the answer's JSON stands twice: {[key for key, _ in pairs]}")
    return found


def _text_of(error: urllib.error.HTTPError) -> str:
    """The start of what the server wrote; empty where that cannot be read."""
    try:
        return error.read(500).decode(errors="replace")
    except UNANSWERED:
        return ""


def _sleep(seconds: float, until: float, what: str) -> None:
    """Pause before a request. Raises RequestError, with the last failure, if it ends too late."""
    if time.monotonic() + max(seconds, 0.0) >= until:
        last = f"; the last time: {what}" if what else ""
        raise RequestError(f"not asked{' again' if what else ''}: total_s has passed{last}")
    time.sleep(max(seconds, 0.0))


def _pause(attempt: int, asked: str) -> float:
    """Seconds before the next try: twice as long each time, or what the server asks for."""
    if asked.isdecimal():
        return min(float(asked), MOST_WAIT_S)
    return min(FIRST_WAIT_S * 2**attempt, MOST_WAIT_S) * random.uniform(0.5, 1.0)


@cache
def server_of(url: str, request_s: float, retries: int, per_minute: int, key: str) -> Server:
    """The server of these settings: one pace of requests over all calls of this process."""
    return Server(
        url=url, request_s=request_s, retries=retries, per_minute=per_minute, key_variable=key
    )
