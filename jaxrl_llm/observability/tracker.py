"""Where the metrics of a run go: a file of JSON lines, TensorBoard, the console."""

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
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


class TensorBoardTracker:
    """Scalars for TensorBoard.

    `resume_step` is the step from which a run resumes; TensorBoard hides later steps that an
    earlier process wrote.
    """

    def __init__(self, folder: str | os.PathLike[str], *, resume_step: int | None = None):
        # tensorboardX imports torch where it is installed. That takes 3 CPU-seconds and serves only
        # torch tensors, which are never logged here.
        with _hidden("torch"):
            from tensorboardX import SummaryWriter
        purge_step = None if resume_step is None else resume_step + 1
        self._writer = SummaryWriter(str(folder), purge_step=purge_step)

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Write the numbers of a step."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, as_host_number(value), step)

    def text(self, step: int, name: str, text: str) -> None:
        """Write a text of a step."""
        self._writer.add_text(name, text, step)

    def close(self) -> None:
        """Write what is left to disk."""
        self._writer.close()


@contextmanager
def _hidden(module: str) -> Iterator[None]:
    """Imports of `module` inside the block fail with ImportError, unless it was imported before."""
    if module in sys.modules:
        yield
        return
    sys.modules[module] = None  # pyright: ignore[reportArgumentType]
    try:
        yield
    finally:
        del sys.modules[module]


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
