"""The process pool in which user reward functions run.

Every call has a time limit. A worker that runs past it, or dies, is replaced. The caller then gets
a `Reply` with the error. Nothing that a user function does can stop or hang the trainer.

The process pool of a library is not enough. A kill must reach the processes that a user function
started. A worker must end when the trainer is killed, even if it holds the interpreter lock: see
`keeper.py`. Answers are data that the trainer checks, never objects: see `wire.py`.
"""

import json
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Literal

from jaxrl_llm.rewards.calling import BatchCall, CallError, Reply, SampleCall, timeout_error
from jaxrl_llm.rewards.loading import FunctionInfo
from jaxrl_llm.rewards.workers import keeper
from jaxrl_llm.rewards.workers.messages import info_of, pack_calls, replies_of
from jaxrl_llm.rewards.workers.wire import (
    MAX_ANSWER,
    Channel,
    Malformed,
    pack_request,
    unpack_answer,
)
from jaxrl_llm.sandbox import processes

LOAD_LIMIT = 120.0  # seconds to import a user's module; libraries such as torch are slow
GRACE = 1.0  # seconds for an async call to end at its own limit before its worker is killed
END_LIMIT = 10.0  # seconds for a keeper to end all processes of its worker
KEEPER = """
import json, sys
settings = json.loads(sys.argv[1])
sys.path[:] = settings["path"]
from jaxrl_llm.rewards.workers import keeper
keeper.main(settings)
"""
# Variables whose names say that they are secret.
SECRET = re.compile(
    r"TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL|(^|_)(API_?)?KEY(_|$)|APIKEY|(^|_)AUTH(_|$)"
    r"|^(AWS|AZURE|GOOGLE|GCP|WANDB|KUBERNETES|SSH)_",
    re.IGNORECASE,
)


@dataclass(frozen=True, kw_only=True)
class WorkerLimits:
    """What a worker, with all processes that it starts, may take and see."""

    memory_gb: float = 16.0
    file_gb: float = 4.0  # a file that it writes
    processes: int = 256
    output_bytes: int = 2**16  # printed in a minute
    environment: tuple[str, ...] = ()  # secret variables that it gets nevertheless

    def settings(self) -> dict[str, int]:
        """The limits in the units of `keeper.py`."""
        return {
            "memory_bytes": int(self.memory_gb * 1e9),
            "file_bytes": int(self.file_gb * 1e9),
            "processes": self.processes,
            "output_bytes": self.output_bytes,
        }

    def environ(self) -> dict[str, str]:
        """The environment without secrets."""
        return {name: value for name, value in os.environ.items() if not self._withholds(name)}

    def explained(self, message: str) -> str:
        """An error's message. If it names a variable that was withheld, it says how to pass it."""
        for name in filter(self._withholds, os.environ):
            if name in message:
                names = json.dumps([*self.environment, name])
                return f"{message}; {name} is withheld: --config.reward.environment='{names}'"
        return message

    def _withholds(self, name: str) -> bool:
        return name not in self.environment and bool(SECRET.search(name))


@dataclass(frozen=True, kw_only=True)
class Task:
    """Calls of one function for one worker."""

    function: int
    calls: Sequence[BatchCall | SampleCall]
    # "run": one after the other, each answered at once. "gather": awaited together.
    operation: Literal["run", "gather"] = "run"


