"""OPO on sums of three digits, from random weights, on two CPU cores.

python scripts/train.py --config=configs/opo.py

On-policy RL with the optimal reward baseline (Hao et al. 2025, https://arxiv.org/abs/2505.23585): a
sample is compared with its group's mean reward weighted by length. Exactly on-policy: one optimizer
step an iteration, no KL.
"""

from dataclasses import replace

from jaxrl_llm import config as c
from jaxrl_llm.configs.grpo import get_config as grpo_config


def get_config() -> c.Config:
    """The run; every value can be overridden on the command line."""
    base = grpo_config()
    return replace(
        base,
        name="opo",
        total_steps=400,  # as many optimizer steps as the other runs have in 200
        actor=replace(base.actor, ppo_mini_batch_size=base.data.train_batch_size),
        algorithm=c.OPO(),
    )
