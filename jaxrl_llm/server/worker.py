"""The thread that drives the engine: it adds sequences, steps, and hands tokens to an event loop.

Only this thread calls the engine. A step may take long, so the event loop leaves orders here, and
gets what a step brought to all sequences in one call.
"""

import asyncio
import logging
import threading
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from jaxrl_llm.generation.sequence import Sampling, Sequence
from jaxrl_llm.generation.session import Engine

log = logging.getLogger(__name__)
# Decode steps of a call while fewer sequences than MANY run; else the engine's own number. New
# requests wait for its end, and streams come so often.
FEW_STEPS, MANY = 16, 64


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """A completion that is wanted of the engine."""

    prompt: Seq[int]
    limit: int  # most tokens
    seed_key: np.ndarray  # data of a key, uint32 [2]
    sample_id: int
    sampling: Sampling


class Receiver(Protocol):
    """Gets the tokens of a sequence, in the thread of the event loop."""

    def receive(self, tokens: Seq[int], logprobs: Seq[float], reason: str | None) -> None:
        """Take more tokens; the reason for the end comes with the last ones."""
        ...

    def fail(self, error: Exception) -> None:
        """Learn that no more tokens will come."""
        ...


@dataclass(eq=False)
class Running:
    """A sequence of the engine, and what its receiver has of it."""

    sequence: Sequence
    receiver: Receiver
    sent: int  # tokens, the prompt included
    wanted: Wanted


_Brought = tuple[Receiver, list[int], list[float], str | None]


class Worker:
    """Runs an engine for an event loop."""

    def __init__(self, engine: Engine) -> None:
        self.failure: Exception | None = None  # why the engine stands still
        self._engine = engine
        self._orders: list[Callable[[], None]] = []
        self._wake = threading.Condition()
        self._closing = False
        self._receivers: set[Receiver] = set()  # receivers that want tokens; the event loop has it
        self._running: dict[Receiver, Running] = {}  # sequences in work; the thread has it
        self._by_sequence: dict[Sequence, Running] = {}  # the same
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begin to work for a loop."""
        self._loop = loop
        self._thread.start()

    def close(self) -> None:
        """End after the current step."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join()

    def add(self, wanted: Wanted, receiver: Receiver) -> None:
        """Answer a prompt. The receiver gets the tokens."""
        if self.failure is not None:
            receiver.fail(self.failure)
            return
        self._receivers.add(receiver)
        self._order(lambda: self._add(wanted, receiver))

    def abort(self, receiver: Receiver) -> None:
        """End a sequence early. Its receiver gets no more tokens."""
        if receiver in self._receivers:
            self._receivers.remove(receiver)
            self._order(lambda: self._abort(receiver))

    @property
    def num_unfinished(self) -> int:
        """Sequences that want tokens."""
        return len(self._receivers)

    @property
    def num_queued(self) -> int:
        """Sequences among them that wait for a slot."""
        running = sum(x.sequence.status == "running" for x in [*self._running.values()])
        return max(self.num_unfinished - running, 0)

    @property
    def num_free_tokens(self) -> int:
        """Tokens that fit into the free pages of the cache."""
        return self._engine.num_free_tokens

    # --------------------------------------------------------------------- in the thread

    def _order(self, order: Callable[[], None]) -> None:
        with self._wake:
            self._orders.append(order)
            self._wake.notify()

    def _run(self) -> None:
        try:
            while self._work():
                pass
        except Exception as error:  # a fault of a device, say; every request must hear of it
            log.exception("the engine failed")
            self._call(self._fail, error)

    def _work(self, wait_s: float | None = None) -> bool:
        """Carry out the orders and one step; False when the end was ordered.

        With nothing to do it waits, at most `wait_s`.
        """
        with self._wake:
            self._wake.wait_for(self._has_work, wait_s)
            orders, self._orders = self._orders, []
        for order in orders:
            order()
        if not self._closing and self._engine.has_work:
            self._hand_over(self._step())
        return not self._closing

    def _has_work(self) -> bool:
        return bool(self._orders or self._engine.has_work or self._closing)

    def _step(self) -> Seq[Sequence]:
        # Between two calls the device waits for the host: the longer, the more sequences.
        few = len(self._running) < MANY
        return self._engine.step(FEW_STEPS if few else 0)

    def _begin(self, wanted: Wanted) -> Sequence:
        """Have the engine answer a prompt. Raises ValueError for one that it cannot answer."""
        return self._engine.add(
            wanted.prompt,
            limit=wanted.limit,
            seed_key=wanted.seed_key,
            sample_id=wanted.sample_id,
            sampling=wanted.sampling,
        )

    def _ended(self, running: Running) -> None:
        """Free what a sequence that waits holds."""
        self._engine.finish(running.sequence)

    def _add(self, wanted: Wanted, receiver: Receiver) -> None:
        try:
            sequence = self._begin(wanted)
        except ValueError as error:  # this request cannot be answered; others can
            self._call(receiver.fail, error)
            return
        running = Running(sequence, receiver, len(sequence.tokens), wanted)
        self._running[receiver] = self._by_sequence[sequence] = running

    def _abort(self, receiver: Receiver) -> None:
        if running := self._running.pop(receiver, None):  # else it has ended by itself
            del self._by_sequence[running.sequence]
            self._engine.abort(running.sequence)

    def _hand_over(self, changed: Seq[Sequence]) -> None:
        """Give the event loop what a step brought, and the engine the slots of ended answers."""
        brought: list[_Brought] = []
        for sequence in changed:
            running = self._by_sequence.get(sequence)
            if running is None:
                continue
            tokens, logprobs = sequence.tokens[running.sent :], sequence.logprobs[running.sent :]
            running.sent += len(tokens)
            ended = sequence.status in ("waiting", "ended")
            if ended:
                del self._running[running.receiver], self._by_sequence[sequence]
                if sequence.status == "waiting":
                    self._ended(running)
            if tokens or ended:
                reason = sequence.stop_reason if ended else None
                brought.append((running.receiver, tokens, logprobs, reason))
        if brought:
            self._call(self._receive, brought)

    def _call(self, function: Callable[[Any], None], value: Any) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, value)

    # --------------------------------------------------------------------- in the event loop

    def _receive(self, brought: Seq[_Brought]) -> None:
        for receiver, tokens, logprobs, reason in brought:
            if receiver in self._receivers:  # else it was aborted meanwhile
                if reason is not None:
                    self._receivers.remove(receiver)
                receiver.receive(tokens, logprobs, reason)

    def _fail(self, error: Exception) -> None:
        self.failure = error
        for receiver in [*self._receivers]:
            receiver.fail(error)
        self._receivers.clear()