class Hopeless:
    """Counts lost calls: after `limit` of them without a good one, no more calls are made.

    So a function that always hangs costs minutes and not hours.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lost = 0
        self._worked = False
        self._lock = threading.Lock()

    def note(self, reply: Reply) -> None:
        """Count one answer."""
        lost = reply.error is not None and reply.error.kind in ("crash", "timeout")
        with self._lock:
            self._lost += lost
            self._worked |= not lost

    def error(self) -> CallError | None:
        """The error that replaces a further call, or None while calls go on."""
        with self._lock:
            if self._worked or self._lost < self._limit:
                return None
        message = f"not called: all {self._limit} calls before it crashed or ran out of time"
        return CallError(kind="not run", message=message)


class WorkerPool:
    """Worker processes, started when first needed and replaced when lost.

    `references` are (path, settings, pickle) of the functions. Tasks name them by index.
    """

    def __init__(
        self,
        references: Sequence[tuple[str, Mapping[str, Any], bytes]],
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
        self._threads = ThreadPoolExecutor(num_workers, thread_name_prefix="reward")

    def load(self, function: int) -> FunctionInfo:
        """Import a function in a worker and describe it. Raises ValueError when that fails."""
        worker = self._idle.get()
        try:
            return worker.load(function)
        finally:
            self._idle.put(worker)

    def submit(self, task: Task, hopeless: Hopeless) -> "Future[list[Reply]]":
        """Make the calls of a task in a free worker. Guarantees: one `Reply` a call, in order."""
        return self._threads.submit(self._perform, task, hopeless)

    def _perform(self, task: Task, hopeless: Hopeless) -> list[Reply]:
        worker = self._idle.get()  # never waits: there are as many threads as workers
        try:
            if task.operation == "gather":
                return self._gather(worker, task, hopeless)
            replies: list[Reply] = []
            while len(replies) < len(task.calls):
                error = hopeless.error()
                if error is not None:
                    return replies + [Reply(error=error)] * (len(task.calls) - len(replies))
                # A lost call ends the stream. The next turn starts after it with a new worker.
                rest = task.calls[len(replies) :]
                for reply in worker.stream(task.function, rest, self._timeout):
                    hopeless.note(reply)
                    replies.append(reply)
            return replies
        finally:
            self._idle.put(worker)

    def _gather(self, worker: "_Worker", task: Task, hopeless: Hopeless) -> list[Reply]:
        turns = -(-len(task.calls) // self._max_concurrency)
        result = worker.gather(task.function, task.calls, self._timeout, turns)
        if isinstance(result, CallError):  # the event loop itself was blocked or lost
            return [Reply(error=replace(result, shared=True))] * len(task.calls)
        for reply in result:
            hopeless.note(reply)
        return result

    def close(self) -> None:
        """End the workers, including those in the middle of a call."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for worker in self._workers:
            worker.close()
        self._threads.shutdown(wait=True)


