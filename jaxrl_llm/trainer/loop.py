"""The loop of online RL: its cadence of iterations, validation, saving and logging."""

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from jaxrl_llm.distributed.multihost import fetch, gather_rows, make_global
from jaxrl_llm.distributed.reshard import switch_bytes, time_switch
from jaxrl_llm.distributed.sharding import batch_sharding
from jaxrl_llm.observability.metrics import performance_metrics
from jaxrl_llm.observability.timing import Timer
from jaxrl_llm.trainer.evaluate import Validation, Validator
from jaxrl_llm.trainer.guards import CompileCounter, check_gradients, count_compilations
from jaxrl_llm.trainer.online import Iteration
from jaxrl_llm.trainer.output import RunOutput
from jaxrl_llm.trainer.program import PROGRAM, States
from jaxrl_llm.trainer.rewarding import StepContext
from jaxrl_llm.trainer.roles import params_of
from jaxrl_llm.trainer.samples import prompt_batch
from jaxrl_llm.types import Prompt, RolloutBatch

Save = Callable[[int, States, dict[str, float]], None]


class Interrupted(Exception):
    """The user asked to stop; everything up to the last step is saved."""


@dataclass(kw_only=True)
class Totals:
    """What the summary reports; part of the checkpoint, so that a resumed run reports all of it."""

    first: dict[str, float] = field(default_factory=dict)  # validation before any RL step
    last: dict[str, float] = field(default_factory=dict)
    first_reward: float | None = None
    last_reward: float | None = None
    tokens: int = 0
    seconds: float = 0.0
    stage_seconds: dict[str, float] = field(default_factory=dict)


@dataclass(kw_only=True)
class Loop:
    """One run's steps, from where it stands to `total_steps`."""

    iteration: Iteration
    states: States
    batches: Any  # PromptLoader
    validator: Validator
    output: RunOutput
    save: Save
    totals: Totals
    pad_id: int
    step: int = 0  # iterations done
    resumed: bool = False
    _compilations: CompileCounter = field(default_factory=CompileCounter)
    _compiled_once: bool = False

    def run(self) -> None:
        """Every step left. Raises Interrupted after saving when the user pressed Ctrl-C."""
        config = self.iteration.config
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
                    self.save(self.step, self.states, metrics)
                if stopping and not last:
                    raise Interrupted

    def _begin(self) -> None:
        """Validation and a checkpoint before the first RL step, so no warm-up is done twice."""
        metrics: dict[str, float] = {}
        if self.iteration.config.validation.before_train:
            metrics = self._validate()
            self.totals.first = dict(self.totals.last)
        self.output.log(0, metrics)
        self.save(0, self.states, metrics)

    def _one_step(self) -> dict[str, float]:
        """One iteration; returns its metrics as numbers."""
        config, timer = self.iteration.config, Timer()
        step = self.step + 1
        started = time.perf_counter()
        prompts: list[Prompt] = next(self.batches)
        context = StepContext(prompts=prompts, n=config.rollout.n)
        host_batch = prompt_batch(
            prompts,
            n=config.rollout.n,
            max_prompt_length=config.data.max_prompt_length,
            pad_id=self.pad_id,
        )
        batch = make_global(host_batch, batch_sharding(self.iteration.mesh))
        compiled = self._compilations.programs(PROGRAM)
        self.states, batch, found = self.iteration.program.run(
            self.states, batch, step, context, timer
        )
        again = self._compilations.programs(PROGRAM) - compiled
        if again and self._compiled_once:
            self.output.message(f"step {step} compiled {again} programs again; it should not")
        self._compiled_once = True
        found = fetch(found)
        trees = {name: role.spec.params for name, role in self.iteration.roles.items()}
        check_gradients(found, trees, step)
        metrics = {name: float(value) for name, value in found.items()}
        seconds = time.perf_counter() - started
        self.step = step
        metrics |= self._measure(batch, timer, seconds)
        metrics["perf/compilations"] = float(again)
        metrics["training/epoch"] = float(self.batches.epoch)
        self._note(metrics, timer, seconds)
        self.output.rollout(step, context, batch)
        return metrics

    def _measure(self, batch: RolloutBatch, timer: Timer, seconds: float) -> dict[str, float]:
        """Times, throughput and memory of the step."""
        lengths, mask = fetch((batch.prompt_lengths, batch.mask))
        prompt_tokens, response_tokens = int(lengths.sum()), int(mask.sum())
        self.totals.tokens += prompt_tokens + response_tokens
        metrics = performance_metrics(
            timer.timings() | {"step": seconds},
            num_prompt_tokens=prompt_tokens,
            num_response_tokens=response_tokens,
            num_devices=self.iteration.mesh.size,
        )
        if self.iteration.mesh.shape["fsdp"] > 1 and self.step == 1:
            metrics |= self.layout_switch_metrics()
        return metrics

    def layout_switch_metrics(self) -> dict[str, float]:
        """Seconds and bytes of the actor's switch from the training to the generation layout."""
        role = self.iteration.roles["actor"]
        params = params_of(self.states["actor"])
        return {
            "timing_s/layout_switch": time_switch(params, role.use_shardings),
            "perf/layout_switch_gb": switch_bytes(
                role.spec.params, role.param_shardings, role.use_shardings
            )
            / 1e9,
        }

    def _note(self, metrics: dict[str, float], timer: Timer, seconds: float) -> None:
        totals = self.totals
        totals.seconds += seconds
        for name, value in timer.timings().items():
            totals.stage_seconds[name] = totals.stage_seconds.get(name, 0.0) + value
        reward = metrics["critic/score/mean"]
        totals.first_reward = reward if totals.first_reward is None else totals.first_reward
        totals.last_reward = reward

    def _validate(self) -> dict[str, float]:
        started = time.perf_counter()
        found: Validation = self.validator.run(params_of(self.states["actor"]), self.step)
        self.totals.last = found.metrics
        self.output.validation(self.step, found)
        return found.metrics | {"timing_s/testing": time.perf_counter() - started}


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
