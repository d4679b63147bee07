"""Everything that a run writes or shows; process 0 alone writes metrics."""

import dataclasses
import json
import math
import platform
import shlex
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

import jax
import numpy as np

from jaxrl_llm.checkpoint.identity import package_versions
from jaxrl_llm.checkpoint.layout import STEP_PREFIX
from jaxrl_llm.config import (
    Config,
    ExactAnswer,
    PairwiseRewardModel,
    RewardConfig,
    RewardRegression,
    as_dict,
    run_folder,
)
from jaxrl_llm.distributed.multihost import barrier, fetch_rows, is_main
from jaxrl_llm.evaluation.evaluate import Validation, graded_as_trained
from jaxrl_llm.generation.completions import completions_of
from jaxrl_llm.generation.memory import words_of
from jaxrl_llm.generation.stop_strings import Stops
from jaxrl_llm.observability.console import Console, ShownSample
from jaxrl_llm.observability.jsonl import GLOBAL_STEP, JsonlFile, MetricsWriter
from jaxrl_llm.observability.trace import TraceWriter, as_text, last_user_turn
from jaxrl_llm.observability.trackers import Guarded, TrackedRun, open_trackers, tracker_names
from jaxrl_llm.plan.conversing import completions_of_turns, traced, with_turns
from jaxrl_llm.plan.generating import Generate
from jaxrl_llm.plan.in_graph import RECORDED, STOPS, samples_of, trajectories_of
from jaxrl_llm.plan.plan import Plan
from jaxrl_llm.plan.roles import Role
from jaxrl_llm.program.stage import StepContext
from jaxrl_llm.report.refresher import ReportRefresher
from jaxrl_llm.supervision.alarms import EVENTS, STEP, Event
from jaxrl_llm.supervision.callbacks import Callbacks, Sample
from jaxrl_llm.supervision.signals import send_to_null
from jaxrl_llm.supervision.starts import STARTS
from jaxrl_llm.tokenizer import Tokenizer
from jaxrl_llm.trainer.shown_settings import settings_line
from jaxrl_llm.typed_records.tree import described
from jaxrl_llm.types import Completion, Prompt, RolloutBatch
from jaxrl_llm.whole_files import write_whole

ABOUT = "about.json"
TRAININGS = ("warmup", "teacher", "reward_model")  # supervised trainings before the run
TOKEN_FIELDS = ("old_logprobs", "reference_logprobs", "values", "advantages")


