"""What the plan of an online run settles before any array exists."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from test_online_algorithms import config_of
from tiny_iteration import even_tokens, open_iteration, tiny_config

from jaxrl_llm.config import (
    ConfigError,
    FilterGroupsConfig,
    OptimizerConfig,
    PhaseConfig,
)
from jaxrl_llm.distributed.mesh import make_mesh
from jaxrl_llm.plan.online import plan_online
from jaxrl_llm.plan.scores import ArrayReward
from jaxrl_llm.program.stage import HOST
from jaxrl_llm.tokenizer import CharTokenizer

DECAY = OptimizerConfig(learning_rate=8.0, schedule="linear")


def planned(config):
    mesh = make_mesh(devices=jax.devices()[:1])
    return plan_online(config, CharTokenizer(), mesh, ArrayReward(even_tokens))


def rate_at(plan, role: str, optimizer_step: int) -> float:
    return float(plan.roles[role].optimizer.learning_rate(np.int32(optimizer_step)))


def test_the_decay_of_the_actor_counts_the_steps_that_it_takes():
    """Of 10 iterations the actor waits 4: 6 iterations of 2 mini-batches are 12 steps, not 20."""
    config = tiny_config(model_reward=False)
    config = replace(
        config,
        total_steps=10,
        actor=replace(config.actor, ppo_epochs=1, optimizer=DECAY),
        critic=replace(config.critic, ppo_epochs=1, optimizer=DECAY, warmup_steps=4),
    )
    plan = planned(config)
    np.testing.assert_allclose(rate_at(plan, "actor", 6), 4.0, rtol=1e-6)
    assert rate_at(plan, "actor", 12) == 0.0 < rate_at(plan, "actor", 11)
    np.testing.assert_allclose(rate_at(plan, "critic", 10), 4.0, rtol=1e-6)

    # A phase without a critic lets the actor learn, though the warm-up is not over.
    phase = PhaseConfig(algorithm=config_of("grpo").algorithm, steps=3)
    first = PhaseConfig(algorithm=config.algorithm, steps=2)
    phases = planned(replace(config, phases=(first, phase)))  # waits in steps 1 and 2 alone
    assert [it.config.critic.warmup_steps for it in phases.phases] == [4, 4, 4]
    assert rate_at(phases, "actor", 16) == 0.0 < rate_at(phases, "actor", 15)
    # The critic learns in the other 7 iterations, also where nothing warms up.
    cold = replace(config, phases=(first, phase), critic=replace(config.critic, warmup_steps=0))
    for plan in (phases, planned(cold)):
        assert rate_at(plan, "critic", 14) == 0.0 < rate_at(plan, "critic", 13)
    assert rate_at(plan, "actor", 20) == 0.0 < rate_at(plan, "actor", 19)


def test_a_critic_that_learns_alone_leaves_steps_to_the_actor():
    """Without a critic the actor learns in all steps, whatever the key says."""
    config = tiny_config(model_reward=False)
    alone = replace(config, total_steps=5, critic=replace(config.critic, warmup_steps=5))
    with pytest.raises(ConfigError, match=r"critic.warmup_steps=5.*total_steps=6 works"):
        planned(alone)
    planned(replace(alone, total_steps=6))
    planned(replace(alone, algorithm=config_of("grpo").algorithm))


@pytest.mark.parametrize("kl", [True, False])
def test_rewards_of_steps_reach_the_rewards_of_tokens(kl):
    config = tiny_config(model_reward=False, algorithm={"use_kl_in_reward": kl})
    plan = planned(replace(config, reward=replace(config.reward, process_rewards=True)))
    stages = {stage.name: stage for stage in plan.phases[0].stages}
    assert "step_rewards" in stages["reward"].writes and "step_rewards" in stages["kl"].reads
    assert stages["reward"].shapes(12)["step_rewards"].shape == (12, 5)
    assert "step_rewards" not in {
        field for stage in planned(config).phases[0].stages for field in stage.reads
    }


class PadsOutside(CharTokenizer):
    """Pads with an id that models of 24 tokens do not have."""

    pad_id = 24


def test_padding_that_is_no_token_of_the_model_is_refused_with_both_sizes():
    mesh = make_mesh(devices=jax.devices()[:1])
    with pytest.raises(ValueError, match="padding id 24 is .*vocabulary of 24 tokens .*has 96"):
        plan_online(tiny_config(), PadsOutside(), mesh, None)


def test_dynamic_sampling_repeats_every_host_stage():
    """A host stage needs the prompts of its round: ReMax scores greedy answers on the host."""
    config = config_of("remax")
    groups = FilterGroupsConfig(enable=True)
    iteration = open_iteration(
        replace(config, rollout=replace(config.rollout, filter_groups=groups))
    )
    collected = [stage.name for segment in iteration.collecting for stage in segment.stages]
    assert set(collected) == {"gen", "gen_max", "reward", "reward_max"}
    assert not [s for segment in iteration.learning for s in segment.stages if s.role == HOST]
