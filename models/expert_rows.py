"""Rows of tokens through the grouped matmuls of their experts, and moves of rows.

Shape letters: D hidden, F inner size of an expert, E experts, M rows.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxrl_llm.kernels.grouped_matmul import grouped_matmul
from jaxrl_llm.models.layers import PROJECTION

Kernels = tuple[jax.Array, jax.Array, jax.Array]  # gate, up [E, D, F] and down [E, F, D]


def computed_experts(x_MD: jax.Array, kernels: Kernels, sizes_E: jax.Array) -> jax.Array:
    """down(silu(gate(x)) * up(x)), each run of `sizes_E` rows by its expert.

    Rows after the last expert's are 0.
    """
    gate, up, down = kernels
    dot = partial(_grouped, sizes_E=sizes_E)
    return dot(jax.nn.silu(dot(x_MD, gate)) * dot(x_MD, up), down)


def _grouped(x_MD: jax.Array, kernel_EDF: jax.Array, *, sizes_E: jax.Array) -> jax.Array:
    """Each run of `sizes_E` rows times the weights of its expert."""
    y_MF = grouped_matmul(x_MD, kernel_EDF.astype(x_MD.dtype), sizes_E)
    return checkpoint_name(y_MF, PROJECTION)


@jax.custom_vjp
def moved(x: jax.Array, source: jax.Array, target: jax.Array) -> jax.Array:
    """Row `source[i]` of x as row i, and 0 where there is none. Row j of x goes to `target[j]`.

    The gradient moves rows back by a gather. A scatter would add with atomics on a GPU, in another
    order in every run.
    """
    return jnp.take(x, source, axis=0, mode="fill", fill_value=0)


def _moved_forward(x: jax.Array, source: jax.Array, target: jax.Array) -> tuple[jax.Array, Any]:
    return moved(x, source, target), (source, target)


def _moved_backward(residuals: Any, gradient: jax.Array) -> tuple[jax.Array, None, None]:
    source, target = residuals
    return moved(gradient, target, source), None, None


moved.defvjp(_moved_forward, _moved_backward)
