"""A learned cost: a scalar model learns the length of answers, and a stage subtracts its score.

python scripts/train.py --config=docs/examples/cost_model.py

docs/add-a-stage.md explains it.
"""

from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp

from jaxrl_llm.config import Config, Custom, ExtraModelConfig, OptimizerConfig, OwnUpdate
from jaxrl_llm.configs.grpo import get_config as grpo_config
from jaxrl_llm.program.stage import Stage, StageOutput


@dataclass(frozen=True, kw_only=True, eq=False)
class CostPenalty(Stage):
    """scores = function_scores - weight * max(cost_scores - limit, 0)."""

    weight: float
    limit: float

    name = "cost_penalty"
    writes = ("scores", "excess_cost")

    def __call__(
        self, state: Any, step: Any, *, function_scores: Any, cost_scores: Any
    ) -> StageOutput:
        excess = jnp.maximum(cost_scores - self.limit, 0.0)
        scores = function_scores - self.weight * excess
        return StageOutput(
            {"scores": scores, "excess_cost": excess}, {"cost/excess": excess.mean()}
        )


def cost_penalty(*, weight: float = 0.5, limit: float = 0.0) -> Stage:
    """The stage, with the settings of config.stages."""
    return CostPenalty(weight=weight, limit=limit)


def length_error(new_scores: Any, mask: Any, *, scale: float = 1.0) -> tuple[Any, dict[str, Any]]:
    """The squared error of the predicted cost: the share of the longest response, times scale."""
    cost = scale * mask.mean(axis=1)
    return jnp.square(new_scores - cost), {"cost/true": cost}


def get_config() -> Config:
    """GRPO on sums, with a cost model of the actor's shape that learns in each step."""
    base = grpo_config()
    update = OwnUpdate(
        loss=Custom(path=f"{__file__}:length_error"), optimizer=OptimizerConfig(learning_rate=1e-3)
    )
    model = ExtraModelConfig(name="cost", hf_config=base.actor.hf_config, update=update)
    stage = Custom(path=f"{__file__}:cost_penalty", settings={"weight": 0.1})
    return replace(base, name="cost_model", models=(model,), stages=(stage,))