class _Worker:
    """The trainer's end of one worker process."""

    def __init__(
        self,
        references: Sequence[tuple[str, Mapping[str, Any], bytes]],
        max_concurrency: int,
        limits: WorkerLimits,
    ) -> None:
        self._references = references
        self._greeting = pack_request([references, max_concurrency])
        self._limits = limits
        self._process: subprocess.Popen[bytes] | None = None  # the keeper
        self._channel: Channel | None = None
        self._number = 0  # of the last request
        self._infos: dict[int, FunctionInfo] = {}
        self._closed = False
        self._lock = threading.Lock()

    def _start(self) -> None:
        if sys.platform != "linux":
            raise ValueError(
                "reward functions of yours run in worker processes, whose limits need Linux; take "
                "a grader of jaxrl_llm, for example exact_answer, or run on Linux"
            )
        ours, theirs = socket.socketpair()
        settings = {
            "socket": theirs.fileno(),
            "trainer": os.getpid(),
            "path": [path or os.getcwd() for path in sys.path],
            **self._limits.settings(),
        }
        with self._lock:
            if self._closed:
                raise _Lost(CallError(kind="not run", message="the reward pool was closed"))
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", KEEPER, json.dumps(settings)],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is the trainer's to handle
                # A user module that imports jax must not take the accelerator from the trainer.
                env={**self._limits.environ(), "JAX_PLATFORMS": "cpu"},
            )
        theirs.close()
        self._channel = Channel(ours)
        self._infos = {}
        self._send(self._greeting, LOAD_LIMIT)

    def _send(self, message: bytes, limit: float) -> None:
        assert self._channel is not None
        try:
            self._channel.send(message, limit)
        except OSError:  # also when it does not read
            raise _Lost(self._crash()) from None

    def _head(self, operation: str, function: int, timeout: float) -> list[Any]:
        """The head of the next request."""
        self._number += 1
        return [self._number, operation, function, timeout]

    def _receive(self, limit: float, timeout: CallError) -> Any:
        """The next answer. Raises _Lost on a crash, and after `limit` seconds; Malformed."""
        assert self._channel is not None
        try:
            return unpack_answer(self._channel.receive(limit, MAX_ANSWER))
        except EOFError:
            raise _Lost(self._crash()) from None
        except TimeoutError:
            self._kill()
            raise _Lost(timeout) from None

    def _lost_by(self, error: Malformed) -> CallError:
        """The error for an answer that cannot be used; the worker is removed."""
        self._kill()
        return CallError(kind="crash", message=f"the worker process sent {error}")

    def load(self, function: int) -> FunctionInfo:
        """Start the process if there is none, and import the function in it. Raises ValueError."""
        if self._process is not None and self._process.poll() is not None:
            self._kill()  # it died while idle, perhaps out of memory: no sample is to blame
        if self._process is not None and function in self._infos:
            return self._infos[function]
        path = self._references[function][0]
        slow = CallError(kind="timeout", message=f"importing it took over {LOAD_LIMIT:g} s")
        try:
            if self._process is None:
                self._start()
            self._send(pack_request([*self._head("load", function, LOAD_LIMIT), []]), LOAD_LIMIT)
            info = info_of(self._receive(LOAD_LIMIT, slow), self._number)
        except Malformed as error:
            raise _not_imported(path, self._lost_by(error)) from None
        except _Lost as lost:
            raise _not_imported(path, lost.error) from None
        except ValueError as error:
            raise ValueError(self._limits.explained(str(error))) from None
        self._infos[function] = info
        return info

    def stream(
        self, function: int, calls: Sequence[BatchCall | SampleCall], timeout: float
    ) -> list[Reply]:
        """Make calls one by one. The list ends early, with the error, when a call is lost."""
        replies: list[Reply] = []
        try:
            info = self._ready(function)
            limit = timeout + (GRACE if info.is_async else 0.0)
            self._send(pack_calls(self._head("run", function, timeout), info, calls), limit)
            for request in calls:
                answer = self._receive(limit, timeout_error(info, timeout))
                replies += self._explained(replies_of(answer, self._number, [request.size]))
        except Malformed as error:
            replies.append(Reply(error=self._lost_by(error)))
        except _Lost as lost:
            replies.append(Reply(error=lost.error))
        return replies

    def gather(
        self, function: int, calls: Sequence[BatchCall | SampleCall], timeout: float, turns: int
    ) -> list[Reply] | CallError:
        """Await calls together, in `turns` of the concurrency; an error when all are lost."""
        try:
            info = self._ready(function)
            limit = timeout * turns + GRACE
            self._send(pack_calls(self._head("gather", function, timeout), info, calls), limit)
            answer = self._receive(limit, timeout_error(info, timeout))
            sizes = [request.size for request in calls]
            return self._explained(replies_of(answer, self._number, sizes))
        except Malformed as error:
            return self._lost_by(error)
        except _Lost as lost:
            return lost.error

    def _explained(self, replies: list[Reply]) -> list[Reply]:
        return [
            replace(r, error=replace(r.error, message=self._limits.explained(r.error.message)))
            if r.error is not None
            else r
            for r in replies
        ]

    def _ready(self, function: int) -> FunctionInfo:
        try:
            return self.load(function)
        except ValueError as error:
            raise _Lost(CallError(kind="crash", message=str(error))) from None

    def _crash(self) -> CallError:
        """How the process ended; the worker is removed."""
        assert self._process is not None
        try:
            code = self._process.wait(timeout=GRACE)
            how = f"exit code {code}" if code >= 0 else processes.signal_name(-code)
            if code == keeper.EXCESS:
                how = "it passed its limit of memory or processes"
        except subprocess.TimeoutExpired:
            how = "it closed its connection"
        self._kill()
        return CallError(kind="crash", message=f"the worker process ended ({how})")

    def _kill(self) -> None:
        with self._lock:
            process, channel = self._process, self._channel
            self._process = self._channel = None
        if process is not None:
            _end(process)
        if channel is not None:
            channel.close()

    def close(self) -> None:
        """End the process. A thread that waits for its answer sees the connection close."""
        with self._lock:
            self._closed = True
            process = self._process
        if process is not None:
            _end(process)


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Have the keeper end its worker and all that the worker started."""
    process.terminate()
    process.send_signal(signal.SIGCONT)  # a user function may have stopped it
    try:
        process.wait(END_LIMIT)
    except subprocess.TimeoutExpired:  # stopped again and again; its worker ends with it
        process.kill()
        process.wait()


def _not_imported(path: str, error: CallError) -> ValueError:
    return ValueError(f"Importing the reward function {path} failed: {error.message}.")


class _Lost(Exception):
    """The worker is gone; `error` says why."""

    def __init__(self, error: CallError) -> None:
        super().__init__(error.message)
        self.error = error
