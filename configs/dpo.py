"""DPO on pairs of a right and a wrong sum, from random weights, on two CPU cores.

python scripts/train.py --config=configs/dpo.py

The model of `ppo.py` learns the format by a short supervised warm-up. Direct preference
optimisation (Rafailov et al. 2023, https://arxiv.org/abs/2305.18290) then teaches it to prefer
right answers to wrong ones. The reference is the warmed-up model. Your own pairs, rows of prompt,
chosen and rejected: --config.data.train_files=[pairs.jsonl], and the same for val_files.
Other forms: --config.algorithm.form=robust|hinge|ipo|sigmoid_norm.
"""

from dataclasses import replace

from jaxrl_llm import config as c
from jaxrl_llm.configs.ppo import CHAIN_SUM, MODEL
from jaxrl_llm.configs.ppo import get_config as ppo_config


def get_config() -> c.Config:
    """The run; every value can be overridden on the command line."""
    warmup = ppo_config().warmup
    assert warmup is not None
    return c.Config(
        name="dpo",
        total_steps=300,
        save_every=100,
        data=c.DataConfig(
            tokenizer="char",
            train_tasks=(CHAIN_SUM,),
            val_tasks=(CHAIN_SUM,),
            train_batch_size=64,
            max_prompt_length=6,
            max_response_length=6,
            truncation="right",  # a wrong answer that is too long is cut, as the policy's own
        ),
        actor=c.ActorConfig(
            hf_config=MODEL,
            optimizer=c.OptimizerConfig(learning_rate=1e-4, schedule="linear", warmup_steps=20),
        ),
        algorithm=c.DPO(beta=0.1),
        validation=c.ValidationConfig(every=50, generate=True),
        warmup=replace(warmup, stop_at=0.3),
    )
