"""Generating ahead on one group of devices: two processes do what one does."""

import sys
from pathlib import Path

import pytest
from tiny_run import REPOSITORY, TinyRun, assert_close

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
