"""Numbers that are not finite: in gradients, after each step, and in weights."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.distributed.multihost import fetch
from jaxrl_llm.learner.losses import NONFINITE

SHOWN = 5


class NonFiniteGradients(ValueError):
    """A gradient was NaN or infinite; the state holds the parameters before it.

    `parameters` are the names of those whose gradient is not finite, with their role.
    """

    parameters: tuple[str, ...] = ()


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
            _stop(np.asarray(flags), tree, step, what, prefix or "model", _nonfinite(metrics))


def _nonfinite(metrics: Mapping[str, Any]) -> list[str]:
    """The names of metrics that are no finite number, in the order of the stages."""
    numbers = {name: np.asarray(value) for name, value in metrics.items()}
    return [name for name, x in numbers.items() if x.ndim == 0 and not np.isfinite(x)]


def _stop(
    flags: np.ndarray, params: Any, step: int, what: str, role: str, others: Sequence[str]
) -> None:
    names = [name for name, bad in zip(_names(params), flags, strict=True) if bad]
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    if others:
        more += f". Nor are the metrics {', '.join(others[:SHOWN])}: the cause may be there"
    error = NonFiniteGradients(
        f"{what} {step}: the gradient of the {role} is not finite in {', '.join(names[:SHOWN])}"
        f"{more}. That update was not applied, and no checkpoint has weights that are not finite. "
        "Lower the learning rate, or train in float32, and start again to resume."
    )
    error.parameters = tuple(f"{role}.{name}" for name in names)
    raise error


def nonfinite_values(params: Mapping[str, Any]) -> list[str]:
    """The parameters, as role.name, that hold a NaN or an infinity. Every process must call it."""

    @jax.jit
    def bad(leaves: list[jax.Array]) -> list[jax.Array]:
        return [~jnp.isfinite(leaf).all() for leaf in leaves]

    found = []
    for role, tree in params.items():
        flags = fetch(bad(jax.tree.leaves(tree)))
        found += [f"{role}.{name}" for name, flag in zip(_names(tree), flags, strict=True) if flag]
    return found


def _names(params: Any) -> tuple[str, ...]:
    """Dotted names of the leaves of a parameter tree, in tree order."""
    paths, _ = jax.tree_util.tree_flatten_with_path(params)
    return tuple(".".join(str(getattr(key, "key", key)) for key in path) for path, _ in paths)
