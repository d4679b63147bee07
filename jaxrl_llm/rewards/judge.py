"""Reward from a language model behind an OpenAI-compatible server (chat completions).

The settings say how it is asked and read. Answers are cached, so that a resumed run and a repeated
sample get the same reward without another request.
"""

import hashlib
import http.client
import json
import math
import os
import random
import re
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from jaxrl_llm.config import JUDGE_PATTERN, JUDGE_TEMPLATE

RUNS_IN_POOL = True  # a call waits for a server
TEMPLATE, PATTERN = JUDGE_TEMPLATE, JUDGE_PATTERN
FIELDS = ("question", "response", "ground_truth")
RETRIED = (408, 409, 429, 500, 502, 503, 504)
FATAL = (401, 403, 404)  # and redirects: no request can work
FIRST_WAIT_S, MOST_WAIT_S = 0.5, 30.0  # between two tries of a request
MOST_BYTES = 1 << 20  # of an answer
LEAST_S = 0.01  # of a request: 0 would not block
UNANSWERED = (OSError, http.client.HTTPException)  # what a server that is away or broken raises
ERROR_COLUMN = "judge/error"  # `calling.grade` puts its texts into the failures


class JudgeError(Exception):
    """Why a sample has no score; `fatal` when every other request would fail too."""

    def __init__(self, message: str, *, fatal: bool = False):
        super().__init__(message)
        self.fatal = fatal


def judge(
    prompts: Sequence[Any],
    completions: Sequence[Any],
    ground_truth: Sequence[Any],
    log_extra: Callable[[str, Sequence[Any]], None],
    *,
    url: str,
    model: str,
    template: str = TEMPLATE,
    pattern: str = PATTERN,
    scale: float = 10.0,
    temperature: float = 0.0,
    max_tokens: int = 512,
    concurrency: int = 32,
    retries: int = 4,
    request_s: float = 60.0,
    total_s: float = 25.0,
    requests_per_minute: int = 0,
    cache_file: str = "",
    key_variable: str = "OPENAI_API_KEY",
) -> list[float]:
    """The last number that `pattern` finds in the judge's answer, over `scale`.

    `url` ends before /chat/completions, as in http://127.0.0.1:8000/v1. `template` has the fields
    {question}, {response} and {ground_truth}. A sample without a score is NaN, so it counts as
    failed: a request failed `retries` + 1 times, or `total_s` seconds had passed since the call.
    The trace and the failure have the reason.
    """
    until = time.monotonic() + total_s
    server = _server(url, request_s, retries, requests_per_minute, key_variable)
    answers = _cache(cache_file)
    fatal: list[str] = []  # why no request can work

    def one(i: int) -> _Judged:
        texts = (_last_text(prompts[i]), _last_text(completions[i]), _truth(ground_truth[i]))
        body = {
            "model": model,
            "messages": [{"role": "user", "content": filled(template, texts)}],
            "temperature": temperature,
            "max_tokens": max_tokens,
        }
        try:
            answer = answers.get(url, body)
            if answer is None:
                if fatal:
                    raise JudgeError(f"not asked, as another request failed for good: {fatal[0]}")
                answer = server.ask(body, until)
                answers.put(url, body, answer)
            return _Judged(read_score(answer, pattern, scale) / scale, answer)
        except JudgeError as error:
            if error.fatal:
                fatal.append(str(error))
            return _Judged(error=str(error))

    threads = ThreadPoolExecutor(concurrency)
    futures = [threads.submit(one, i) for i in range(len(prompts))]
    answered = wait(futures, max(until - time.monotonic(), 0.0)).done
    threads.shutdown(wait=False)  # a thread ends with its request, whose answer is still cached
    late = _Judged(error="not answered: total_s has passed")
    found = [future.result() if future in answered else late for future in futures]
    log_extra("judge/answer", [judged.answer for judged in found])
    if any(judged.error for judged in found):
        log_extra(ERROR_COLUMN, [judged.error for judged in found])
    return [judged.score for judged in found]


@dataclass(frozen=True)
class _Judged:
    """One sample: its score with the judge's answer, or why it has none."""

    score: float = math.nan
    answer: str = ""
    error: str = ""


def prepare(*, url: str, template: str = TEMPLATE, pattern: str = PATTERN, **_: Any) -> None:
    """Before a run: whether the settings make sense. Raises ValueError."""
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"judge url={url!r}: give a server such as http://127.0.0.1:8000/v1")
    if "{response}" not in template:
        raise ValueError("the judge's template lacks {response}, so it would not see the answer")
    if re.compile(pattern).groups != 1:
        raise ValueError(f"the judge's pattern {pattern!r} needs one group: the number")


def filled(template: str, texts: Sequence[str]) -> str:
    """The template with its fields; what stands in a text is not filled again."""
    values: dict[str, str] = dict(zip(FIELDS, texts, strict=True))
    return re.sub("{(" + "|".join(FIELDS) + ")}", lambda match: values[match[1]], template)


def read_score(answer: str, pattern: str, scale: float) -> float:
    """The last number that the pattern finds, from -scale to scale. Raises JudgeError."""
    found = re.findall(pattern, answer)
    try:
        score = float(found[-1])
    except (IndexError, ValueError):
        raise JudgeError(f"no score in the judge's answer: {answer[-200:]!r}") from None
    if not abs(score) <= scale:
        raise JudgeError(f"the score {score:g} is beyond scale={scale:g}: {answer[-200:]!r}")
    return score


