"""DPO on a pretrained model of 0.5B to 8B and your own pairs, on one GPU or more.

python scripts/train.py --config=configs/dpo_pretrained.py --config.actor.path=MODEL
  --config.data.train_files=[pairs.jsonl]

Rows have prompt, chosen and rejected. The model should have been fine-tuned on answers of this kind
before; it is also the reference (Rafailov et al. 2023, https://arxiv.org/abs/2305.18290).
A pass has four pairs, each padded to the longest row: shorter limits of data.max_prompt_length and
data.max_response_length save time and memory. So does --config.precompute_reference=true, which
computes the log-probs of the reference once, before the first step.
LoRA: --config.actor.lora.rank=32 --config.actor.optimizer.learning_rate=2e-5.
"""

from dataclasses import replace

from jaxrl_llm import config as c
from jaxrl_llm.configs.sft_pretrained import get_config as sft_config

PAIRS = {"micro_batch_tokens": 0, "micro_batch_size": 4}  # packing would part a pair


def get_config() -> c.Config:
    """The run; every value can be overridden on the command line."""
    base = sft_config()
    optimizer = c.OptimizerConfig(learning_rate=1e-6, schedule="linear", warmup_steps=20)
    return replace(
        base,
        name="dpo_pretrained",
        actor=replace(base.actor, optimizer=optimizer, **PAIRS),
        algorithm=c.DPO(beta=0.1),
    )
