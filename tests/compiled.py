"""A call as one program, and arrays without one."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np


def compiled(function: Callable[..., Any], *arguments: Any, **settings: Any) -> Any:
    """`function(*arguments, **settings)` as one program; the settings are constants of it.

    Outside of jit, every new operation and shape is a program of some 20 ms of CPU.
    """
    return jax.jit(lambda *traced: function(*traced, **settings))(*arguments)


def on_device(x: np.ndarray, dtype: Any) -> jax.Array:
    """`x` in that dtype. jnp.asarray would be a program for each shape."""
    return jax.device_put(x.astype(dtype))
