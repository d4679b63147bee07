"""Where the metrics of a run go: a file of JSON lines, the console; trackers.py has others."""

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Protocol

from jaxrl_llm.observability.jsonl import JsonlFile

GLOBAL_STEP = "training/global_step"


class Tracker(Protocol):
    """Takes the metrics of each step. Requires: values are host numbers, not device arrays."""

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Record the metrics of a step; called once a step, in order."""
        ...

    def close(self) -> None:
        """Write what is left."""
        ...


class JsonlTracker:
    """metrics.jsonl: one object a step, each step once.

    Opening an existing file removes a line that a kill has torn.

    Requires: `truncate_after(N)` is called before a resume from step N.
    Raises: ValueError when the file already has the step that is logged.
    """

    def __init__(self, path: str | os.PathLike[str], *, fsync: bool = False):
        self._file = JsonlFile(path, key=GLOBAL_STEP, fsync=fsync)

    @property
    def last_step(self) -> int | None:
        """The last step in the file; None while it is empty."""
        return self._file.last_step

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Append one line."""
        if self.last_step is not None and step <= self.last_step:
            raise ValueError(
                f"{self._file.path} has step {self.last_step} already, so step {step} cannot "
                "follow: resume from a checkpoint (which cuts the file), or take a new run_dir."
            )
        numbers = {name: as_host_number(value) for name, value in metrics.items()}
        self._file.append({GLOBAL_STEP: step} | numbers)

    def truncate_after(self, step: int) -> None:
        """Remove the lines of steps after `step`."""
        self._file.truncate_after(step)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class MultiTracker:
    """Several trackers as one."""

    def __init__(self, trackers: Sequence[Tracker]):
        self._trackers = tuple(trackers)

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Log to each."""
        for tracker in self._trackers:
            tracker.log(step, metrics)

    def close(self) -> None:
        """Close each, also when closing one fails."""
        with ExitStack() as stack:
            for tracker in self._trackers:
                stack.callback(tracker.close)


def as_host_number(value: Any) -> int | float:
    """A Python number of a Python, numpy or fetched scalar."""
    return value if isinstance(value, int | float) else float(value)
