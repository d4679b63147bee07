"""Two processes of one device each run to the metrics of one process of one device.

Each takes its share of the data and of the samples, and no more.
"""

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from tiny_run import (
    REPOSITORY,
    SAMPLES,
    SAVE_EVERY,
    TOTAL_STEPS,
    TinyRun,
    assert_close,
    assert_same_bits,
    read_jsonl,
)

TRAIN = str(REPOSITORY / "scripts" / "train.py")
PROCESSES = [sys.executable, "-m", "jaxrl_llm.launch.local", "--processes=2", "--"]
WATCH = str(REPOSITORY / "tests" / "watch_hosts.py")
STEPS, RESUMED_FROM = TOTAL_STEPS, TOTAL_STEPS - SAVE_EVERY


@pytest.fixture(scope="module")
def one(ppo_run: TinyRun) -> TinyRun:
    return ppo_run


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    run = TinyRun(tmp_path_factory.mktemp("two"))
    run.finish(launcher=[*PROCESSES, WATCH, str(run.folder), TRAIN])
    return run


def test_metrics_are_those_of_one_process(one: TinyRun, two: TinyRun) -> None:
    expected, found = one.metrics(), two.metrics()
    assert list(found) == list(expected) == list(range(STEPS + 1))
    for step, row in expected.items():
        assert_close(found[step], row, rtol=1e-5, atol=2e-6)


def test_programs_are_compiled_once_though_processes_wait_for_each_other(
    one: TinyRun, two: TinyRun
) -> None:
    expected, found = (read_jsonl(run.run_dir / "metrics.jsonl") for run in (one, two))
    name = "perf/compilations"
    assert [row.get(name) for row in found] == [row.get(name) for row in expected]
    assert any(row.get(name) for row in expected)


def test_process_0_alone_writes_metrics(two: TinyRun) -> None:
    assert [p.name for p in two.run_dir.glob("metrics*")] == ["metrics.jsonl"]
    assert len(list((two.run_dir / "tensorboard").glob("events*"))) == 1
    log = (two.folder / "log.txt").read_text().splitlines()
    assert any(line.startswith("[0] step 1/") for line in log)
    assert not any(line.startswith("[1] step 1/") for line in log)


def test_each_process_traces_the_samples_that_it_scored(one: TinyRun, two: TinyRun) -> None:
    expected, found = one.samples("train"), two.samples("train")
    assert found.keys() == expected.keys()
    assert len(found) == STEPS * SAMPLES
    for key, sample in expected.items():
        for name in ("prompt", "tokens", "score", "finished"):
            assert found[key][name] == sample[name], (key, name)


def test_each_process_traces_the_held_out_answers_that_it_graded(
    one: TinyRun, two: TinyRun
) -> None:
    expected, found = one.samples("validation"), two.samples("validation")
    assert found.keys() == expected.keys()
    for key, sample in expected.items():
        for name in ("prompt", "tokens", "score", "finished"):
            assert found[key][name] == sample[name], (key, name)
    files = {path.name.partition("-")[0] for path in (two.run_dir / "trace").iterdir()}
    assert files == {"train", "train.process1", "validation", "validation.process1"}
    assert len(two.samples("validation.process1")) == len(one.samples("validation")) // 2


def test_a_process_takes_its_share_of_samples_and_data(two: TinyRun) -> None:
    # Responses and log-probs of 4 tokens each and their number for the reward, both lengths for the
    # counts of tokens. The same without counts of held-out answers, before and after the warm-up,
    # and after steps 3, 6, 9, 12.
    of_samples = STEPS * SAMPLES * (2 * 4 * 4 + 4 + 2 * 4)
    of_answers = 6 * 16 * (2 * 4 * 4 + 4)
    # Process 0 owns the samples whose tokens are traced with more numbers: four fields of its rows.
    of_details = STEPS * SAMPLES // 2 * (4 * 4 * 4)
    for process in range(2):
        found = json.loads((two.folder / f"hosts-{process}.json").read_text())
        details = of_details if process == 0 else 0
        assert found["fetched"] == (of_samples + of_answers) // 2 + details
        # The reward's statistics, one grade a held-out sample: nothing with tokens.
        assert found["largest_message"] < 1000
        assert found["checked"] == (64 + 64 + 16) // 2  # prompts, examples, held-out prompts
        # Half of the rows of its batches are in the other's stripe; batches are made ahead.
        drawn = (STEPS + 10 + 2 * 3) * 8
        assert 0 < found["read_again"] < 0.75 * drawn


def test_weights_are_those_of_one_process(one: TinyRun, two: TinyRun) -> None:
    expected, found = one.weights(STEPS), two.weights(STEPS)
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_allclose(found[name], array, rtol=1e-3, atol=1e-5, err_msg=name)


