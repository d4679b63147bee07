"""A reward model, rejection sampling by its judgement, then PPO: three trainings in one run.

python scripts/train.py --config=configs/ppo_reward_rejection.py

The recipe of Llama 2 (Touvron et al. 2023, https://arxiv.org/abs/2307.09288) on sums of three
digits. The run warms the model up and trains the reward model of `ppo_reward_model.py`. Then it
fine-tunes on the best of eight answers by that reward for 40 rounds, and goes on with PPO under the
same reward.
"""

from dataclasses import replace

from jaxrl_llm import config as c
from jaxrl_llm.configs.ppo_reward_model import get_config as reward_model_config

REJECTION = c.RejectionSampling()


def get_config() -> c.Config:
    """The run; every value can be overridden on the command line."""
    base = reward_model_config()
    return replace(
        base,
        name="ppo_reward_rejection",
        total_steps=160,
        data=replace(base.data, train_batch_size=64),
        actor=replace(base.actor, ppo_mini_batch_size=32),
        rollout=replace(base.rollout, n=8),
        phases=(c.PhaseConfig(algorithm=REJECTION, steps=40),),
    )
