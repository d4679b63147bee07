"""The page: what it holds of a run, its bounds, and that no text of a run becomes script."""

import base64
import hashlib
import json
import random
import re
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from written_run import A_STEP, ATTACKS, STEPS, lines, metrics, sample, write_run

from jaxrl_llm.observability.jsonl import GLOBAL_STEP
from jaxrl_llm.observability.names import WATCHED
from jaxrl_llm.report import html, refresher, samples
from jaxrl_llm.report.curves import Curve, MetricsFile
from jaxrl_llm.report.explanations import explanations
from jaxrl_llm.report.refresher import ReportRefresher
from jaxrl_llm.report.run_files import RunFiles, is_run, open_runs
from jaxrl_llm.report.samples import Trace, first_line_of, last_step, rows_at, spread
from jaxrl_llm.report.server import ReportServer


def data_of(text: str) -> dict:
    """The block of JSON in a page, as a browser reads it: up to the first end of a script."""
    return json.loads(text.split('id="data">')[1].split("</script")[0])


# ------------------------------------------------------------------------- what it reads


def test_a_thinned_curve_keeps_its_spikes():
    values = [0.0] * 10_000
    values[1234], values[8765] = 9.0, -7.0
    curve = Curve(steps=list(range(10_000)), values=values).thinned(100)
    assert len(curve.steps) <= 100 and curve.steps == sorted(set(curve.steps))
    points = dict(zip(curve.steps, curve.values, strict=True))
    assert points[1234] == 9.0 and points[8765] == -7.0
    assert (curve.steps[0], curve.steps[-1]) == (0, 9_999)  # the page shows the last value


def test_the_median_of_a_stage_is_that_of_all_steps(tmp_path):
    """Every fourth step is slow, so half of the points of a thinned curve are."""
    steps = [{"training/global_step": i, "timing_s/gen": 1.0 + (i % 4 == 0)} for i in range(4_000)]
    (tmp_path / "metrics.jsonl").write_text(lines(steps))
    curve = RunFiles(tmp_path).read()["curves"]["timing_s/gen"]
    assert curve["values"].count(2.0) >= len(curve["values"]) // 2 - 1
    assert (curve["median"], curve["sum"], curve["of"]) == (1.0, 5_000.0, 4_000)


def test_metrics_are_read_as_they_are_written(tmp_path):
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path)
    file.read()
    path.write_text(lines([metrics(1)]) + '{"training/global_')
    file.read()
    assert file.curves["timing_s/gen"].steps == [1]
    path.write_text(lines([metrics(1), metrics(2) | {"timing_s/gen": None}]))
    file.read()
    assert file.curves["timing_s/step"].steps == [1, 2]
    assert file.curves["timing_s/gen"].steps == [1]  # no number in step 2
    path.write_text(lines([metrics(1)]))  # cut back for a resume
    file.read()
    assert file.curves["timing_s/step"].steps == [1]


def test_a_run_that_resumed_between_two_reads_is_read_again(tmp_path):
    """The file was cut back and has grown beyond its old size, so its size alone says nothing."""
    folder = write_run(tmp_path / "run")
    run = RunFiles(folder)
    assert run.read()["samples"][-1]["score"] == 1.0
    again = [metrics(step) | {"timing_s/gen": 2.0} for step in range(11, STEPS + 11)]
    path = folder / "metrics.jsonl"
    path.write_text(lines([metrics(step) for step in range(1, 11)] + again))
    held_out = folder / "trace" / "validation-00000000.jsonl"
    held_out.write_text(held_out.read_text().replace('"score": 1.0', '"score": 2.0'))
    found = run.read()
    curve = found["curves"]["timing_s/gen"]
    assert curve["steps"] == [*range(1, STEPS + 11)]
    assert curve["values"] == [97.0] + [1.0] * 9 + [2.0] * STEPS
    assert found["samples"][-1]["score"] == 2.0


