"""The trainer's side of the processes in which tools and environments run.

A job is answered, or lost with an error: nothing that it does can stop or hang the trainer. The
answers come in any order. An environment stays in one process, and is made again from its history
when that process is lost.
"""

import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any, Protocol

from jaxrl_llm.agents.sessions import (
    Action,
    Answer,
    Description,
    Host,
    Setup,
    Value,
    error_of,
)
from jaxrl_llm.rewards.calling import CallError
from jaxrl_llm.rewards.workers.pool import LOAD_LIMIT
from jaxrl_llm.rewards.workers.process import GRACE, Lost, WorkerLimits, WorkerProcess

MOST_WAITING = 4096  # async calls at a time in one process


@dataclass(eq=False)
class Job:
    """An action to be done for `owner`. Without an action, its session ends."""

    owner: Any
    action: Action | None
    limit: float  # seconds
    session: int = 0  # 0: the tools of the run alone
    history: Sequence[tuple[Action, Value]] = ()  # earlier actions of the session, with answers
    is_async: bool = False
    alone: bool = False  # no other job at the same time: a loss is its own
    number: int = field(default=0, init=False)
    worker: Any = field(default=None, init=False)


class Tools(Protocol):
    """Where tools and environments run."""

    description: Description

    def submit(self, job: Job) -> None:
        """Begin a job."""
        ...

    def done(self, wait_s: float = 0.0) -> list[tuple[Job, Answer]]:
        """The jobs that ended; waits for one, up to `wait_s`, while there are open ones."""
        ...

    def close(self) -> None:
        """End all."""
        ...


def open_tools(setup: Setup, *, local: bool, num_workers: int, limits: WorkerLimits) -> Tools:
    """Load tools and environments: in this process, for ours, or in worker processes.

    Raises: ValueError, with the remedy, for what cannot be loaded.
    """
    return LocalTools(setup) if local else ToolWorkers(setup, num_workers, limits)


class LocalTools:
    """Our own tools and environments, which need no process and never wait."""

    def __init__(self, setup: Setup) -> None:
        self._host = Host(setup)
        self.description = self._host.describe()
        self._done: list[tuple[Job, Answer]] = []

    def submit(self, job: Job) -> None:
        """Do a job."""
        if job.action is None:
            _now(self._host.end(job.session))
            return
        self._done.append((job, _now(self._host.answer(job.session, (), job.action))))

    def done(self, wait_s: float = 0.0) -> list[tuple[Job, Answer]]:
        """The jobs since the last call."""
        done, self._done = self._done, []
        return done

    def close(self) -> None:
        """Nothing runs."""


def _now(work: Coroutine[Any, Any, Any]) -> Any:
    """The result of a coroutine that waits for nothing."""
    try:
        work.send(None)
    except StopIteration as ended:
        return ended.value
    raise AssertionError("a tool of ours waits")


class ToolWorkers:
    """Worker processes: `num_workers` for one job at a time, and one for async jobs if needed."""

    def __init__(self, setup: Setup, num_workers: int, limits: WorkerLimits) -> None:
        self._done: queue.SimpleQueue[tuple[Job, Answer]] = queue.SimpleQueue()
        self._open = 0
        self._places: dict[int, _Worker] = {}  # the worker of each session
        self._numbers = 0

        def worker(width: int) -> _Worker:
            return _Worker(setup, width, limits, self._done)

        self._workers = [worker(1) for _ in range(num_workers)]
        self._wide = worker(MOST_WAITING)
        try:
            self.description = (self._workers or [self._wide])[0].describe()
        except ValueError:
            self.close()
            raise

    def submit(self, job: Job) -> None:
        """Give a job to the worker of its session, else to the one with the fewest jobs."""
        place = self._places.get(job.session)
        if place is None:
            place = self._wide if job.is_async else min(self._workers, key=lambda w: w.num_jobs)
            if job.session:
                self._places[job.session] = place
        if job.action is None:
            self._places.pop(job.session, None)
        else:
            self._open += 1
            place.num_jobs += 1
        self._numbers += 1
        job.number, job.worker = self._numbers, place
        place.submit(job)

    def done(self, wait_s: float = 0.0) -> list[tuple[Job, Answer]]:
        """The jobs that ended; waits for one, up to `wait_s`, while there are open ones."""
        done: list[tuple[Job, Answer]] = []
        with suppress(queue.Empty):
            while self._open:
                block = wait_s > 0 and not done
                done.append(self._done.get(block, wait_s if block else None))
                done[-1][0].worker.num_jobs -= 1
                self._open -= 1
        return done

    def close(self) -> None:
        """End the processes, also in the middle of a job."""
        for worker in (*self._workers, self._wide):
            worker.close()


