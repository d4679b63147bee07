"""Checks after a step: a gradient that is not finite ends the run and names its parameter."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxrl_llm.learner.losses import tree_names
from jaxrl_llm.learner.train_step import NONFINITE

SHOWN = 5


class NonFiniteGradients(RuntimeError):
    """A gradient was NaN or infinite; the state still holds the last good parameters."""


def check_gradients(
    metrics: dict[str, Any], params: Mapping[str, Any], step: int, what: str = "step"
) -> None:
    """Take the flags of the train step out of `metrics`; raise NonFiniteGradients if any is set.

    `params` gives the parameter tree of each prefix of the metric names.
    """
    for prefix, tree in params.items():
        name = f"{prefix}/{NONFINITE}" if prefix else NONFINITE
        flags = metrics.pop(name, None)
        if flags is not None and np.asarray(flags).any():
            _stop(np.asarray(flags), tree, step, what, prefix or "model")


def _stop(flags: np.ndarray, params: Any, step: int, what: str, role: str) -> None:
    names = [name for name, bad in zip(tree_names(params), flags, strict=True) if bad]
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    raise NonFiniteGradients(
        f"{what} {step}: the gradient of the {role} is not finite in {', '.join(names[:SHOWN])}"
        f"{more}. That update was not applied, so the last checkpoint and the state are sound. "
        "Lower the learning rate, or train in float32, and start again to resume."
    )
