"""Samples that are left out move no weight and no metric, whatever their scores are."""

from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
from tiny_iteration import even_tokens, first_states, prompts, tiny_config

from jaxrl_llm import config as c
from jaxrl_llm.distributed.mesh import make_mesh
from jaxrl_llm.distributed.multihost import fetch, make_global
from jaxrl_llm.distributed.sharding import batch_sharding
from jaxrl_llm.observability.timing import Timer
from jaxrl_llm.plan.online import plan_online
from jaxrl_llm.plan.scores import ArrayReward
from jaxrl_llm.plan.stages import KL_CONTROLLER
from jaxrl_llm.tokenizer import load_tokenizer

LEFT_OUT = (1, 6, 7)


class SomeFail(ArrayReward):
    """Rewards of which some fail."""

    def left_out(self, context: Any, rows: int) -> np.ndarray:
        failed = np.zeros(rows, np.float32)
        failed[list(LEFT_OUT)] = 1.0
        return failed


class Steps:
    """First steps of a run; `score` replaces the scores of the samples that are left out."""

    def __init__(self, config: c.Config) -> None:
        self._score = 0.0
        host = SomeFail(self._reward, masks=True)
        mesh = make_mesh(devices=jax.devices()[:1])
        (self._phase,) = plan_online(config, load_tokenizer("char"), mesh, host).phases

    def _reward(self, responses: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        scores = even_tokens(responses, lengths)
        scores[list(LEFT_OUT)] = self._score
        return scores

    def run(self, score: float) -> tuple[dict[str, Any], Any, dict[str, Any]]:
        self._score = score
        phase = self._phase
        batch = make_global(prompts(phase.config), batch_sharding(phase.mesh))
        states, batch, metrics = phase.program.run(first_states(phase), batch, 1, None, Timer())
        learned = {"actor": states["actor"].params, "kl": states.get(KL_CONTROLLER)}
        return fetch(learned), fetch(batch), fetch(metrics)


@pytest.mark.parametrize(
    "algorithm",
    [
        c.PPO(use_kl_in_reward=True, kl_coef=0.05, kl_controller="adaptive", kl_horizon=10.0),
        pytest.param(c.GRPO(rollout_is="token", rollout_is_batch_normalize=True,
                            rollout_rs="seq_mean_k1", rollout_rs_threshold="0.5_2"),
                     marks=pytest.mark.nightly),
        pytest.param(c.GPG(), marks=pytest.mark.slow),
        pytest.param(c.ClipCov(), marks=pytest.mark.slow),
    ],
    ids=["ppo", "corrected", "gpg", "clip_cov"],
)  # fmt: skip
def test_the_score_of_a_sample_that_is_left_out_moves_nothing(algorithm: Any) -> None:
    steps = Steps(replace(tiny_config(model_reward=False), algorithm=algorithm))
    low, batch, metrics = steps.run(0.0)
    high, _, other = steps.run(1000.0)
    jax.tree.map(np.testing.assert_array_equal, low, high)
    jax.tree.map(np.testing.assert_array_equal, metrics, other)
    assert metrics["reward/masked_frac"] == pytest.approx(len(LEFT_OUT) / len(batch.scores))
    assert not batch.advantages[list(LEFT_OUT)].any()
    kept = np.setdiff1d(np.arange(len(batch.scores)), LEFT_OUT)
    assert metrics["critic/score/mean"] == pytest.approx(batch.scores[kept].mean())
    if isinstance(algorithm, c.PPO):  # the policy is the reference, so the KL is 0
        moved = 1 - 0.2 * len(kept) / algorithm.kl_horizon
        assert low["kl"] == pytest.approx(algorithm.kl_coef * moved, rel=1e-6)


@pytest.mark.nightly
def test_truncated_samples_of_a_model_reward_are_left_out() -> None:
    config = tiny_config(algorithm={"use_kl_in_reward": False})
    config = replace(config, rollout=replace(config.rollout, mask_truncated=True))
    mesh = make_mesh(devices=jax.devices()[:1])
    (phase,) = plan_online(config, load_tokenizer("char"), mesh, None).phases
    batch = make_global(prompts(config), batch_sharding(phase.mesh))
    _, batch, metrics = phase.program.run(first_states(phase), batch, 1, None, Timer())
    batch = fetch(batch)
    last = batch.responses[np.arange(len(batch.scores)), batch.response_lengths - 1]
    stopped = np.isin(last, config.rollout.stop_token_ids)
    truncated = batch.sample_mask == 0
    assert truncated.any() and not truncated.all()
    assert (batch.response_lengths[truncated] == config.data.max_response_length).all()
    assert stopped.any() and not stopped[truncated].any()
    assert not batch.advantages[truncated].any()
    assert fetch(metrics)["reward/masked_frac"] == pytest.approx(truncated.mean())
