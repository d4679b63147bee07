"""Two processes of one device each run to the metrics of one process of one device."""

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
)

LAUNCH = [
    *(sys.executable, "-m", "jaxrl_llm.launch.local", "--processes=2", "--"),
    str(REPOSITORY / "scripts" / "train.py"),
]
STEPS, RESUMED_FROM = TOTAL_STEPS, TOTAL_STEPS - SAVE_EVERY


@pytest.fixture(scope="module")
def one(ppo_run: TinyRun) -> TinyRun:
    return ppo_run


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    run = TinyRun(tmp_path_factory.mktemp("two"))
    run.finish(launcher=LAUNCH)
    return run


def test_metrics_are_those_of_one_process(one: TinyRun, two: TinyRun) -> None:
    expected, found = one.metrics(), two.metrics()
    assert list(found) == list(expected) == list(range(STEPS + 1))
    for step, row in expected.items():
        assert_close(found[step], row, rtol=1e-5, atol=2e-6)


def test_process_0_alone_writes_metrics(two: TinyRun) -> None:
    assert [p.name for p in two.run_dir.glob("metrics*")] == ["metrics.jsonl"]
    assert len(list((two.run_dir / "tensorboard").iterdir())) == 1
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


def test_weights_are_those_of_one_process(one: TinyRun, two: TinyRun) -> None:
    expected, found = one.weights(STEPS), two.weights(STEPS)
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_allclose(found[name], array, rtol=1e-3, atol=1e-5, err_msg=name)


def test_two_processes_resume(tmp_path: Path, two: TinyRun) -> None:
    run = TinyRun(tmp_path)
    shutil.copytree(two.run_dir, run.run_dir)
    shutil.rmtree(run.step_path(STEPS))
    (run.run_dir / "config.json").unlink()  # it names the other folder's reward
    output = run.finish(launcher=LAUNCH)
    assert output.count(f"resumed from {run.step_path(RESUMED_FROM)}") == 1
    assert run.metrics() == two.metrics()
    assert run.samples("train") == two.samples("train")
    assert_same_bits(run.weights(STEPS), two.weights(STEPS))
