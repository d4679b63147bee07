"""Processes with two devices and with one: groups that say so, and a refusal without them."""

import sys
from pathlib import Path

import pytest
from tiny_run import REPOSITORY, TinyRun, assert_close

TRAIN = str(REPOSITORY / "tests" / "uneven_train.py")
LAUNCHER = [sys.executable, "-m", "jaxrl_llm.launch.local", "--processes=2", "--", TRAIN]
SHORT = ("--config.mesh.fsdp=2", "--config.total_steps=2", "--config.validation.every=0")
GROUPS = (
    "--config.placement.rollout=inference",
    "--config.node_groups.train={count: 1, gpus_per_node: 2}",
    "--config.node_groups.inference={count: 1, gpus_per_node: 1}",
)


@pytest.mark.slow
def test_a_run_is_that_of_one_process_and_goes_on(tmp_path: Path) -> None:
    run, one = TinyRun(tmp_path / "two", *SHORT, *GROUPS), TinyRun(tmp_path / "one", *SHORT)
    run.finish(launcher=LAUNCHER)
    one.finish("--devices=3", "--config.placement.rollout=2")
    for step, row in one.metrics().items():
        assert_close(run.metrics()[step], row, rtol=1e-5, atol=2e-6)
    output = run.finish("--config.total_steps=3", launcher=LAUNCHER)
    assert f"resumed from {run.step_path(2)}" in output and run.saved_steps()[-1] == 3


@pytest.mark.nightly
def test_one_group_over_them_is_refused(tmp_path: Path) -> None:
    run = TinyRun(tmp_path, *SHORT)
    output = run.finish(launcher=LAUNCHER, code=2)
    assert "the processes have 2, 1 devices; start all with the same number" in output