def test_steps_are_found_as_by_reading_every_line(tmp_path):
    draw = random.Random(0)
    for case in range(40):
        steps = sorted(draw.choices(range(12), k=draw.randrange(1, 9)))
        rows = [{"step": step, "text": "x" * draw.randrange(60)} for step in steps]
        file = tmp_path / f"train-{case:08d}.jsonl"
        file.write_text(lines(rows) + draw.choice(["", '{"st', '{"step": 11, "te']))
        with open(file, "rb") as opened:
            for wanted in range(13):
                later = [row for row in rows if row["step"] >= wanted]
                offset = first_line_of(opened, wanted)
                assert offset == len(lines(rows[: len(rows) - len(later)]))
                found = rows_at(opened, offset, 99)
                assert found == [row for row in later if row["step"] == later[0]["step"]]
            assert last_step(opened) == steps[-1]


@pytest.mark.parametrize(("first", "last"), [(1, 48), (1, 49), (0, 48), (7, 1000), (5, 5), (0, 96)])
def test_spread_steps_are_no_more_than_asked_for(first, last):
    steps = spread(first, last, 48)
    assert len(steps) <= 48 and steps[0] == first and steps[-1] == last
    gaps = {b - a for a, b in zip(steps[1:-2], steps[2:-1], strict=True)}
    assert len(gaps) <= 1 and (last - first > 47 or steps == list(range(first, last + 1)))


def test_samples_are_of_evenly_spread_steps(tmp_path):
    folder = tmp_path / "trace"
    folder.mkdir()
    for first in range(0, 1000, 100):
        rows = [sample(step, i) for step in range(max(first, 1), first + 100) for i in range(3)]
        (folder / f"train-{first:08d}.jsonl").write_text(lines(rows))
    (folder / "train.process1-00000900.jsonl").write_text(lines([sample(950, 3)]))
    (folder / "validation-00000000.jsonl").write_text(lines([sample(s, 0) for s in (0, 250, 999)]))
    found, left_out = Trace(folder).samples()
    train = [s["step"] for s in found if s["kind"] == "train"]
    assert set(train) == {1, *range(32, 999, 32), 950, 999}
    assert train.count(64) == 3 and left_out == 0
    assert [s["step"] for s in found if s["kind"] == "validation"] == [0, 250, 999]


def test_a_file_is_opened_once_for_its_step_and_once_for_its_samples(tmp_path, monkeypatch):
    folder = tmp_path / "trace"
    folder.mkdir()
    for first in range(0, 200, 10):
        rows = [sample(step, 0) for step in range(first, first + 10)]
        (folder / f"train-{first:08d}.jsonl").write_text(lines(rows))
    opened = []

    def counting(path, mode):
        opened.append(path)
        return open(path, mode)

    monkeypatch.setattr(samples, "open", counting, raising=False)
    found, _ = Trace(folder).samples()
    assert len({s["step"] for s in found}) == 26  # 0, 8, ..., 192, 199
    assert len(opened) <= 2 * 20 + 1


def test_long_samples_are_cut(tmp_path, monkeypatch):
    monkeypatch.setattr("jaxrl_llm.report.samples.MOST_BYTES", 400_000)
    (tmp_path / "trace").mkdir()
    long = {"response": "y" * 50_000, "tokens": [1] * 9000, "logprobs": [-0.123456789] * 9000}
    rows = [sample(step, i, **long) for step in range(20) for i in range(2)]
    (tmp_path / "trace" / "train-00000000.jsonl").write_text(lines(rows))
    text = html.page([RunFiles(tmp_path)])
    assert 100_000 < len(text) < 600_000
    (run,) = data_of(text)["runs"]
    first = run["samples"][0]
    assert first["num_tokens"] == 9000 and len(first["tokens"]) == 1024
    assert "44000 characters left out" in first["response"]
    assert first["details"]["logprobs"][0] == -0.1235
    assert len(run["samples"]) + run["samples_left_out"] == 40 and run["samples_left_out"] > 0


