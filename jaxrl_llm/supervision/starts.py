"""The record of a run's starts: RUN/starts.jsonl, which is only ever appended to.

Each start of the run is a line, and so is each end that the process lived to write. A process that
was killed has no line for its end: the next start says so.
"""

import hashlib
import os
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxrl_llm.checkpoint.identity import package_versions
from jaxrl_llm.observability.jsonl import JsonlFile, read_jsonl

STARTS = "starts.jsonl"
START = "start"  # the number of a start, from 1
NO_END = "killed, or its machine was lost"


@dataclass(kw_only=True)
class Starts:
    """The lines of one start, which the main process writes."""

    folder: Path
    number: int = 0

    def begin(
        self,
        *,
        step: int,
        config_text: str,
        changed: Mapping[str, Any],
        devices: str,
        undone: Sequence[Mapping[str, Any]],
    ) -> str:
        """Write the line of this start; how the start before it ended, or empty for the first.

        Args:
            step: the step of the checkpoint that the run goes on from; 0 for a new run.
            changed: keys of the config that differ from the start before, each with both values.
            undone: alarms of steps that the run computes again, which events.jsonl loses.
        """
        earlier = read_starts(self.folder)[-1:]
        self.number = earlier[0][START] + 1 if earlier else 1
        last = earlier[0].get("end", NO_END) if earlier else ""
        self._append(
            {
                "step": step,
                "last_end": last,
                "config": hashlib.blake2b(config_text.encode(), digest_size=8).hexdigest(),
                "changed": changed,
                "devices": devices,
                "host": platform.node(),
                "pid": os.getpid(),
                "versions": package_versions() | {"python": platform.python_version()},
                "undone_alarms": undone,
            }
        )
        return last

    def end(self, how: str, step: int) -> None:
        """Write the line of the end after `step`, in words."""
        self._append({"step": step, "end": how})

    def _append(self, line: dict[str, Any]) -> None:
        file = JsonlFile(self.folder / STARTS, key=START)
        try:
            file.append({START: self.number, "time": time.strftime("%Y-%m-%dT%H:%M:%S%z")} | line)
        finally:
            file.close()


def read_starts(folder: Path) -> list[dict[str, Any]]:
    """The starts of a run, each with its `end` where one was written; empty without a record."""
    starts: dict[int, dict[str, Any]] = {}
    if (folder / STARTS).exists():
        for line in read_jsonl([folder / STARTS], key=START):
            first = starts.setdefault(line[START], line)
            if "end" in line and first is not line:
                first |= {"end": line["end"], "end_step": line["step"], "end_time": line["time"]}
    return list(starts.values())
