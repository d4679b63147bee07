"""One training in progress: its plan, its batches, its position, and its speed."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxrl_llm.distributed.hardware import hardware_of
from jaxrl_llm.distributed.multihost import fetch, gather_objects, sum_over_processes
from jaxrl_llm.evaluation.evaluate import Evaluation
from jaxrl_llm.learner.train_state import Params
from jaxrl_llm.models.flops import forward_flops, training_flops
from jaxrl_llm.observability.garbage import COLLECTOR
from jaxrl_llm.observability.metrics import performance_metrics
from jaxrl_llm.observability.timing import Timer
from jaxrl_llm.plan.plan import Plan
from jaxrl_llm.plan.roles import Role
from jaxrl_llm.program.counting import CompileCounter
from jaxrl_llm.program.program import PROGRAM
from jaxrl_llm.program.segment import Segment
from jaxrl_llm.program.stage import States
from jaxrl_llm.supervision.alarms import AlarmBell
from jaxrl_llm.supervision.callbacks import Callbacks
from jaxrl_llm.supervision.communication_report import CommunicationReport
from jaxrl_llm.supervision.nonfinite import NonFiniteGradients, check_gradients
from jaxrl_llm.supervision.profiling import StepProfiler
from jaxrl_llm.supervision.watchdog import BETWEEN, Watch
from jaxrl_llm.trainer.batches import Batches, StepTokens
from jaxrl_llm.trainer.output import MetricsLog, RunTotals

Save = Callable[[int, States, dict[str, float], dict[str, Any]], None]


@dataclass(kw_only=True)
class Clock:
    """Times, throughput and compilations of the steps of a run."""

    totals: RunTotals
    compilations: CompileCounter
    timer: Timer = field(default_factory=Timer)
    recompiled: int = 0  # programs that the last step compiled and should not have
    _started: float = 0.0
    _seconds: float = 0.0
    _compiled: int = 0
    _steps: int = 0

    def start(self, timer: Timer) -> Timer:
        """Begin a step; returns its stage timer. The first one counts what was compiled ahead."""
        if self._steps:
            COLLECTOR.end_start()
            self._compiled = self.compilations.programs(PROGRAM)
        self.timer, self._started = timer, time.perf_counter()
        return self.timer

    def stop(self) -> None:
        """End a step."""
        self._seconds = time.perf_counter() - self._started

    def metrics(self, plan: Plan, step: int, tokens: StepTokens) -> dict[str, float]:
        """timing_s/* and perf/* of the step that was stopped; it is added to the totals."""
        seconds = self._seconds
        timings, mesh = self.timer.timings(), plan.learner.mesh
        self.totals.add(seconds, tokens.num_prompt + tokens.num_response, timings)
        metrics = performance_metrics(
            timings | {"step": seconds},
            num_prompt_tokens=tokens.num_prompt,
            num_response_tokens=tokens.num_response,
            num_devices=plan.num_devices,
        )
        if plan.at(step).epochs:
            hardware = hardware_of(mesh.devices.flat[0].device_kind)
            metrics |= mfu_metrics(
                plan.at(step).program.segments,
                timings,
                roles=plan.roles,
                epochs=plan.at(step).epochs,
                step=step,
                lengths=tokens.lengths,
                peak=None if hardware is None else hardware.flops,
            )
        if plan.layout_switch_bytes:
            metrics["perf/layout_switch_gb"] = plan.layout_switch_bytes / 1e9
        compiled = self.compilations.programs(PROGRAM) - self._compiled
        expected = self._steps == 0 or plan.begins_program(step)
        self.recompiled = 0 if expected else compiled
        self._steps += 1
        return metrics | {"perf/compilations": float(compiled)}


@dataclass(kw_only=True)
class Training:
    """A plan, a source of batches, and the states that its steps change.

    The steps of a run are one training. Each supervised training before them is another: it has no
    clock, no checkpoints, and its own file of metrics.
    """

    plan: Plan
    batches: Batches
    states: States
    total_steps: int
    evaluations: Sequence[Evaluation]
    output: MetricsLog
    validate_every: int  # steps; 0 only after the last
    step: int = 0  # steps done
    is_new: bool = False  # begins with a validation and, with `save_first`, a checkpoint
    # Ends early once this metric reaches the number, if it is not 0.
    target: tuple[str, float] = ("", 0.0)
    what: str = "step"  # in the message of a gradient that is not finite
    watch: Watch = field(default_factory=Watch)
    # Of a run's own steps:
    clock: Clock | None = None
    communication: CommunicationReport | None = None
    profiler: StepProfiler | None = None
    stop_requested: Callable[[], bool] | None = None
    save_with: Save | None = None
    save_every: int = 0
    save_first: bool = True
    validate_first: bool = True
    stopped: bool = False
    alarms: AlarmBell | None = None
    alarmed: bool = False  # an alarm ended it
    callbacks: Callbacks | None = None
    called_off: bool = False  # a callback ended it
    _save_asked: bool = False  # by an alarm of the last step

    def begin_step(self) -> Timer:
        """Begin the next step. Returns the timer of its stages."""
        self.step += 1
        if self.plan.begins_program(self.step):
            self.watch.forget()
        self.watch.enter(BETWEEN, self.step)
        self.states = self.plan.enter(self.step, self.states)
        if self.profiler is not None:
            self.profiler.begin(self.step)
        timer = Timer(watch=self._clocks)
        return timer if self.clock is None else self.clock.start(timer)

    def _clocks(self, running: Sequence[str]) -> None:
        """These clocks of the step run now."""
        self.watch.clocks(running)
        self.output.stage(self.step, running)

    def measure(self, batch: Any, context: Any, found: dict[str, Any]) -> dict[str, float]:
        """The metrics of a step whose program ran, on the host.

        Raises NonFiniteGradients. Every process must call it.
        """
        if self.profiler is not None and self.step in self.profiler.steps:
            self.watch.enter("profile", learn=False)  # process 0 writes a trace, others wait
        found = self.batches.finish(self.step, batch, context, fetch(found))
        trees = {name: role.spec.learned for name, role in self.plan.roles.items()}
        try:
            check_gradients(found, trees, self.step, self.what)
        except NonFiniteGradients as error:
            if self.alarms is not None:
                self.alarms.nonfinite(self.step, self.states, error)
            raise
        metrics = {name: float(value) for name, value in found.items()}
        if self.clock is not None:
            self.clock.stop()
            trace = None if self.profiler is None else self.profiler.end(self.step)
            metrics |= self.clock.metrics(self.plan, self.step, self.batches.tokens(batch))
            if self.communication is not None:
                program = self.plan.at(self.step).program
                metrics |= self.communication.step(program, self.step, metrics, trace)
            metrics["training/epoch"] = float(self.batches.epoch)
            self.clock.totals.add_reward(metrics.get("critic/score/mean"))
            if self.clock.recompiled:
                self.output.message(
                    f"step {self.step} compiled {self.clock.recompiled} programs again; "
                    "it should not"
                )
        return metrics

    def validation_is_due(self) -> bool:
        """Whether this step is followed by a validation; the last one always is."""
        return self._is_due(self.validate_every)

    def save_is_due(self) -> bool:
        """Whether this step is followed by a checkpoint; the last one always is."""
        return self._is_due(self.save_every) or self.stopped or self._save_asked

    def validate(self) -> dict[str, float]:
        """Held-out metrics after the last step; empty if there is nothing to measure."""
        if self.step == 0 and not self.validate_first:
            return {}
        started = time.perf_counter()
        metrics: dict[str, float] = {}
        self.watch.enter("validation")
        self.output.stage(self.step, ["validation"])
        for evaluation in self.evaluations:
            metrics |= evaluation.run(self.states, self.step)
        self.watch.enter(BETWEEN)
        self.output.stage(self.step, [])
        name, least = self.target
        if least and metrics.get(name, 0.0) >= least:
            self.stopped = True
        if self.clock is None or not metrics:
            return metrics
        self.clock.totals.last = dict(metrics)
        if self.step == 0:
            self.clock.totals.first = dict(metrics)
        return metrics | {"timing_s/testing": time.perf_counter() - started}

    def report(self, metrics: dict[str, float]) -> None:
        """Write the metrics of the last step. The processes then agree whether to continue."""
        self.output.log(self.step, metrics)
        if self.callbacks is not None:
            self.callbacks.step(self.step, metrics)
        actions = set() if self.alarms is None else self.alarms.step(self.step, metrics)
        if self.stop_requested is not None and self.step:  # a run does one step at least
            called_off = self.callbacks is not None and self.callbacks.asked
            flags = (self.stop_requested(), "save" in actions, "stop" in actions, called_off)
            asked, self._save_asked, self.alarmed, self.called_off = any_process(*flags)
            self.stopped = self.stopped or asked or self.alarmed or self.called_off

    def save(self, metrics: dict[str, float]) -> None:
        """Write a checkpoint, if the training has checkpoints."""
        if self.save_with is not None:
            self.watch.enter("save")
            self.output.stage(self.step, ["save"])
            position, ahead = self.batches.saved(self.step, self.states)
            self.save_with(self.step, self.states | ahead, metrics, position)
            self.watch.enter(BETWEEN)
            self.output.stage(self.step, [])

    def take_params(self) -> Params:
        """The learner's parameters; the training gives up its states, and so their memory."""
        states, self.states = self.states, {}
        return self.plan.learner.params_in(states)

    def _is_due(self, every: int) -> bool:
        return self.step == self.total_steps or bool(every and self.step % every == 0)


def any_process(*flags: bool) -> list[bool]:
    """Whether each flag is set on a process: all must stop after the same step. A collective."""
    return [any(of_all) for of_all in zip(*gather_objects(flags, "any_process"), strict=True)]


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
    and everything where `peak` is None. `lengths` are those of this process's samples, and every
    process must call this.
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
