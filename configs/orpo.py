"""ORPO on pairs of a right and a wrong sum, from random weights, on two CPU cores.

python scripts/train.py --config=configs/orpo.py

One training instead of two (Hong et al. 2024, https://arxiv.org/abs/2403.07691). The likelihood of
the right answers teaches the task, while an odds ratio pushes the wrong ones away. There is no
warm-up and no reference model.
"""

from dataclasses import replace

from jaxrl_llm import config as c
from jaxrl_llm.configs.dpo import get_config as dpo_config


def get_config() -> c.Config:
    """The pairs of DPO, learned from random weights."""
    base = dpo_config()
    optimizer = c.OptimizerConfig(learning_rate=1e-3, schedule="cosine", warmup_steps=20)
    return replace(
        base,
        name="orpo",
        algorithm=c.ORPO(beta=0.5),
        actor=replace(base.actor, optimizer=optimizer),
        warmup=None,
    )
