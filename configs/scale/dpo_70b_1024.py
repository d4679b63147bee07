"""DPO of a 70B model on 128 hosts of eight GPUs.

The weights are random: give --config.actor.path=FOLDER for a run.
"""

from jaxrl_llm import config as c
from jaxrl_llm.configs.scale.shapes import LLAMA_3_1_70B


def get_config() -> c.Config:
    return c.Config(
        name="dpo_70b_1024",
        mesh=c.MeshConfig(data=8, fsdp=128),
        data=c.DataConfig(
            tokenizer="char",
            train_tasks=(c.ChainSum(),),
            train_batch_size=4096,
            max_prompt_length=1024,
            max_response_length=1024,
        ),
        actor=c.ActorConfig(
            hf_config=LLAMA_3_1_70B,
            dtype="bfloat16",
            remat="full",
            scan_layers=True,
            micro_batch_size=2,
        ),
        algorithm=c.DPO(),
    )
