"""PPO of a 7B model with a critic on eight GPUs of one host.

The weights are random: give --config.actor.path=FOLDER for a run.
"""

from jaxrl_llm import config as c
from jaxrl_llm.configs.scale.shapes import QWEN2_5_7B


def get_config() -> c.Config:
    model = {"dtype": "bfloat16", "remat": "projections", "micro_batch_tokens": 8192}
    return c.Config(
        name="ppo_7b_8",
        mesh=c.MeshConfig(fsdp=8),
        data=c.DataConfig(
            tokenizer="char",
            train_tasks=(c.ChainSum(),),
            train_batch_size=512,
            max_prompt_length=1024,
            max_response_length=1024,
        ),
        actor=c.ActorConfig(hf_config=QWEN2_5_7B, ppo_mini_batch_size=512, **model),
        critic=c.CriticConfig(**model),
        algorithm=c.PPO(use_kl_loss=True),
        reward=c.RewardConfig(functions=(c.ExactAnswer(),)),
    )
