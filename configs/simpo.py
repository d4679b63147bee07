"""SimPO on pairs of a right and a wrong sum, from nothing, on two CPU cores.

python scripts/train.py --config=configs/simpo.py

The warm-up and the pairs of `dpo.py`; then the mean log-prob of an answer's tokens is its reward,
which must be larger for the right one by a margin, and no reference model takes part (Meng et al.
2024, https://arxiv.org/abs/2405.14734).
"""

from dataclasses import replace

from jaxrl_llm import config as c
from jaxrl_llm.configs.dpo import get_config as dpo_config


def get_config() -> c.Config:
    """The run of DPO without a reference."""
    base = dpo_config()
    return replace(
        base,
        name="simpo",
        algorithm=c.SimPO(beta=2.0, gamma=1.0),
    )
