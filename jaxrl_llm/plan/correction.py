"""The stage of rollout correction: what an algorithm weighs and rejects."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from jaxrl_llm.algorithms.algorithm import Algorithm
from jaxrl_llm.algorithms.fields import field_names
from jaxrl_llm.plan.dataflow import Stage, StageOutput


def correction(algorithm: Algorithm) -> "Correction | None":
    """The stage of what the algorithm weighs and rejects; None where it does neither."""
    named = {"importance_weights": algorithm.importance, "loss_mask": algorithm.rejection}
    named = {name: fn for name, fn in named.items() if fn is not None}
    if not named:
        return None
    return Correction(writes=tuple(named), functions=tuple(named.values()))


@dataclass(frozen=True, kw_only=True, eq=False)
class Correction(Stage):
    """Rollout correction: the function that gives each field that is written."""

    writes: tuple[str, ...]
    functions: Sequence[Callable[..., Any]]

    name = "rollout_corr"

    def __call__(self, state: Any, step: Any, **fields: Any) -> StageOutput:
        writes, metrics = {}, {}
        for name, fn in zip(self.writes, self.functions, strict=True):
            writes[name], found = fn(*(fields[field] for field in field_names(fn)))
            metrics |= found
        return StageOutput(writes, metrics)
