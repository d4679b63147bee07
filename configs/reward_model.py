"""A reward model on pairs of a right and a wrong sum, from random weights, on two CPU cores.

python scripts/train.py --config=configs/reward_model.py

A scalar model learns to score the right answer above the wrong one (Bradley and Terry 1952, as in
Ouyang et al. 2022, https://arxiv.org/abs/2203.02155). An online run takes its newest checkpoint as
a reward: --config.reward.model.path=runs/reward_model. Your own pairs
have prompt, chosen, rejected and perhaps a margin; for ratings instead of pairs (prompt,
completion, rating) --config.algorithm=reward_regression.
"""

from dataclasses import replace

from jaxrl_llm import config as c
from jaxrl_llm.configs.dpo import get_config as dpo_config


def get_config() -> c.Config:
    """The pairs of DPO, scored."""
    base = dpo_config()
    optimizer = c.OptimizerConfig(learning_rate=1e-3, schedule="cosine", warmup_steps=20)
    return replace(
        base,
        name="reward_model",
        total_steps=300,
        data=replace(base.data, train_batch_size=256),
        actor=replace(base.actor, optimizer=optimizer),
        algorithm=c.PairwiseRewardModel(center=0.01),
        validation=c.ValidationConfig(every=100),
        warmup=None,
    )
