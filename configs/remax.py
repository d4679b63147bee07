"""ReMax on sums of three digits, from random weights, on two CPU cores.

python scripts/train.py --config=configs/remax.py

ReMax has no critic and no groups (Li et al. 2023, https://arxiv.org/abs/2310.10505). Each of 512
prompts is answered twice, by a sample and greedily. The greedy answer's reward is the baseline.
"""

from dataclasses import replace

from jaxrl_llm import config as c
from jaxrl_llm.configs.ppo import get_config as ppo_config


def get_config() -> c.Config:
    """The run; every value can be overridden on the command line."""
    base = ppo_config()
    return replace(
        base,
        name="remax",
        total_steps=300,  # it learns more slowly: 200 end at 0.90
        data=replace(base.data, train_batch_size=512),
        actor=replace(base.actor, ppo_mini_batch_size=256),
        rollout=replace(base.rollout, n=1),
        algorithm=c.ReMax(use_kl_in_reward=True),
    )
