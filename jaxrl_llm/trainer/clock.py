"""Listeners that measure a run: the clock of its steps, and its progress."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxrl_llm.distributed.hardware import hardware_of
from jaxrl_llm.distributed.multihost import sum_over_processes
from jaxrl_llm.models.flops import forward_flops, training_flops
from jaxrl_llm.observability.garbage import COLLECTOR
from jaxrl_llm.observability.metrics import performance_metrics
from jaxrl_llm.observability.timing import Timer
from jaxrl_llm.plan.plan import Plan
from jaxrl_llm.plan.roles import Role
from jaxrl_llm.program.counting import CompileCounter
from jaxrl_llm.program.program import PROGRAM
from jaxrl_llm.program.segment import Segment
from jaxrl_llm.supervision.listener import Listener, Wish
from jaxrl_llm.trainer.batches import Batches
from jaxrl_llm.trainer.output import RunTotals


@dataclass(kw_only=True)
class Clock(Listener):
    """Times, throughput and compilations of the steps of a run."""

    plan: Plan
    batches: Batches
    totals: RunTotals
    compilations: CompileCounter
    message: Callable[[str], None]
    _timer: Timer = field(default_factory=Timer)
    _started: float = 0.0
    _compiled: int = 0
    _steps: int = 0

    def begin(self, step: int, timer: Timer) -> None:
        """Start the clock. The first step also counts what was compiled ahead."""
        if self._steps:
            COLLECTOR.end_start()
            self._compiled = self.compilations.programs(PROGRAM)
        self._timer, self._started = timer, time.perf_counter()

    def measured(self, step: int, batch: Any, metrics: Mapping[str, float]) -> dict[str, float]:
        """timing_s/* and perf/* of the step, which is added to the totals."""
        seconds = time.perf_counter() - self._started
        tokens, plan = self.batches.tokens(batch), self.plan
        timings, mesh = self._timer.timings(), plan.learner.mesh
        self.totals.add(seconds, tokens.num_prompt + tokens.num_response, timings)
        measured = performance_metrics(
            timings | {"step": seconds},
            num_prompt_tokens=tokens.num_prompt,
            num_response_tokens=tokens.num_response,
            num_devices=plan.num_devices,
        )
        if plan.at(step).epochs:
            hardware = hardware_of(mesh.devices.flat[0].device_kind)
            measured |= mfu_metrics(
                plan.at(step).program.segments,
                timings,
                roles=plan.roles,
                epochs=plan.at(step).epochs,
                step=step,
                lengths=tokens.lengths,
                peak=None if hardware is None else hardware.flops,
            )
        if plan.layout_switch_bytes:
            measured["perf/layout_switch_gb"] = plan.layout_switch_bytes / 1e9
        compiled = self.compilations.programs(PROGRAM) - self._compiled
        if compiled and self._steps and not plan.begins_program(step):
            self.message(f"step {step} compiled {compiled} programs again; it should not")
        self._steps += 1
        return measured | {"perf/compilations": float(compiled)}

    def validated(
        self, step: int, metrics: Mapping[str, float], seconds: float
    ) -> dict[str, float]:
        return {"timing_s/testing": seconds}


@dataclass(kw_only=True)
class Progress(Listener):
    """The epoch, and what the summary says of the metrics.

    `compared` gives the metric by which checkpoints are compared, and its value.
    """

    batches: Batches
    totals: RunTotals
    compared: Callable[[Mapping[str, float]], tuple[str, float] | None]

    def measured(self, step: int, batch: Any, metrics: Mapping[str, float]) -> dict[str, float]:
        self.totals.add_reward(metrics.get("critic/score/mean"))
        return {"training/epoch": float(self.batches.epoch)}

    def validated(
        self, step: int, metrics: Mapping[str, float], seconds: float
    ) -> dict[str, float]:
        self.totals.last = dict(metrics)
        if step == 0:
            self.totals.first = dict(metrics)
        return {}

    def reported(self, step: int, metrics: Mapping[str, float]) -> Wish:
        self.totals.metrics |= metrics
        compared = self.compared(metrics)
        if compared is not None:
            self.totals.add_compared(step, *compared)
        return Wish.NOTHING


# ------------------------------------------------------------------------- use of the devices


def segment_flops(
    segment: Segment,
    roles: Mapping[str, Role],
    epochs: Mapping[str, int],
    lengths: Sequence[int],
    *,
    step: int | None = None,
) -> float:
    """Useful FLOPs of a segment: one pass of each stage's role, or its epochs of updates.

    `lengths` are the prompt and response tokens of every sample. A prompt counts once for each
    sample that answers it, as other trainers count it. A stage without a model counts nothing, nor
    does an update that has not begun at `step`.
    """
    total = 0.0
    for stage in segment.stages:
        role = roles.get(stage.role)
        if role is None:
            continue
        spec = role.spec
        if not stage.updates:
            total += forward_flops(spec.config, lengths, spec.kind)
        elif step is None or step >= stage.first_step:
            adapters = spec.lora is not None
            one = training_flops(spec.config, lengths, spec.kind, adapters=adapters)
            total += epochs[stage.role] * one
    return total


def mfu_metrics(
    segments: Sequence[Segment],
    timings: Mapping[str, float],
    *,
    roles: Mapping[str, Role],
    epochs: Mapping[str, int],
    lengths: Sequence[int],
    peak: float | None,
    step: int,
) -> dict[str, float]:
    """perf/mfu/actor and perf/mfu/critic: model FLOPs utilisation of the programs that update.

    The FLOPs of a program are divided by its seconds and by the `peak` FLOPs a second of its
    devices. Passes before the update that are in the same program count. A program that generates
    is left out, because decoding is bound by memory. So is an update that has not begun at `step`,
    and everything where `peak` is None. `lengths` belong to this process's samples, and
    every process must call this.
    """
    metrics: dict[str, float] = {}
    if peak is None:
        return metrics
    for segment in segments:
        if segment.generates:
            continue
        updated = [s.role for s in segment.stages if s.updates and step >= s.first_step]
        updated = [name for name in updated if name in roles]
        if updated:
            own = segment_flops(segment, roles, epochs, lengths, step=step)
            flops = sum_over_processes(own, "flops")
            used = flops / (timings[segment.name] * roles[updated[0]].mesh.size * peak)
            metrics |= {f"perf/mfu/{name}": used for name in updated}
    return metrics
