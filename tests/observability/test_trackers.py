"""Each tracker with its real package, offline; a class of one's own; failures that end no run."""

import errno
import json
import os
import struct
import subprocess
import sys
import threading
import time
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from tiny_run import TinyRun

from jaxrl_llm.config import ConfigError, load_config
from jaxrl_llm.observability import trackers
from jaxrl_llm.observability.trackers import (
    MOST_FAILURES,
    Guarded,
    TrackedRun,
    mlflow_name,
    open_trackers,
)

SAMPLES = [{"prompt": "1+1=", "response": "2", "ground_truth": "2", "score": 1.0}]


def installed(package: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(find_spec(package) is None, reason=f"needs {package}")


def opened(folder: Path, resume_step: int | None = None) -> TrackedRun:
    config = {"seed": 3, "rollout": {"n": 2}, "data": {"train_files": ["a"]}}
    return TrackedRun(name="tiny", run_dir=folder, config=config, resume_step=resume_step)


def use(name: str, folder: Path) -> None:
    """A run of two steps after a warm-up, and its resume from step 1."""
    said: list[str] = []
    for resume_step, first in ((None, 1), (1, 2)):
        (tracker,) = open_trackers([name], opened(folder, resume_step), said.append)
        if resume_step is None:
            tracker.log(5, {"sft/loss": 2.5}, "warmup")
        for step in range(first, 3):
            metrics = {"training/global_step": step, "critic/score/mean": step / 4}
            named = {"val-core/x/acc/mean@1": 0.5, "timing_s/ref+values": 2.0}
            tracker.log(step, metrics | named)
            tracker.samples(step, SAMPLES)
            tracker.text(step, "alarms/x/text", "an alarm <b>")
        tracker.close()
        if name == "wandb":
            time.sleep(1.1)  # its offline folders are named by the second
    assert said == []


def run_apart(name: str, folder: Path, read: str, **environment: str) -> list:
    """`use` in a process of its own, and what the lines of `read` then name `found`."""
    code = f"""
import json, sys
from pathlib import Path
sys.path[:0] = {[str(folder) for folder in Path(__file__).parents[:2]]!r}
from test_trackers import use
use({name!r}, Path({str(folder)!r}))
{read}
Path("found.json").write_text(json.dumps(found))
"""
    known = {
        k: v for k, v in os.environ.items() if not k.startswith(("WANDB", "MLFLOW", "TRACKIO"))
    }
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env=known | environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "found.json").read_text())


def leveldb_records(data: bytes) -> list[bytes]:
    """The records of a W&B file: a header of 7 bytes, then blocks of 32 KiB as LevelDB has them."""
    place, found, part = 7, [], b""
    while place + 7 <= len(data):
        if 2**15 - place % 2**15 < 7:  # a block's end, too short for a record
            place += 2**15 - place % 2**15
            continue
        _, length, kind = struct.unpack_from("<IHB", data, place)
        part += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            found.append(part)
            part = b""
    return found


@installed("wandb")
def test_wandb(tmp_path):
    read = """
from wandb.proto import wandb_internal_pb2 as pb
from test_trackers import leveldb_records
rows, ids = [], set()
for file in sorted(Path("wandb").glob("offline*/*.wandb")):
    for data in leveldb_records(file.read_bytes()):
        record = pb.Record(); record.ParseFromString(data)
        if record.WhichOneof("record_type") == "run":
            ids.add(record.run.run_id)
        if record.WhichOneof("record_type") == "history":
            row = {".".join(i.nested_key) or i.key: json.loads(i.value_json)
                   for i in record.history.item}
            rows.append({k: v for k, v in row.items() if not isinstance(v, dict)})
found = [rows, sorted(ids)]
"""
    rows, ids = run_apart("wandb", tmp_path, read, WANDB_MODE="offline", WANDB_SILENT="true")
    assert ids == [json.loads((tmp_path / "trackers.json").read_text())["wandb"]]
    scores = [(r["training/global_step"], r["critic/score/mean"]) for r in rows
              if "critic/score/mean" in r]  # fmt: skip
    assert scores == [(1, 0.25), (2, 0.5), (2, 0.5)]  # the step after the resume, again
    assert [r["warmup/sft/loss"] for r in rows if "warmup/sft/loss" in r] == [2.5]
    tables = list((tmp_path / "wandb").glob("*/files/media/table/samples*.json"))
    assert tables and json.loads(tables[0].read_text())["data"] == [list(SAMPLES[0].values())]


@installed("trackio")
def test_trackio(tmp_path):
    read = """
import sqlite3
(file,) = Path("t").rglob("*.db")
rows = sqlite3.connect(file).execute("select run_name, step, metrics from metrics").fetchall()
found = [[name, step, str(metrics)] for name, step, metrics in rows]
"""
    rows = run_apart("trackio", tmp_path, read, TRACKIO_DIR=str(tmp_path / "t"))
    assert len({name for name, _, _ in rows}) == 1
    texts = [(step, text) for _, step, text in rows]
    assert sum("critic/score/mean" in text for _, text in texts) == 3
    assert any(step == 5 and "warmup/sft/loss" in text for step, text in texts)
    assert any("1+1=" in text for _, text in texts)


