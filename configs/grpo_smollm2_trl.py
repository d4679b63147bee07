"""GRPO on SmolLM2-135M-Instruct with settings that TRL has too, to run the two side by side.

python scripts/prepare_model.py smollm2 --output=smollm2
python scripts/train.py --config=configs/grpo_smollm2_trl.py

The task of configs/ppo_smollm2.py without its critic (Shao et al. 2024,
https://arxiv.org/abs/2402.03300). As in the paper, each response weighs the same whatever its
length. A KL penalty holds the policy near the model that it began as. It is k3 without verl's
clamps, past which a token has no gradient. configs/grpo_smollm2.py learns more of the same task.

python scripts/compare_trl.py --config=configs/grpo_smollm2_trl.py --seeds=[1,2,3] --output=c.jsonl
"""

from dataclasses import replace

from jaxrl_llm import config as c
from jaxrl_llm.configs.ppo_smollm2 import get_config as ppo_config


def get_config() -> c.Config:
    """The run; every value can be overridden on the command line."""
    base = ppo_config()
    # TRL spares norms and biases the weight decay; without one there is nothing to differ in.
    optimizer = replace(base.actor.optimizer, weight_decay=0.0)
    return replace(
        base,
        name="grpo_smollm2_trl",
        total_steps=100,
        data=replace(base.data, train_batch_size=64),
        actor=replace(base.actor, ppo_mini_batch_size=32, shuffle=True, optimizer=optimizer),
        rollout=replace(base.rollout, n=8),
        algorithm=c.GRPO(
            loss_aggregation="seq-mean-token-mean", kl_loss_coef=0.001, kl_loss_type="k3_unclamped"
        ),
    )
