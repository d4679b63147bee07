"""Trackers that show a run elsewhere: TensorBoard, W&B, Trackio, MLflow, or a class of yours.

`config.log.trackers` names them. Each gets the same calls, on the main process. The failure of one
is reported once, and the run goes on: metrics.jsonl has everything.
"""

import json
import os
import re
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from jaxrl_llm.config.rules.paths import PACKAGES
from jaxrl_llm.observability.jsonl import GLOBAL_STEP
from jaxrl_llm.references import load

IDS = "trackers.json"  # in the run's folder: ids by tracker, under which a resumed run goes on
PROJECT = "jaxrl_llm"  # where the tracker's own variable names none
MOST_FAILURES = 5  # in a row, after which a tracker is not called again
# Failures of other people's code. sys.exit would end a run with the code of a success.
FAILURES = (Exception, SystemExit)
LONGEST_PARAMETER = 500  # characters of a value of MLflow


@dataclass(frozen=True, kw_only=True)
class TrackedRun:
    """The run, as a tracker is opened with it."""

    name: str
    run_dir: Path
    config: Mapping[str, Any]  # as in config.json
    resume_step: int | None  # the step it goes on from; None of a new run

    def id_of(self, tracker: str) -> str:
        """An id of this run for a tracker: the same after a resume, another for a new run."""
        file = self.run_dir / IDS
        known = json.loads(file.read_text()) if file.exists() else {}
        if self.resume_step is None or tracker not in known:
            known[tracker] = secrets.token_hex(4)
            self.keep_id(tracker, known[tracker])
        return known[tracker]

    def keep_id(self, tracker: str, found: str) -> None:
        """Remember an id that a tracker made."""
        file = self.run_dir / IDS
        known = json.loads(file.read_text()) if file.exists() else {}
        file.write_text(json.dumps(known | {tracker: found}, indent=2) + "\n")

    def flat_config(self) -> dict[str, Any]:
        """The config as dotted keys with numbers, bools and text."""
        return dict(_flat("", self.config))