def without_its_last_step(run: TinyRun, folder: Path) -> TinyRun:
    """A copy of `run` that has lost its last checkpoint."""
    copy = TinyRun(folder)
    shutil.copytree(run.run_dir, copy.run_dir)
    shutil.rmtree(copy.step_path(STEPS))
    (copy.run_dir / "config.json").unlink()  # it names the other folder's reward
    return copy


@pytest.mark.slow
def test_two_processes_stop_at_an_alarm_of_one(tmp_path: Path, two: TinyRun) -> None:
    """Process 0 watches alone. Both save the step and end, and the launcher leaves it there."""
    run = without_its_last_step(two, tmp_path)
    launcher = [*PROCESSES[:-1], "--restarts=2", "--", TRAIN]
    alarm = "--config.alarms.update_kl={action: stop, threshold: 0}"
    output = run.finish(alarm, launcher=launcher, code=3)
    assert output.count(f"stopped by an alarm at step {RESUMED_FROM + 1} of {STEPS}") == 1
    assert "restart 1" not in output and run.saved_steps()[-1] == RESUMED_FROM + 1
    run.finish(launcher=launcher)
    assert run.metrics() == two.metrics()
    assert_same_bits(run.weights(STEPS), two.weights(STEPS))


@pytest.mark.slow  # trainer/test_damaged_run.py has one process, and test_multihost.py gathering
def test_two_processes_set_a_damaged_checkpoint_aside_and_resume(
    tmp_path: Path, two: TinyRun
) -> None:
    """Each compares its share of the files; one of them finds the damage."""
    run = without_its_last_step(two, tmp_path)
    damaged, sound = (run.step_path(RESUMED_FROM - i * SAVE_EVERY) for i in range(2))
    file = max((damaged / "critic").rglob("*"), key=lambda f: f.stat().st_size)
    file.write_bytes(file.read_bytes()[:-1])
    output = run.finish(launcher=[*PROCESSES, TRAIN])
    assert output.count(f"{damaged} is damaged: critic/") == 1
    assert output.count("resumed from") == output.count(f"resumed from {sound}") == 1
    assert run.metrics() == two.metrics()
    assert run.samples("train") == two.samples("train")
    assert run.events() == two.events() != []
    assert_same_bits(run.weights(STEPS), two.weights(STEPS))


@pytest.mark.nightly
def test_one_process_goes_on_from_two(tmp_path: Path, two: TinyRun) -> None:
    run = without_its_last_step(two, tmp_path)
    assert f"resumed from {run.step_path(RESUMED_FROM)}" in run.finish_here()
    metrics, expected = run.metrics(), two.metrics()
    for step in range(RESUMED_FROM + 1, STEPS + 1):
        assert_close(metrics[step], expected[step], rtol=1e-5, atol=2e-6)


# Process 1 of two has the second half of a batch, and so fails for all that it grades. One process
# grades the whole batch in one call, as nothing is tried again.
SECOND_HALF_FAILS = f"""
import os

works = 0 if os.environ.get("JAXRL_PROCESS_ID") == "1" else {SAMPLES // 2}


def digits(completions):
    return [sum(c.isdigit() for c in text) / 4 if i < works else None
            for i, text in enumerate(completions)]
"""
FAILING = (
    "--config.algorithm=grpo",
    "--config.warmup=null",
    "--config.data.val_tasks=[]",
    "--config.checkpoint.best_metric=",
    "--config.total_steps=4",
    "--config.save_every=0",
    "--config.reward.max_retries=0",
)


@pytest.mark.nightly
def test_both_processes_mask_what_failed_on_one(tmp_path: Path) -> None:
    """In four steps: a run in which all samples of three steps are masked would end."""
    one, two = (TinyRun(tmp_path / name, *FAILING) for name in ("one", "two"))
    for run in (one, two):
        (run.folder / "reward.py").write_text(SECOND_HALF_FAILS)
    one.finish_here()
    two.finish(launcher=[*PROCESSES, TRAIN])
    expected, metrics = one.metrics(), two.metrics()
    assert list(metrics) == list(expected)
    for step in range(1, 5):
        row = expected[step]
        assert row["reward/masked_frac"] == 0.5 and row["rewards/failures"] == SAMPLES // 2
        assert_close(metrics[step], row, rtol=1e-5, atol=2e-6)
    samples = one.samples("train")
    for key, sample in two.samples("train").items():
        failed = key[1] >= SAMPLES // 2
        assert (sample["score"] is None) == bool(sample["failures"]) == failed
        assert all(samples[key][name] == sample[name] for name in ("tokens", "score"))
    weights = one.weights(4)
    for name, array in two.weights(4).items():
        np.testing.assert_allclose(array, weights[name], rtol=1e-3, atol=1e-5, err_msg=name)
