"""CISPO on sums of three digits, from nothing, on two CPU cores.

python scripts/train.py --config=configs/cispo.py

Clipped importance weights (MiniMax 2025, https://arxiv.org/abs/2506.13585) on GRPO's advantages: a
token whose ratio is past the bound keeps its gradient, where PPO's clip would drop it.
"""

from dataclasses import replace

from jaxrl_llm.config import Config, FunctionConfig
from jaxrl_llm.configs.grpo import get_config as grpo_config


def get_config() -> Config:
    """The run; every value can be overridden on the command line."""
    return replace(
        grpo_config(),
        name="cispo",
        total_steps=300,
        # A wide bound: with 0.2 the run is slower, 0.83 of held-out problems after 200 steps.
        algorithm=FunctionConfig(
            path="jaxrl_llm.algorithms.alias:cispo", settings={"clip_high": 4.0}
        ),
    )
