"""PPO of a 72B model with a critic on 128 hosts of eight GPUs.

The weights are random: give --config.actor.path=FOLDER for a run.
"""

from jaxrl_llm import config as c
from jaxrl_llm.configs.scale.shapes import QWEN2_5_72B


def get_config() -> c.Config:
    model = {
        "dtype": "bfloat16",
        "remat": "full",
        "scan_layers": True,
        "micro_batch_tokens": 8192,
    }
    return c.Config(
        name="ppo_72b_1024",
        mesh=c.MeshConfig(data=4, fsdp=256, generation=c.PhaseMeshConfig(tensor=4)),
        data=c.DataConfig(
            tokenizer="char",
            train_tasks=(c.ChainSum(),),
            train_batch_size=8192,
            max_prompt_length=1024,
            max_response_length=3072,
        ),
        actor=c.ActorConfig(hf_config=QWEN2_5_72B, ppo_mini_batch_size=8192, **model),
        critic=c.CriticConfig(**model),
        rollout=c.RolloutConfig(num_slots=32),
        algorithm=c.PPO(use_kl_loss=True),
        reward=c.RewardConfig(functions=(c.ExactAnswer(),)),
    )
