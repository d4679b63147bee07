"""Reward from a server of the user: it gets rows as JSON and answers a score for each row."""

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxrl_llm.rewards.calling import plain
from jaxrl_llm.rewards.http_client import LATE, RequestError, in_time, server_of

RUNS_IN_POOL = True  # a call waits for a server
ERROR_COLUMN = "remote/error"  # `calling.grade` puts its texts into the failures
OURS = ("trainer_state", "log_metric", "completion_ids")  # parameters that are not columns


def remote(
    prompts: Sequence[Any],
    completions: Sequence[Any],
    log_extra: Callable[[str, Sequence[Any]], None],
    ground_truth: Sequence[Any],
    data_source: Sequence[str],
    *,
    url: str,
    batch_size: int = 32,
    concurrency: int = 8,
    retries: int = 4,
    request_s: float = 60.0,
    total_s: float = 25.0,
    key_variable: str = "REWARD_SERVER_KEY",
    **columns: Sequence[Any],
) -> list[Any]:
    """The score of each row from the server; docs/write-a-reward.md has the forms of an answer.

    A request has `batch_size` rows. If it fails `retries` + 1 times, or has no answer after
    `total_s` seconds, the score of its rows is NaN. They count as failed; the trace has the reason.
    """
    until = time.monotonic() + total_s
    server = server_of(url, request_s, retries, 0, key_variable)
    rows = [
        {
            "prompt": plain(prompts[i]),
            "response": _text(completions[i]),
            "ground_truth": plain(ground_truth[i]),
            "data_source": data_source[i],
            "columns": {k: plain(v[i]) for k, v in columns.items() if k not in OURS},
        }
        for i in range(len(prompts))
    ]
    starts = range(0, len(rows), batch_size)
    fatal: list[str] = []  # why no request can work

    def ask(number: int) -> _Answer:
        part = rows[starts[number] : starts[number] + batch_size]
        try:
            if fatal:
                raise RequestError(f"not asked, as another request failed for good: {fatal[0]}")
            return _Answer(server.ask({"rows": part}, until, lambda answer: _grades(answer, part)))
        except RequestError as error:
            if error.fatal:
                fatal.append(str(error))
            return _Answer(error=str(error))

    answers = in_time(ask, len(starts), _Answer(error=LATE), concurrency=concurrency, until=until)
    grades: list[Any] = []
    errors: list[str] = []
    for start, answer in zip(starts, answers, strict=True):
        size = len(rows[start : start + batch_size])
        grades += answer.grades or [math.nan] * size
        errors += [answer.error] * size
    _log(grades, errors, log_extra)
    return [_value(grade) for grade in grades]


@dataclass(frozen=True)
class _Answer:
    """The grades of the rows of a request, or why there are none."""

    grades: Sequence[Any] = ()
    error: str = ""


def _text(completion: Any) -> str:
    """A text, or the content of the one message of a conversational completion."""
    return completion if isinstance(completion, str) else str(completion[-1].get("content", ""))


def _grades(answer: Any, rows: Sequence[Any]) -> list[Any]:
    """One grade a row. ValueError for an answer of another form."""
    grades = answer["scores"] if isinstance(answer, Mapping) else answer
    if not isinstance(grades, list) or len(grades) != len(rows):
        number = len(grades) if isinstance(grades, list) else json.dumps(grades)[:80]
        raise ValueError(f"the answer has {number} scores for {len(rows)} rows")
    for grade in grades:
        score = grade["score"] if isinstance(grade, Mapping) and not _in_steps(grade) else grade
        if not (score is None or _in_steps(score) or type(score) in (int, float)):
            raise ValueError(
                f"{json.dumps(grade)[:80]} is neither a number nor an object with a score"
            )
    return grades


def _in_steps(grade: Any) -> bool:
    return isinstance(grade, Mapping) and "step_scores" in grade


def _value(grade: Any) -> Any:
    return grade["score"] if isinstance(grade, Mapping) and not _in_steps(grade) else grade


def _log(
    grades: Sequence[Any], errors: Sequence[str], log_extra: Callable[[str, Sequence[Any]], None]
) -> None:
    """The other keys of the grades, and the errors, as columns of the trace."""
    maps = [grade if isinstance(grade, Mapping) else {} for grade in grades]
    for name in dict.fromkeys(name for entry in maps for name in entry):
        if name != "score" and not any(_in_steps(entry) for entry in maps):
            log_extra(f"remote/{name}", [entry.get(name) for entry in maps])
    if any(errors):
        log_extra(ERROR_COLUMN, errors)
