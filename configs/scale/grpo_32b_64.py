"""GRPO of a 32B model on eight hosts of eight GPUs.

Weights are split inside a group of two hosts and copied between the groups; generation splits
heads over two GPUs. They are random: give --config.actor.path=FOLDER for a run.
"""

from jaxrl_llm import config as c
from jaxrl_llm.configs.scale.shapes import QWEN2_5_32B


def get_config() -> c.Config:
    return c.Config(
        name="grpo_32b_64",
        mesh=c.MeshConfig(data=4, fsdp=16, generation=c.PhaseMeshConfig(tensor=2)),
        data=c.DataConfig(
            tokenizer="char",
            train_tasks=(c.ChainSum(),),
            train_batch_size=256,
            max_prompt_length=1024,
            max_response_length=3072,
        ),
        actor=c.ActorConfig(
            hf_config=QWEN2_5_32B,
            dtype="bfloat16",
            remat="full",
            scan_layers=True,
            ppo_mini_batch_size=256,
            micro_batch_tokens=8192,
        ),
        rollout=c.RolloutConfig(n=8, num_slots=64),
        algorithm=c.GRPO(use_kl_loss=True),
        reward=c.RewardConfig(functions=(c.ExactAnswer(),)),
    )
