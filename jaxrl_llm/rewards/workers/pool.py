"""The process pool in which reward functions of the user run.

Every call has a time limit. A worker that runs past it, or dies, is replaced, and the caller gets
a `Reply` with the error. Nothing that a function does can stop or hang the trainer.
"""

import queue
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from jaxrl_llm.rewards.calling import BatchCall, CallError, Reply, SampleCall, timeout_error
from jaxrl_llm.rewards.loading import FunctionInfo
from jaxrl_llm.rewards.workers.process import GRACE, Lost, WorkerLimits, WorkerProcess

Call = BatchCall | SampleCall
Reference = tuple[str, Mapping[str, Any], bytes]  # path, settings, pickle of a function

LOAD_LIMIT = 120.0  # seconds to import a user's module; libraries such as torch are slow
MOST_LOST = 16  # calls of a step that are lost before any is answered; the others are not made


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


class _Worker:
    """A worker process, and which functions it has imported."""

    def __init__(
        self, references: Sequence[Reference], max_concurrency: int, limits: WorkerLimits
    ) -> None:
        self._references = references
        greeting = (references, max_concurrency)
        self._process = WorkerProcess("jaxrl_llm.rewards.workers.worker", greeting, limits)
        self._infos: dict[int, FunctionInfo] = {}
        self.close = self._process.close

    def load(self, function: int) -> FunctionInfo:
        """Start the process if there is none, and import the function in it. Raises ValueError."""
        if self._process.start():
            self._infos = {}
        if function not in self._infos:
            slow = CallError(kind="timeout", message=f"importing it took over {LOAD_LIMIT:g} s")
            try:
                info = self._process.ask(function, LOAD_LIMIT, slow)
            except Lost as lost:
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
                yield from self._process.ask((function, timeout, sent, True), limit, late)
                return
            yield self._process.ask((function, timeout, sent, False), limit, late)
            for _ in sent[1:]:
                yield self._process.receive(limit, late)
        except (Lost, ValueError) as lost:
            error = getattr(lost, "error", None) or CallError(kind="crash", message=str(lost))
            shared = Reply(error=replace(error, shared=together))
            yield from [shared] * (len(calls) if together else 1)
