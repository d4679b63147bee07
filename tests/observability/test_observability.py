"""Metrics against hand computation; files that survive a kill; the console's two faces."""

import io
import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from contextlib import closing
from importlib.util import find_spec

import jax.numpy as jnp
import numpy as np
import pytest
from documented_metrics import documented_names
from tensorboardX.proto.event_pb2 import Event

from jaxrl_llm.observability import names
from jaxrl_llm.observability.console import (
    Console,
    ShownSample,
    duration,
    headlines,
    number,
    printable,
)
from jaxrl_llm.observability.jsonl import JsonlFile, MetricsWriter, read_jsonl
from jaxrl_llm.observability.metrics import (
    batch_metrics,
    memory_metrics,
    performance_metrics,
    repeated_share,
)
from jaxrl_llm.observability.timing import Timer
from jaxrl_llm.observability.trace import TraceWriter
from jaxrl_llm.observability.trackers import TensorBoard, TrackedRun
from jaxrl_llm.types import Completion, Prompt


def test_batch_metrics_by_hand():
    nan = jnp.nan
    mask = jnp.array([[1.0, 1.0, 0.0, 0.0], [1.0, 1.0, 0.0, 1.0], [0.0, 0.0, 0.0, 0.0]])
    found = batch_metrics(
        prompt_lengths=jnp.array([4, 2, 0]),  # the last row is padding
        response_lengths=jnp.array([2, 4, 0]),  # the policy did not sample all of four tokens
        mask=mask,
        scores=jnp.array([1.0, 0.0, 100.0]),
        rewards=jnp.array([[-0.5, 1.0, nan, nan], [-0.25, 0.0, nan, 0.0], [nan, nan, nan, nan]]),
        advantages=jnp.array([[1.0, 2.0, nan, nan], [3.0, 4.0, nan, -5.0], [nan, nan, nan, nan]]),
        returns=jnp.array([[1.0, 2.0, nan, nan], [3.0, 4.0, nan, 5.0], [nan, nan, nan, nan]]),
        values=jnp.array([[1.0, 2.0, nan, nan], [3.0, 4.0, nan, 3.0], [nan, nan, nan, nan]]),
        max_response_length=4,
        max_prompt_length=4,
        old_logprobs=mask,  # another field of the batch
    )
    # returns - values is 0 0 0 0 2: variance 0.8; returns 1..5: variance 2.5.
    expected = {
        "critic/score/mean": 0.5,
        "critic/score/max": 1.0,
        "critic/score/min": 0.0,
        "critic/rewards/mean": 0.125,
        "critic/rewards/max": 0.5,
        "critic/rewards/min": -0.25,
        "critic/advantages/mean": 1.0,
        "critic/advantages/max": 4.0,
        "critic/advantages/min": -5.0,
        "critic/returns/mean": 3.0,
        "critic/returns/max": 5.0,
        "critic/returns/min": 1.0,
        "critic/values/mean": 2.6,
        "critic/values/max": 4.0,
        "critic/values/min": 1.0,
        "critic/vf_explained_var": 1 - 0.8 / (2.5 + 1e-5),
        "response_length/mean": 3.0,
        "response_length/max": 4.0,
        "response_length/min": 2.0,
        "response_length/clip_ratio": 0.5,
        "prompt_length/mean": 3.0,
        "prompt_length/max": 4.0,
        "prompt_length/min": 2.0,
        "prompt_length/clip_ratio": 0.5,
    }
    assert found.keys() == expected.keys()
    for name, value in found.items():
        assert value.dtype == jnp.float32 and value.shape == ()
        assert float(value) == pytest.approx(expected[name], rel=1e-6), name


def test_batch_metrics_without_a_critic_or_a_token():
    zeros = jnp.zeros((2, 3))
    found = batch_metrics(
        prompt_lengths=jnp.array([0, 0]),
        response_lengths=jnp.array([0, 0]),
        mask=zeros,
        scores=zeros[:, 0],
        rewards=zeros,
        advantages=zeros,
        returns=zeros,
        max_response_length=3,
    )
    assert "critic/values/mean" not in found and "prompt_length/clip_ratio" not in found
    assert set(map(float, found.values())) == {0.0}


