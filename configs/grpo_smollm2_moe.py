"""GRPO on a mixture of experts made of SmolLM2-135M-Instruct: sums as a chat, on one GPU.

python scripts/prepare_model.py smollm2 --output=smollm2
jaxrl prepare upcycle --model=smollm2 --output=smollm2_moe --experts=4
python scripts/train.py --config=configs/grpo_smollm2_moe.py

The run of configs/grpo_smollm2_trl.py. Each layer begins with four copies of its MLP, of which a
token takes two, so the mixture begins as the dense model. Experts learn from different tokens and
move apart. The rollout's experts are replayed in the updates, and the load-balance loss of each
layer keeps them in use: `actor/router_load` and `actor/router_load_mean` show it. See docs/moe.md.
"""

from dataclasses import replace

from jaxrl_llm import config as c
from jaxrl_llm.configs.grpo_smollm2_trl import get_config as grpo_config


def get_config() -> c.Config:
    """The run; every value can be overridden on the command line."""
    base = grpo_config()
    actor = replace(
        base.actor,
        path="smollm2_moe",
        micro_batch_size=128,  # halves the activations, of which a layer of experts has more
        router_aux_loss_coef=0.01,
        router_aux_loss_by_layer=True,
        router_z_loss_coef=0.001,
    )
    return replace(base, name="grpo_smollm2_moe", total_steps=200, actor=actor)