def _last_text(value: Any) -> str:
    """A text, or the content of the last message of a conversation."""
    return value if isinstance(value, str) else str(value[-1].get("content", ""))


def _truth(value: Any) -> str:
    return "" if value is None else str(value)


# ------------------------------------------------------------------------- the server


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirect would carry the key to another server."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


@dataclass(kw_only=True)
class Server:
    """Sends requests, not faster than allowed, and again when the server is busy or away."""

    url: str
    request_s: float
    retries: int
    per_minute: int  # 0 has no limit
    key_variable: str
    _next: float = 0.0  # when the next request may start
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def ask(self, body: Mapping[str, Any], until: float) -> str:
        """The answer's text, before the monotonic time `until`. Raises JudgeError."""
        what = ""
        for attempt in range(self.retries + 1):
            self._wait_for_turn(until, what)
            try:
                return self._send(body, until)
            except urllib.error.HTTPError as error:
                with error:
                    what = f"HTTP {error.code}: {_text_of(error)}"
                if error.code not in RETRIED:
                    fatal = error.code in FATAL or error.code < 400
                    raise JudgeError(self._explained(error.code, what), fatal=fatal) from None
                asked = error.headers.get("Retry-After", "")
            except (*UNANSWERED, ValueError, LookupError, TypeError) as error:
                what, asked = f"{type(error).__name__}: {error}", ""
            if attempt < self.retries:
                _sleep(_pause(attempt, asked), until, what)
        raise JudgeError(f"{self.url} failed {self.retries + 1} times; the last time: {what}")

    def _send(self, body: Mapping[str, Any], until: float) -> str:
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get(self.key_variable):
            headers["Authorization"] = f"Bearer {key}"
        data, address = json.dumps(body).encode(), f"{self.url.rstrip('/')}/chat/completions"
        request = urllib.request.Request(address, data, headers, method="POST")
        opener = urllib.request.build_opener(_NoRedirect)
        limit = max(min(self.request_s, until - time.monotonic()), LEAST_S)
        with opener.open(request, timeout=limit) as answer:
            found = json.loads(answer.read(MOST_BYTES))
        text = found["choices"][0]["message"]["content"]
        if not isinstance(text, str):
            raise ValueError("the answer has no text")
        return text

    def _wait_for_turn(self, until: float, what: str) -> None:
        with self._lock:
            turn = max(self._next, time.monotonic()) if self.per_minute else time.monotonic()
            if turn < until and self.per_minute:  # a request that is not made takes no turn
                self._next = turn + 60.0 / self.per_minute
        _sleep(turn - time.monotonic(), until, what)

    def _explained(self, code: int, what: str) -> str:
        if code not in (401, 403):
            return what
        name = self.key_variable
        return f"{what}; set {name}, and --config.reward.environment='[\"{name}\"]'"


def _text_of(error: urllib.error.HTTPError) -> str:
    """The start of what the server wrote; empty where that cannot be read."""
    try:
        return error.read(500).decode(errors="replace")
    except UNANSWERED:
        return ""


def _sleep(seconds: float, until: float, what: str) -> None:
    """Pause before a request. Raises JudgeError, with the last failure, if it ends too late."""
    if time.monotonic() + max(seconds, 0.0) >= until:
        last = f"; the last time: {what}" if what else ""
        raise JudgeError(f"not asked{' again' if what else ''}: total_s has passed{last}")
    time.sleep(max(seconds, 0.0))


def _pause(attempt: int, asked: str) -> float:
    """Seconds before the next try: twice as long each time, or what the server asks for."""
    if asked.isdecimal():
        return min(float(asked), MOST_WAIT_S)
    return min(FIRST_WAIT_S * 2**attempt, MOST_WAIT_S) * random.uniform(0.5, 1.0)


@cache
def _server(url: str, request_s: float, retries: int, per_minute: int, key: str) -> Server:
    """The server of these settings: one pace of requests over all calls of this process."""
    return Server(
        url=url, request_s=request_s, retries=retries, per_minute=per_minute, key_variable=key
    )


# ------------------------------------------------------------------------- the cache


class Answers:
    """Answers by request, in memory and, with a path, in a file of JSON lines."""

    def __init__(self, path: str):
        self._path = Path(path) if path else None
        self._found: dict[str, str] = {}
        self._lock = threading.Lock()
        if self._path is not None and self._path.exists():
            for line in self._path.read_text().splitlines():
                try:
                    entry = json.loads(line)
                    self._found[entry["request"]] = entry["answer"]
                except (ValueError, LookupError, TypeError):
                    continue  # a kill has torn the line

    def get(self, url: str, body: Mapping[str, Any]) -> str | None:
        """The answer to this request, if it was asked before."""
        return self._found.get(_key(url, body))

    def put(self, url: str, body: Mapping[str, Any], answer: str) -> None:
        """Keep an answer."""
        line = json.dumps({"request": _key(url, body), "answer": answer}) + "\n"
        with self._lock:
            self._found[_key(url, body)] = answer
            if self._path is not None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                with open(self._path, "a") as file:
                    file.write(line)


@cache
def _cache(path: str) -> Answers:
    return Answers(path)


def _key(url: str, body: Mapping[str, Any]) -> str:
    return hashlib.blake2b(json.dumps([url, body]).encode(), digest_size=16).hexdigest()