def test_performance_metrics_by_hand():
    timings = {"gen": 2.0, "update_actor": 3.0, "reward": 1.0, "step": 8.0}
    found = performance_metrics(
        timings, num_prompt_tokens=600, num_response_tokens=400, num_devices=5
    )
    assert found.pop("perf/cpu_memory_used_gb", 1.0) > 0
    found.pop("perf/max_memory_allocated_gb", None)  # only accelerators tell
    found.pop("perf/memory_in_use_gb", None)
    assert found.pop("perf/process_memory_gb", 1.0) > 0
    assert found == {
        "timing_s/gen": 2.0,
        "timing_s/update_actor": 3.0,
        "timing_s/reward": 1.0,
        "timing_s/step": 8.0,
        "timing_per_token_ms/gen": 5.0,
        "timing_per_token_ms/update_actor": 3.0,
        "perf/total_num_tokens": 1000.0,
        "perf/time_per_step": 8.0,
        "perf/throughput": 25.0,
    }


def test_memory_is_that_of_the_fullest_device():
    class Device:
        def __init__(self, stats):
            self.memory_stats = lambda: stats

    sizes = [(2**30, 2**29), (3 * 2**30, 2**28)]
    full = [Device({"peak_bytes_in_use": peak, "bytes_in_use": now}) for peak, now in sizes]
    found = memory_metrics(full)
    assert found["perf/max_memory_allocated_gb"] == 3.0 and found["perf/memory_in_use_gb"] == 0.5
    assert "perf/max_memory_allocated_gb" not in memory_metrics([Device(None)])


def test_timer_adds_up_overlapping_names():
    times = iter([0.0, 1.0, 3.0, 6.0, 10.0, 10.5])
    timer = Timer(clock=lambda: next(times))
    timer.start("gen")  # 0
    with timer("reward"):  # 1 to 3
        pass
    assert timer.stop("gen") == 6.0
    with pytest.raises(KeyError), timer("gen"):  # 10 to 10.5
        raise KeyError
    assert timer.timings() == {"reward": 2.0, "gen": 6.5}


def steps_of(path):
    return [entry["training/global_step"] for entry in read_jsonl([path])]


def test_metrics_jsonl_keeps_floats_and_steps(tmp_path):
    path = tmp_path / "run" / "metrics.jsonl"
    values = [0.1, 1 / 3, 5e-324, 1.7976931348623157e308, float(np.float32(0.1)), -0.0]
    tracker = MetricsWriter(path)
    tracker.log(0, {})
    tracker.log(1, {f"x{i}": value for i, value in enumerate(values)})
    tracker.log(2, {"f32": np.float32(0.1), "int": 3, "nan": float("nan")})
    with pytest.raises(ValueError, match="has step 2 already"):
        tracker.log(2, {})
    # Every line is on disk before the file is closed.
    _, first, second = read_jsonl([path])
    assert [first[f"x{i}"] for i in range(len(values))] == values
    assert np.signbit(first["x5"])
    assert second["f32"] == float(np.float32(0.1)) and second["int"] == 3
    assert second["nan"] is None
    tracker.close()
    again = MetricsWriter(path)
    assert again.last_step == 2
    again.log(3, {})
    again.close()
    assert steps_of(path) == [0, 1, 2, 3]


def test_truncate_after_and_torn_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    tracker = MetricsWriter(path)
    for step in range(5):
        tracker.log(step, {"x": step})
    tracker.close()
    whole = path.read_bytes()
    with open(path, "ab") as file:
        file.write(b'{"training/global_step": 5, "x"')  # as a kill leaves it
    tracker = MetricsWriter(path)
    assert path.read_bytes() == whole and tracker.last_step == 4
    tracker.truncate_after(7)
    assert path.read_bytes() == whole
    tracker.truncate_after(2)
    assert steps_of(path) == [0, 1, 2] and tracker.last_step == 2
    tracker.log(3, {"x": 30})
    tracker.truncate_after(-1)
    assert path.read_bytes() == b"" and tracker.last_step is None
    tracker.log(0, {})
    tracker.close()
    assert steps_of(path) == [0]


