"""RLOO on sums of three digits, from random weights, on two CPU cores.

python scripts/train.py --config=configs/rloo.py

REINFORCE with leave-one-out baselines (Ahmadian et al. 2024, https://arxiv.org/abs/2402.14740). A
sample's reward, less its KL to the warmed-up model, is compared with the mean of the others that
answer the same prompt.
"""

from dataclasses import replace

from jaxrl_llm import config as c
from jaxrl_llm.configs.grpo import get_config as grpo_config


def get_config() -> c.Config:
    """The run; every value can be overridden on the command line."""
    return replace(
        grpo_config(),
        name="rloo",
        algorithm=c.RLOO(use_kl_in_reward=True),
    )
