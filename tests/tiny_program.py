"""A run of seconds whose rows a program gives."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from tiny import READS_TEXT as MODEL

import jaxrl_llm as rl


def program_config(run_dir: Path, **changes: Any) -> rl.Config:
    """GRPO of two steps, without data, and without a reward unless `changes` has one."""
    own = rl.Config(
        run_dir=str(run_dir),
        total_steps=2,
        data=rl.DataConfig(
            tokenizer="char", train_batch_size=8, max_prompt_length=4, max_response_length=4
        ),
        actor=rl.ActorConfig(hf_config=MODEL, ppo_mini_batch_size=8),
        rollout=rl.RolloutConfig(n=2),
        algorithm=rl.GRPO(),
        log=rl.LogConfig(tensorboard=False, samples_every=0, trace=False),
    )
    return replace(own, **changes)


EXACT = rl.RewardConfig(functions=(rl.ExactAnswer(extract="whole"),))
