"""GRPO with a mixture of experts on sums of three digits, from random weights, on two CPU cores.

python scripts/train.py --config=configs/grpo_moe.py

The model of configs/grpo.py with eight experts in each layer, of which a token takes two. Two
experts have the size of the dense layer, so a token costs as much. The load-balance loss keeps all
experts in use. See docs/moe.md.
"""

from dataclasses import replace

from jaxrl_llm import config as c
from jaxrl_llm.configs.grpo import get_config as grpo_config
from jaxrl_llm.configs.ppo import MODEL

EXPERTS = {
    "model_type": "qwen3_moe",
    "head_dim": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 192,
    "norm_topk_prob": True,
}


def get_config() -> c.Config:
    """The run; every value can be overridden on the command line."""
    base = grpo_config()
    actor = replace(
        base.actor,
        hf_config=MODEL | EXPERTS,
        router_aux_loss_coef=0.01,
        router_z_loss_coef=0.001,
    )
    return replace(base, name="grpo_moe", actor=actor)
