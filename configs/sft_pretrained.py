"""Supervised fine-tuning of a pretrained model of 0.5B to 8B, on one GPU or more.

python scripts/train.py --config=configs/sft_pretrained.py --config.actor.path=MODEL
  --config.data.train_files=[chats.jsonl]

Rows have messages, prompt and completion, or text. The loss is on the assistant's turns. Rows are
packed without padding, and the learning rate of 1e-5 falls to 0 by a cosine. Rows that are longer
than 1,024 + 1,024 tokens are refused: raise --config.data.max_prompt_length and
max_response_length, or set --config.data.truncation=right.
LoRA: --config.actor.lora.rank=32 --config.actor.optimizer.learning_rate=2e-4.
"""

from dataclasses import replace

from jaxrl_llm import config as c
from jaxrl_llm.configs.grpo_pretrained import DATA, POLICY


def get_config() -> c.Config:
    """The run; every value can be overridden on the command line."""
    optimizer = c.OptimizerConfig(learning_rate=1e-5, schedule="cosine", warmup_steps=20)
    return c.Config(
        name="sft_pretrained",
        total_steps=300,
        save_every=100,
        data=DATA,
        actor=replace(POLICY, optimizer=optimizer),
        algorithm=c.SFT(),
        validation=c.ValidationConfig(every=50),
    )
