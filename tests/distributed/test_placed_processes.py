"""Roles on different processes: the metrics of one process, at the same time."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from in_process import launch_here
from placed_steps import small_config
from tiny_iteration import OF_THE_DECODE_LOOP, first_states, open_iteration, run_step
from tiny_run import REPOSITORY

pytestmark = pytest.mark.nightly

STEPS = 3  # that are compared
MORE_STEPS = 12  # in one of which updates overlap, also on a busy machine
GROUPS = {"critic": "node1:0", "reference": "critic", "rollout": "node2:0", "actor": "node0:0"}


def placed(folder: Path, processes: int, placement: dict[str, Any]) -> list[dict[str, Any]]:
    """What each process found of the steps."""
    script = [str(REPOSITORY / "tests" / "placed_steps.py"), str(folder), json.dumps(placement)]
    words = [f"--processes={processes}", "--", *script, str(STEPS + MORE_STEPS)]
    result = launch_here(*words)
    assert result.returncode == 0, result.stdout + result.stderr
    return [json.loads((folder / f"{i}.json").read_text()) for i in range(processes)]


@pytest.fixture(scope="module")
def expected() -> list[dict[str, Any]]:
    """The metrics of the same steps in one process on one device."""
    iteration = open_iteration(small_config({}))
    states, found = first_states(iteration), []
    for step in range(1, STEPS + 1):
        states, _, metrics = run_step(iteration, states, step)
        found.append(metrics)
    return found


def check_metrics(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """Every process knows the metrics of all groups, and they equal one process's."""
    for each in found:
        assert [s["metrics"] for s in each["steps"]] == [s["metrics"] for s in found[0]["steps"]]
    for step, metrics in zip(found[0]["steps"][:STEPS], expected, strict=True):
        one = step["metrics"]
        assert one["perf/moved_between_groups_gb"] > 0
        numbers = {name for name, x in metrics.items() if np.ndim(x) == 0}
        assert numbers <= one.keys()
        for name in numbers - OF_THE_DECODE_LOOP:
            np.testing.assert_allclose(one[name], metrics[name], 1e-5, 2e-6, err_msg=name)


def span(found: dict[str, Any], step: int, stage: str) -> tuple[float, float]:
    """When a process was in the segment that has this stage."""
    spans = found["steps"][step]["spans"]
    ((_, began, ended),) = [each for each in spans if stage in each[0].split("+")]
    return began, ended


def overlap(one: tuple[float, float], other: tuple[float, float]) -> bool:
    return max(one[0], other[0]) < min(one[1], other[1])


def stages(found: dict[str, Any]) -> set[str]:
    """The device stages that a process entered."""
    names = {name for step in found["steps"] for name, _, _ in step["spans"]}
    return {stage for name in names for stage in name.split("+")}


def test_a_critic_in_another_process_gives_the_metrics_of_one(tmp_path, expected):
    found = placed(tmp_path, 2, {"critic": 1})
    check_metrics(found, expected)
    assert [each["held"] for each in found] == [["actor", "kl_controller", "reference"], ["critic"]]
    # A process runs the programs of its own devices only.
    assert not stages(found[0]) & {"values", "update_critic"}
    assert stages(found[1]) == {"values", "update_critic", "reward"}
    # In a step that compiles nothing.
    pairs = [
        (span(found[0], step, "update_actor"), span(found[1], step, "update_critic"))
        for step in range(1, STEPS + MORE_STEPS)
    ]
    assert any(overlap(*pair) for pair in pairs), pairs
    for each in found:  # the times that the other process measured
        timings = each["steps"][-1]["timings"]
        assert timings["update_actor"] > 0 and timings["update_critic"] > 0


def test_a_critic_over_all_processes_takes_turns_with_an_actor_on_one(tmp_path, expected):
    found = placed(tmp_path, 2, {"actor": "node0:0", "critic": "node0:0;node1:0"})
    check_metrics(found, expected)
    assert [each["held"] for each in found] == [
        ["actor", "critic", "kl_controller", "reference"],
        ["critic"],
    ]
    assert stages(found[1]) == {"values", "update_critic", "reward"}


@pytest.mark.slow
def test_generation_in_another_process_gives_the_metrics_of_one(tmp_path, expected):
    found = placed(tmp_path, 2, {"rollout": "1"})
    check_metrics(found, expected)
    assert found[1]["held"] == [] and "gen" in stages(found[1])
    assert "gen" not in stages(found[0])
    weights = [step["metrics"]["perf/rollout_weights_gb"] for step in found[0]["steps"]]
    assert min(weights) > 0


@pytest.mark.slow
def test_four_processes_have_three_groups(tmp_path, expected):
    """The fourth has the second half of the rollout."""
    found = placed(tmp_path, 4, {**GROUPS, "rollout": "node2:0;node3:0"})
    check_metrics(found, expected)
    assert [each["held"] for each in found] == [
        ["actor", "kl_controller"],
        ["critic", "reference"],
        [],
        [],
    ]
    assert all("gen" in stages(each) for each in found[2:])
    pairs = [
        (span(found[0], step, "update_actor"), span(found[1], step, "update_critic"))
        for step in range(1, STEPS + MORE_STEPS)
    ]
    assert any(overlap(*pair) for pair in pairs), pairs
