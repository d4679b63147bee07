"""A reference that follows the policy: the formula, an exact resume, and its place on disk."""

import numpy as np
import pytest
from test_run import SMALL, config_of
from tiny_run import TinyRun, assert_same_bits

from jaxrl_llm.checkpoint.manager import stored_roles
from jaxrl_llm.config import ConfigError
from jaxrl_llm.trainer.loop import train

FLAGS = {
    "algorithm": '{"kind": "grpo"}',
    "reference": '{"refresh_every": 2, "mixup_alpha": 0.75}',
    "total_steps": "5",
    "save_every": "1",
    "checkpoint.keep_latest": "9",
}


def weights_of(run: TinyRun, role: str, step: int) -> dict[str, np.ndarray]:
    weights = run.weights(step).items()
    return {name.removeprefix(role): x for name, x in weights if name.startswith(f"{role}[")}


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> TinyRun:
    run, config = config_of(tmp_path_factory.mktemp("whole"), **FLAGS)
    train(config)
    return run


def test_every_two_steps_it_moves_towards_the_policy(whole):
    """reference = 0.75 policy + 0.25 reference after steps 2 and 4, before the next one."""
    first, policy = weights_of(whole, "reference", 0), weights_of(whole, "actor", 2)
    assert first and first.keys() == policy.keys()
    assert_same_bits(weights_of(whole, "reference", 2), first)
    second = weights_of(whole, "reference", 3)
    for name, x in second.items():
        mixed = np.float32(0.25) * first[name] + np.float32(0.75) * policy[name]
        np.testing.assert_allclose(x, mixed, rtol=1e-6, atol=1e-7)
        assert not np.array_equal(x, first[name])
    assert_same_bits(weights_of(whole, "reference", 4), second)
    assert "reference" in stored_roles(whole.step_path(3))
    assert not (whole.checkpoints / "frozen").exists()


@pytest.mark.nightly
@pytest.mark.parametrize("step", [2, 3])
def test_a_resume_has_the_same_bits(tmp_path, whole, step):
    """From 2 on, the resume begins with a refresh."""
    again, config = config_of(tmp_path, **FLAGS, resume=str(whole.step_path(step)))
    train(config)
    assert_same_bits(again.weights(5), whole.weights(5))


@pytest.mark.nightly
def test_a_killed_run_goes_on_with_the_same_bits(tmp_path, whole):
    words = [f"--config.{name}={value}" for name, value in (SMALL | FLAGS).items()]
    again = TinyRun(tmp_path, *words)
    again.pause_at(5)
    again.kill_when(again.paused)
    again.unpause()
    again.finish()
    assert_same_bits(again.weights(5), whole.weights(5))
    assert again.metrics() == whole.metrics()


def test_what_cannot_follow_is_refused(tmp_path):
    follows = {"reference": '{"refresh_every": 1}'}
    with pytest.raises(ConfigError, match="frozen base of the adapters"):
        config_of(tmp_path, algorithm='{"kind": "grpo"}', actor__lora='{"rank": 2}', **follows)
    with pytest.raises(ConfigError, match="its log-probs would change"):
        config_of(tmp_path, algorithm="dpo", precompute_reference="true", **follows)