class _Worker:
    """A process and the thread that talks to it. The process ends with the thread."""

    def __init__(
        self,
        setup: Setup,
        width: int,
        limits: WorkerLimits,
        done: "queue.SimpleQueue[tuple[Job, Answer]]",
    ) -> None:
        self._process = WorkerProcess("jaxrl_llm.agents.worker", setup, limits)
        self._width, self._done = width, done
        self.num_jobs = 0
        self._inbox: queue.SimpleQueue[Job | Callable[[], None] | None] = queue.SimpleQueue()
        self._awake, self._wake = os.pipe()
        self._queued: deque[Job] = deque()
        self._open: dict[int, tuple[Job, float]] = {}  # with the time by which it must end
        self._held: set[int] = set()  # sessions that the process has
        self._fault = ""  # why the process could not load
        self._ended = False
        self._description: Description | None = None
        self._thread = threading.Thread(target=self._serve, name="tools", daemon=True)
        self._thread.start()

    def describe(self) -> Description:
        """Start the process. Raises ValueError for what cannot be loaded."""
        started = threading.Event()

        def start() -> None:
            self._start(describes=True)
            started.set()

        self._put(start)
        started.wait()
        if self._description is None:
            raise ValueError(self._fault)
        return self._description

    def submit(self, job: Job) -> None:
        """Queue a job."""
        self._put(job)

    def close(self) -> None:
        """End the process and the thread."""
        self._put(None)
        self._process.close()
        self._thread.join()
        for end in (self._awake, self._wake):
            os.close(end)

    def _put(self, item: "Job | Callable[[], None] | None") -> None:
        self._inbox.put(item)
        os.write(self._wake, b"\0")

    # --------------------------------------------------------------------- the thread

    def _serve(self) -> None:
        while not self._ended:
            self._send_queued()
            until = min((end for _, end in self._open.values()), default=None)
            left = None if until is None else max(until - time.monotonic(), 0.0)
            connection = self._process.connection if self._open else None
            ready = wait([self._awake, *([connection] if connection else [])], left)
            if self._awake in ready:
                self._take()
            if connection is not None and connection in ready:
                self._receive(connection)
            elif self._open:
                self._end_late()

    def _take(self) -> None:
        """Take what was put; there may be less of it than there are marks in the pipe."""
        os.read(self._awake, 2**16)
        with suppress(queue.Empty):
            while True:
                item = self._inbox.get_nowait()
                if item is None:
                    self._ended = True
                elif isinstance(item, Job):
                    self._queued.append(item)
                else:
                    item()

    def _send_queued(self) -> None:
        while self._queued and len(self._open) < self._width:
            if self._open and (
                self._queued[0].alone or any(j.alone for j, _ in self._open.values())
            ):
                return
            job = self._queued.popleft()
            if job.action is None:
                self._forget(job.session)
            elif self._start():
                self._send(job)
            else:
                self._done.put((job, error_of(self._fault)))

    def _start(self, *, describes: bool = False) -> bool:
        """Have a process that has loaded its tools; False, with the fault, where that fails."""
        try:
            if not self._process.start():
                return not self._fault
            self._held.clear()
            slow = CallError(kind="timeout", message=f"importing took over {LOAD_LIMIT:g} s")
            answer: Any = self._process.ask(describes, LOAD_LIMIT, slow)
        except (Lost, ValueError, OSError) as error:
            answer = f"a worker process for tools could not start: {error}"
        self._fault = answer if isinstance(answer, str) else ""
        self._description = answer if isinstance(answer, Description) else None
        return not self._fault

    def _forget(self, session: int) -> None:
        if session in self._held:
            self._held.discard(session)
            with suppress(Lost):
                self._process.send((0, session, (), None, 0.0))

    def _send(self, job: Job) -> None:
        history = () if job.session in self._held else tuple(job.history)
        limit = job.limit * (1 + len(history))
        self._open[job.number] = job, time.monotonic() + limit + GRACE * (self._width > 1)
        try:
            self._process.send((job.number, job.session, history, job.action, limit))
        except Lost as lost:
            self._lose(lost.error)
            return
        if job.session:
            self._held.add(job.session)

    def _receive(self, connection: Connection) -> None:
        try:
            number, answer = connection.recv()
        except (EOFError, OSError):
            self._lose(self._process.crash())
            return
        job, _ = self._open.pop(number)
        self._done.put((job, answer))

    def _end_late(self) -> None:
        """End the process if a job has passed its time."""
        now = time.monotonic()
        late = [job for job, end in self._open.values() if end <= now]
        if late:
            self._process.kill()
            kind = "timeout" if len(self._open) == 1 else "crash"
            self._lose(CallError(kind=kind, message=f"it ran longer than {late[0].limit:g} s"))

    def _lose(self, error: CallError) -> None:
        """The jobs of a process that is gone. Of several, nobody knows which is to blame."""
        self._held.clear()
        shared = len(self._open) > 1
        for job, _ in self._open.values():
            self._done.put((job, error_of(error.message, error.kind, shared=shared)))
        self._open.clear()
