"""Dr. GRPO on sums of three digits, from random weights, on two CPU cores.

python scripts/train.py --config=configs/dr_grpo.py

GRPO without the two things that bias it (Liu et al. 2025, https://arxiv.org/abs/2503.20783). The
advantage is not divided by the group's std. A response's loss is divided by a constant length, not
by its own. There is no KL, so no reference model.
"""

from dataclasses import replace

from jaxrl_llm import config as c
from jaxrl_llm.configs.grpo import get_config as grpo_config


def get_config() -> c.Config:
    """The run; every value can be overridden on the command line."""
    return replace(
        grpo_config(),
        name="dr_grpo",
        algorithm=c.DrGRPO(),
    )