@dataclass(kw_only=True)
class MetricsLog:
    """The reports of a training. Only the main process has something to write to."""

    phase: str = ""  # name of a supervised training, such as "warmup"
    console: Console | None = None
    writer: MetricsWriter | None = None
    report: ReportRefresher | None = None
    trackers: list[Guarded] = field(default_factory=list)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of a step, once."""
        if self.writer is not None:
            self.writer.log(step, metrics)
        if self.console is not None:
            self.console.log(step, metrics)
        if self.report is not None:
            self.report.step()
        numbers = {name: float(value) for name, value in metrics.items()}
        if not self.phase:
            numbers = {GLOBAL_STEP: step} | numbers
        for tracker in self.trackers:
            tracker.log(step, numbers, self.phase)

    def message(self, text: str) -> None:
        """Show a line to the user."""
        if self.console is not None:
            self.console.message(text)

    def stage(self, step: int, running: Sequence[str]) -> None:
        """Show the current stage of a step; empty between stages."""
        if self.console is not None:
            self.console.stage(step, running)


class RunOutput(MetricsLog):
    """metrics.jsonl, events.jsonl, TensorBoard, trace, report and console of one run directory."""

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        *,
        tokenizer: Tokenizer,
        stops: Stops,
        resume_step: int | None,
        callbacks: Callbacks,
    ):
        """Open everything. Cut off what was written after `resume_step`; None cuts off all."""
        super().__init__()
        self._config = config
        self.run_dir = run_dir
        self._tokenizer = tokenizer
        self._stops = stops
        self._callbacks = callbacks
        self._stack = ExitStack()
        keep = -1 if resume_step is None else resume_step
        self._events: JsonlFile | None = None
        self._trace: TraceWriter | None = None
        # Every process traces the samples that it owns, in files of its own.
        self._suffix = "" if is_main() else f".process{jax.process_index()}"
        try:
            if is_main():
                self._open_files_and_trackers(keep)
            if config.log.trace:
                self._open_trace(keep)
        except BaseException:  # such as a tracker that cannot be opened
            self._stack.close()
            raise

    def _open_trace(self, keep: int) -> None:
        limit = self._config.log.trace_gb * 1e9 / jax.process_count() or math.inf
        self._trace = TraceWriter(self.run_dir / "trace", most_bytes=limit)
        self._stack.callback(self._trace.close)
        if is_main():
            self._trace.truncate_after(keep)
        barrier("trace")  # no process writes while the main one cuts

    def _open_files_and_trackers(self, keep: int) -> None:
        config = self._config
        for name in TRAININGS if keep < 0 else ():  # left by a run that saved nothing
            (self.run_dir / name / "metrics.jsonl").unlink(missing_ok=True)
        self.writer = MetricsWriter(self.run_dir / "metrics.jsonl")
        self._stack.callback(self.writer.close)
        self.writer.truncate_after(keep)
        self._events = JsonlFile(self.run_dir / EVENTS, key=STEP)
        self._events.truncate_after(keep)
        self._stack.callback(self._events.close)
        self.console = Console(
            every=config.log.console_every,
            samples_every=config.log.samples_every,
        )
        self._stack.callback(self.console.close)
        run = TrackedRun(
            name=config.name,
            run_dir=self.run_dir,
            config=as_dict(config),
            resume_step=None if keep < 0 else keep,
        )
        for tracker in open_trackers(tracker_names(config.log), run, self.message):
            self.trackers.append(tracker)
            self._stack.callback(tracker.close)
        if config.log.report:
            self.report = ReportRefresher(self.run_dir, self.console.message)
            self._stack.callback(self.report.close)  # when the trace is closed

    def __enter__(self) -> "RunOutput":
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def flush(self) -> None:
        """Wait until the trace of every step so far is written. A checkpoint comes after it."""
        if self._trace is not None:
            self._trace.wait()

    def event(self, event: Event) -> None:
        """An alarm: a line of events.jsonl, in the console and in the trackers."""
        if self._events is not None:
            self._events.append(dataclasses.asdict(event))
        for tracker in self.trackers:
            tracker.log(event.step, {f"alarms/{event.name}": event.value})
            tracker.text(event.step, f"alarms/{event.name}/text", event.line())
        self.message(event.line())

    def begin(self, first_step: int) -> None:
        """RL begins, with `first_step` steps done before."""
        if self.console is not None:
            self.console.begin("step", self._config.total_steps, first_step)

    def status(self, text: str) -> None:
        """Show what happens before the first step."""
        if self.console is not None:
            self.console.status(text)

    def supervised(self, name: str, steps: int) -> MetricsLog:
        """The reports of a supervised training, in a new DIR/<name>/metrics.jsonl."""
        assert name in TRAININGS, name
        if self.console is None:
            return MetricsLog(phase=name)
        writer = MetricsWriter(self.run_dir / name / "metrics.jsonl")
        writer.truncate_after(-1)
        self._stack.callback(writer.close)
        self.console.begin(name.replace("_", " "), steps)
        return MetricsLog(
            phase=name,
            console=self.console,
            writer=writer,
            report=self.report,
            trackers=self.trackers,
        )

    def rollout(self, step: int, context: StepContext, batch: RolloutBatch) -> None:
        """Trace this process's samples, and show some of them every so many steps."""
        shown = bool(self._config.log.samples_every) or self._callbacks.want_samples
        if self._trace is None and not shown:
            return
        reward = context.reward
        if reward is None:
            scores, parts = self._take_device_samples(step, context, batch), {}
            extras = [traced(each) for each in context.trajectories] or None
            failures = {}
        else:
            scores, parts, extras = reward.scores, reward.parts, reward.extras
            model_scores = self._model_scores(batch)
            if model_scores:
                scores, model_parts = fetch_rows((batch.scores, model_scores), context.rows)
                parts = parts | model_parts
            failures: dict[int, list[str]] = {}
            for failure in reward.failures:
                failures.setdefault(failure.index, []).append(failure.describe())
            if self._config.reward.on_failure == "mask":
                scores = np.where(reward.failed != 0, np.float32(np.nan), scores)
        owned = context.rows.owned
        prompts = context.prompts_of(owned)
        if context.trajectories:
            prompts = with_turns(prompts, context.trajectories)
        if self._trace is not None:
            self._trace.write(
                "train" + self._suffix,
                step,
                policy_version=context.policy_version,
                last_policy_versions=context.last_policy_versions,
                prompts=prompts,
                completions=context.completions,
                scores=scores,
                parts=parts,
                extras=extras,
                failures=failures,
                indices=context.first_sample + owned,
                details=self._token_details(context, batch),
            )
        if self._callbacks.want_samples:
            self._callbacks.add(step, _samples(prompts, context.completions, scores, parts))
        every = self._config.log.samples_every
        if self.trackers and every and (step == 1 or step % every == 0):
            self._show_samples(step, prompts, context.completions, scores)
        if self.console is not None:
            first = range(0, len(owned), context.n)  # one sample of each group
            shown = [
                ShownSample(
                    question=last_user_turn(prompts[i]),
                    response=context.completions[i].text,
                    truth=as_text(prompts[i].ground_truth),
                    score=float(scores[i]),
                    parts={name: float(part[i]) for name, part in parts.items()},
                )
                for i in first[: self._config.log.num_samples]
            ]
            self.console.samples(step, shown)

    def _show_samples(
        self,
        step: int,
        prompts: Sequence[Prompt],
        completions: Sequence[Completion],
        scores: np.ndarray,
    ) -> None:
        """The first samples of a step, for trackers."""
        rows = [
            {
                "prompt": prompt.text,
                "response": completion.text,
                "ground_truth": "" if prompt.ground_truth is None else str(prompt.ground_truth),
                "score": float(score),
            }
            for prompt, completion, score in zip(prompts, completions, scores, strict=True)
        ][: self._config.log.num_samples]
        for tracker in self.trackers if rows else ():
            tracker.samples(step, rows)

    def validation(self, step: int, validation: Validation) -> None:
        """Trace this process's answers to held-out prompts after `step` steps."""
        if self._trace is not None:
            self._trace.write(
                "validation" + self._suffix,
                step,
                policy_version=step,
                prompts=validation.prompts,
                completions=validation.completions,
                scores=validation.grades,
                extras=validation.extras,
                failures=validation.failures,
                indices=validation.indices,
            )

    def _model_scores(self, batch: RolloutBatch) -> dict[str, jax.Array]:
        """The scores of the models whose weighted sum is the reward, by name."""
        scores = {} if batch.model_scores is None else {"model": batch.model_scores}
        weighted = [model.name for model in self._config.models if model.weight]
        names = [name for name in weighted if f"{name}_scores" in batch.extra]
        return scores | {name: batch.extra[f"{name}_scores"] for name in names}

    def _token_details(self, context: StepContext, batch: RolloutBatch) -> dict[str, np.ndarray]:
        """Numbers of each token of the first samples of a step, where this process owns them."""
        most = self._config.log.trace_details
        ours = int((context.first_sample + context.rows.owned < most).sum())
        # A role apart may lie on devices of other processes.
        if not ours or (self._config.placement and jax.process_count() > 1):
            return {}
        fields = {name: batch[name] for name in TOKEN_FIELDS if batch[name] is not None}
        return {name: x[:ours] for name, x in fetch_rows(fields, context.rows).items()}

    def _take_device_samples(
        self, step: int, context: StepContext, batch: RolloutBatch
    ) -> np.ndarray:
        """Responses that no host stage has seen; returns the scores of the owned rows."""
        if STOPS in batch.extra:  # answers of several turns
            names = (*RECORDED, "sample_ids", "group_ids", "scores")
            fields = fetch_rows({name: batch[name] for name in names}, context.rows)
            ids = fields["sample_ids"], fields["group_ids"]
            samples = list(samples_of(context, step, *ids))
            context.trajectories = trajectories_of(self._tokenizer, samples, fields)
            context.completions = completions_of_turns(context.trajectories)
            return fields["scores"]
        fields = (batch.responses, batch.response_lengths, batch.rollout_logprobs, batch.scores)
        responses, lengths, logprobs, scores = fetch_rows(fields, context.rows)
        context.completions = completions_of(
            self._tokenizer, self._stops, responses, lengths, logprobs
        )
        return scores