def _flat(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for name, entry in value.items():
            yield from _flat(f"{key}.{name}" if key else name, entry)
    elif isinstance(value, bool | int | float | str):
        yield key, value
    else:
        yield key, json.dumps(value)


class RunTracker(Protocol):
    """A tracker. A class of yours has these methods, and is called with a `TrackedRun`."""

    def log(self, step: int, metrics: Mapping[str, float], phase: str) -> None:
        """The metrics of a step. `phase` is empty for the run's own steps, else "warmup", ...

        Steps of a phase count from 1 again.
        """
        ...

    def text(self, step: int, name: str, text: str) -> None:
        """A text of a step, such as an alarm."""
        ...

    def samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Some samples of a step; each has prompt, response, ground_truth, score."""
        ...

    def close(self) -> None:
        """Write what is left."""
        ...


# ------------------------------------------------------------------------- opening


def open_trackers(
    names: Sequence[str], run: TrackedRun, say: Callable[[str], None]
) -> list["Guarded"]:
    """The trackers of these names or paths.

    Raises: ValueError when one cannot be opened: at the start nobody is surprised.
    """
    found: list[Guarded] = []
    makers = {name: TRACKERS[name] if name in TRACKERS else load(name) for name in names}
    for name, make in makers.items():
        try:
            tracker = make(run)
        except FAILURES as error:
            for opened in found:
                opened.close()
            raise ValueError(
                f"the tracker {name} could not be opened ({type(error).__name__}: {error}); "
                "repair it, or leave it out of config.log.trackers"
            ) from error
        found.append(Guarded(name, tracker, say))
    return found


class Guarded:
    """A tracker whose failures do not end a run: the first is reported, and the run goes on."""

    def __init__(self, name: str, tracker: RunTracker, say: Callable[[str], None]):
        self._name, self._tracker, self._say = name, tracker, say
        self._failures, self._reported = 0, False

    def log(self, step: int, metrics: Mapping[str, float], phase: str = "") -> None:
        """The metrics of a step."""
        self._call(lambda: self._tracker.log(step, metrics, phase))

    def text(self, step: int, name: str, text: str) -> None:
        """A text of a step."""
        self._call(lambda: self._tracker.text(step, name, text))

    def samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Some samples of a step."""
        self._call(lambda: self._tracker.samples(step, samples))

    def close(self) -> None:
        """Write what is left, also of a tracker that failed before."""
        if self._failures < MOST_FAILURES:
            self._call(lambda: self._tracker.close())
        else:
            with suppress(*FAILURES):  # what is wrong was said
                self._tracker.close()

    def _call(self, action: Callable[[], None]) -> None:
        if self._failures >= MOST_FAILURES:
            return
        try:
            action()
            self._failures = 0
        except FAILURES as error:
            self._failures += 1
            what = f"the tracker {self._name} failed ({type(error).__name__}: {error})"
            if not self._reported:
                self._say(f"{what}; the run goes on, and metrics.jsonl has everything")
            elif self._failures == MOST_FAILURES:
                self._say(f"{what} {MOST_FAILURES} times in a row; it is not called again")
            self._reported = True


# ------------------------------------------------------------------------- packages


class TensorBoard:
    """Scalars, texts and hparams for TensorBoard, in RUN/tensorboard.

    Steps after `resume_step` that an earlier process wrote are hidden.
    """

    def __init__(self, run: TrackedRun):
        # tensorboardX imports torch where it is installed. That takes 3 CPU-seconds and serves only
        # torch tensors, which are never logged here.
        with _hidden("torch"):
            from tensorboardX import SummaryWriter
        self._new_writer: Any = SummaryWriter
        self._folder = run.run_dir / "tensorboard"
        purge = 0 if run.resume_step is None else run.resume_step + 1
        self._writer = SummaryWriter(str(self._folder), purge_step=purge)
        self._phases: dict[str, Any] = {}
        self._run, self._last = run, {}
        if run.resume_step is None:
            text = json.dumps(run.config, indent=2)
            self._writer.add_text("config", f"```\n{text}\n```", 0)

    def log(self, step: int, metrics: Mapping[str, float], phase: str) -> None:
        writer = self._writer
        if phase:  # steps of its own, so a run of its own
            if phase not in self._phases:
                # It always begins again, so what a run that was killed wrote of it is hidden.
                folder = str(self._folder / phase)
                self._phases[phase] = self._new_writer(folder, purge_step=0)
            writer = self._phases[phase]
        else:
            self._last |= metrics
        for name, value in metrics.items():
            writer.add_scalar(name, value, step)

    def text(self, step: int, name: str, text: str) -> None:
        self._writer.add_text(name, text, step)

    def samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        self._writer.add_text("samples", as_markdown(samples), step)

    def close(self) -> None:
        chosen = {
            n: x for n, x in self._last.items() if n.startswith(("val-core/", "critic/score/m"))
        }
        self._writer.add_hparams(self._run.flat_config(), chosen, name="hparams")
        for writer in (self._writer, *self._phases.values()):
            writer.close()


class WandB:
    """Weights & Biases. WANDB_PROJECT, WANDB_MODE and its other variables apply."""

    def __init__(self, run: TrackedRun):
        import wandb  # pyright: ignore[reportMissingImports]

        self._wandb: Any = wandb
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=run.name,
            id=run.id_of("wandb"),
            resume="allow",
            dir=str(run.run_dir),
            config=dict(run.config),
        )
        # Steps are a metric: W&B's own count may not go back, and a resumed run's does.
        self._run.define_metric("*", step_metric=GLOBAL_STEP)

    def log(self, step: int, metrics: Mapping[str, float], phase: str) -> None:
        if phase:
            self._run.define_metric(f"{phase}/*", step_metric=f"{phase}/step")
            named = {f"{phase}/{name}": x for name, x in metrics.items() if name != GLOBAL_STEP}
            self._run.log(named | {f"{phase}/step": step})
        else:
            self._run.log({**metrics, GLOBAL_STEP: step})

    def text(self, step: int, name: str, text: str) -> None:
        self._run.log({name: self._wandb.Html(_escaped(text)), GLOBAL_STEP: step})

    def samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        columns = list(samples[0])
        rows = [[sample[name] for name in columns] for sample in samples]
        table = self._wandb.Table(columns=columns, data=rows, allow_mixed_types=True)
        self._run.log({"samples": table, GLOBAL_STEP: step})

    def close(self) -> None:
        self._run.finish()


