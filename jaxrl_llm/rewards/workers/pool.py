"""The process pool in which reward functions of the user run.

Every call has a time limit. A worker that runs past it, or dies, is replaced, and the caller gets
a `Reply` with the error. Nothing that a function does can stop or hang the trainer.
"""

import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

from jaxrl_llm.rewards.calling import BatchCall, CallError, Reply, SampleCall, timeout_error
from jaxrl_llm.rewards.loading import FunctionInfo
from jaxrl_llm.sandbox.processes import signal_name

Call = BatchCall | SampleCall
Reference = tuple[str, Mapping[str, Any], bytes]  # path, settings, pickle of a function

LOAD_LIMIT = 120.0  # seconds to import a user's module; libraries such as torch are slow
GRACE = 1.0  # seconds for an async call to end at its own limit before its worker is killed
MOST_LOST = 16  # calls of a step that are lost before any is answered; the others are not made
START = """
import json, sys
settings = json.loads(sys.argv[1])
sys.path[:] = settings["path"]
from jaxrl_llm.rewards.workers import worker
worker.main(settings)
"""


@dataclass(frozen=True, kw_only=True)
class WorkerLimits:
    """Limits of a worker process."""

    memory_gb: float = 16.0
    file_gb: float = 4.0  # largest file that it may write


class LostCalls:
    """Counts the lost calls of a function, so that one that always hangs costs minutes, not hours.

    After MOST_LOST lost calls without an answer, no more calls are made.
    """

    def __init__(self) -> None:
        self._lost, self._answered = 0, False

    def count(self, reply: Reply) -> None:
        """Count a reply."""
        if reply.error is not None and reply.error.kind in ("crash", "timeout"):
            self._lost += 1
        else:
            self._answered = True

    def error(self) -> CallError | None:
        """The error in place of a further call, or None while calls are made."""
        if self._answered or self._lost < MOST_LOST:
            return None
        message = f"not called: all {self._lost} calls before it crashed or ran out of time"
        return CallError(kind="not run", message=message)