@installed("mlflow")
def test_mlflow(tmp_path):
    read = """
import mlflow
client = mlflow.MlflowClient()
(run,) = client.search_runs([client.get_experiment_by_name("jaxrl_llm").experiment_id])
history = client.get_metric_history(run.info.run_id, "critic/score/mean")
names = [file.path for file in client.list_artifacts(run.info.run_id, "samples")]
found = [run.data.params, run.data.metrics, [[m.step, m.value] for m in history], names]
"""
    store = {"MLFLOW_TRACKING_URI": f"file:{tmp_path / 'ml'}", "MLFLOW_ALLOW_FILE_STORE": "true"}
    params, metrics, history, names = run_apart("mlflow", tmp_path, read, **store)
    assert params == {"seed": "3", "rollout.n": "2", "data.train_files": '["a"]'}
    assert (metrics["warmup/sft/loss"], metrics["val-core/x/acc/mean_at_1"]) == (2.5, 0.5)
    assert metrics["timing_s/ref_2b_values"] == 2.0
    assert history == [[1, 0.25], [2, 0.5], [2, 0.5]]
    assert names == ["samples/00000001.md", "samples/00000002.md"]


def test_a_run_shows_its_warm_up_apart(ppo_run: TinyRun):
    """Fault 29. Steps of the warm-up are not steps of the run."""
    folder = ppo_run.run_dir / "tensorboard"
    (own,) = folder.glob("events.*")
    (warmup,) = (folder / "warmup").glob("events.*")
    assert b"sft/loss" in warmup.read_bytes() and b"sft/loss" not in own.read_bytes()
    for shown in (b"samples/text_summary", b"config/text_summary", b"critic/score/mean"):
        assert shown in own.read_bytes()
    assert (folder / "hparams").is_dir()


# ------------------------------------------------------------------------- one's own

OWN = """
import json


class Mine:
    def __init__(self, run):
        if run.name == "bad":
            raise RuntimeError("no server")
        self.file = open(run.run_dir / "mine.jsonl", "a")

    def log(self, step, metrics, phase):
        print(json.dumps(["log", step, phase, sorted(metrics)]), file=self.file)

    def text(self, step, name, text):
        print(json.dumps(["text", step, name]), file=self.file)

    def samples(self, step, samples):
        print(json.dumps(["samples", step, samples]), file=self.file)

    def close(self):
        self.file.close()
"""


def test_a_class_of_ones_own(tmp_path):
    (tmp_path / "mine.py").write_text(OWN)
    path = f"{tmp_path / 'mine.py'}:Mine"
    use(path, tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "mine.jsonl").read_text().splitlines()]
    assert rows[0] == ["log", 5, "warmup", ["sft/loss"]]
    assert ["samples", 2, SAMPLES] in rows and ["text", 1, "alarms/x/text"] in rows
    bad = TrackedRun(name="bad", run_dir=tmp_path, config={}, resume_step=None)
    with pytest.raises(ValueError, match="could not be opened .RuntimeError: no server.*leave it"):
        open_trackers([path], bad, print)


def test_a_tracker_that_fails_is_reported_once_and_ends_no_run():
    calls: list[int] = []

    class Broken:
        def log(self, step, metrics, phase):
            calls.append(step)
            if step != 3:
                raise OSError("no network")

        text = samples = None

        def close(self):
            calls.append(0)

    said: list[str] = []
    tracker = Guarded("broken", Broken, said.append)  # pyright: ignore
    assert not tracker.open()
    for step in range(1, 20):
        tracker.log(step, {})
    tracker.close()
    assert len(said) == 2
    assert said[0] == (
        "the tracker broken failed (OSError: no network); the run goes on, and metrics.jsonl has "
        "everything"
    )
    assert "not called again" in said[1]
    assert calls == [*range(1, 3 + MOST_FAILURES + 1), 0]


def test_a_tracker_that_exits_is_one_that_fails(tmp_path):
    """The run ended with code 0 before its last step."""
    said: list[str] = []
    exits: Any = SimpleNamespace(log=lambda *_: sys.exit(0), close=lambda: sys.exit(0))
    tracker = Guarded("exits", lambda: exits, said.append)
    assert not tracker.open()
    for step in range(1, 9):
        tracker.log(step, {})
    tracker.close()
    assert said[0].startswith("the tracker exits failed (SystemExit: 0); the run goes on")
    (tmp_path / "exits.py").write_text("import sys\n\ndef opened(run):\n    sys.exit(0)\n")
    run: Any = SimpleNamespace()
    with pytest.raises(ValueError, match=r"could not be opened \(SystemExit: 0\)"):
        open_trackers([f"{tmp_path}/exits.py:opened"], run, said.append)


