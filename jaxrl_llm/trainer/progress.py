"""The progress of a run: totals, the clock of steps, use of the devices, summary."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from jaxrl_llm.compiling.counting import CompileCounter
from jaxrl_llm.config import Config, PairwiseRewardModel, RewardRegression
from jaxrl_llm.distributed.hardware import hardware_of
from jaxrl_llm.distributed.multihost import gather_objects, is_main, sum_over_processes
from jaxrl_llm.models.flops import forward_flops, training_flops
from jaxrl_llm.observability.garbage import COLLECTOR
from jaxrl_llm.observability.metrics import performance_metrics
from jaxrl_llm.observability.timing import Timer
from jaxrl_llm.plan.dataflow import Segment
from jaxrl_llm.plan.offline import OfflinePlan
from jaxrl_llm.plan.online import OnlinePlan
from jaxrl_llm.plan.program import PROGRAM
from jaxrl_llm.plan.roles import Role

Plan = OnlinePlan | OfflinePlan


@dataclass(kw_only=True)
class Totals:
    """What the summary reports. The checkpoint holds it, so a resumed run reports all steps."""

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

    def add_reward(self, reward: float | None) -> None:
        """Note the mean reward of a step, where it has one."""
        if reward is not None:
            self.first_reward = reward if self.first_reward is None else self.first_reward
            self.last_reward = reward


@dataclass(frozen=True, kw_only=True)
class StepTokens:
    """The tokens of the samples that a step learned from."""

    num_prompt: int
    num_response: int
    # Of whole samples, where they were generated; of those that this process owns.
    lengths: Sequence[int] = ()

    @classmethod
    def of_all(
        cls, *, num_prompt: int, num_response: int, lengths: Sequence[int] = ()
    ) -> "StepTokens":
        """From the numbers of this process's samples. Every process must call it."""
        everyone = gather_objects([num_prompt, num_response], "tokens")
        prompt, response = (sum(numbers) for numbers in zip(*everyone, strict=True))
        return cls(num_prompt=prompt, num_response=response, lengths=lengths)


@dataclass(kw_only=True)
class Clock:
    """Times, throughput and compilations of the steps of a run."""

    totals: Totals
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
        if isinstance(plan, OnlinePlan):
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


def any_process(*flags: bool) -> list[bool]:
    """Whether each flag is set on a process: all must stop after the same step. A collective."""
    return [any(of_all) for of_all in zip(*gather_objects(flags, "any_process"), strict=True)]


@dataclass(frozen=True, kw_only=True)
class Summary:
    """What a finished or interrupted run returns to its caller."""

    run_dir: Path
    step: int
    totals: Totals
    seconds: float  # of this process, start to end
    interrupted: bool
    alarmed: bool = False  # an alarm ended it before its last step
    called_off: bool = False  # a callback ended it before its last step
    reason: str = ""  # that the callback gave
    checkpoint: Path


def print_summary(summary: Summary, config: Config) -> None:
    """Print what changed, how fast, and where everything is. Only process 0 prints."""
    if is_main():
        print("\n".join(summary_lines(summary, config)), flush=True)


def summary_lines(summary: Summary, config: Config) -> list[str]:
    """The summary as lines of plain text."""
    totals, run_dir = summary.totals, summary.run_dir
    state = "interrupted" if summary.interrupted else "finished"
    if summary.alarmed:
        state = "stopped by an alarm"
    if summary.called_off:
        state = "stopped by a callback" + (f" ({summary.reason})" if summary.reason else "")
    lines = [f"{state} at step {summary.step} of {config.total_steps} in {summary.seconds:.0f} s"]
    if totals.first_reward is not None and totals.last_reward is not None:
        lines.append(f"  reward          {totals.first_reward:.3f} -> {totals.last_reward:.3f}")
    for name, last in totals.last.items():
        if name.startswith("val-aux/") and not (name.endswith("/failures") and last):
            continue  # metrics.jsonl has them
        first = f"{totals.first[name]:.3f} -> " if name in totals.first else ""
        lines.append(f"  {name}  {first}{last:.3f}")
    if totals.seconds:
        lines.append(f"  tokens/s        {totals.tokens / totals.seconds:,.0f}")
        overlap = sum(totals.stage_seconds.values()) > 1.01 * totals.seconds
        note = " (one that runs while the host grades counts until both are done)"
        lines.append(f"  time a stage{note if overlap else ''}")
        for name, seconds in totals.stage_seconds.items():
            lines.append(f"    {name:<40} {seconds:8.1f} s  {seconds / totals.seconds:4.0%}")
    lines += [
        f"  checkpoint      {summary.checkpoint}",
        f"  metrics         {run_dir / 'metrics.jsonl'}",
        f"  alarms          {run_dir / 'events.jsonl'}",
    ]
    if config.log.report:
        lines.append(f"  report          {run_dir / 'report.html'}")
    if config.log.tensorboard:
        viewer = "(its viewer: pip install tensorboard)"
        lines.append(f"  TensorBoard     tensorboard --logdir {run_dir / 'tensorboard'} {viewer}")
    if (trace := run_dir / "trace").is_dir() and any(trace.iterdir()):  # not where none answered
        lines.append(f"  trace           {trace}")
    is_reward = isinstance(config.algorithm, PairwiseRewardModel | RewardRegression)
    lines.append(
        f"  export          jaxrl export --model={summary.checkpoint} --output={run_dir / 'export'}"
        + (" --role=reward" if is_reward else "")
    )
    if summary.interrupted or summary.alarmed or summary.called_off:
        again = "run the same command again"
        if config.resume != "auto":
            again += " with --config.resume=auto"
        lines.append(f"  go on           {again}; it resumes from the checkpoint")
    return lines
