"""CISPO on sums of three digits, from random weights, on two CPU cores.

python scripts/train.py --config=configs/cispo.py

Clipped importance weights (MiniMax 2025, https://arxiv.org/abs/2506.13585) on GRPO's advantages: a
token whose ratio is past the bound keeps its gradient, where PPO's clip would drop it.
"""

from dataclasses import replace

from jaxrl_llm import config as c
from jaxrl_llm.configs.grpo import get_config as grpo_config


def get_config() -> c.Config:
    """The run; every value can be overridden on the command line."""
    base = grpo_config()
    # Nothing clips a gradient here. At GRPO's learning rate the run goes up and down, and ends at
    # 0.83 after 200 steps. With a bound of 4.0 on the weights it does not learn.
    optimizer = replace(base.actor.optimizer, learning_rate=1e-4)
    return replace(
        base,
        name="cispo",
        total_steps=300,
        actor=replace(base.actor, optimizer=optimizer),
        algorithm=c.CISPO(),
    )