def test_a_tracker_that_never_answers_holds_up_no_run(monkeypatch):
    """W&B on a network that drops packets, or a full disk: the watchdog ended the run."""
    monkeypatch.setattr(trackers, "MOST_WAITING", 3)
    monkeypatch.setattr(trackers, "CLOSE_S", 0.2)
    said: list[str] = []
    answer = threading.Event()
    stuck: Any = SimpleNamespace(log=lambda *_: answer.wait(), close=answer.wait)
    tracker = Guarded("stuck", lambda: stuck, said.append)
    assert not tracker.open()
    began = time.monotonic()
    for step in range(9):
        tracker.log(step, {})
    tracker.close()
    assert time.monotonic() - began < 5
    assert [text.split(";")[0] for text in said] == [
        "the tracker stuck is too slow and loses values",
        "the tracker stuck did not end in 0.2 s",
    ]
    answer.set()
    monkeypatch.setattr(trackers, "OPEN_S", 0.1)
    opening = Guarded("stuck", lambda: time.sleep(1), said.append)  # pyright: ignore
    assert opening.open() == "it took more than 0.1 s"


def test_an_error_of_the_disk_ends_no_tensorboard(tmp_path, monkeypatch):
    """tensorboardX's thread died of it, and the next calls of the run waited for ever."""
    said: list[str] = []
    (tracker,) = open_trackers(["tensorboard"], opened(tmp_path), said.append)
    plain = trackers.EventsFile._write

    def full(self, event):
        if event.step == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        plain(self, event)

    monkeypatch.setattr(trackers.EventsFile, "_write", full)
    for step in range(1, 30):
        tracker.log(step, {"critic/score/mean": step / 4})
    tracker.close()
    assert len(said) == 1 and "No space left on device" in said[0]
    (events,) = (tmp_path / "tensorboard").glob("events.*")
    assert events.read_bytes().count(b"critic/score/mean") >= 28


def test_names_of_mlflow_are_whole_and_unique():
    names = ["a/b@1", "val//data/math", "a+b", "a*b", "../x/."]
    assert [mlflow_name(name) for name in names] == [
        "a/b_at_1",
        "val/__/data/math",
        "a_2b_b",
        "a_2a_b",
        "_.._/x/_._",
    ]


def test_a_metric_that_mlflow_refuses_does_not_take_the_others():
    """A whole step was lost for one name. A lost server is asked once, not once a metric."""
    taken, calls = [], []

    class Failure(Exception):
        @property
        def error_code(self):
            return str(self)

    def log_batch(run, metrics):
        calls.append(metrics)
        if any(metric.value == 4 for metric in metrics):
            raise Failure("INTERNAL_ERROR")
        if any(metric.value == 3 for metric in metrics):
            raise Failure("INVALID_PARAMETER_VALUE")
        taken.extend(metric.key for metric in metrics)

    tracker = object.__new__(trackers.MLflow)
    tracker._client, tracker._id = SimpleNamespace(log_batch=log_batch), "id"
    tracker._refused = set()
    entities = SimpleNamespace(Metric=lambda key, value, *_: SimpleNamespace(key=key, value=value))
    modules = {"mlflow": entities, "mlflow.entities": entities}
    modules["mlflow.exceptions"] = SimpleNamespace(MlflowException=Failure)
    with mock.patch.dict(sys.modules, modules):
        with pytest.raises(Failure, match="INVALID"):
            tracker.log(1, {"a": 1.0, "b": 3.0, "c": 2.0}, "")
        tracker.log(2, {"a": 1.0, "b": 3.0}, "")  # reported before: five failures would end it
        with pytest.raises(Failure, match="INVALID"):
            tracker.log(3, {"b": 3.0}, "")
        calls.clear()
        with pytest.raises(Failure, match="INTERNAL"):
            tracker.log(4, {"a": 1.0, "c": 4.0}, "")
        assert len(calls) == 1
    assert taken == ["a", "c", "a"]


def test_a_package_that_cannot_be_imported_is_refused_first(monkeypatch):
    """Half of it is installed. It was found 90 s later."""
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ValueError, match="wandb cannot be imported .*; install it again"):
        trackers.import_packages(["wandb", "my_file.py:Mine"])


def test_no_tracker_is_opened_where_one_is_not_there(tmp_path):
    (tmp_path / "mine.py").write_text(OWN)
    with pytest.raises(ValueError, match="there is no file nowhere.py"):
        open_trackers([f"{tmp_path / 'mine.py'}:Mine", "nowhere.py:Mine"], opened(tmp_path), print)
    assert not (tmp_path / "mine.jsonl").exists()


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ("[wandbb]", "no such tracker; did you mean 'wandb'"),
        ("[nowhere.py:Mine]", "there is no file nowhere.py"),
    ],
)
def test_a_wrong_name_is_refused_at_once(names, message):
    with pytest.raises(ConfigError, match=message):
        load_config("grpo", {"log.trackers": names})


def test_a_missing_package_is_named_with_its_command(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install wandb"):
        load_config("grpo", {"log.trackers": "[wandb]"})
