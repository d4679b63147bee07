"""Generating ahead: which policy answers which prompts, and that it is corrected for."""

from pathlib import Path
from typing import Any

import pytest
from tiny_run import TinyRun

from jaxrl_llm.config import ConfigError, load_config
from jaxrl_llm.trainer.run import train

STEPS = 4
APART = {"placement.rollout": "1"}


def run(folder: Path, **changes: Any) -> TinyRun:
    tiny = TinyRun(folder)
    overrides = {"run_dir": str(tiny.run_dir), "total_steps": str(STEPS), "warmup.steps": "2"}
    train(load_config(str(folder / "tiny.py"), list((overrides | changes).items())))
    return tiny


def tokens_of(tiny: TinyRun, step: int) -> list[Any]:
    return [s["tokens"] for (at, _), s in sorted(tiny.samples("train").items()) if at == step]


@pytest.fixture(scope="module")
def resting(tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    """A run whose policy never changes."""
    folder = tmp_path_factory.mktemp("resting")
    return run(folder, **{"actor.optimizer.learning_rate": "0"})


@pytest.mark.parametrize("staleness", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_the_policy_of_a_batch_follows_from_its_step(tmp_path, resting, staleness):
    ahead = run(tmp_path, **APART, **{"max_staleness": str(staleness)})
    metrics = ahead.metrics()
    versions = [max(0, step - 1 - staleness) for step in range(1, STEPS + 1)]
    found = [metrics[step]["rollout/staleness"] for step in range(1, STEPS + 1)]
    assert found == [step - 1 - versions[step - 1] for step in range(1, STEPS + 1)]
    traced = {
        step: sample["policy_version"] for (step, _), sample in ahead.samples("train").items()
    }
    assert [traced[step] for step in range(1, STEPS + 1)] == versions
    for step, version in enumerate(versions, start=1):
        # The first policy's answers are those of a policy that never learns.
        same = tokens_of(ahead, step) == tokens_of(resting, step)
        assert same == (version == 0), step
        assert "rollout_corr/rollout_is_mean" in metrics[step]  # on by itself
    assert "rollout_corr/rollout_is_mean" not in resting.metrics()[1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "--config.placement.rollout=4-7"),
        (APART | {"algorithm": "rejection_sampling"}, "with config.algorithm=rejection_sampling"),
        (APART | {"data.priority": "failure_rate"}, "does not work with config.data.priority"),
        (
            APART | {"algorithm": "grpo", "rollout.filter_groups.enable": "true"},
            "does not work with config.rollout.filter_groups.enable",
        ),
    ],
)
def test_what_cannot_be_generated_ahead_is_refused(tmp_path, changes, message):
    TinyRun(tmp_path)
    changes = changes | {"max_staleness": "1"}
    with pytest.raises(ConfigError, match=message):
        load_config(str(tmp_path / "tiny.py"), list(changes.items()))
