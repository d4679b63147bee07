"""Whole runs with roles on different processes: their metrics, and resuming after a kill."""

import sys
from pathlib import Path

import pytest
from tiny_run import REPOSITORY, TOTAL_STEPS, TinyRun, assert_close, assert_same_bits

TRAIN = str(REPOSITORY / "scripts" / "train.py")
LAUNCH = [sys.executable, "-m", "jaxrl_llm.launch.local"]
KILLED_IN, RESUMED_FROM = 7, 6
CRITIC = ("--config.placement.critic=1",)
ROLLOUT = (
    "--config.placement.rollout=inference",
    "--config.node_groups.train={count: 1, gpus_per_node: 1}",
    "--config.node_groups.inference={count: 1, gpus_per_node: 1}",
)
THREE_GROUPS = (
    "--config.mesh.fsdp=2",
    "--config.placement.actor=node0:0;node1:0",
    "--config.placement.critic=node2:0",
    "--config.placement.reference=critic",
    "--config.placement.rollout=node3:0",
)

AHEAD = (*ROLLOUT, "--config.max_staleness=1")
AHEAD_IN_ONE = ("--devices=2", "--config.placement.rollout=1", "--config.max_staleness=1")

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("processes", "flags"),
    [(2, CRITIC), (2, ROLLOUT), (4, THREE_GROUPS), (2, AHEAD)],
    ids=["critic", "rollout", "three groups", "ahead"],
)
def test_a_run_is_that_of_one_process_and_resumes_exactly(
    processes: int, flags: tuple[str, ...], tmp_path: Path, ppo_run: TinyRun
) -> None:
    launcher = [*LAUNCH, f"--processes={processes}", "--", TRAIN]
    whole = TinyRun(tmp_path / "whole", *flags)
    whole.finish(launcher=launcher)
    one = ppo_run
    if flags is AHEAD:
        one = TinyRun(tmp_path / "one", *AHEAD_IN_ONE)
        one.finish()
    expected, found = one.metrics(), whole.metrics()
    assert list(found) == list(expected) == list(range(TOTAL_STEPS + 1))
    for step, row in expected.items():
        assert_close(found[step], row, rtol=1e-5, atol=2e-6)
    samples = whole.samples("train")
    for key, sample in one.samples("train").items():
        assert samples[key]["tokens"] == sample["tokens"], key

    run = TinyRun(tmp_path / "killed", *flags)
    run.pause_at(KILLED_IN)
    with run.process(launcher=launcher) as process:
        saved = run.step_path(RESUMED_FROM)
        run.wait_for(lambda: run.paused() and saved.exists(), process)
    run.unpause()
    output = run.finish(launcher=launcher)
    assert output.count(f"resumed from {saved}") == 1
    assert run.metrics() == whole.metrics()
    assert run.samples("train") == whole.samples("train")
    assert run.events() == whole.events()
    assert_same_bits(run.weights(TOTAL_STEPS), whole.weights(TOTAL_STEPS))
