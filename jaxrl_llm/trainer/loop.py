"""The loop of a run, whatever it trains: its cadence of steps, validation, saving and logging."""

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import jax
import numpy as np

from jaxrl_llm.config import Config
from jaxrl_llm.distributed.multihost import gather_rows
from jaxrl_llm.trainer.guards import CompileCounter, count_compilations
from jaxrl_llm.trainer.output import RunOutput
from jaxrl_llm.trainer.program import PROGRAM, States
from jaxrl_llm.trainer.roles import Role

Save = Callable[[int, States, dict[str, float]], None]


class Interrupted(Exception):
    """The user asked to stop; everything up to the last step is saved."""


@dataclass(kw_only=True)
class Totals:
    """What the summary reports; part of the checkpoint, so that a resumed run reports all of it."""

    first: dict[str, float] = field(default_factory=dict)  # validation before the first step
    last: dict[str, float] = field(default_factory=dict)
    first_reward: float | None = None
    last_reward: float | None = None
    tokens: int = 0
    seconds: float = 0.0
    stage_seconds: dict[str, float] = field(default_factory=dict)

    def add(self, seconds: float, tokens: int, stages: dict[str, float]) -> None:
        """Count one step: its time, its tokens, and the time of each of its stages."""
        self.seconds += seconds
        self.tokens += tokens
        for name, value in stages.items():
            self.stage_seconds[name] = self.stage_seconds.get(name, 0.0) + value


class Work(Protocol):
    """What a run does at each step, online or offline; the loop asks for it when it is due."""

    @property
    def learner(self) -> Role:
        """The role whose weights are the run's result."""
        ...

    @property
    def frozen(self) -> list[str]:
        """Names of the states that no step changes: saved once a run."""
        ...

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Token ids that end a response."""
        ...

    @property
    def best_metric(self) -> str:
        """By which the best checkpoint is kept; see CheckpointManager."""
        ...

    @property
    def batches(self) -> Any:
        """The loader of the training data, whose position is part of a checkpoint."""
        ...

    def abstract_states(self) -> States:
        """Shapes and shardings of everything that the roles keep."""
        ...

    def first_states(self, output: RunOutput) -> States:
        """The states that a new run begins with."""
        ...

    def begin(self, states: States, output: RunOutput, totals: Totals) -> None:
        """Go on from `states`; `output` and `totals` are told of each step."""
        ...

    @property
    def states(self) -> States:
        """The states after the last step."""
        ...

    def begins_program(self, step: int) -> bool:
        """Whether `step` is the first that runs a program, and so may compile."""
        ...

    def step(self, step: int) -> dict[str, float]:
        """Do step number `step` (1-based); its metrics."""
        ...

    def validate(self, step: int) -> dict[str, float]:
        """Held-out metrics after `step` steps; empty where there is nothing to measure."""
        ...


@dataclass(kw_only=True)
class Loop:
    """One run's steps, from where it stands to `total_steps`."""

    config: Config
    work: Work
    output: RunOutput
    save: Save
    totals: Totals
    step: int = 0  # steps done
    resumed: bool = False
    _compilations: CompileCounter = field(default_factory=CompileCounter)
    _compiled_once: bool = False

    def run(self) -> None:
        """Every step left. Raises Interrupted after saving when the user pressed Ctrl-C."""
        config = self.config
        self.output.begin(self.step)
        if not self.resumed:
            self._begin()
        with _stop_requests() as stop_requested, count_compilations() as self._compilations:
            while self.step < config.total_steps:
                metrics = self._one_step()
                last = self.step == config.total_steps
                stopping = _any_process(stop_requested())
                if config.validation.every and self.step % config.validation.every == 0 or last:
                    metrics |= self._validate()
                self.output.log(self.step, metrics)
                due = config.save_every and self.step % config.save_every == 0
                if due or last or stopping:
                    self.save(self.step, self.work.states, metrics)
                if stopping and not last:
                    raise Interrupted

    def _begin(self) -> None:
        """Validation and a checkpoint before the first step, so no warm-up is done twice."""
        metrics: dict[str, float] = {}
        if self.config.validation.before_train:
            metrics = self._validate()
            self.totals.first = dict(self.totals.last)
        self.output.log(0, metrics)
        self.save(0, self.work.states, metrics)

    def _one_step(self) -> dict[str, float]:
        compiled = self._compilations.programs(PROGRAM)
        metrics = self.work.step(self.step + 1)
        self.step += 1
        again = self._compilations.programs(PROGRAM) - compiled
        if again and self._compiled_once and not self.work.begins_program(self.step):
            self.output.message(f"step {self.step} compiled {again} programs again; it should not")
        self._compiled_once = True
        return metrics | {
            "perf/compilations": float(again),
            "training/epoch": float(self.work.batches.epoch),
        }

    def _validate(self) -> dict[str, float]:
        started = time.perf_counter()
        metrics = self.work.validate(self.step)
        if not metrics:
            return {}
        self.totals.last = metrics
        return metrics | {"timing_s/testing": time.perf_counter() - started}


def _any_process(flag: bool) -> bool:
    """True on every process when it is on one: all must stop after the same step."""
    if jax.process_count() == 1:
        return flag
    return bool(gather_rows(np.array([flag])).any())


@contextmanager
def _stop_requests() -> Iterator[Callable[[], bool]]:
    """Ctrl-C and SIGTERM end the run after the step under way; a second one ends it at once."""
    received: list[int] = []

    def on_signal(number: int, frame: Any) -> None:
        if received:
            raise KeyboardInterrupt
        received.append(number)

    previous = {s: signal.signal(s, on_signal) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(received)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
