"""SimPO on pairs of a right and a wrong sum, from random weights, on two CPU cores.

python scripts/train.py --config=configs/simpo.py

The warm-up and the pairs are the same as in `dpo.py`. The reward of an answer is the mean log-prob
of its tokens (Meng et al. 2024, https://arxiv.org/abs/2405.14734). The reward of the right answer
must be larger by a margin. There is no reference model.
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
