"""GRPO on SmolLM2-135M-Instruct: sums of two and three terms, asked as a chat, on one GPU.

python scripts/prepare_model.py smollm2 --output=smollm2
python scripts/train.py --config=configs/grpo_smollm2.py

The task of configs/ppo_smollm2.py without its critic (Shao et al. 2024,
https://arxiv.org/abs/2402.03300). As in DAPO (https://arxiv.org/abs/2503.14476), each token weighs
the same, there is no KL penalty, and the upper clip is wider. An entropy bonus keeps the samples of
a group different.
"""

from dataclasses import replace

from jaxrl_llm import config as c
from jaxrl_llm.configs.ppo_smollm2 import get_config as ppo_config


def get_config() -> c.Config:
    """The run; every value can be overridden on the command line."""
    base = ppo_config()
    return replace(
        base,
        name="grpo_smollm2",
        actor=replace(
            base.actor, shuffle=True, optimizer=replace(base.actor.optimizer, weight_decay=0.0)
        ),
        algorithm=c.GRPO(use_kl_loss=False, clip_high=0.28, entropy_coef=0.01),
    )
