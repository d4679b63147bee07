"""Supervised fine-tuning on sums of three digits, from random weights, on two CPU cores.

python scripts/train.py --config=configs/sft.py

Next-token likelihood of the answers alone, the first stage of Ouyang et al. 2022
(https://arxiv.org/abs/2203.02155). Rows of very different lengths can be packed without padding:
--config.actor.micro_batch_tokens=8192. Your own rows have prompt and completion, messages, or text:
--config.data.train_files=[examples.jsonl] --config.data.train_tasks=[], the same for val_files, and
--config.validation.generate=false where no answer can be called right or wrong.
"""

from jaxrl_llm import config as c
from jaxrl_llm.configs.ppo import CHAIN_SUM, MODEL


def get_config() -> c.Config:
    """The run; every value can be overridden on the command line."""
    return c.Config(
        name="sft",
        total_steps=300,
        save_every=100,
        data=c.DataConfig(
            tokenizer="char",
            train_tasks=(CHAIN_SUM,),
            val_tasks=(CHAIN_SUM,),
            train_batch_size=256,
            max_prompt_length=6,
            max_response_length=4,
        ),
        actor=c.ActorConfig(
            hf_config=MODEL,
            optimizer=c.OptimizerConfig(learning_rate=1e-3, schedule="cosine", warmup_steps=10),
        ),
        algorithm=c.SFT(),
        validation=c.ValidationConfig(every=50, generate=True),
    )
