"""GRPO on sums of three digits, from random weights, on two CPU cores.

python scripts/train.py --config=configs/grpo.py

The default run without its critic: each prompt is answered eight times, and a sample is compared
with the other seven (Shao et al. 2024, https://arxiv.org/abs/2402.03300).
"""

from dataclasses import replace

from jaxrl_llm import config as c
from jaxrl_llm.configs.ppo import get_config as ppo_config


def get_config() -> c.Config:
    """The run; every value can be overridden on the command line."""
    base = ppo_config()
    return replace(
        base,
        name="grpo",
        data=replace(base.data, train_batch_size=64),
        actor=replace(base.actor, ppo_mini_batch_size=32),
        rollout=replace(base.rollout, n=8),
        algorithm=c.GRPO(),
    )
