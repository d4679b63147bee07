"""GPG on sums of three digits, from random weights, on two CPU cores.

python scripts/train.py --config=configs/gpg.py

Group policy gradient (Chu et al. 2025, https://arxiv.org/abs/2504.02546): plain REINFORCE on a
sample's reward less the mean of its group. There is no ratio, so no pass computes the old policy,
and one optimizer step an iteration keeps it on-policy.
"""

from dataclasses import replace

from jaxrl_llm import config as c
from jaxrl_llm.configs.grpo import get_config as grpo_config


def get_config() -> c.Config:
    """The run; every value can be overridden on the command line."""
    base = grpo_config()
    return replace(
        base,
        name="gpg",
        total_steps=400,  # as many optimizer steps as the other runs have in 200
        actor=replace(base.actor, ppo_mini_batch_size=base.data.train_batch_size),
        algorithm=c.GPG(),
    )
