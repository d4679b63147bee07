"""GRPO of a model that calls a calculator, from random weights, on two CPU cores.

python scripts/train.py --config=configs/agent.py

The prompt is `37*48=`. The model writes a call, `[37*48]`, reads the result, `=1776`, and answers
in a second turn. A short supervised warm-up on such conversations teaches the format. The reward is
the environment's: 1 for the right answer. docs/agents.md has the curves.
"""

from dataclasses import replace

from jaxrl_llm import config as c
from jaxrl_llm.configs.grpo import get_config as grpo_config

TASK = c.CalculatorCalls()


def get_config() -> c.Config:
    """The run; every value can be overridden on the command line."""
    base = grpo_config()
    assert base.warmup is not None
    return replace(
        base,
        name="agent",
        total_steps=60,
        save_every=30,
        data=replace(
            base.data,
            train_tasks=(TASK,),
            val_tasks=(replace(TASK, size=256),),
            train_batch_size=32,
            max_response_length=20,
        ),
        actor=replace(
            base.actor,
            ppo_mini_batch_size=16,
            optimizer=replace(base.actor.optimizer, learning_rate=4e-4),
        ),
        rollout=replace(
            base.rollout, environment=(c.Calculator(),), max_turn_tokens=8, num_slots=256
        ),
        algorithm=c.GRPO(use_kl_loss=False),
        reward=c.RewardConfig(),
        validation=c.ValidationConfig(every=10),
        warmup=replace(base.warmup, batch_size=64, stop_at=0.6),
    )
