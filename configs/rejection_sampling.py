"""Rejection-sampling fine-tuning on sums of three digits, from random weights, on two CPU cores.

python scripts/train.py --config=configs/rejection_sampling.py

RAFT (Dong et al. 2023, https://arxiv.org/abs/2304.06767): the warmed-up model of `ppo.py` answers
each prompt eight times. The best answer is kept if it is right. The model learns it like any other
example. Each iteration is a round, on what the model answers by then.
"""

from dataclasses import replace

from jaxrl_llm import config as c
from jaxrl_llm.configs.ppo import get_config as ppo_config


def get_config() -> c.Config:
    """The run; every value can be overridden on the command line."""
    base = ppo_config()
    return replace(
        base,
        name="rejection_sampling",
        data=replace(base.data, train_batch_size=64),
        actor=replace(base.actor, ppo_mini_batch_size=32),
        rollout=replace(base.rollout, n=8),
        algorithm=c.RejectionSampling(threshold=0.5),
    )
