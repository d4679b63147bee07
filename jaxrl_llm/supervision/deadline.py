"""`checkpoint.save_by`: a run saves and ends before a time, such as the end of a cluster's job."""

import os
import re
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from jaxrl_llm.config import ConfigError
from jaxrl_llm.supervision.listener import Listener, Wish
from jaxrl_llm.typed_records.bounds import end_time

# Epoch seconds of a job's start. A launcher sets it, so that restarts do not move the end.
STARTED = "JAXRL_STARTED"
RECENT = 50  # steps whose longest counts
MARGIN_S = 10.0  # for the end of the process


@dataclass(kw_only=True)
class Deadline(Listener):
    """Tells at each step's boundary whether another step and a save would end too late."""

    at: float  # epoch seconds; infinity never comes
    save_s: Callable[[], float]  # the longest recent save, seconds until it is on disk
    message: Callable[[str], None]
    clock: Callable[[], float] = time.time
    _steps: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    _last: float = field(init=False)

    def __post_init__(self) -> None:
        self._last = self.clock()

    def reported(self, step: int, metrics: Mapping[str, float]) -> Wish:
        """Ask for the end where another step and a save would end too late.

        The time of a step is that between two boundaries, with its validation.
        """
        if not step:
            return Wish.NOTHING
        now = self.clock()
        self._steps.append(now - self._last)
        self._last = now
        longest, save = max(self._steps), self.save_s()
        if now + longest + save + MARGIN_S <= self.at:
            return Wish.NOTHING
        self.message(
            f"config.checkpoint.save_by is in {self.at - now:.0f} s, and a step takes up to "
            f"{longest:.3g} s, a save {save:.3g} s: the run saves and ends"
        )
        return Wish.STOP


@dataclass(frozen=True, kw_only=True)
class StopRequest(Listener):
    """Asks for the end once a signal has come."""

    came: Callable[[], bool]

    def reported(self, step: int, metrics: Mapping[str, float]) -> Wish:
        return Wish.STOP if self.came() else Wish.NOTHING


def read_deadline(save_by: str) -> float:
    """Epoch seconds of `checkpoint.save_by`; infinity where it is empty.

    Raises: ConfigError when it has passed.
    """
    if not save_by:
        return float("inf")
    at = end_time(save_by, start_time())
    if at <= time.time():
        raise ConfigError(
            f"config.checkpoint.save_by={save_by} has passed; give a later time, or leave it out "
            'with --config.checkpoint.save_by=""'
        )
    return at


def start_time(environment: Mapping[str, str] = os.environ) -> float:
    """Epoch seconds of the start of this job, or of this process outside of a launcher."""
    given = environment.get(STARTED, "")
    return float(given) if re.fullmatch(r"\d+(\.\d+)?", given) else time.time()
