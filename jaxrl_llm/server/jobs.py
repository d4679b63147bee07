"""Answers in the making: the choices of each request, and requests that come again.

A client whose connection breaks sends its request again. It then gets the same answer: the one that
is there, the one that is being made, or one that is made again with the same keys.
"""

import asyncio
import time
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from jaxrl_llm.agents.tool_calls import ToolCallParser
from jaxrl_llm.generation.completions import TextStream
from jaxrl_llm.generation.sequence import Sampling
from jaxrl_llm.server.protocol import ApiError, Asked
from jaxrl_llm.server.worker import Wanted, Worker
from jaxrl_llm.tokenizer import Tokenizer

KEPT_S = 60.0  # how long an answer is kept for a request that may come again
MOST_KEPT = 256  # answers kept
FINISH_REASONS = {
    "stop": "stop",
    "length": "length",
    "context": "length",
}  # the engine's, the API's


class Choice:
    """One completion, as far as it is made."""

    def __init__(
        self, asked: Asked, tokenizer: Tokenizer, changed: "Callable[[Choice], None]"
    ) -> None:
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.text = ""  # text of whole characters, without a stop string
        self.finish_reason: str | None = None
        self.error: Exception | None = None
        self._asked, self._changed = asked, changed
        self._as_it_comes = asked.stream or bool(asked.stop)  # else the text is decoded at the end
        self._stream = TextStream(tokenizer)
        self._stopped = False  # a stop string is complete

    @property
    def ended(self) -> bool:
        """True if nothing more comes."""
        return self.finish_reason is not None or self.error is not None

    @property
    def shown(self) -> int:
        """Characters that can be shown: an end that may begin a stop string waits."""
        most = 0 if self.ended else max(map(len, self._asked.stop), default=1) - 1
        for length in range(min(most, len(self.text)), 0, -1):
            if any(stop.startswith(self.text[-length:]) for stop in self._asked.stop):
                return len(self.text) - length
        return len(self.text)

    def receive(self, tokens: Sequence[int], logprobs: Sequence[float], reason: str | None) -> None:
        """Take further tokens, none after one that ends the completion."""
        if self._asked.own_stops:
            for i, token in enumerate(tokens):  # which of them ends it?
                self._take([token], logprobs[i : i + 1])
                if self._stopped or token in self._asked.stop_ids:
                    reason = "stop"
                    break
        else:
            self._take(tokens, logprobs)
        if reason is not None:
            self._end(reason)
        self._changed(self)

    def fail(self, error: Exception) -> None:
        """End without a completion."""
        self.error = error
        self._changed(self)

    def _take(self, tokens: Sequence[int], logprobs: Sequence[float]) -> None:
        self.tokens += tokens
        self.logprobs += logprobs
        if self._as_it_comes:
            self._add_text(self._stream.add(self._without_stop(tokens)))

    def _end(self, reason: str) -> None:
        if not self._as_it_comes:
            self.text = self._stream.add(self._without_stop(self.tokens))
        if not self._stopped:
            self._add_text(self._stream.end())
        if reason in FINISH_REASONS:
            self.finish_reason = FINISH_REASONS[reason]
        else:
            self.error = RuntimeError(f"the engine ended the answer: {reason}")

    def _without_stop(self, tokens: Sequence[int]) -> Sequence[int]:
        return tokens[:-1] if tokens and tokens[-1] in self._asked.stop_ids else tokens

    def _add_text(self, text: str) -> None:
        """Add to the text, and cut it where a stop string begins."""
        before = len(self.text)
        self.text += text
        found = [self.text.find(x, max(before - len(x) + 1, 0)) for x in self._asked.stop]
        if places := [place for place in found if place >= 0]:
            self.text, self._stopped = self.text[: min(places)], True


