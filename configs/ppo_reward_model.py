"""PPO on sums of three digits, judged by a reward model that the run trains first.

python scripts/train.py --config=configs/ppo_reward_model.py

The model and the warm-up are the same as in `ppo.py`. A scalar model, begun from the warmed-up
actor, then learns from pairs of a right and a wrong answer (Bradley and Terry, as in Ouyang et al.
2022, https://arxiv.org/abs/2203.02155). Its score is the only reward. So no Python takes part in an
iteration, which is one compiled program. Validation still asks whether the answer is right.
"""

from dataclasses import replace

from jaxrl_llm import config as c
from jaxrl_llm.configs.ppo import get_config as ppo_config


def get_config() -> c.Config:
    """The default run under a learned reward."""
    base = ppo_config()
    training = c.SupervisedConfig(
        steps=600,
        batch_size=256,
        eval_every=50,
        stop_at=0.98,
        optimizer=c.OptimizerConfig(learning_rate=1e-3, schedule="cosine", warmup_steps=20),
    )
    return replace(
        base,
        name="ppo_reward_model",
        # A wrong answer that is too long is cut, as the policy's own are.
        data=replace(base.data, truncation="right"),
        reward=c.RewardConfig(model=c.RewardModelConfig(training=training, center=0.05)),
        algorithm=c.PPO(lam=0.95, use_kl_in_reward=True, kl_coef=0.2),
    )
