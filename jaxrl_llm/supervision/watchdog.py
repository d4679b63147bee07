"""Ends a run that stands still, and says which process the others wait for.

Each stage of a step has a limit: LONGEST times its longest so far, at least the config's floor, at
most its ceiling. Past it, every process writes its Python stacks to stderr and to
RUN/stacks-<process>.txt, and ends with exit code STALLED. A launcher then starts the run again.

A thread watches, so it does not matter where the main thread stands. Where the thread itself
cannot run, because something holds Python's lock, a timer of faulthandler ends the process. Each
process writes to RUN/watchdog/ where it stands, and reads what the others wrote.
"""

import contextlib
import faulthandler
import json
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TextIO

import jax

from jaxrl_llm.config import WatchdogConfig
from jaxrl_llm.distributed.multihost import barrier, is_main, waits_at
from jaxrl_llm.whole_files import write_whole

_log = logging.getLogger(__name__)
STALLED = 75  # the exit code: a failure that a new start may repair (EX_TEMPFAIL of sysexits.h)
LONGEST = 10.0  # times the longest that a stage took
POLL_S = 1.0
SILENT_S = 10.0  # a process that wrote nothing for so long does not run
OTHERS_S = 3.0  # for the other processes to write their stacks, before this one ends
LOCK_S = 5.0  # after the limit: then Python's lock is held, and the timer of faulthandler ends
BETWEEN = "between stages"
START, END = "start", "end"

EndProcess = Callable[[int], object]  # os._exit


# ------------------------------------------------------------------------- limits


@dataclass(kw_only=True)
class Limits:
    """The limit of each stage in seconds, learnt from how long it took."""

    floor_s: float
    ceiling_s: float
    _longest: dict[str, float] = field(default_factory=dict)

    def add(self, stage: str, seconds: float) -> None:
        """Note how long a stage took. The first time does not count: programs are compiled."""
        known = self._longest.get(stage)
        self._longest[stage] = 0.0 if known is None else max(known, seconds)

    def of(self, stage: str) -> float:
        """The limit of a stage; the ceiling where it was not seen twice."""
        longest = self._longest.get(stage, 0.0)
        learnt = max(self.floor_s, LONGEST * longest)
        return min(self.ceiling_s, learnt) if longest else self.ceiling_s

    def forget(self) -> None:
        """Programs will be compiled again: no stage is known."""
        self._longest.clear()


# ------------------------------------------------------------------------- who lags


@dataclass(frozen=True, kw_only=True)
class Place:
    """The place of a process, as it writes it to its file."""

    at: float  # epoch seconds of the writing
    step: int
    stage: str
    changes: int  # stages since the start: all processes go through the same
    waits: str | None  # the name of the barrier or the exchange at which it waits for others

    def __str__(self) -> str:
        waits = "" if self.waits is None else f", where it waits for the others ({self.waits})"
        return f"step {self.step}, stage {self.stage}{waits}"


def lagging(places: Mapping[int, Place], count: int, now: float) -> dict[int, str]:
    """The processes that the others wait for, and what is known of each.

    Empty where all stand at the same place, such as in one program of all devices.
    """
    left = [k for k, place in places.items() if place.stage == END]
    if 0 < len(left) < count:
        return {k: f"left the run after step {places[k].step}" for k in left}
    missing = [process for process in range(count) if process not in places]
    if missing:
        return dict.fromkeys(missing, "never wrote where it stands")
    silent = {k: now - place.at for k, place in places.items() if now - place.at > SILENT_S}
    if silent:
        return {
            k: f"has not run for {seconds:.0f} s (stopped, gone, or something holds Python's "
            f"lock); it was in {places[k]}"
            for k, seconds in silent.items()
        }
    behind = _behind(places)
    return {} if len(behind) == count else {k: f"is in {places[k]}" for k in behind}


def _behind(places: Mapping[int, Place]) -> list[int]:
    """The processes at the earliest place. One that waits for others counts as further."""
    order = {k: (place.changes, place.waits is not None) for k, place in places.items()}
    return [k for k, place in order.items() if place == min(order.values())]


# ------------------------------------------------------------------------- the watch


class Watch:
    """Hears from a training where it stands, and logs it. This one does not watch."""

    # Notes that the watchdog ends the run, and after which step; on the main process.
    note_end: Callable[[str, int], object] | None = None

    def enter(self, stage: str, step: int | None = None, *, learn: bool = True) -> None:
        """A stage begins, and the one before ends. Its time is not learnt with `learn=False`."""
        if step is not None:
            _log.info("step %d begins", step)
        _log.info("%s", stage)

    def clocks(self, running: Sequence[str]) -> None:
        """The clocks of a step that run now: they name the stage."""
        self.enter(" and ".join(running) or BETWEEN)

    def forget(self) -> None:
        """Drop the learnt limits: what follows compiles programs."""


