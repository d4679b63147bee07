"""Sessions of the engine: the RL mix, appended turns, clients, and slots kept busy by turns."""

import heapq
import time
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.generation import Weights
from benchmarks.harness import Case, CheckFailed, Programs, most_mult_prob_error, require
from benchmarks.options import Options
from benchmarks.workloads import GenerationWorkload, generation_workloads
from jaxrl_llm.algorithms.mismatch import mismatch_metrics
from jaxrl_llm.config import Config
from jaxrl_llm.distributed.layout import Layout, generation_layout, mesh_of
from jaxrl_llm.distributed.sharding import replicated
from jaxrl_llm.generation.sampler import SamplingParams
from jaxrl_llm.generation.sequence import Sequence as Sampled
from jaxrl_llm.generation.session import Engine, EngineSettings
from jaxrl_llm.models.base import model_spec

CONTEXT, TURN = 4000, 100  # ids of a waiting sequence, and of the turn that is appended
TINY = (30, 4)  # the same for the shape `tiny`
TURNS, SAMPLED, OBSERVED = 4, 128, 16  # turns of a sample, and ids of a turn and an observation
LATENCIES = (None, 0, 1, 10)  # seconds of the tool; None: no tool, and one turn as long as all


class SessionCase(Case):
    """A workload of one engine with random weights."""

    benchmark = "sessions"
    warm = True  # the check is a whole run

    def __init__(
        self, shape: str, name: str, config: Config, layout: Layout, weights: Weights
    ) -> None:
        self.shape, self.name = shape, name
        self.config, self.layout, self.weights = config, layout, weights

    def lower(self) -> dict[str, jax.stages.Lowered]:
        # The engine compiles its programs when it first calls them.
        return {"trainer": self.weights.trainer(*self.checked_rows())}

    @abstractmethod
    def checked_rows(self) -> tuple[int, int]:
        """Rows and tokens of the trainer's log-probs that the check reads."""

    @abstractmethod
    def settings(self) -> EngineSettings:
        """Settings of the engine."""

    def prepare(self, programs: Programs) -> None:
        self.programs, self.params = programs, self.weights.get()
        self.engine = Engine(self.weights.spec, self.params, self.settings())
        self.rng, self.runs = np.random.default_rng(1), 0

    def key(self) -> np.ndarray:
        """Another key for each run, so that none repeats an earlier one."""
        self.runs += 1
        return np.asarray(jax.random.key_data(jax.random.key(self.runs)))

    def ids(self, number: int) -> list[int]:
        """Random ids."""
        return self.rng.integers(0, self.weights.spec.config.vocab_size, number).tolist()

    def agree(self, sequences: Sequence[Sampled]) -> dict[str, float]:
        """Require log-probs that agree with the trainer's."""
        rows, width = self.checked_rows()
        tokens, logprobs = np.zeros((rows, width), np.int32), np.zeros((rows, width), np.float32)
        mask = np.zeros((rows, width), np.float32)
        for row, sequence in enumerate(sequences[:rows]):
            length = len(sequence.tokens)
            tokens[row, :length] = sequence.tokens
            logprobs[row, :length] = sequence.logprobs
            mask[row, :length] = sequence.sampled
        on = jax.device_put(tokens, replicated(self.layout.mesh))
        trainer = self.programs["trainer"](self.params, on)
        out = mismatch_metrics(trainer, jnp.asarray(logprobs), jnp.asarray(mask))
        error = float(out["token_mult_prob_error"])
        most = most_mult_prob_error(self.weights.spec.config, self.config.rollout.quantization)
        require("token_mult_prob_error", error, most)
        return {"token_mult_prob_error": error}

    def memory(self, programs: Programs) -> int | None:
        return None

    def release(self) -> None:
        weights = self.weights
        super().release()
        weights.done()


