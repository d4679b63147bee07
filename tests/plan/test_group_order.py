"""Sample i answers prompt i // n in every field and stage: shuffled, refilled, packed."""

from dataclasses import replace
from typing import Any, ClassVar

import jax
import numpy as np
import pytest
from tiny import EXPERTS
from tiny_iteration import (
    MODEL,
    PROMPTS,
    N,
    even_tokens,
    first_states,
    packed,
    prompts,
    tiny_config,
)

from jaxrl_llm import config as c
from jaxrl_llm.config import (
    Custom,
    RewardConfig,
    RewardModelConfig,
    SupervisedConfig,
    TeacherConfig,
)
from jaxrl_llm.distributed.mesh import make_mesh
from jaxrl_llm.distributed.multihost import fetch, make_global
from jaxrl_llm.distributed.sharding import batch_sharding
from jaxrl_llm.observability.timing import Timer
from jaxrl_llm.plan.online import plan_online
from jaxrl_llm.plan.scores import ArrayReward
from jaxrl_llm.tokenizer import load_tokenizer
from jaxrl_llm.types import INPUT_FIELDS, ROLLOUT_FIELDS

# An algorithm that asks for every field there is, so that every stage runs.
EVERYTHING = """
from dataclasses import replace

import jax.numpy as jnp

from jaxrl_llm.algorithms.advantages import gae, remax
from jaxrl_llm.algorithms.algorithm import Algorithm, compose
from jaxrl_llm.algorithms.group_advantages import gdpo, rloo
from jaxrl_llm.algorithms.imitation import forward_kl_top_k
from jaxrl_llm.algorithms.policy_losses import ppo_clip
from jaxrl_llm.algorithms.value_losses import clipped_value_loss
from jaxrl_llm.config import Composed


def advantage(
    rewards, values, mask, group_ids, greedy_scores, reward_parts, sum_pi_squared,
    importance_weights,
):
    total, returns = gae(rewards, values, mask)
    total += rloo(rewards, mask, group_ids)[0] + remax(rewards, greedy_scores, mask)[0]
    total += gdpo(reward_parts, mask, group_ids)[0]
    return total + jnp.where(mask != 0, sum_pi_squared * importance_weights, 0.0), returns


def loss(
    logprobs, old_logprobs, advantages, mask, teacher_logprobs, top_logprobs, teacher_top_logprobs
):
    of_tokens = ppo_clip(logprobs, old_logprobs, advantages, mask)[0]
    of_tokens += forward_kl_top_k(top_logprobs, teacher_top_logprobs, mask)[0]
    return of_tokens - jnp.where(mask != 0, logprobs * teacher_logprobs, 0.0), {}


def not_rare(old_logprobs, mask):
    return jnp.where((mask != 0) & (old_logprobs > -3.1), mask, 0.0), {}


def everything() -> Algorithm:
    settings = Composed(
        entropy_coef=0.1, rollout_is="token", use_kl_in_reward=True, kl_coef=0.1,
        kl_controller="adaptive", use_kl_loss=True,
    )
    algorithm = compose(settings, advantage, loss, clipped_value_loss)
    return replace(algorithm, rejection=not_rare)
"""


class OfSteps(ArrayReward):
    """Some of each score belongs to its tokens, the later ones more."""

    lengths: ClassVar[list[np.ndarray]] = []

    def score(self, context: Any, step: int, answers: Any) -> Any:
        self.lengths[:] = [answers.lengths]
        return super().score(context, step, answers)

    def left_out(self, context: Any, rows: int) -> np.ndarray:
        return (self.lengths[0] == 1).astype(np.float32)

    def step_rewards(self, context: Any, shape: tuple[int, int]) -> np.ndarray:
        place = np.arange(shape[1])
        return np.where(place < self.lengths[0][:, None], (place + 1) / 10, 0).astype(np.float32)


@pytest.mark.slow
@pytest.mark.parametrize("row_tokens", [33, 0])
def test_groups_in_another_order_give_every_field_in_that_order(row_tokens, tmp_path):
    """Three slots take 32 samples, so the order of the groups decides who fills which.

    Every field of the batch is written, so a new stage is covered by itself.
    """
    file = tmp_path / "everything.py"
    file.write_text(EVERYTHING)
    config = tiny_config(model_reward=False)
    function = c.ExactAnswer()
    config = replace(
        config,
        actor=replace(
            config.actor,
            hf_config=MODEL | EXPERTS | {"num_hidden_layers": 1},  # whose routes are a field
            ppo_mini_batch_size=PROMPTS,
            ppo_epochs=1,
        ),
        critic=replace(config.critic, ppo_epochs=1),
        reward=RewardConfig(
            functions=(function,), model=RewardModelConfig(weight=0.5), process_rewards=True
        ),
        teacher=TeacherConfig(training=SupervisedConfig(), top_k=3),
        algorithm=Custom(path=f"{file}:everything"),
    )
    config = replace(config, rollout=replace(config.rollout, top_k=20))  # for rollout_kept
    config = packed(config, row_tokens) if row_tokens else config
    mesh = make_mesh(devices=jax.devices()[:1])
    reward = OfSteps(even_tokens, masks=True)
    (iteration,) = plan_online(config, load_tokenizer("char"), mesh, reward).phases

    def run(batch):
        batch = make_global(batch, batch_sharding(mesh))
        states, batch, metrics = iteration.program.run(
            first_states(iteration), batch, 1, None, Timer()
        )
        return fetch(batch), fetch(metrics)

    groups = np.random.default_rng(3).permutation(PROMPTS)
    rows = (groups[:, None] * N + np.arange(N)).reshape(-1)
    batch, metrics = run(prompts(config))
    moved, moved_metrics = run(jax.tree.map(lambda x: x[rows], prompts(config)))
    # Only of responses in parts, as test_executor.py makes them.
    assert batch.policy_versions is None
    for name in set(ROLLOUT_FIELDS) - {"policy_versions"}:
        x, y = getattr(batch, name), getattr(moved, name)
        assert x is not None, f"no stage of this test writes {name}: have EVERYTHING ask for it"
        assert len(np.unique(np.asarray(x), axis=0)) > 1, f"all samples have the same {name}"
        if np.issubdtype(x.dtype, np.integer) or name == "mask":
            np.testing.assert_array_equal(y, x[rows], err_msg=name)
        else:
            assert x.dtype == np.float32, name
            np.testing.assert_allclose(y, x[rows], rtol=2e-4, atol=2e-4, err_msg=name)
    # And the updates, which see no order either.
    for name in ("actor/grad_norm", "critic/grad_norm", "actor/pg_loss", "critic/vf_loss"):
        np.testing.assert_allclose(moved_metrics[name], metrics[name], rtol=2e-3, err_msg=name)
    assert set(INPUT_FIELDS) < set(ROLLOUT_FIELDS) and metrics["actor/grad_norm"] > 0