def test_a_file_of_one_torn_line_and_long_lines(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"step": 1')
    file = JsonlFile(path, key="step")
    assert file.last_step is None and path.read_bytes() == b""
    long = "é\u2028\n\ud800" * 50_000  # several chunks; a line separator, a lone surrogate
    file.append({"step": 1, "text": long}, {"step": 1, "text": long})
    file.append({"step": 2, "text": long})
    file.close()
    file = JsonlFile(path, key="step")
    assert file.last_step == 2
    file.truncate_after(1)
    file.close()
    assert [entry["text"] == long for entry in read_jsonl([path])] == [True, True]


def test_a_foreign_line_is_refused_by_name(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text("hello\n")
    with pytest.raises(ValueError, match=r"metrics\.jsonl has a line .*b'hello"):
        MetricsWriter(path)


WRITER = """
import sys
from jaxrl_llm.observability.jsonl import JsonlFile
file = JsonlFile(sys.argv[1], key="step")
for step in range(10**9):
    file.append({"step": step, "text": "x" * 100_000})
"""


def test_kill_leaves_a_file_that_opens(tmp_path):
    path = tmp_path / "x.jsonl"
    process = subprocess.Popen([sys.executable, "-c", WRITER, str(path)])
    try:
        end = time.monotonic() + 30
        while not (path.exists() and path.stat().st_size > 10**6):
            assert time.monotonic() < end
            time.sleep(0.005)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    file = JsonlFile(path, key="step")
    steps = [entry["step"] for entry in read_jsonl([path])]
    assert steps == list(range(len(steps))) and file.last_step == steps[-1]
    file.close()


def read_events(folder):
    """The events of TFRecord files: length, its checksum, data, its checksum."""
    events = []
    for path in sorted(folder.glob("events.out.tfevents.*")):
        data = path.read_bytes()
        while data:
            size = int.from_bytes(data[:8], "little")
            events.append(Event.FromString(data[12 : 12 + size]))
            data = data[12 + size + 4 :]
    return events


def tracked(folder, **changes):
    own = {"name": "run", "run_dir": folder, "config": {"seed": 3}, "resume_step": None}
    return TrackedRun(**own | changes)


def scalars(folder):
    values = [(e.step, v) for e in read_events(folder) for v in e.summary.value]
    return [(step, v.tag, v.simple_value) for step, v in values if v.HasField("simple_value")]


def test_names_of_tensorboard_are_kept(tmp_path):
    """Two data sets shared a curve."""
    board = TensorBoard(tracked(tmp_path))
    metrics = {"val-core/a+b/acc/mean@4": 1.0, "val-core/a*b/acc/mean@4": 2.0, "/c": 3.0}
    board.log(1, metrics, "")
    board.close()
    assert {tag: x for _, tag, x in scalars(tmp_path / "tensorboard")} == metrics


def test_tensorboard_files(tmp_path):
    """Scalars, with a phase's apart; texts; hparams; and what a resume hides."""
    board = TensorBoard(tracked(tmp_path))
    board.log(1, {"sft/loss": 2.0}, "warmup")
    board.log(1, {"critic/score/mean": 0.5}, "")
    board.log(2, {"critic/score/mean": 0.75}, "")
    board.samples(2, [{"prompt": "<b>|", "score": 0.5}])
    board.close()
    folder = tmp_path / "tensorboard"
    name = "critic/score/mean"
    assert scalars(folder) == [(1, name, 0.5), (2, name, 0.75)]
    assert scalars(folder / "warmup") == [(1, "sft/loss", 2.0)]
    texts = {
        v.tag.removesuffix("/text_summary"): v.tensor.string_val[0].decode()
        for e in read_events(folder)
        for v in e.summary.value
        if v.tensor.string_val
    }
    assert '"seed": 3' in texts["config"]
    assert "&lt;b&gt;&#124;" in texts["samples"]
    of_run = [v.tag for e in read_events(folder / "hparams") for v in e.summary.value]
    assert any(tag.startswith("_hparams_/") for tag in of_run) and name in of_run
    resumed = TensorBoard(tracked(tmp_path / "resumed", resume_step=1))
    resumed.log(2, {"x": 1.0}, "")
    resumed.close()
    # A session start at step 2 hides what an earlier process wrote from there on.
    events = read_events(tmp_path / "resumed" / "tensorboard")
    assert [e.step for e in events if e.HasField("session_log")] == [2]


def write_trace(trace, kind, step, **changes):
    prompts = [Prompt(token_ids=(1, 2), text="1+1=", row=7), Prompt(token_ids=(3,), text="2+2=")]
    logprobs = (float(np.float32(-0.1)), float(np.float32(-1 / 3)))
    completions = [
        Completion(tokens=(9, 2), text="2", logprobs=logprobs, finished=True),
        Completion(tokens=(), text="", logprobs=(), finished=False),
    ]
    trace.write(
        kind,
        step,
        policy_version=step - 1,
        prompts=prompts,
        completions=completions,
        scores=np.float32([1.0, np.nan]),  # the second failed
        **changes,
    )
    return logprobs


def test_trace_holds_every_sample(tmp_path):
    trace = TraceWriter(tmp_path / "trace", steps_per_file=10)
    logprobs = write_trace(
        trace,
        "train",
        3,
        parts={"exact": np.float32([1.0, np.nan])},
        extras=[{"shout": "2"}, {}],
        failures={1: ["it hung"]},
        indices=(4, 5),
        details={"values": np.float32([[0.5, 0.1, 7.0]]), "advantages": np.float32([[2, 2, 0]])},
    )
    trace.wait()
    first, second = read_jsonl([tmp_path / "trace" / "train-00000000.jsonl"])
    assert first == {
        "step": 3,
        "policy_version": 2,
        "last_policy_version": 2,
        "index": 4,
        "data_source": "default",
        "row": 7,
        "prompt": "1+1=",
        "prompt_ids": [1, 2],
        "question": None,
        "ground_truth": None,
        "response": "2",
        "tokens": [9, 2],
        "logprobs": [-0.1, -0.33333334],
        "finished": True,
        "score": 1.0,
        "parts": {"exact": 1.0},
        "extras": {"shout": "2"},
        "failures": [],
        "details": {"values": [0.5, 0.1], "advantages": 2.0},  # of its two tokens
    }
    assert second["details"] == {}
    assert np.float32(first["logprobs"]).tolist() == list(logprobs)
    assert (second["index"], second["score"], second["failures"]) == (5, None, ["it hung"])
    assert second["parts"] == {"exact": None}
    trace.close()


def test_trace_truncation(tmp_path):
    trace = TraceWriter(tmp_path, steps_per_file=2)
    write_trace(trace, "validation", 0)
    for step in range(1, 6):
        write_trace(trace, "train", step)
    write_trace(trace, "validation", 4)
    trace.wait()
    with open(tmp_path / "train-00000004.jsonl", "ab") as file:
        file.write(b'{"step": 5, "pro')
    trace.truncate_after(2)
    files = sorted(path.name for path in tmp_path.glob("*.jsonl"))
    assert files == ["train-00000000.jsonl", "train-00000002.jsonl", "validation-00000000.jsonl"]
    steps = [e["step"] for e in read_jsonl(sorted(tmp_path.glob("train-*.jsonl")))]
    assert steps == [1, 1, 2, 2]
    write_trace(trace, "train", 3)
    trace.wait()
    assert len(list(read_jsonl([tmp_path / "train-00000002.jsonl"]))) == 4
    trace.close()


def test_a_trace_has_a_limit(tmp_path):
    """10,000 steps of 2,048 samples made 8 GB."""
    trace = TraceWriter(tmp_path)
    write_trace(trace, "train", 1)
    trace.close()
    a_step = (tmp_path / "train-00000000.jsonl").stat().st_size
    limit = 20 * a_step
    trace = TraceWriter(tmp_path, most_bytes=limit)
    write_trace(trace, "validation", 2)
    for step in range(2, 90):
        write_trace(trace, "train", step)
    trace.close()
    files = sorted(tmp_path.glob("*.jsonl"))
    size = sum(path.stat().st_size for path in files)
    assert limit / 2 < size < limit * 1.3
    steps = [e["step"] for e in read_jsonl(sorted(tmp_path.glob("train-*.jsonl")))]
    assert steps == [step for step in range(steps[0], 90) for _ in range(2)]
    trace = TraceWriter(tmp_path, most_bytes=limit)  # a resume goes on behind the last file
    trace.truncate_after(87)
    write_trace(trace, "train", 88)
    trace.close()
    steps = [e["step"] for e in read_jsonl(sorted(tmp_path.glob("train-*.jsonl")))]
    assert steps == sorted(steps) and steps[-2:] == [88, 88]


def test_a_trace_that_cannot_be_written_is_an_error_of_the_next_step(tmp_path):
    trace = TraceWriter(tmp_path / "trace")
    (tmp_path / "trace" / "train-00000000.jsonl").mkdir()
    write_trace(trace, "train", 1)
    with pytest.raises(OSError):
        write_trace(trace, "train", 2)
    trace.close()


def test_console_plain_lines():
    out = io.StringIO()
    times = iter([0.0, 0.0, 60.0, 62.0, 64.0, 69.0])
    console = Console(file=out, samples_every=2, clock=lambda: next(times))
    console.begin("PPO", 4)
    console.log(1, {"critic/score/mean": 0.5, "perf/throughput": 12345.6, "other": 1.0})
    console.log(2, {"critic/score/mean": 0.123456, "val-core/chain_sum/acc/mean@1": 0.9})
    console.samples(1, [ShownSample(question="a", response="b", score=0.0, parts={"c": 0.0})])
    red = {"question": "1+1=\n", "response": "\x1b[31m2", "truth": "2", "score": 1.0}
    console.samples(2, [ShownSample(**red, parts={"exact": 1.0, "short": 0.5})])
    console.samples(3, [ShownSample(question="not", response="shown", score=0.0)])
    console.log(3, {"rewards/failures": 0.0})
    console.log(4, {"rewards/failures": 2.0})
    console.message("done\nin time")
    console.close()
    assert out.getvalue().splitlines() == [
        "PPO: 4 steps",
        "PPO 1/4 | reward 0.5 | tokens/s/device 12,346",
        "PPO 2/4 | reward 0.1235 | held-out 0.9 | left 0:04",  # the compiling step is forgotten
        "  sample | reward 0 | a -> b",
        "  sample | reward 1 (exact 1, short 0.5) | 1+1=\\n -> \\x1b[31m2 | truth 2",
        "PPO 3/4 | left 0:02",
        "PPO 4/4 | reward failures 2",
        "done",
        "in time",
    ]


def test_console_shows_every_nth_step_and_the_last():
    out = io.StringIO()
    with closing(Console(file=out, every=2)) as console:
        console.begin("PPO", 5, first_step=2)
        for step in (3, 4, 5):
            console.log(step, {})
    lines = out.getvalue().splitlines()
    assert lines[0] == "PPO: 5 steps from step 2"
    assert [line.split(" | ")[0] for line in lines[1:]] == ["PPO 4/5", "PPO 5/5"]


def test_console_live_on_a_terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")
    parent, child = pty.openpty()
    file = os.fdopen(child, "w")
    with closing(Console(file=file, samples_every=1)) as console:
        console.begin("warm-up", 3)
        console.log(3, {"sft/loss": 2.0})
        console.begin("PPO", 10)
        console.log(4, {"critic/score/mean": 0.625, "perf/throughput": 10.0, "actor/ppo_kl": 0.5})
        console.samples(4, [ShownSample(question="[bold]1+1=[/bold]", response="2", score=1.0)])
        console.stage(5, ["gen"])
        console._display._live.refresh()  # pyright: ignore
        console.message("a warning\x1b]0;title")
    file.flush()
    seen = ""
    os.set_blocking(parent, False)
    while True:
        try:
            seen += os.read(parent, 1 << 16).decode()
        except (BlockingIOError, OSError):
            break
    file.close()
    os.close(parent)
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", seen)
    assert "\x1b]" not in seen  # no text of a message controls the terminal
    assert "\x1b[" in seen and seen.rstrip().endswith("\x1b[?25h")  # the cursor is back
    for part in (
        "reward",
        "0.625",
        "4/10",
        "[bold]1+1=[/bold]",
        "samples of step 4",
        "a warning",
        "gen",
    ):
        assert part in text, part


def test_small_formats():
    assert [duration(s) for s in (0.4, 59.6, 3723.0)] == ["0:00", "1:00", "1:02:03"]
    assert [number(v) for v in (0.123456, 1e-7, 12345.6, 3.0, float("nan"))] == [
        "0.1235",
        "1e-07",
        "12,346",
        "3",
        "nan",
    ]
    assert printable("a\tb\x1b é中") == "a\\tb\\x1b é中"
    two = {"val-core/a/acc/mean@1": 0.5, "val-core/b/acc/mean@1": 0.25}
    assert headlines(two) == {"held-out a": 0.5, "held-out b": 0.25}
    assert json.dumps(headlines({})) == "{}"
    graded = {"val-core/a/acc/mean@1": 1.0, "val-core/a/reward/mean@1": 3.77}
    assert headlines(graded) == {"held-out": 1.0, "held-out reward": 3.77}
    assert headlines(graded | {"val-core/a/reward/mean@1": 1.0}) == {"held-out": 1.0}


def test_every_line_is_valid_json_whatever_a_metric_is(tmp_path):
    """NaN and Infinity, which Python's json writes by default, are not JSON."""
    tracker = MetricsWriter(tmp_path / "metrics.jsonl")
    tracker.log(1, {"a": float("nan"), "b": np.float32("inf"), "c": -np.inf, "d": 0.5})
    tracker.close()

    def refused(word):
        raise AssertionError(f"{word} is not JSON")

    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    found = json.loads(line, parse_constant=refused)
    assert found == {"training/global_step": 1, "a": None, "b": None, "c": None, "d": 0.5}


def test_every_metric_that_the_docs_name_is_reserved():
    """`data/known_score` may not be replaced either, nor any metric that is added later."""
    named = [name for name in documented_names() if "/" in name and not name.startswith("eval_")]
    assert len(named) > 50
    assert [n for n in named if not names.is_reserved(n) and not n.startswith("rewards/")] == []


HIDDEN = """
import sys
from pathlib import Path
from jaxrl_llm.observability.trackers import TensorBoard, TrackedRun
run = TrackedRun(name="run", run_dir=Path(sys.argv[1]), config={}, resume_step=None)
tracker = TensorBoard(run)
tracker.log(1, {"a": 0.25}, "")
tracker.close()
found = {name for name in ("torch", "jax", "orbax") if name in sys.modules}
import torch  # nothing of it is broken afterwards
print(found or "none", torch.ones(2).sum().item())
"""


@pytest.mark.skipif(find_spec("torch") is None, reason="needs torch")
def test_tensorboard_does_not_import_torch(tmp_path):
    command = [sys.executable, "-c", HIDDEN, str(tmp_path)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert found.stdout == "none 2.0\n"
    assert scalars(tmp_path / "tensorboard") == [(1, "a", 0.25)]


def test_repeated_share_by_hand() -> None:
    assert repeated_share([1] * 15) is None
    assert repeated_share(list(range(20))) == 0.0
    assert repeated_share([1] * 20) == 1 - 1 / 17
    assert repeated_share([1, 2, 3, 4, 5] * 4) == 1 - 5 / 17