def _samples(
    prompts: Sequence[Prompt],
    completions: Sequence[Completion],
    scores: np.ndarray,
    parts: Mapping[str, np.ndarray],
) -> list[Sample]:
    """Each completion with its prompt and its grade."""
    return [
        Sample(
            prompt=prompt.text,
            response=completion.text,
            score=float(scores[i]),
            parts={name: float(part[i]) for name, part in parts.items()},
            ground_truth=prompt.ground_truth,
            data_source=prompt.data_source,
            tokens=completion.tokens,
            logprobs=completion.logprobs,
            finished=completion.finished,
        )
        for i, (prompt, completion) in enumerate(zip(prompts, completions, strict=True))
    ]


# ------------------------------------------------------------------------- banner


def about(
    plan: Plan, *, run_dir: Path, num_train: int, num_held_out: int, step: int | None, steps: int
) -> dict[str, str]:
    """A line for each of: run, devices, model, settings, slots, data, reward, versions.

    `step` is None for a new run.
    """
    state = "new" if step is None else f"goes on from step {step}"
    held_out = f", {num_held_out:,} held out" if num_held_out else ", none held out"
    versions = package_versions()
    return {
        "run": f"{run_dir}, {state}, {steps:,} steps",
        "devices": devices_line(plan),
        "model": "; ".join(_model(name, role) for name, role in plan.roles.items()),
        "settings": settings_line(plan.config),
        **({"generation": line} if (line := _generation(plan)) else {}),
        "data": f"{num_train:,} training rows{held_out}",
        **({"reward": reward} if (reward := reward_text(plan.config.reward)) else {}),
        **({"grader": grader_text(plan.config)} if num_held_out and reward else {}),
        "versions": f"jaxrl_llm {versions['jaxrl_llm']}, jax {versions['jax']}, "
        f"Python {platform.python_version()}",
        "started": time.strftime("%Y-%m-%d %H:%M:%S %z"),
    }


