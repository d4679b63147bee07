"""IPO on pairs of a right and a wrong sum, from random weights, on two CPU cores.

python scripts/train.py --config=configs/ipo.py

The run of `dpo.py` under the loss of Azar et al. 2023 (https://arxiv.org/abs/2310.12036). The
log-ratio of chosen and rejected is averaged over their tokens. It is drawn to 1 / (2 beta) and no
further.
"""

from dataclasses import replace

from jaxrl_llm import config as c
from jaxrl_llm.configs.dpo import get_config as dpo_config


def get_config() -> c.Config:
    """The run of DPO under a squared loss."""
    base = dpo_config()
    return replace(
        base,
        name="ipo",
        algorithm=c.IPO(beta=0.3),
    )