class WorkerPool:
    """Worker processes, started when first needed and replaced when lost."""

    def __init__(
        self,
        references: Sequence[Reference],
        *,
        num_workers: int,
        timeout: float,
        max_concurrency: int = 64,
        limits: WorkerLimits | None = None,
    ) -> None:
        self.num_workers = num_workers
        self._timeout = timeout
        self._max_concurrency = max_concurrency
        limits = limits or WorkerLimits()
        self._workers = [_Worker(references, max_concurrency, limits) for _ in range(num_workers)]
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        for worker in self._workers:
            self._idle.put(worker)
        # A worker ends with the thread that started it, so these threads start all of them.
        self._threads = ThreadPoolExecutor(num_workers, thread_name_prefix="reward")

    def load(self, function: int) -> FunctionInfo:
        """Import a function in a worker and describe it. Raises ValueError when that fails."""
        return self._threads.submit(self._load, function).result()

    def _load(self, function: int) -> FunctionInfo:
        worker = self._idle.get()
        try:
            return worker.load(function)
        finally:
            self._idle.put(worker)

    def submit(
        self, function: int, calls: Sequence[Call], lost: LostCalls, *, together: bool = False
    ) -> "Future[list[Reply]]":
        """Make calls in a free worker, one by one or awaited together: one `Reply` a call."""
        return self._threads.submit(self._run, function, calls, lost, together)

    def _run(
        self, function: int, calls: Sequence[Call], lost: LostCalls, together: bool
    ) -> list[Reply]:
        worker = self._idle.get()  # never waits: there are as many threads as workers
        replies: list[Reply] = []
        turns = -(-len(calls) // self._max_concurrency) if together else 1
        try:
            while len(replies) < len(calls):
                if error := lost.error():
                    return replies + [Reply(error=error)] * (len(calls) - len(replies))
                # A lost call ends the answers. The next turn starts after it with a new worker.
                rest = calls[len(replies) :]
                for reply in worker.run(function, rest, self._timeout, turns, together):
                    lost.count(reply)
                    replies.append(reply)
            return replies
        finally:
            self._idle.put(worker)

    def close(self) -> None:
        """End the workers, including those in the middle of a call."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for worker in self._workers:
            worker.close()
        self._threads.shutdown(wait=True)


class _Lost(Exception):
    """The worker is gone; `error` says why."""

    def __init__(self, error: CallError) -> None:
        super().__init__(error.message)
        self.error = error


class _Worker:
    """The trainer's end of one worker process."""

    def __init__(
        self, references: Sequence[Reference], max_concurrency: int, limits: WorkerLimits
    ) -> None:
        self._references = references
        self._max_concurrency = max_concurrency
        self._limits = limits
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._infos: dict[int, FunctionInfo] = {}
        self._closed = False
        self._lock = threading.Lock()

    def load(self, function: int) -> FunctionInfo:
        """Start the process if there is none, and import the function in it. Raises ValueError."""
        if self._process is not None and self._process.poll() is not None:
            self._kill()  # it died while idle, perhaps out of memory: no sample is to blame
        if self._process is None:
            self._start()
        if function not in self._infos:
            slow = CallError(kind="timeout", message=f"importing it took over {LOAD_LIMIT:g} s")
            try:
                info = self._ask(function, LOAD_LIMIT, slow)
            except _Lost as lost:
                path = self._references[function][0]
                raise ValueError(f"Importing the reward function {path} failed: {lost}") from None
            if isinstance(info, str):
                raise ValueError(info)
            self._infos[function] = info
        return self._infos[function]

    def run(
        self, function: int, calls: Sequence[Call], timeout: float, turns: int, together: bool
    ) -> Iterator[Reply]:
        """Make calls: a reply each, up to the error of a call that is lost.

        Calls that are awaited together, in `turns` of the concurrency, are lost together.
        """
        try:
            info = self.load(function)
            limit = timeout * turns + (GRACE if info.is_async else 0.0)
            late = timeout_error(info, timeout)
            sent = [replace(call, fields=info.arguments(call.fields)) for call in calls]
            if together:
                yield from self._ask((function, timeout, sent, True), limit, late)
                return
            yield self._ask((function, timeout, sent, False), limit, late)
            for _ in sent[1:]:
                yield self._receive(limit, late)
        except (_Lost, ValueError) as lost:
            error = getattr(lost, "error", None) or CallError(kind="crash", message=str(lost))
            shared = Reply(error=replace(error, shared=together))
            yield from [shared] * (len(calls) if together else 1)

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        settings = {
            "socket": theirs.fileno(),
            "trainer": os.getpid(),
            "path": [path or os.getcwd() for path in sys.path],
            "memory_bytes": int(self._limits.memory_gb * 1e9),
            "file_bytes": int(self._limits.file_gb * 1e9),
        }
        with self._lock, theirs:
            if self._closed:
                raise ValueError("the reward pool was closed")
            self._process = subprocess.Popen(
                [sys.executable, "-u", "-P", "-c", START, json.dumps(settings)],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is the trainer's to handle
                # A user module that imports jax must not take the accelerator from the trainer.
                env={**os.environ, "JAX_PLATFORMS": "cpu"},
            )
        self._connection = Connection(ours.detach())
        self._connection.send((self._references, self._max_concurrency))
        self._infos = {}

    def _ask(self, request: Any, limit: float, late: CallError) -> Any:
        assert self._connection is not None
        try:
            self._connection.send(request)
        except OSError:
            raise _Lost(self._crash()) from None
        return self._receive(limit, late)

    def _receive(self, limit: float, late: CallError) -> Any:
        """The next answer. Raises _Lost on a crash, and after `limit` seconds."""
        assert self._connection is not None
        try:
            if self._connection.poll(limit):
                return self._connection.recv()
        except (EOFError, OSError):
            raise _Lost(self._crash()) from None
        self._kill()
        raise _Lost(late)

    def _crash(self) -> CallError:
        """Remove a worker whose process has ended, and say how it ended."""
        assert self._process is not None
        try:
            code = self._process.wait(timeout=GRACE)
            how = f"exit code {code}" if code >= 0 else signal_name(-code)
        except subprocess.TimeoutExpired:
            how = "it closed its connection"
        self._kill()
        return CallError(kind="crash", message=f"the worker process ended ({how})")

    def _kill(self) -> None:
        """End the process and what it has started, except in sessions of their own."""
        with self._lock:
            process, connection = self._process, self._connection
            self._process = self._connection = None
        if process is not None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if connection is not None:
            connection.close()

    def close(self) -> None:
        """End the process. A thread that waits for its answer sees the connection close."""
        with self._lock:
            self._closed = True
            process = self._process
        if process is not None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