def reward_text(reward: RewardConfig) -> str:
    """The reward in words: each function, with the settings that are not its defaults."""
    names = [described(function) for function in reward.functions]
    if reward.weights:
        names = [f"{weight:g} * {name}" for weight, name in zip(reward.weights, names, strict=True)]
    return " + ".join([*names, *(["a reward model"] if reward.model is not None else [])])


def grader_text(config: Config) -> str:
    """The graders of held-out answers in words."""
    if graded_as_trained(config):
        default = f"{reward_text(replace(config.reward, model=None))}, as in training"
    else:
        default = described(config.validation.grader or ExactAnswer())
        if config.reward.functions and default != reward_text(config.reward):
            default += " (--config.validation.grader=null takes the reward functions)"
    sources = [f"{one.source}: {described(one.grader)}" for one in config.validation.graders]
    return "; ".join([default, *sources])


def about_lines(about: dict[str, str]) -> str:
    """`about` for the console."""
    return "\n".join(f"{name:<9} {text}" for name, text in about.items() if name != "started")


def write_about(folder: Path, about: dict[str, str]) -> None:
    """Replace RUN/about.json, which the report shows."""
    write_whole(folder / ABOUT, json.dumps(about, indent=2) + "\n")


def devices_line(plan: Plan) -> str:
    """The devices of a run with their mesh, and the processes."""
    mesh = plan.learner.mesh
    sizes = [f"{axis}={size}" for axis, size in mesh.shape.items() if size > 1]
    along = f" ({', '.join(sizes)})" if sizes else ""
    processes = f", {jax.process_count()} processes" if jax.process_count() > 1 else ""
    return f"{plan.num_devices} x {mesh.devices.flat[0].device_kind}{along}{processes}"


def _generation(plan: Plan) -> str:
    """The slots and cache tokens of a replica; empty where nothing had to be found."""
    memory = plan.config.rollout.memory_gb
    stage = next((s for s in plan.at(1).stages if isinstance(s, Generate)), None)
    if not memory or stage is None:
        return ""
    samples = stage.how.samples // stage.model.generation.num_replicas
    return f"{words_of(stage.how.settings, samples)}, in {memory:g} GB"


def _model(name: str, role: Role) -> str:
    config = role.spec.config
    return (
        f"{name} {config.family}, {parameters(role.spec.num_params)} parameters, "
        f"{config.num_layers} layers, {role.forward.dtype}"
    )


def parameters(number: int) -> str:
    """A number of parameters as people say it: 1.54 B."""
    for unit, size in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return str(number)


# ------------------------------------------------------------------------- summary


