"""GSPO on sums of three digits, from random weights, on two CPU cores.

python scripts/train.py --config=configs/gspo.py

Group sequence policy optimisation (Zheng et al. 2025, https://arxiv.org/abs/2507.18071): the ratio
of a whole response, normalised by its length, is clipped. The paper's bounds (the defaults of the
algorithm) are for hundreds of tokens; over three the ratio moves more, and so do the bounds here.
"""

from dataclasses import replace

from jaxrl_llm import config as c
from jaxrl_llm.configs.grpo import get_config as grpo_config


def get_config() -> c.Config:
    """The run; every value can be overridden on the command line."""
    return replace(
        grpo_config(),
        name="gspo",
        algorithm=c.GSPO(clip_low=0.03, clip_high=0.04),
    )
