"""GRPO of a 1.5B model on one GPU.

The weights are random: give --config.actor.path=FOLDER for a run.
"""

from jaxrl_llm import config as c
from jaxrl_llm.configs.scale.shapes import QWEN2_5_1_5B


def get_config() -> c.Config:
    return c.Config(
        name="grpo_1_5b_1",
        data=c.DataConfig(
            tokenizer="char",
            train_tasks=(c.ChainSum(),),
            train_batch_size=128,
            max_prompt_length=512,
            max_response_length=512,
        ),
        actor=c.ActorConfig(
            hf_config=QWEN2_5_1_5B,
            dtype="bfloat16",
            ppo_mini_batch_size=128,
            micro_batch_tokens=9216,
        ),
        rollout=c.RolloutConfig(n=8, num_slots=1024),
        algorithm=c.GRPO(use_kl_loss=False),
        reward=c.RewardConfig(functions=(c.ExactAnswer(),)),
    )
