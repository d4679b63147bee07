"""Generating ahead: two processes do what one does, and resume exactly."""

import shutil
import sys
from pathlib import Path

import pytest
from tiny_run import REPOSITORY, TinyRun, assert_close, assert_same_bits

LAUNCH = [
    *(sys.executable, "-m", "jaxrl_llm.launch.local", "--processes=2", "--"),
    str(REPOSITORY / "scripts" / "train.py"),
]
FLAGS = (
    "--config.total_steps=4",
    "--config.mesh.data=2",
    "--config.max_staleness=2",
    "--config.partial_rollouts=1",
    "--config.data.priority=failure_rate",
)
FILTERED = (
    "--config.total_steps=4",
    "--config.save_every=1",
    "--config.checkpoint.keep_latest=9",
    "--config.warmup=null",
    "--config.placement.rollout=1",
    "--config.max_staleness=1",
    "--config.algorithm=dapo",
    "--config.rollout.filter_groups.enable=true",
    "--config.rollout.filter_groups.shortage=fill",
    "--config.rollout.filter_groups.max_num_gen_batches=3",
    "--config.data.priority=failure_rate",
)


@pytest.mark.slow
def test_two_processes_generate_ahead_what_one_does(tmp_path: Path) -> None:
    one, two = TinyRun(tmp_path / "one", *FLAGS), TinyRun(tmp_path / "two", *FLAGS)
    one.finish("--devices=2")
    two.finish(launcher=LAUNCH)
    expected, found = one.samples("train"), two.samples("train")
    assert found.keys() == expected.keys()
    for key, sample in expected.items():
        for name in ("tokens", "policy_version", "last_policy_version"):
            assert found[key][name] == sample[name], key
    metrics = two.metrics()
    assert metrics[4]["rollout/continued"] > 0
    for step, row in one.metrics().items():
        assert_close(metrics[step], row, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_two_processes_filter_ahead_the_groups_of_one_and_resume_exactly(tmp_path: Path) -> None:
    one, two = TinyRun(tmp_path / "one", *FILTERED), TinyRun(tmp_path / "two", *FILTERED)
    one.finish("--devices=2")
    two.finish(launcher=LAUNCH)
    found, metrics = two.samples("train"), two.metrics()
    assert max(row.get("train/num_gen_batches", 0) for row in metrics.values()) > 1
    for key, sample in one.samples("train").items():
        for name in ("tokens", "policy_version", "score"):
            assert found[key][name] == sample[name], key
        assert sample["policy_version"] == max(0, key[0] - 2)
    for step, row in one.metrics().items():
        assert_close(metrics[step], row, rtol=1e-4, atol=1e-5)
    again = TinyRun(tmp_path / "again", *FILTERED)
    shutil.copytree(two.run_dir, again.run_dir)
    for step in (3, 4):
        shutil.rmtree(again.step_path(step))
    (again.run_dir / "config.json").unlink()  # it names the other folder's reward
    assert f"resumed from {again.step_path(2)}" in again.finish(launcher=LAUNCH)
    assert again.metrics() == metrics
    assert again.samples("train") == found
    assert_same_bits(again.weights(4), two.weights(4))