class Trackio:
    """Trackio. TRACKIO_PROJECT, TRACKIO_DIR and TRACKIO_SPACE_ID apply."""

    def __init__(self, run: TrackedRun):
        import trackio  # pyright: ignore[reportMissingImports]

        self._trackio: Any = trackio
        self._run: Any = trackio.init(
            project=os.environ.get("TRACKIO_PROJECT", PROJECT),
            name=f"{run.name}-{run.id_of('trackio')}",
            space_id=os.environ.get("TRACKIO_SPACE_ID"),
            resume="allow",
            config=run.flat_config(),
            embed=False,
            auto_log_cpu=False,
            auto_log_gpu=False,
        )

    def log(self, step: int, metrics: Mapping[str, float], phase: str) -> None:
        prefix = f"{phase}/" if phase else ""
        self._run.log({f"{prefix}{name}": x for name, x in metrics.items()}, step=step)

    def text(self, step: int, name: str, text: str) -> None:
        self._run.log({name: self._trackio.Markdown(text)}, step=step)

    def samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        self.text(step, "samples", as_markdown(samples))

    def close(self) -> None:
        self._run.finish()


class MLflow:
    """MLflow. MLFLOW_TRACKING_URI and MLFLOW_EXPERIMENT_NAME apply."""

    def __init__(self, run: TrackedRun):
        import mlflow  # pyright: ignore[reportMissingImports]

        self._client: Any = mlflow.MlflowClient()
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        experiment = self._client.get_experiment_by_name(name)
        made = experiment.experiment_id if experiment else self._client.create_experiment(name)
        known = run.run_dir / IDS
        ids = json.loads(known.read_text()) if known.exists() else {}
        if run.resume_step is not None and "mlflow" in ids:
            self._id = ids["mlflow"]
            self._client.update_run(self._id, status="RUNNING")
            return
        self._id = self._client.create_run(made, run_name=run.name).info.run_id
        run.keep_id("mlflow", self._id)
        for key, value in run.flat_config().items():
            self._client.log_param(self._id, key, str(value)[:LONGEST_PARAMETER])

    def log(self, step: int, metrics: Mapping[str, float], phase: str) -> None:
        from mlflow.entities import Metric  # pyright: ignore[reportMissingImports]

        prefix, now = f"{phase}/" if phase else "", int(time.time() * 1000)
        found = [
            Metric(mlflow_name(f"{prefix}{name}"), float(x), now, step)
            for name, x in metrics.items()
        ]
        self._client.log_batch(self._id, metrics=found)

    def text(self, step: int, name: str, text: str) -> None:
        self._client.log_text(self._id, text, f"{name}/{step:08d}.md")

    def samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        self.text(step, "samples", as_markdown(samples))

    def close(self) -> None:
        self._client.set_terminated(self._id)


TRACKERS: dict[str, Callable[[TrackedRun], RunTracker]] = {
    "tensorboard": TensorBoard,
    "wandb": WandB,
    "trackio": Trackio,
    "mlflow": MLflow,
}
assert set(PACKAGES) == set(TRACKERS)


# ------------------------------------------------------------------------- texts


def mlflow_name(name: str) -> str:
    """A metric's name in the letters that MLflow allows."""
    return re.sub(r"[^\w\-. :/]", "_", name.replace("@", "_at_"))


def as_markdown(samples: Sequence[Mapping[str, Any]]) -> str:
    """Samples as a table; what a model writes is shown as text."""
    columns = list(samples[0]) if samples else []
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    for sample in samples:
        lines.append("| " + " | ".join(_cell(sample[name]) for name in columns) + " |")
    return "\n".join(lines)


def _cell(value: Any) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return _escaped(text).replace("|", "&#124;").replace("\n", "<br>")


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


@contextmanager
def _hidden(module: str) -> Iterator[None]:
    """Imports of `module` inside the block fail with ImportError, unless it was imported before."""
    if module in sys.modules:
        yield
        return
    sys.modules[module] = None  # pyright: ignore[reportArgumentType]
    try:
        yield
    finally:
        with suppress(KeyError):
            del sys.modules[module]
