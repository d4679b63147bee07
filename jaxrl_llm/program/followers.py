"""Roles whose weights are another role's, on devices of their own."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_llm.distributed.reshard import to_devices
from jaxrl_llm.learner.train_state import Params, is_at, params_of, stays_float32
from jaxrl_llm.models.base import ModelSpec


class Follower:
    """A role that takes the weights of another to its own devices as each step begins."""

    def __init__(self, name: str, source: str, dtype: str, *, spec: ModelSpec, shardings: Params):
        """`spec` and `shardings` describe the weights on the role's devices."""
        self.name = name
        self.source = source
        self.timing = f"sync_{name}"
        self._dtype = dtype
        self._spec, self._shardings = spec, shardings
        # The state of the source, and what came of it: weights, and the bytes that moved.
        self._last: tuple[Any, Any, int] = (None, None, 0)

    def follow(self, state: Any) -> tuple[Any, int]:
        """The weights on the role's devices, and the bytes that they moved. A state moves once."""
        if self._last[0] is not state:
            self._last = (None, None, 0)  # the old weights make room
            weights = to_devices(params_of(state), self._shardings, self._dtype, self._stays)
            self._last = (state, *weights)
        return self._last[1:]

    def abstract(self) -> Any:
        """Shape, dtype and sharding of the weights."""

        def one(path: Any, x: Any, sharding: Any) -> jax.ShapeDtypeStruct:
            dtype = x.dtype if self._stays(path) else jnp.dtype(self._dtype)
            return jax.ShapeDtypeStruct(x.shape, dtype, sharding=sharding)

        return jax.tree.map_with_path(one, self._spec.params, self._shardings)

    def _stays(self, path: Any) -> bool:
        return stays_float32(path) or is_at(path, self._spec.float32_head)
