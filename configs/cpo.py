"""CPO on pairs of a right and a wrong sum, from random weights, on two CPU cores.

python scripts/train.py --config=configs/cpo.py

The warm-up and the pairs are the same as in `dpo.py`. CPO is DPO with a uniform reference, so there
is no reference model (Xu et al. 2024, https://arxiv.org/abs/2401.08417). The likelihood of the
right answers is added to the loss.
"""

from dataclasses import replace

from jaxrl_llm import config as c
from jaxrl_llm.configs.dpo import get_config as dpo_config


def get_config() -> c.Config:
    """The run of DPO without a reference, and with the likelihood of the chosen."""
    base = dpo_config()
    return replace(
        base,
        name="cpo",
        algorithm=c.CPO(beta=0.1),
    )