class Job:
    """The answer to one request. Its choices have the numbers from `number` on."""

    def __init__(self, asked: Asked, number: int) -> None:
        self.asked, self.number = asked, number
        self.id = uuid.uuid4().hex
        self.created = int(time.time())
        self.choices: list[Choice] = []
        self.users = 0  # connections that wait for it
        self.delivered = False  # a connection got all of it
        self.left_at = 0.0  # monotonic time when the last connection was gone
        self.changed = asyncio.Event()  # another one after each change
        self.parser: ToolCallParser | None = None  # reads calls; None: the model's own

    @property
    def ended(self) -> bool:
        """True if all choices are made."""
        return bool(self.choices) and all(choice.ended for choice in self.choices)

    @property
    def sampled(self) -> int:
        """Tokens of all choices."""
        return sum(len(choice.tokens) for choice in self.choices)

    async def wait(self) -> None:
        """Wait for the end of all choices."""
        while not self.ended:
            await self.changed.wait()

    async def wait_for_first(self) -> None:
        """Wait for the first change of a choice."""
        while not any(choice.tokens or choice.ended for choice in self.choices):
            await self.changed.wait()

    def check(self) -> None:
        """Raise ApiError if a choice has failed."""
        for choice in self.choices:
            if isinstance(choice.error, ValueError):
                raise ApiError(400, str(choice.error))
            if choice.error is not None:
                raise ApiError(500, f"the answer failed: {choice.error}", kind="server_error")

    def note_change(self) -> None:
        """Wake who waits for a change."""
        changed, self.changed = self.changed, asyncio.Event()
        changed.set()


class Jobs:
    """The answers that are made or kept. Call it in the thread of the event loop only."""

    def __init__(self, worker: Worker, tokenizer: Tokenizer, *, seed: int, most: int) -> None:
        self._worker, self._tokenizer, self._most = worker, tokenizer, most
        # Not the key of a request with the same seed, whose samples count from 0 too.
        self._seed_key = _key(seed + 2**32)
        self._number = 0  # number of the next choice
        self._by_request: dict[bytes, list[Job]] = {}
        self._left: deque[tuple[float, bytes, Job]] = deque()

    def take(self, asked: Asked, request: bytes, *, again: bool) -> Job:
        """A job for a request. `again`: the client lost an answer to an equal one.

        Raises: ApiError 429 when too many choices are unfinished. The next try has the same keys.
        """
        self._forget()
        known = self._by_request.setdefault(request, [])
        job = min(known, key=_standing) if again and known else None
        if job is None:
            job = Job(asked, self._number)
            self._number = (self._number + asked.num_choices) % 2**32
            known.append(job)
        try:
            job.users += 1
            if not job.choices:
                self._start(job)
        except ApiError:
            self.leave(job, request, delivered=False)
            raise
        return job

    def leave(self, job: Job, request: bytes, *, delivered: bool) -> None:
        """Say that a connection is done with a job. An answer for nobody is not made further."""
        job.users -= 1
        job.delivered |= delivered
        if job.users:
            return
        if not job.ended:
            for choice in job.choices:
                self._worker.abort(choice)
            job.choices = []
        job.left_at = time.monotonic()
        self._left.append((job.left_at, request, job))

    def _start(self, job: Job) -> None:
        asked = job.asked
        if self._worker.num_unfinished + asked.num_choices > self._most:
            raise ApiError(
                429,
                f"{self._worker.num_unfinished} answers are unfinished, of at most {self._most}",
                kind="overloaded",
                headers={"Retry-After": "1"},
            )
        job.choices = [
            Choice(asked, self._tokenizer, partial(self._note, job))
            for _ in range(asked.num_choices)
        ]
        sampling = Sampling(
            temperature=asked.temperature, top_k=asked.top_k, top_p=asked.top_p, min_p=asked.min_p
        )
        # With a seed they are the samples of `OpenModel.generate`.
        key, first = self._seed_key, job.number
        if asked.seed is not None:
            key, first = _key(asked.seed), 0
        for i, choice in enumerate(job.choices):
            wanted = Wanted(
                prompt=asked.prompts[i // asked.n],
                limit=asked.limit,
                seed_key=key,
                sample_id=(first + i) % 2**32,
                sampling=sampling,
            )
            self._worker.add(wanted, choice)

    def _note(self, job: Job, choice: Choice) -> None:
        if choice.ended:
            self._worker.abort(choice)  # a stop string ends it here, and not in the engine
        job.note_change()

    def _forget(self) -> None:
        """Drop what is too old, or too much."""
        old = time.monotonic() - KEPT_S
        while self._left and (self._left[0][0] < old or len(self._left) > MOST_KEPT):
            left_at, request, job = self._left.popleft()
            if job.users == 0 and job.left_at == left_at:
                self._by_request[request].remove(job)
                if not self._by_request[request]:
                    del self._by_request[request]


def _standing(job: Job) -> tuple[bool, bool]:
    """The order in which a request that comes again takes a job: a lost one is first."""
    return job.delivered, job.users > 0


def _key(seed: int) -> np.ndarray:
    """The data of `jax.random.key(seed)`, without a call of a device."""
    return np.array([seed >> 32, seed & 0xFFFFFFFF], np.uint32)