def test_the_page_has_the_run(tmp_path):
    run, other = write_run(tmp_path / "a" / "run"), write_run(tmp_path / "b" / "run", 3e-4)
    data = data_of(html.page(open_runs([run, other])))
    first, second = data["runs"]
    assert [first["name"], second["name"]] == [str(run), str(other)]  # the names alone are equal
    assert first["curves"]["critic/score/mean"]["values"][-1] == 1.0
    assert first["curves"]["warmup: loss"]["steps"] == [1, 2, 3, 4]
    assert first["config"]["actor.learning_rate"] != second["config"]["actor.learning_rate"]
    assert first["alarms"][0]["step"] == 7
    assert len(first["samples"]) == STEPS * A_STEP + 4
    assert first["texts"]["2"] == "<b>bold</b>"


def test_the_page_explains_its_metrics_in_the_words_of_the_docs(tmp_path):
    explained = data_of(html.page([RunFiles(write_run(tmp_path / "run"))]))["explained"]
    assert explained["val-core/sums/acc/mean@1"].startswith("share of right answers")
    assert explained["warmup: loss"] == "loss of the whole batch"
    names = ("eval_grad_norm", "timing_s/gen", "gen/micro_batches", "mine")
    said = explanations(names)
    assert said["eval_grad_norm"] == "held out: global gradient norm before clipping"
    assert said["timing_s/gen"].startswith("seconds of a compiled program")
    assert said["gen/micro_batches"].startswith("micro-batches of a packed pass")
    assert "mine" not in said
    assert not [text for text in said.values() if re.search(r"[`\[¹²³⁵]", text)]


def test_watchers_are_listed_with_the_metrics_of_the_run(tmp_path):
    names = {"a", "critic/score/mean", "val-core/a/reward/mean@1", "val-core/b/reward/mean@4"}
    alarms = {name: {"action": "warn", "threshold": 0.1} for name in WATCHED}
    run = write_run(tmp_path / "run")
    (run / "config.json").write_text(json.dumps({"alarms": alarms | {"mine": {}}}))
    (run / "metrics.jsonl").write_text(lines([{GLOBAL_STEP: 1} | dict.fromkeys(names, 0.5)]))
    seen = {one["name"]: one["metrics"] for one in RunFiles(run).read()["watchers"]}
    assert list(seen) == list(WATCHED)
    assert {name: seen[name] for name in seen if seen[name]} == {
        "nonfinite": ["all"],
        "reward_std": ["critic/score/mean"],
        "reward_deviation": ["critic/score/mean"],
        "reward_hacking": ["val-core/a/reward/mean@1", "val-core/b/reward/mean@4"],
    }


@pytest.mark.parametrize("damage", [b"garbage\n", b'{"step": "x"}\n', b"[1]\n", b"\0" * 9 + b"\n"])
def test_damaged_lines_are_left_out(tmp_path, caplog, damage):
    run = write_run(tmp_path / "run")
    whole = RunFiles(run).read()
    for file in (run / "metrics.jsonl", run / "events.jsonl", run / "trace/train-00000000.jsonl"):
        first, *rest = file.read_bytes().splitlines(keepends=True)
        file.write_bytes(b"".join([first, damage, *rest]))
    found = RunFiles(run).read()
    assert (found["curves"], found["alarms"]) == (whole["curves"], whole["alarms"])
    assert 0 < len(found["samples"]) <= len(whole["samples"])
    texts = [record.getMessage() for record in caplog.records]
    assert sum("metrics.jsonl has a damaged line, which is left out" in text for text in texts) == 1


# ------------------------------------------------------------------------- no script


def test_no_text_of_a_run_ends_the_block_of_data(tmp_path):
    text = html.page([RunFiles(write_run(tmp_path / "run"))])
    (run,) = data_of(text)["runs"]
    said = {s["response"].split(" ", 2)[2] for s in run["samples"]}
    assert said >= set(ATTACKS)  # kept as text, to the last character
    assert text.lower().count("<script") == text.lower().count("</script") == 2
    assert "<img" not in text and "<!--" not in text


