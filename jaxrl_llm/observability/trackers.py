"""Trackers that show a run elsewhere: TensorBoard, W&B, Trackio, MLflow, or a class of yours.

`config.log.trackers` names them. Each gets the same calls, on the main process, in a thread of its
own. No failure or delay of one reaches the run: metrics.jsonl has everything.
"""

import importlib
import json
import os
import re
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import Full, Queue
from typing import Any, Protocol

from jaxrl_llm.config import LogConfig
from jaxrl_llm.config.rules.paths import PACKAGES
from jaxrl_llm.observability.jsonl import GLOBAL_STEP
from jaxrl_llm.references import load

IDS = "trackers.json"  # in the run's folder: ids by tracker, under which a resumed run goes on
PROJECT = "jaxrl_llm"  # where the tracker's own variable names none
MOST_FAILURES = 5  # in a row, after which a tracker is not called again
MOST_WAITING = 1000  # calls that wait for a tracker; further ones are dropped
OPEN_S = 300.0  # for a tracker to open
CLOSE_S = 120.0  # for a tracker to write what is left at the end
GOES_ON = "the run goes on, and metrics.jsonl has everything"
# Failures of other people's code. sys.exit would end a run with the code of a success.
FAILURES = (Exception, SystemExit)
LONGEST_PARAMETER = 500  # characters of a value of MLflow
# MLflow's codes for a name or value that it refuses, itself or in its database.
WRONG_METRIC = ("INVALID_PARAMETER_VALUE", "BAD_REQUEST")


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


def tracker_names(log: LogConfig) -> list[str]:
    """The trackers of a run, each once."""
    names = [*(["tensorboard"] if log.tensorboard else []), *log.trackers]
    return list(dict.fromkeys(names))


def open_trackers(
    names: Sequence[str], run: TrackedRun, say: Callable[[str], None]
) -> list["Guarded"]:
    """The trackers of these names or paths.

    Raises: ValueError when one cannot be opened: at the start nobody is surprised.
    """
    trackers: list[Guarded] = []
    makers = {name: TRACKERS[name] if name in TRACKERS else load(name) for name in names}
    for name, make in makers.items():
        tracker = Guarded(name, partial(make, run), say)
        if error := tracker.open():
            for opened in trackers:
                opened.close()
            key = "set config.log.tensorboard=false" if name == "tensorboard" else ""
            raise ValueError(
                f"the tracker {name} could not be opened ({error}); repair it, or "
                f"{key or 'leave it out of config.log.trackers'}"
            )
        trackers.append(tracker)
    return trackers


def import_packages(names: Sequence[str]) -> None:
    """Import the packages of trackers, before anything that takes longer.

    Raises: ValueError for one that is there and cannot be imported.
    """
    for name in names:
        if name in PACKAGES:
            try:
                with _hidden("torch"):
                    importlib.import_module(PACKAGES[name])
            except FAILURES as error:
                raise ValueError(
                    f"the tracker {name}: its package {PACKAGES[name]} cannot be imported "
                    f"({type(error).__name__}: {error}); install it again, or leave {name} out"
                ) from None


