"""The stages that score: reward functions, a reward model, or the weighted sum of both."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_llm.config import Config
from jaxrl_llm.trainer.dataflow import DEVICE, Stage, StageOutput
from jaxrl_llm.trainer.roles import Role
from jaxrl_llm.trainer.stages import (
    GREEDY_SCORE,
    HostReward,
    UpdateSizes,
    greedy_reward_stage,
    reward_function_stage,
    reward_model_stage,
)


def reward_stages(
    config: Config, model: Role | None, functions: HostReward | None, sizes: UpdateSizes
) -> list[Stage]:
    """Stages that write the scores of the samples and of the greedy answers.

    At least one of `model` and `functions` is given.
    """
    group, by_functions, by_model = config.rollout.n, [], []
    if functions is not None:
        by_functions = [
            reward_function_stage(functions),
            greedy_reward_stage(functions, group=group),
        ]
    if model is not None:
        by_model = [
            reward_model_stage(model, sizes),
            reward_model_stage(model, sizes, greedy_group=group),
        ]
    if not by_functions or not by_model:
        return by_functions or by_model
    assert config.reward.model is not None
    weight, out = config.reward.model.weight, []
    for one, other in zip(by_functions, by_model, strict=True):
        out += _summed(one, other, weight)
    return out


def _summed(by_functions: Stage, by_model: Stage, weight: float) -> list[Stage]:
    """Both stages with fields of their own, and one that adds them: functions + weight * model."""
    score = by_functions.writes[0]
    greedy = "greedy_" if score.startswith("greedy_") else ""
    parts = (f"{greedy}function_scores", f"{greedy}model_scores")

    def add(state: Any, step: jax.Array, of_functions: Any, of_model: Any) -> StageOutput:
        total = of_functions + weight * of_model
        if greedy:
            metrics = {GREEDY_SCORE: total.mean()}
        else:
            deviation = of_model.std(ddof=1) if of_model.size > 1 else jnp.float32(0)
            metrics = {"rewards/model/mean": of_model.mean(), "rewards/model/std": deviation}
        return StageOutput(writes=(total,), metrics=metrics)

    names = [stage.name for stage in (by_functions, by_model)]
    assert names[0] == names[1]
    return [
        replace(by_functions, writes=(parts[0], *by_functions.writes[1:])),
        replace(by_model, name=f"{names[1]}_model", writes=(parts[1],)),
        Stage(name=f"{names[0]}_sum", fn=add, reads=parts, writes=(score,), role=DEVICE),
    ]
