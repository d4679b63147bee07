"""GiGPO of a model that walks through a maze, from random weights, on two CPU cores.

python scripts/train.py --config=configs/maze.py

A maze has 5 x 5 cells. Each of 20 turns is a move, U, D, L or R. An observation has the cell, the
goal and the moves that are open: `b3>e5 UDL`. A supervised warm-up on random walks teaches the
format. The reward is 1 at the goal. GiGPO (Feng et al. 2025, https://arxiv.org/abs/2505.10978)
also compares the moves that a group made in the same cell. The environment runs inside the program
that samples and learns.
"""

from dataclasses import replace

from jaxrl_llm import config as c
from jaxrl_llm.configs.agent import get_config as agent_config
from jaxrl_llm.configs.ppo import CRITIC

TASK = c.MazeGames()


def get_config() -> c.Config:
    """The run; every value can be overridden on the command line."""
    base = agent_config()
    assert base.warmup is not None
    return replace(
        base,
        name="maze",
        total_steps=140,
        save_every=70,
        data=replace(
            base.data,
            train_tasks=(TASK,),
            val_tasks=(replace(TASK, size=128),),
            train_batch_size=16,
            max_prompt_length=20,
            max_response_length=268,  # 20 moves of two tokens, and 19 observations of 12
        ),
        actor=replace(
            base.actor,
            hf_config=CRITIC | {"max_position_embeddings": 512},
            ppo_mini_batch_size=16,
            optimizer=replace(base.actor.optimizer, learning_rate=1e-3),
        ),
        rollout=replace(base.rollout, environment=(c.Maze(),), max_turn_tokens=2, num_slots=128),
        reward=c.RewardConfig(process_rewards=True),
        algorithm=c.GiGPO(),
        validation=c.ValidationConfig(every=10, temperature=1.0),
        warmup=replace(
            base.warmup,
            steps=200,
            batch_size=48,
            eval_every=0,
            stop_at=0.0,
            optimizer=replace(base.warmup.optimizer, learning_rate=2e-3),
        ),
    )