class Guarded:
    """A tracker in a thread of its own: it can neither end a run nor hold it up.

    The first failure is reported. What it does not take in time is dropped.
    """

    def __init__(
        self, name: str, make: Callable[[], RunTracker], say: Callable[[str], None]
    ) -> None:
        self._name, self._make, self._say = name, make, say
        self._failures, self._said = 0, set[str]()
        self._opened: Future[RunTracker] = Future()
        self._calls: Queue[Callable[[RunTracker], None] | None] = Queue(MOST_WAITING)
        self._thread = threading.Thread(target=self._work, name=f"tracker {name}", daemon=True)

    def open(self) -> str:
        """Open the tracker. Returns what went wrong, else an empty text."""
        self._thread.start()
        try:
            self._opened.result(OPEN_S)
        except TimeoutError:
            return f"it took more than {OPEN_S:g} s"
        except FAILURES as error:
            return f"{type(error).__name__}: {error}"
        return ""

    def log(self, step: int, metrics: Mapping[str, float], phase: str = "") -> None:
        """The metrics of a step."""
        self._call(lambda tracker: tracker.log(step, dict(metrics), phase))

    def text(self, step: int, name: str, text: str) -> None:
        """A text of a step."""
        self._call(lambda tracker: tracker.text(step, name, text))

    def samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Some samples of a step."""
        self._call(lambda tracker: tracker.samples(step, samples))

    def close(self) -> None:
        """Write what is left, for CLOSE_S at most."""
        deadline = time.monotonic() + CLOSE_S
        with suppress(Full):
            self._calls.put(None, timeout=CLOSE_S)
        self._thread.join(max(deadline - time.monotonic(), 0.0))
        if self._thread.is_alive():
            self._say_once(f"the tracker {self._name} did not end in {CLOSE_S:g} s; {GOES_ON}")

    def _call(self, call: Callable[[RunTracker], None]) -> None:
        try:
            self._calls.put_nowait(call)
        except Full:
            self._say_once(f"the tracker {self._name} is too slow and loses values; {GOES_ON}")

    def _work(self) -> None:
        try:
            tracker = self._make()
        except BaseException as error:
            self._opened.set_exception(error)
            return
        self._opened.set_result(tracker)
        while (call := self._calls.get()) is not None:
            if self._failures < MOST_FAILURES:
                self._try(partial(call, tracker))
        if self._failures < MOST_FAILURES:
            self._try(tracker.close)
        else:
            with suppress(*FAILURES):  # its failures were reported
                tracker.close()

    def _try(self, action: Callable[[], None]) -> None:
        try:
            action()
            self._failures = 0
        except FAILURES as error:
            self._failures += 1
            failed = f"the tracker {self._name} failed"
            if failed not in self._said:
                self._say(f"{failed} ({type(error).__name__}: {error}); {GOES_ON}")
                self._said.add(failed)
            elif self._failures == MOST_FAILURES:
                self._say(f"{failed} {MOST_FAILURES} times in a row; it is not called again")

    def _say_once(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self._say(text)


# ------------------------------------------------------------------------- packages


class TensorBoard:
    """Scalars, texts and hparams for TensorBoard, in RUN/tensorboard.

    Steps after `resume_step` that an earlier process wrote are hidden.
    """

    def __init__(self, run: TrackedRun):
        self._folder = run.run_dir / "tensorboard"
        purge = 0 if run.resume_step is None else run.resume_step + 1
        self._file = EventsFile(self._folder, purge)
        self._phases: dict[str, EventsFile] = {}
        self._run, self._last = run, dict[str, float]()
        if run.resume_step is None:
            self._file.text("config", f"```\n{json.dumps(run.config, indent=2)}\n```", 0)

    def log(self, step: int, metrics: Mapping[str, float], phase: str) -> None:
        file = self._file
        if phase:  # steps of its own, so a run of its own
            if phase not in self._phases:
                # It always begins again, so what a run that was killed wrote of it is hidden.
                self._phases[phase] = EventsFile(self._folder / phase, 0)
            file = self._phases[phase]
        else:
            self._last |= metrics
        file.scalars(metrics, step)

    def text(self, step: int, name: str, text: str) -> None:
        self._file.text(name, text, step)

    def samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        self.text(step, "samples", as_markdown(samples))

    def close(self) -> None:
        chosen = {
            n: x for n, x in self._last.items() if n.startswith(("val-core/", "critic/score/m"))
        }
        hparams = EventsFile(self._folder / "hparams", None)
        hparams.hparams(self._run.flat_config(), chosen)
        for file in (self._file, hparams, *self._phases.values()):
            file.close()


class EventsFile:
    """A file of TensorBoard, which is on disk after each call.

    tensorboardX's own writer has a thread. An error of the disk ended it, and the next call of the
    run waited for ever.
    """

    def __init__(self, folder: Path, purge_step: int | None):
        # tensorboardX imports torch where it is installed. That takes 3 CPU-seconds and serves only
        # torch tensors, which are never logged here.
        with _hidden("torch"):
            from tensorboardX import event_file_writer, summary
            from tensorboardX.proto import event_pb2
        folder.mkdir(parents=True, exist_ok=True)
        self._events: Any = event_pb2
        self._summary: Any = summary
        self._writer: Any = event_file_writer.EventsWriter(str(folder / "events"))
        if purge_step is not None:
            log = self._events.SessionLog
            event = partial(self._events.Event, step=purge_step)
            self._write(event(file_version="brain.Event:2"))
            self._write(event(session_log=log(status=log.START)))

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        # tensorboardX's own `scalar` gives "a+b" and "a*b" one tag.
        kind = self._summary.Summary
        values_of = (kind.Value(tag=name, simple_value=float(x)) for name, x in values.items())
        self._add(step, *(kind(value=[value]) for value in values_of))

    def text(self, name: str, text: str, step: int) -> None:
        self._add(step, self._summary.text(name, text))

    def hparams(self, config: dict[str, Any], metrics: dict[str, float]) -> None:
        self._add(0, *self._summary.hparams(config, metrics))
        self.scalars(metrics, 0)

    def close(self) -> None:
        self._writer.close()

    def _add(self, step: int, *summaries: Any) -> None:
        for each in summaries:
            self._write(self._events.Event(summary=each, step=step))
        self._writer.flush()

    def _write(self, event: Any) -> None:
        event.wall_time = time.time()
        self._writer.write_event(event)


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
        self._refused: set[str] = set()  # names of metrics
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
        from mlflow.exceptions import MlflowException  # pyright: ignore[reportMissingImports]

        prefix, now = f"{phase}/" if phase else "", int(time.time() * 1000)
        batch = [
            Metric(mlflow_name(f"{prefix}{name}"), float(x), now, step)
            for name, x in metrics.items()
        ]
        try:
            self._client.log_batch(self._id, metrics=batch)
        except MlflowException as error:
            if error.error_code not in WRONG_METRIC:  # a lost server would be tried once a metric
                raise
            # One wrong metric fails the whole batch, so each is sent alone.
            refused: dict[str, Exception] = {}
            for metric in batch:
                try:
                    self._client.log_batch(self._id, metrics=[metric])
                except MlflowException as error:
                    if error.error_code not in WRONG_METRIC:
                        raise
                    refused[metric.key] = error
            new = refused.keys() - self._refused
            self._refused |= new
            # A name that is refused in every step is reported once, and takes no other with it.
            if new or len(refused) == len(batch):
                raise refused[min(new or refused)] from None

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
    """A metric's name in the letters and parts that MLflow allows; other names have another.

    A part of a path may not be empty, `.` or `..`; another character is its code.
    """
    parts = [
        re.sub(r"[^\w\-. :]", lambda found: f"_{ord(found[0]):x}_", part.replace("@", "_at_"))
        for part in name.split("/")
    ]
    return "/".join(f"_{part}_" if part in ("", ".", "..") else part for part in parts)


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
