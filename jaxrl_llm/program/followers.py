"""Roles whose weights are another role's, on devices of their own."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_llm.distributed.reshard import to_devices
from jaxrl_llm.learner.train_state import Adapted, Params, params_of
from jaxrl_llm.models.base import ModelSpec
from jaxrl_llm.models.casting import is_at, stays_float32
from jaxrl_llm.models.lora import split


class Follower:
    """A role that takes the weights of another to its own devices as each step begins.

    With adapters only they move. The frozen base goes there once.
    """

    def __init__(
        self,
        name: str,
        source: str,
        dtype: str,
        *,
        spec: ModelSpec,
        shardings: Params,
        base: str = "",
    ):
        """`spec` and `shardings` describe the weights on the role's devices.

        `base` is the role that keeps the weights below the adapters of `source`.
        """
        self.name = name
        self.source = source
        self.base = base
        self.timing = f"sync_{name}"
        self._dtype = dtype
        self._spec, self._shardings = spec, shardings
        # The state of the source, and what came of it: weights, and the bytes that moved.
        self._last: tuple[Any, Any, int] = (None, None, 0)
        self._base: Params | None = None

    @property
    def sources(self) -> set[str]:
        """The roles whose states it reads."""
        return {self.source, self.base} - {""}

    def follow(self, states: Mapping[str, Any]) -> tuple[Any, int]:
        """The weights on the role's devices, and the bytes that they moved. A state moves once."""
        state = states[self.source]
        if self._last[0] is not state:
            self._last = (None, None, 0)  # the old weights make room
            self._last = (state, *self._moved(state, states))
        return self._last[1:]

    def _moved(self, state: Any, states: Mapping[str, Any]) -> tuple[Any, int]:
        if not self.base:
            return to_devices(params_of(state), self._shardings, self._dtype, self._stays)
        places, size = split(self._shardings), 0
        if self._base is None:
            base = {name: states[self.base][name] for name in places[0]}
            self._base, size = to_devices(base, places[0], self._dtype, _everything)
        own, more = to_devices(params_of(state), places[1], self._dtype, _everything)
        return Adapted(own=own, base=self._base), size + more

    def abstract(self) -> Any:
        """Shape, dtype and sharding of the weights."""

        def one(path: Any, x: Any, sharding: Any) -> jax.ShapeDtypeStruct:
            stays = self.base or self._stays(path)
            dtype = x.dtype if stays else jnp.dtype(self._dtype)
            return jax.ShapeDtypeStruct(x.shape, dtype, sharding=sharding)

        weights = jax.tree.map_with_path(one, self._spec.params, self._shardings)
        if not self.base:
            return weights
        base, own = split(weights)
        return Adapted(own=own, base=base)

    def _stays(self, path: Any) -> bool:
        return stays_float32(path) or is_at(path, self._spec.float32_head)


def _everything(path: Any) -> bool:
    """Adapters and their base keep their dtypes: they are merged where they generate."""
    return True
