"""Observations on disk: each is written before its use, and read again by a run that resumes.

A step that was interrupted begins again with the same draws. An environment or a tool that answers
otherwise then (a search on the web, a judge) gets no say: the recorded answer counts.
"""

import hashlib
import json
import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from jaxrl_llm.agents.environments import Step
from jaxrl_llm.agents.sessions import Action, Value
from jaxrl_llm.agents.tools import Result

log = logging.getLogger(__name__)
PATTERN = "step_*.jsonl"


class Observations:
    """The files of a folder, one a step."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._steps: dict[int, tuple[IO[str], dict[str, Any]]] = {}  # steps in work
        folder.mkdir(parents=True, exist_ok=True)

    def get(self, step: int, sample: int, number: int, digest: str) -> tuple[Value] | None:
        """The recorded answer to the action that is `number` in its sample; None without one.

        `digest` is the `digest_of` the action: another action has another answer.
        """
        known = self._opened(step)[1].get(_key(sample, number))
        if known is None or known["action"] != digest:
            return None
        return (_value_of(known["value"]),)

    def put(self, step: int, sample: int, number: int, digest: str, value: Value) -> None:
        """Write an answer. It is with the system, and a killed process cannot lose it."""
        file, _ = self._opened(step)
        line = {"key": _key(sample, number), "action": digest, "value": _plain(value)}
        file.write(json.dumps(line) + "\n")
        file.flush()

    def drop_before(self, step: int) -> None:
        """Remove the files of earlier steps, which no resume begins again."""
        for file in self._folder.glob(PATTERN):
            if (number := int(file.stem.rpartition("_")[2])) < step:
                if number in self._steps:
                    self._steps.pop(number)[0].close()
                file.unlink(missing_ok=True)

    def close(self) -> None:
        """Close the files."""
        for file, _ in self._steps.values():
            file.close()
        self._steps.clear()

    def _opened(self, step: int) -> tuple[IO[str], dict[str, Any]]:
        """The file of a step, and what an earlier process wrote to it."""
        if step not in self._steps:
            path, known = self._folder / f"step_{step}.jsonl", {}
            for line in path.read_text().splitlines() if path.is_file() else ():
                with suppress(ValueError):  # the last line of a process that was killed
                    entry = json.loads(line)
                    known[entry["key"]] = entry
            if known:
                log.info("Step %d begins again with %d observations", step, len(known))
            file = path.open("a")
            file.write("\n" * bool(known))  # behind a line that may be cut
            self._steps[step] = file, known
        return self._steps[step]


def _key(sample: int, number: int) -> str:
    return f"{sample}/{number}"


def digest_of(before: str, action: Action) -> str:
    """Stands for an action and what came `before` it in its sample: digests, settings, texts."""
    columns = json.dumps(getattr(action, "columns", None), default=str, sort_keys=True)
    said = getattr(action, "text", None), getattr(action, "calls", None)
    text = repr((before, type(action).__name__, columns, *said))
    return hashlib.blake2b(text.encode(errors="replace"), digest_size=8).hexdigest()


def _plain(value: Value) -> Any:
    if isinstance(value, Step):
        return {"step": asdict(value)}
    if isinstance(value, tuple):
        return {"results": [asdict(result) for result in value]}
    return {"value": value}


def _value_of(plain: Mapping[str, Any]) -> Value:
    if "step" in plain:
        return Step(**plain["step"])
    if "results" in plain:
        return tuple(Result(**result) for result in plain["results"])
    return plain["value"]
