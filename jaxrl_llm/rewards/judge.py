"""Reward from a language model behind an OpenAI-compatible server (chat completions).

The settings say how it is asked and read. Answers are cached, so that a resumed run and a repeated
sample get the same reward without another request.
"""

import hashlib
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
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from jaxrl_llm.config import JUDGE_PATTERN, JUDGE_TEMPLATE

RUNS_IN_POOL = True  # a call waits for a server
TEMPLATE, PATTERN = JUDGE_TEMPLATE, JUDGE_PATTERN
FIELDS = ("question", "response", "ground_truth")
RETRIED = (408, 409, 429, 500, 502, 503, 504)
FIRST_WAIT_S, MOST_WAIT_S = 0.5, 30.0  # between two tries of a request
MOST_BYTES = 1 << 20  # of an answer


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
    requests_per_minute: int = 0,
    cache_file: str = "",
    key_variable: str = "OPENAI_API_KEY",
) -> list[float]:
    """The last number that `pattern` finds in the judge's answer, over `scale`.

    `url` ends before /chat/completions, as in http://127.0.0.1:8000/v1. `template` has the fields
    {question}, {response} and {ground_truth}. A sample without a score, for which a request
    failed `retries` + 1 times, is NaN, so it counts as failed; the trace has the reason.
    """
    server = _server(url, request_s, retries, requests_per_minute, key_variable)
    answers, errors = _cache(cache_file), [""] * len(prompts)
    gave_up = threading.Event()

    def one(i: int) -> tuple[float, str]:
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
                if gave_up.is_set():
                    raise JudgeError("not asked: another request failed for good")
                answer = server.ask(body)
                answers.put(url, body, answer)
            return read_score(answer, pattern) / scale, answer
        except JudgeError as error:
            errors[i] = str(error)
            if error.fatal:
                gave_up.set()
            return math.nan, ""

    with ThreadPoolExecutor(concurrency) as threads:
        found = list(threads.map(one, range(len(prompts))))
    log_extra("judge/answer", [answer for _, answer in found])
    if any(errors):
        log_extra("judge/error", errors)
        if all(errors):  # the message then says why, and not only that a number is missing
            raise JudgeError(next(filter(None, errors)))
    return [score for score, _ in found]


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


def read_score(answer: str, pattern: str) -> float:
    """The last number that the pattern finds. Raises JudgeError."""
    found = re.findall(pattern, answer)
    try:
        return float(found[-1])
    except (IndexError, ValueError):
        raise JudgeError(f"no score in the judge's answer: {answer[-200:]!r}") from None


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

    def ask(self, body: Mapping[str, Any]) -> str:
        """The answer's text. Raises JudgeError."""
        what = ""
        for attempt in range(self.retries + 1):
            self._wait_for_turn()
            try:
                return self._send(body)
            except urllib.error.HTTPError as error:
                with error:
                    what = f"HTTP {error.code}: {error.read(500).decode(errors='replace')}"
                if error.code not in RETRIED:
                    raise JudgeError(self._explained(error.code, what), fatal=True) from None
                asked = error.headers.get("Retry-After", "")
            except (OSError, ValueError, LookupError, TypeError) as error:
                what, asked = f"{type(error).__name__}: {error}", ""
            if attempt < self.retries:
                time.sleep(_pause(attempt, asked))
        raise JudgeError(f"{self.url} failed {self.retries + 1} times; the last time: {what}")

    def _send(self, body: Mapping[str, Any]) -> str:
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get(self.key_variable):
            headers["Authorization"] = f"Bearer {key}"
        data, address = json.dumps(body).encode(), f"{self.url.rstrip('/')}/chat/completions"
        request = urllib.request.Request(address, data, headers, method="POST")
        opener = urllib.request.build_opener(_NoRedirect)
        with opener.open(request, timeout=self.request_s) as answer:
            found = json.loads(answer.read(MOST_BYTES))
        text = found["choices"][0]["message"]["content"]
        if not isinstance(text, str):
            raise ValueError("the answer has no text")
        return text

    def _wait_for_turn(self) -> None:
        if not self.per_minute:
            return
        with self._lock:
            turn = max(self._next, time.monotonic())
            self._next = turn + 60.0 / self.per_minute
        time.sleep(max(turn - time.monotonic(), 0.0))

    def _explained(self, code: int, what: str) -> str:
        if code not in (401, 403):
            return what
        name = self.key_variable
        return f"{what}; set {name}, and --config.reward.environment='[\"{name}\"]'"


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
