"""REINFORCE++ on sums of three digits, from random weights, on two CPU cores.

python scripts/train.py --config=configs/reinforce_plus_plus.py

REINFORCE++ has no critic and no groups (Hu 2025, https://arxiv.org/abs/2501.03262). Each of 512
prompts is answered once. The return, less its KL to the warmed-up model, is whitened over the
batch.
"""

from dataclasses import replace

from jaxrl_llm import config as c
from jaxrl_llm.configs.ppo import get_config as ppo_config


def get_config() -> c.Config:
    """The run; every value can be overridden on the command line."""
    base = ppo_config()
    return replace(
        base,
        name="reinforce_plus_plus",
        data=replace(base.data, train_batch_size=512),
        actor=replace(base.actor, ppo_mini_batch_size=256),
        rollout=replace(base.rollout, n=1),
        algorithm=c.ReinforcePlusPlus(use_kl_in_reward=True),
    )