@dataclass(kw_only=True)
class RunTotals:
    """Numbers of the summary. A checkpoint holds them, so a resumed run reports all steps."""

    first: dict[str, float] = field(default_factory=dict)  # validation before the first step
    last: dict[str, float] = field(default_factory=dict)  # the newest validation
    metrics: dict[str, float] = field(default_factory=dict)  # newest value of every metric
    best_step: int | None = None  # first step with the best value of `best_metric`
    best_metric: str = ""  # as checkpoint.best_metric: with a minus, smaller is better
    best_value: float = 0.0
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

    def add_compared(self, step: int, metric: str, value: float) -> None:
        """Note a value of the metric by which checkpoints are compared, if it is the best."""
        sign = -1 if metric.startswith("-") else 1
        if self.best_step is None or sign * value > sign * self.best_value:
            self.best_step, self.best_metric, self.best_value = step, metric, value

    def add_reward(self, reward: float | None) -> None:
        """Note the mean reward of a step, where it has one."""
        if reward is not None:
            self.first_reward = reward if self.first_reward is None else self.first_reward
            self.last_reward = reward


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The result of a finished or interrupted run."""

    run_dir: Path
    step: int
    totals: RunTotals
    seconds: float  # time of this process, start to end
    interrupted: bool
    alarmed: bool = False  # an alarm ended it before its last step
    called_off: bool = False  # a callback ended it before its last step
    reason: str = ""  # reason that the callback gave
    checkpoint: Path

    @property
    def metrics(self) -> dict[str, float]:
        """The newest value of every metric of the run, by its name in docs/metrics.md."""
        return self.totals.metrics

    @property
    def state(self) -> str:
        """How the run ended, in words."""
        if self.called_off:
            return "stopped by a callback" + (f" ({self.reason})" if self.reason else "")
        if self.alarmed:
            return "stopped by an alarm"
        return "interrupted" if self.interrupted else "finished"


def print_summary(summary: Summary, config: Config) -> None:
    """Print what changed, how fast, and where everything is. Only process 0 prints."""
    if is_main():
        try:
            print("\n".join(summary_lines(summary, config)), flush=True)
        except OSError:  # the terminal was closed: what is left to print is dropped
            send_to_null(1)


def _word(path: Path) -> str:
    """A path as one word of a command."""
    return shlex.quote(str(path))


def summary_lines(summary: Summary, config: Config) -> list[str]:
    """The summary as lines of plain text."""
    totals, run_dir = summary.totals, run_folder(config)
    if run_dir.absolute() != summary.run_dir:  # a callback changed the working directory
        run_dir = summary.run_dir
    lines = [
        f"{summary.state} at step {summary.step} of {config.total_steps} in {summary.seconds:.0f} s"
    ]
    if totals.first_reward is not None and totals.last_reward is not None:
        lines.append(f"  reward          {totals.first_reward:.3f} -> {totals.last_reward:.3f}")
    for name, last in totals.last.items():
        auxiliary = name.startswith("val-aux/") and not (name.endswith("/failures") and last)
        if auxiliary or name.startswith("timing_s/"):
            continue  # metrics.jsonl has them
        first = f"{totals.first[name]:.3f} -> " if name in totals.first else ""
        lines.append(f"  {name}  {first}{last:.3f}")
    if totals.best_step is not None:
        kept = summary.checkpoint.with_name(f"{STEP_PREFIX}_{totals.best_step}")
        lines.append(
            f"  best step       {totals.best_step}: {totals.best_metric.removeprefix('-')} "
            f"{totals.best_value:.3f}"
            + (f", in {kept}" if kept != summary.checkpoint and kept.exists() else "")
        )
    if totals.seconds:
        lines.append(f"  tokens/s        {totals.tokens / totals.seconds:,.0f}")
        overlap = sum(totals.stage_seconds.values()) > 1.01 * totals.seconds
        note = " (one that runs while the host grades counts until both are done)"
        steps = f"of {totals.seconds:,.1f} s in steps 1 to {summary.step}"
        lines.append(f"  time a stage    {steps}{note if overlap else ''}")
        for name, seconds in totals.stage_seconds.items():
            lines.append(f"    {name:<40} {seconds:8.1f} s  {seconds / totals.seconds:4.0%}")
    lines += [
        f"  checkpoint      {summary.checkpoint}",
        f"  metrics         {run_dir / 'metrics.jsonl'}",
        f"  alarms          {run_dir / EVENTS}",
        f"  starts          {run_dir / STARTS}",
    ]
    if config.log.report:
        lines.append(f"  report          {run_dir / 'report.html'}")
    if config.log.tensorboard:
        viewer = "(its viewer: pip install tensorboard)"
        lines.append(
            f"  TensorBoard     tensorboard --logdir {_word(run_dir / 'tensorboard')} {viewer}"
        )
    if (trace := run_dir / "trace").is_dir() and any(trace.iterdir()):  # not where none answered
        lines.append(f"  trace           {trace}")
    is_reward = isinstance(config.algorithm, PairwiseRewardModel | RewardRegression)
    lines.append(
        f"  export          jaxrl export --model={_word(summary.checkpoint)} "
        f"--output={_word(run_dir / 'export')}" + (" --role=reward" if is_reward else "")
    )
    if summary.interrupted or summary.alarmed or summary.called_off:
        again = "run the same command again"
        if config.resume != "auto":
            again += " with --config.resume=auto"
        lines.append(f"  go on           {again}; it resumes from the checkpoint")
    return lines
