"""A reward model from a pretrained model of 0.5B to 8B and your own pairs, on one GPU or more.

python scripts/train.py --config=configs/reward_model_pretrained.py --config.actor.path=MODEL
  --config.data.train_files=[pairs.jsonl]

Rows have prompt, chosen and rejected. The model gets a scalar head, and learns to score the chosen
completion above the rejected one (Bradley and Terry 1952, as in Ouyang et al. 2022,
https://arxiv.org/abs/2203.02155). One pass over the pairs is usually enough. An online run takes
the result as a reward: --config.reward.model.path=runs/reward_model_pretrained.
LoRA: --config.actor.lora.rank=32 --config.actor.optimizer.learning_rate=2e-4.
"""

from dataclasses import replace

from jaxrl_llm import config as c
from jaxrl_llm.configs.dpo_pretrained import PAIRS
from jaxrl_llm.configs.sft_pretrained import get_config as sft_config


def get_config() -> c.Config:
    """The run; every value can be overridden on the command line."""
    base = sft_config()
    return replace(
        base,
        name="reward_model_pretrained",
        actor=replace(base.actor, **PAIRS),
        algorithm=c.PairwiseRewardModel(center=0.01),
    )
