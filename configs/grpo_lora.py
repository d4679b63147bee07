"""GRPO with low-rank adapters on sums of three digits, on two CPU cores.

python scripts/train.py --config=configs/grpo_lora.py

The warm-up trains all weights, which are then the frozen base. GRPO trains adapters of rank 8 on
every projection (Hu et al. 2021, https://arxiv.org/abs/2106.09685), with a learning rate that is
higher than for all weights. The base is also the reference policy. See docs/lora.md.
"""

from dataclasses import replace

from jaxrl_llm import config as c
from jaxrl_llm.configs.grpo import get_config as grpo_config


def get_config() -> c.Config:
    """The run; every value can be overridden on the command line."""
    base = grpo_config()
    optimizer = replace(base.actor.optimizer, learning_rate=3e-3)
    actor = replace(base.actor, lora=c.LoraConfig(rank=8, alpha=16), optimizer=optimizer)
    return replace(base, name="grpo_lora", actor=actor)
