"""GRPO on GSM8K, grade-school math problems, with a pretrained model of 0.5B to 30B.

jaxrl prepare data gsm8k --output=data/gsm8k
python scripts/train.py --config=configs/grpo_gsm8k.py --config.actor.path=MODEL

The config grpo_pretrained with the files that the first command writes, in the folder where it ran.
Answers have up to 512 tokens and end with a line "#### N". The reward is verl's, which wants that
line. Held-out problems are graded alike, before the first step and then every 20 steps.
docs/my-model.md has flags, memory and time for six models.
"""

from dataclasses import replace

from jaxrl_llm import config as c
from jaxrl_llm.configs.grpo_pretrained import get_config as grpo_config

REWARD = c.GSM8K()


def get_config() -> c.Config:
    """The run; every value can be overridden on the command line."""
    base = grpo_config()
    data = replace(
        base.data,
        train_files=("data/gsm8k/train.jsonl",),
        val_files=("data/gsm8k/test.jsonl",),
        max_prompt_length=512,
        max_response_length=512,
    )
    return replace(
        base,
        name="grpo_gsm8k",
        data=data,
        reward=c.RewardConfig(functions=(REWARD,)),
        validation=c.ValidationConfig(every=20, grader=REWARD),
    )
