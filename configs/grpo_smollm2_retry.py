"""GRPO on SmolLM2-135M-Instruct with a verifier: a wrong sum may be answered once more.

python scripts/prepare_model.py smollm2 --output=smollm2
python scripts/train.py --config=configs/grpo_smollm2_retry.py

The task of configs/grpo_smollm2.py, as a conversation. After a wrong answer the verifier says so,
and the model has a second turn. A later right answer pays no more than a first one.
docs/agents.md has the curves.
"""

from dataclasses import replace

from jaxrl_llm import config as c
from jaxrl_llm.configs.grpo_smollm2 import get_config as grpo_config
from jaxrl_llm.configs.ppo_smollm2 import CORRECT


def get_config() -> c.Config:
    """The run; every value can be overridden on the command line."""
    base = grpo_config()
    return replace(
        base,
        name="grpo_smollm2_retry",
        data=replace(base.data, max_response_length=64),
        rollout=replace(
            base.rollout, environment=(c.Retry(grader=CORRECT),), max_turns=2, max_turn_tokens=24
        ),
        reward=c.RewardConfig(),
    )
