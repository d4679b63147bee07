"""KTO on single sums labelled right or wrong, from random weights, on two CPU cores.

python scripts/train.py --config=configs/kto.py

The pairs of `dpo.py` are taken apart: each answer is alone with its label (Ethayarajh et al. 2024,
https://arxiv.org/abs/2402.01306). Your own rows have prompt, completion and label (true or false):
--config.data.train_files=[labelled.jsonl], and the same for val_files.
"""

from dataclasses import replace

from jaxrl_llm import config as c
from jaxrl_llm.configs.dpo import get_config as dpo_config


def get_config() -> c.Config:
    """The run of DPO on labels instead of pairs."""
    base = dpo_config()
    return replace(
        base,
        name="kto",
        algorithm=c.KTO(beta=0.1),
        data=replace(base.data, train_batch_size=128),
    )
