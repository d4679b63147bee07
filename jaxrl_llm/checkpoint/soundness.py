"""Weights that a run can go on from: finite, and of a size that weights have.

A checkpoint whose weights are useless would replace a good one. So they are checked before each
save and after each load, with what the digests of arrays measure anyway.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxrl_llm.checkpoint.digests import Measured, listed, measure
from jaxrl_llm.checkpoint.layout import OPTIMIZER

# Root mean square of an array of weights. Those of published models are below 100.
MOST_RMS = 1e4

ByItem = Mapping[str, Mapping[str, Measured]]  # items, arrays by path


class UselessWeights(ValueError):
    """Weights were not saved, or not taken, because no run could go on from them."""


@dataclass(kw_only=True)
class Growth:
    """The limit on the norm of each role's weights, from the first save of a run on."""

    most: float  # times the norm at the start
    start: dict[str, float] = field(default_factory=dict)  # norms by role

    def begin(self, start: Mapping[str, float]) -> None:
        """Take over the norms of the run that goes on."""
        self.start = dict(start)

    def check(self, items: ByItem, step: int) -> None:
        """Notes the norms of a role that is new. Raises: UselessWeights that says why."""
        why = unsound(items)
        for role, norm in norms(items).items():
            first = self.start.setdefault(role, norm)
            if not why and norm > self.most * first:
                why = (
                    f"the norm of the {role}'s weights is {_shown(norm)}, and it was {first:.3g} "
                    f"at the start. That is above config.checkpoint.max_growth={self.most:g} times"
                )
        if why:
            raise UselessWeights(
                f"step {step} is not saved: {why}. The checkpoint before it is kept. Lower the "
                "learning rate: give another --config.run_dir, and the good checkpoint as "
                "--config.resume"
            )


def unsound(items: ByItem) -> str:
    """The reason why weights or optimizer states are useless; empty where they are not."""
    weights = _weights(items)
    for item, arrays in items.items():
        if item not in weights and not item.endswith(OPTIMIZER):
            continue
        wrong = [f"{item}/{path}" for path, array in arrays.items() if not array.finite]
        if wrong:
            return f"NaN or infinity is in {listed(wrong)}"
    for item in weights:
        large = {path: a.rms for path, a in items[item].items() if not a.rms <= MOST_RMS}
        for path, rms in large.items():
            return (
                f"the weights of {item}/{path} have a root mean square of {_shown(rms)}, and none "
                f"of a model that can be used has more than {MOST_RMS:g}"
            )
    return ""


def norms(items: ByItem) -> dict[str, float]:
    """The norm of each role's weights."""
    return {
        item: math.sqrt(sum(a.squares for a in items[item].values())) for item in _weights(items)
    }


def check_loaded(params: Any, source: object) -> None:
    """Look at weights that were loaded from `source`. Every process must call it.

    Raises: UselessWeights that names a parameter.
    """
    item = "model"
    why = unsound({item: measure({item: params})[item], item + OPTIMIZER: {}})
    if why:
        raise UselessWeights(
            f"{source} cannot be used: {why}. Its run diverged, it is damaged, or its numbers do "
            "not fit into param_dtype; take another checkpoint or fetch it again"
        )


def _weights(items: ByItem) -> list[str]:
    """The items that are weights of a role that learns: those with an optimizer."""
    return [item for item in items if item + OPTIMIZER in items]


def _shown(size: float) -> str:
    return f"{size:.3g}" if math.isfinite(size) else "more than 1e19"  # its square overflows