class Mix(SessionCase):
    """The RL mix: groups share prompts, responses have uneven lengths."""

    def __init__(self, work: GenerationWorkload, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.work = work

    def checked_rows(self) -> tuple[int, int]:
        return 4, self.work.prompt_length + max(self.work.limits)

    def settings(self) -> EngineSettings:
        work, rollout = self.work, self.config.rollout
        slots = rollout.num_slots or work.rows
        return EngineSettings(
            max_context=work.prompt_length + max(work.limits),
            num_slots=slots,
            cache_tokens=rollout.cache_tokens or slots * max(work.limits),
            sampling=SamplingParams(max_new_tokens=max(work.limits)),
            num_beginnings=-(-slots // work.samples) + 16,
            beginning_tokens=work.prompt_length,
            group=work.samples,
            quantization=rollout.quantization,
            attention=self.config.actor.attention,
        )

    def prepare(self, programs: Programs) -> None:
        super().prepare(programs)
        self.prompts = [self.ids(length) for length in self.work.prompt_lengths]

    def check(self) -> dict[str, float]:
        sequences = self.run()
        lengths = [len(x.response) for x in sequences]
        if lengths != list(self.work.limits):
            raise CheckFailed("responses do not have the lengths that were asked for")
        spread = np.linspace(0, self.work.rows - 1, 4).astype(int)
        return self.agree([sequences[i] for i in spread])

    def run(self) -> list[Sampled]:
        engine, work, key = self.engine, self.work, self.key()
        begun = engine.num_steps
        sequences = []
        for number, prompt in enumerate(self.prompts):
            shared = engine.beginning(prompt)
            for i in range(work.samples):
                row = number * work.samples + i
                limit = work.limits[row]
                sequences.append(
                    engine.add(prompt, limit=limit, seed_key=key, sample_id=row, beginning=shared)
                )
        self.calls = 0
        while engine.has_work:
            self.calls += 1
            for sequence in engine.step():
                if sequence.status == "waiting":
                    engine.finish(sequence)
        self.steps = engine.num_steps - begun
        return sequences

    def figures(self, seconds: float) -> dict[str, float]:
        return {
            "tokens/s": sum(self.work.limits) / seconds,
            "decode steps": self.steps,
            "calls": self.calls,
        }


class Appended(SessionCase):
    """A turn after a long context, in every waiting sequence; and the same text from its start."""

    def __init__(self, number: int, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.number = number
        self.context, self.turn = TINY if self.shape == "tiny" else (CONTEXT, TURN)

    def checked_rows(self) -> tuple[int, int]:
        return 1, self.context + 5 * self.turn

    def settings(self) -> EngineSettings:
        context = self.context + 16 * self.turn
        return EngineSettings(
            max_context=context,
            num_slots=self.number,
            cache_tokens=self.number * context,
            attention=self.config.actor.attention,
            sampling=SamplingParams(max_new_tokens=context),
        )

    def check(self) -> dict[str, float]:
        key = self.key()
        self.sequences = [
            self.engine.add(self.ids(self.context), limit=1, seed_key=key, sample_id=i)
            for i in range(self.number)
        ]
        self._work()
        self.run()
        for sequence in self.sequences:  # more ids to compare than the turns have
            self.engine.append(sequence, self.ids(self.turn), limit=2 * self.turn)
        self._work()
        checked = self.sequences
        for _ in range(2):  # the first one compiles
            for sequence in self.sequences:
                self.engine.finish(sequence)
            # Other ids each time: equal beginnings would be found in the cache.
            texts = [self.ids(self.context + self.turn) for _ in checked]
            started = time.perf_counter()
            self.sequences = [
                self.engine.add(ids, limit=1, seed_key=key, sample_id=i)
                for i, ids in enumerate(texts)
            ]
            self._work()
            self.whole = time.perf_counter() - started
        return self.agree(checked)

    def _work(self) -> None:
        while self.engine.has_work:
            self.engine.step(enough=self.number)

    def run(self) -> None:
        for sequence in self.sequences:
            self.engine.append(sequence, self.ids(self.turn), limit=1)
        self._work()

    def figures(self, seconds: float) -> dict[str, float]:
        return {
            "ms": 1e3 * seconds,
            "ms from the start": 1e3 * self.whole,
            "share": seconds / self.whole,
        }


class Clients(SessionCase):
    """Clients that each send their next request when they have the answer to the last one."""

    REQUESTS = 4  # requests of each client

    def __init__(self, number: int, lengths: tuple[int, int], *arguments: Any) -> None:
        super().__init__(*arguments)
        self.number, self.lengths = number, lengths

    def checked_rows(self) -> tuple[int, int]:
        return 1, sum(self.lengths)

    def settings(self) -> EngineSettings:
        context = sum(self.lengths)
        return EngineSettings(
            max_context=context,
            num_slots=self.number,
            cache_tokens=2 * self.number * context,
            attention=self.config.actor.attention,
        )

    def check(self) -> dict[str, float]:
        return self.agree(self.run())

    def run(self) -> list[Sampled]:
        engine, key = self.engine, self.key()
        prompt, response = self.lengths
        left, ended = self.REQUESTS * self.number, []

        def send() -> None:
            nonlocal left
            left -= 1
            engine.add(self.ids(prompt), limit=response, seed_key=key, sample_id=left)

        for _ in range(self.number):
            send()
        while engine.has_work:
            for sequence in engine.step():
                if sequence.status == "waiting":
                    engine.finish(sequence)
                    ended.append(sequence)
                    if left:
                        send()
        return ended

    def figures(self, seconds: float) -> dict[str, float]:
        return {"tokens/s": self.REQUESTS * self.number * self.lengths[1] / seconds}


class Turns(SessionCase):
    """Slots kept busy by a queue of samples of four turns, with a tool that takes its time.

    Groups of eight share a prompt. A sample begins when a slot and memory are free. `latency` is
    the seconds from the end of a turn to its observation; None: one turn of the same length, and no
    tool. All latencies have the memory of the longest, and so the same programs. First turns have
    random lengths, so turns do not end together.
    """

    GROUP = 8
    TURN_S = 2.0  # about what a turn takes with 1,024 slots of 1.5B
    WINDOW = 60.0  # seconds that are measured

    def __init__(
        self,
        slots: int,
        latency: int | None,
        lengths: tuple[int, int],
        *arguments: Any,
    ) -> None:
        super().__init__(*arguments)
        self.slots, self.latency, self.prompt = slots, latency, lengths[0]
        self.most = TURNS * (SAMPLED + OBSERVED)
        longest = max(x or 0 for x in LATENCIES)
        self.in_flight = int(1.2 * slots * (1 + (TURNS - 1) / TURNS * longest / self.TURN_S))
        waiting = self.in_flight - slots  # they have three quarters of their tokens at most
        self.cache_tokens = slots * self.most + waiting * self.most * 3 // 4
        self.window = 0.5 if self.shape == "tiny" else self.WINDOW

    def checked_rows(self) -> tuple[int, int]:
        return 4, self.prompt + self.most

    def settings(self) -> EngineSettings:
        return EngineSettings(
            max_context=self.prompt + self.most,
            num_slots=self.slots,
            cache_tokens=self.cache_tokens,
            sampling=SamplingParams(max_new_tokens=self.most),
            num_beginnings=self.in_flight // self.GROUP + 16,
            beginning_tokens=self.prompt,
            group=self.GROUP,
            attention=self.config.actor.attention,
        )

    def prepare(self, programs: Programs) -> None:
        super().prepare(programs)
        self.seed, self.number, self.most_waiting = self.key(), 0, 0
        self.turns: dict[Sampled, int] = {}  # turns of each sample so far
        self.due: list[tuple[float, int, Sampled]] = []  # times of observations
        self.ended: list[Sampled] = []

    def check(self) -> dict[str, float]:
        """Work until samples have come and gone for their whole time."""
        begun = time.perf_counter()
        long_enough = TURNS * (self.TURN_S + (self.latency or 0))
        while len(self.ended) < 4 or time.perf_counter() < begun + long_enough * (self.window > 1):
            self.serve()
        return self.agree(self.ended)

    def run(self) -> list[Sampled]:
        begun, steps, sampled = time.perf_counter(), self.engine.num_steps, 0
        while time.perf_counter() < begun + self.window:
            sampled += self.serve()
        self.rate = sampled / (time.perf_counter() - begun)
        self.steps = self.engine.num_steps - steps
        return self.ended

    def serve(self) -> int:
        """Give observations that are due, let samples begin, step; the ids of turns that ended."""
        engine, now = self.engine, time.perf_counter()
        while self.due and self.due[0][0] <= now:
            sequence = heapq.heappop(self.due)[2]
            engine.append(sequence, self.ids(OBSERVED), limit=SAMPLED)
        counts = engine.counts()
        self.most_waiting = max(self.most_waiting, counts["waiting"])
        free = self.slots - counts["queued"] - counts["running"]
        for _ in range(min(free, self.in_flight - len(self.turns))):
            self._begin()
        if not engine.has_work:
            time.sleep(0.001)
            return 0
        sampled = 0
        for sequence in engine.step():
            if sequence.status != "waiting":
                continue
            sampled += SAMPLED if self.latency is not None else TURNS * SAMPLED
            if self.latency is None or self.turns[sequence] == TURNS:
                engine.finish(sequence)
                del self.turns[sequence]
                self.ended = [*self.ended[-3:], sequence]
            else:
                self.turns[sequence] += 1
                ready = time.perf_counter() + self.latency
                heapq.heappush(self.due, (ready, sequence.sample_id, sequence))
        return sampled

    def _begin(self) -> None:
        if self.number % self.GROUP == 0:
            self.shared_prompt = self.ids(self.prompt)
            self.shared = self.engine.beginning(self.shared_prompt)
        first = SAMPLED if self.latency is not None else TURNS * SAMPLED
        limit = int(self.rng.integers(1, first + 1)) if self.number < self.slots else first
        sequence = self.engine.add(
            self.shared_prompt,
            limit=limit,
            seed_key=self.seed,
            sample_id=self.number,
            beginning=self.shared,
        )
        self.turns[sequence] = 1
        self.number += 1

    def figures(self, seconds: float) -> dict[str, float]:
        return {
            "tokens/s": self.rate,
            "decode steps": self.steps,
            "most that waited": self.most_waiting,
        }


def sessions_cases(options: Options) -> Sequence[Case]:
    """Every workload of every shape."""
    cases: list[Case] = []
    for shape in options.shapes:
        config = options.config(shape)
        heads = options.shapes[shape].num_kv_heads
        layout = generation_layout(mesh_of(config.mesh, [heads]), heads)
        spec = model_spec(
            options.shapes[shape], dtype=config.rollout.dtype or config.actor.dtype, form="merged"
        )
        mixes = generation_workloads(options, shape)
        numbers = {
            name: options.batches_of(shape, name)
            for name in ("append", "clients", "turns")
            if name in options.workloads
        }
        users = len(mixes) + sum(map(len, numbers.values()))
        latencies = LATENCIES[:2] if shape == "tiny" else LATENCIES
        users += (len(latencies) - 1) * len(numbers.get("turns", ()))
        weights = Weights(spec, config, layout, users)
        common = (config, layout, weights)
        sizes = options.sizes(shape)
        cases += [Mix(work, shape, work.name, *common) for work in mixes]
        for number, _ in numbers.get("append", ()):
            cases.append(Appended(number, shape, f"append_{number}", *common))
        for number, _ in numbers.get("clients", ()):
            cases.append(Clients(number, sizes, shape, f"clients_{number}", *common))
        for slots, _ in numbers.get("turns", ()):
            for latency in latencies:
                name = f"turns_{slots}_{'no_tool' if latency is None else f'{latency}s'}"
                cases.append(Turns(slots, latency, sizes, shape, name, *common))
    return cases
