"""PPO on sums of three digits under two rewards at once: a rule's and a trained model's.

python scripts/train.py --config=configs/ppo_mixed_reward.py

The reward model of `ppo_reward_model.py` judges the answer, and a rule asks whether it is right.
The reward is the rule's plus half of the model's score. Llama 2 weighted several rewards so
(Touvron et al. 2023, https://arxiv.org/abs/2307.09288, section 3.2).
"""

from dataclasses import replace

from jaxrl_llm import config as c
from jaxrl_llm.configs.ppo import get_config as ppo_config
from jaxrl_llm.configs.ppo_reward_model import get_config as reward_model_config


def get_config() -> c.Config:
    """The run; every value can be overridden on the command line."""
    base, judged = ppo_config(), reward_model_config()
    assert judged.reward.model is not None
    return replace(
        judged,
        name="ppo_mixed_reward",
        reward=c.RewardConfig(
            functions=base.reward.functions, model=replace(judged.reward.model, weight=0.5)
        ),
    )