@contextmanager
def open_watch(
    settings: WatchdogConfig, folder: Path, end_process: EndProcess | None
) -> Iterator[Watch]:
    """Watch until the block ends. `end_process` ends this process with a code, without cleaning up.

    None does not watch, and so does a ceiling of 0. Every process must call it.
    """
    if end_process is None or not settings.ceiling_minutes:
        yield Watch()
        return
    files = folder / "watchdog"
    files.mkdir(exist_ok=True)
    if is_main():
        for file in files.iterdir():
            file.unlink(missing_ok=True)
    barrier("watchdog")
    stacks = folder / f"stacks-{jax.process_index()}.txt"
    with contextlib.ExitStack() as stack:
        out = stack.enter_context(open(stacks, "a"))
        watchdog = Watchdog(settings, files, out, end_process)
        stack.callback(_remove_empty, stacks)
        stack.callback(watchdog.close)
        yield watchdog


def _remove_empty(file: Path) -> None:
    with contextlib.suppress(OSError):
        if not file.stat().st_size:
            file.unlink()


class Watchdog(Watch):
    """Watches this process, and looks whether another has ended the run."""

    def __init__(
        self, settings: WatchdogConfig, files: Path, stacks: TextIO, end_process: EndProcess
    ) -> None:
        """`files` is the folder where processes say where they stand."""
        self._limits = Limits(
            floor_s=60 * settings.floor_minutes, ceiling_s=60 * settings.ceiling_minutes
        )
        self._files, self._stacks, self._end_process = files, stacks, end_process
        self._process, self._count = jax.process_index(), jax.process_count()
        self._lock = threading.Lock()
        self._stage, self._step, self._learn, self._changes = START, 0, False, 0
        self._since = time.monotonic()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        self._thread.start()

    def enter(self, stage: str, step: int | None = None, *, learn: bool = True) -> None:
        super().enter(stage, step)
        now = time.monotonic()
        with self._lock:
            if self._learn:
                self._limits.add(self._stage, now - self._since)
            self._stage, self._since, self._learn = stage, now, learn
            self._step = self._step if step is None else step
            self._changes += 1

    def forget(self) -> None:
        with self._lock:
            self._limits.forget()

    def close(self) -> None:
        """Stop watching. The others find that this process has left the run."""
        self._closed.set()
        self._thread.join()
        faulthandler.cancel_dump_traceback_later()
        self.enter(END)
        self._tell(self._now()[0])

    def _run(self) -> None:
        while not self._closed.wait(POLL_S):
            with self._lock:
                place, taken, limit = self._now()
            faulthandler.dump_traceback_later(
                max(limit - taken, 0.0) + LOCK_S, exit=True, file=self._stacks
            )
            self._tell(place)
            others = list(self._files.glob("ended-*.txt"))
            if taken > limit:
                self._end(
                    f"process {self._process} has been in {place} for {taken:.0f} s, and the "
                    f"limit is {limit:.0f} s. {self._who()}"
                )
            elif others:
                self._end(f"process {others[0].stem.partition('-')[2]} ends the run")

    def _now(self) -> tuple[Place, float, float]:
        place = Place(
            at=time.time(),
            step=self._step,
            stage=self._stage,
            changes=self._changes,
            waits=waits_at(),
        )
        limit = self._limits.of(self._stage) if self._learn else self._limits.ceiling_s
        return place, time.monotonic() - self._since, limit

    def _tell(self, place: Place) -> None:
        with contextlib.suppress(OSError):  # a file that cannot be written ends no run
            self._write(f"process-{self._process}.json", json.dumps(asdict(place)))

    def _write(self, name: str, text: str) -> None:
        write_whole(self._files / name, text)

    def _who(self) -> str:
        if self._count == 1:
            return ""
        places = {}
        for process in range(self._count):
            with contextlib.suppress(OSError, ValueError, TypeError):
                text = (self._files / f"process-{process}.json").read_text()
                places[process] = Place(**json.loads(text))
        slow = lagging(places, self._count, time.time())
        if not slow:
            return "No process lags: all stand at the same place"
        return "; ".join(f"process {k} lags: it {what}" for k, what in slow.items())

    def _end(self, why: str) -> None:
        # Otherwise the timer could cut off what is written here.
        faulthandler.cancel_dump_traceback_later()
        message = (
            f"watchdog: {why}. The stacks of process {self._process} are in {self._stacks.name}. "
            f"It ends with exit code {STALLED}; the same command goes on from the last checkpoint"
        )
        for file in (self._stacks, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                file.write(f"{time.strftime('%Y-%m-%dT%H:%M:%S%z')} {message}\n")
                file.flush()
                faulthandler.dump_traceback(file)
        with contextlib.suppress(OSError):
            self._write(f"ended-{self._process}.txt", message)
        with contextlib.suppress(OSError, ValueError):
            if self.note_end is not None:
                self.note_end(f"ended by the watchdog: {why}", max(self._step - 1, 0))
        if self._count > 1:
            time.sleep(OTHERS_S)
        self._end_process(STALLED)
