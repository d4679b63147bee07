"""A call as one program."""

from collections.abc import Callable
from typing import Any

import jax


def compiled(function: Callable[..., Any], *arguments: Any, **settings: Any) -> Any:
    """`function(*arguments, **settings)` as one program; the settings are constants of it.

    Outside of jit, every new operation and shape is a program of some 20 ms of CPU.
    """
    return jax.jit(lambda *traced: function(*traced, **settings))(*arguments)