def test_the_policy_allows_this_script_alone_and_no_network(tmp_path):
    text = html.page([RunFiles(write_run(tmp_path / "run"))])
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)
    assert policy is not None
    script = text.split("<script>")[1].split("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy[1]
    assert policy[1].startswith("default-src 'none';")
    assert "innerHTML" not in script and "eval(" not in script
    own = re.sub(r'id="data">.*?</script', "", text, flags=re.DOTALL)
    assert not re.search(r"(?:src|href)=|https?://|@import|url\(", own)


# ------------------------------------------------------------------------- while a run goes on


def test_a_run_writes_its_page_in_a_thread(tmp_path, monkeypatch):
    written, page = threading.Event(), tmp_path / "run" / "report.html"
    write = html.write_page

    def slow(runs, output):
        write(runs, output)
        written.set()

    monkeypatch.setattr(refresher, "write_page", slow)
    folder = write_run(tmp_path / "run")
    (folder / ".report.html.123.tmp").touch()  # of a process that was killed
    report = ReportRefresher(folder, print)
    assert not page.exists()
    report.step()
    assert written.wait(10) and data_of(page.read_text())["runs"]
    with open(tmp_path / "run" / "metrics.jsonl", "a") as file:
        file.write(lines([metrics(STEPS + 1)]))
    report.close()  # which does not wait for the next page's time
    assert data_of(page.read_text())["runs"][0]["curves"]["timing_s/gen"]["of"] == STEPS + 1
    assert [p.name for p in page.parent.iterdir() if "tmp" in p.name] == []


def test_a_page_that_cannot_be_written_is_said_once(tmp_path):
    said = []
    folder = write_run(tmp_path / "run")
    (folder / "report.html").mkdir()
    report = ReportRefresher(folder, said.append)
    report.step()
    report.close()
    assert len(said) == 1 and "The run goes on" in said[0]


def test_the_server_answers_this_machine_alone(tmp_path):
    with ReportServer([write_run(tmp_path / "run")], 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        assert server.server_address[0] == "127.0.0.1"
        with urllib.request.urlopen(server.url) as answer:
            assert data_of(answer.read().decode())["runs"]
        for path, host, code in (("config.json", "", 404), ("", "evil.example", 403)):
            headers = {"Host": host} if host else {}
            asked = urllib.request.Request(server.url + path, headers=headers)
            with pytest.raises(urllib.error.HTTPError) as error:
                urllib.request.urlopen(asked)
            assert error.value.code == code
            error.value.close()
        server.shutdown()


def test_the_server_ends_with_ctrl_c_as_it_says(tmp_path):
    run = write_run(tmp_path / "run")
    # What runs in the background of a shell would ignore the signal.
    code = (
        "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from jaxrl_llm.launch.main import main\nmain()"
    )
    command = [sys.executable, "-c", code, "report", str(run), "--serve", "--port=0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and b"Ctrl-C ends it" in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        try:
            assert process.wait(60) == 0
        finally:
            process.kill()


# ------------------------------------------------------------------------- the command


def jaxrl(*words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    code = (
        "import sys, resource\nfrom jaxrl_llm.launch.main import main\n"
        "try: main()\n"
        "finally: print(resource.getrusage(resource.RUSAGE_SELF).ru_utime, *sorted(sys.modules))"
    )
    command = [sys.executable, "-c", code, "report", *words]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=60)


def test_the_command_is_quick_and_writes_the_page(tmp_path):
    run = write_run(tmp_path / "run")
    done = jaxrl("run", folder=tmp_path)
    first, last = done.stdout.splitlines()
    seconds, *modules = last.split()
    assert first == "wrote run/report.html" and data_of((run / "report.html").read_text())
    assert set(modules) & {"jax", "numpy", "transformers", "rich"} == set()
    assert float(seconds) < 2.0  # 0.4 on an idle machine


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["runn"], "did you mean 'run'"),
        (["."], "has no metrics.jsonl and no config.json of a run"),
        (["run", "--output=run"], "is a folder"),
    ],
)
def test_a_mistake_is_one_message(tmp_path, words, message):
    write_run(tmp_path / "run")
    done = jaxrl(*words, folder=tmp_path)
    assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr


def test_a_model_is_no_run_and_gets_no_page(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert not is_run(tmp_path)
    (tmp_path / "config.json").write_text('{"total_steps": 1}')
    assert is_run(tmp_path)
