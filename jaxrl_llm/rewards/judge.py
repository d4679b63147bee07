"""Reward from a language model behind an OpenAI-compatible server (chat completions).

The settings say how it is asked and read. Answers are cached, so that a resumed run and a repeated
sample get the same reward without another request.
"""

import hashlib
import json
import math
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from jaxrl_llm.config import JUDGE_PATTERN, JUDGE_TEMPLATE
from jaxrl_llm.rewards.http_client import LATE, RequestError, in_time, server_of

RUNS_IN_POOL = True  # a call waits for a server
TEMPLATE, PATTERN = JUDGE_TEMPLATE, JUDGE_PATTERN
FIELDS = ("question", "response", "ground_truth")
LONGEST = 10_000  # characters at the end of an answer that are read
ERROR_COLUMN = "judge/error"  # `calling.grade` puts its texts into the failures


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
    address = f"{url.rstrip('/')}/chat/completions"
    server = server_of(address, request_s, retries, requests_per_minute, key_variable)
    answers = _cache(cache_file)
    fatal: list[str] = []  # why no request can work

    def one(i: int) -> _Grade:
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
                    raise RequestError(f"not asked, as another request failed for good: {fatal[0]}")
                answer = server.ask(body, until, _answer_text)
                answers.put(url, body, answer)
            return _Grade(read_score(answer, pattern, scale) / scale, answer)
        except RequestError as error:
            if error.fatal:
                fatal.append(str(error))
            return _Grade(error=str(error))

    late = _Grade(error=LATE)  # the answer is still cached
    grades = in_time(one, len(prompts), late, concurrency=concurrency, until=until)
    log_extra("judge/answer", [grade.answer for grade in grades])
    if any(grade.error for grade in grades):
        log_extra(ERROR_COLUMN, [grade.error for grade in grades])
    return [grade.score for grade in grades]


@dataclass(frozen=True)
class _Grade:
    """One sample: its score with the judge's answer, or why it has none."""

    score: float = math.nan
    answer: str = ""
    error: str = ""


def _answer_text(answer: Any) -> str:
    text = answer["choices"][0]["message"]["content"]
    if not isinstance(text, str):
        raise ValueError("the answer has no text")
    return text


def filled(template: str, texts: Sequence[str]) -> str:
    """The template with its fields; what stands in a text is not filled again."""
    values: dict[str, str] = dict(zip(FIELDS, texts, strict=True))
    return re.sub("{(" + "|".join(FIELDS) + ")}", lambda match: values[match[1]], template)


def read_score(answer: str, pattern: str, scale: float) -> float:
    """The last number that the pattern finds, from -scale to scale. Raises RequestError.

    Only the end of a long answer is read, because a pattern may take time with its square.
    """
    try:
        score = float(re.findall(pattern, answer[-LONGEST:])[-1])
    except (IndexError, ValueError):
        raise RequestError(f"no score in the judge's answer: {answer[-200:]!r}") from None
    if not abs(score) <= scale:
        raise RequestError(f"the score {score:g} is beyond scale={scale:g}: {answer[-200:]!r}")
    return score


def _last_text(value: Any) -> str:
    """A text, or the content of the last message of a conversation."""
    return value if isinstance(value, str) else str(value[-1].get("content", ""))


def _truth(value: Any) -> str:
    return "" if value is None else str(value)


# ------------------------------------------------------------------------- the cache


class AnswerCache:
    """Answers by request, in memory and, with a path, in a file of JSON lines."""

    def __init__(self, path: str):
        self._path = Path(path) if path else None
        self._answers: dict[str, str] = {}
        self._lock = threading.Lock()
        if self._path is not None and self._path.exists():
            for line in self._path.read_text().splitlines():
                try:
                    entry = json.loads(line)
                    self._answers[entry["request"]] = entry["answer"]
                except (ValueError, LookupError, TypeError):
                    continue  # a kill has torn the line

    def get(self, url: str, body: Mapping[str, Any]) -> str | None:
        """The answer to this request, if it was asked before."""
        return self._answers.get(_key(url, body))

    def put(self, url: str, body: Mapping[str, Any], answer: str) -> None:
        """Keep an answer."""
        line = json.dumps({"request": _key(url, body), "answer": answer}) + "\n"
        with self._lock:
            self._answers[_key(url, body)] = answer
            if self._path is not None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                with open(self._path, "a") as file:
                    file.write(line)


@cache
def _cache(path: str) -> AnswerCache:
    return AnswerCache(path)


def _key(url: str, body: Mapping[str, Any]) -> str:
    return hashlib.blake2b(json.dumps([url, body]).encode(), digest_size=16).hexdigest()
