"""The state of one role on the device: parameters, optimizer state and its step."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Int

from jaxrl_llm.distributed.sharding import HOST_MEMORY
from jaxrl_llm.models.config import BALANCE
from jaxrl_llm.models.lora import join

Params = Any  # nested dict of arrays
Metrics = dict[str, Array]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class TrainState:
    """A trained role. `step` counts optimizer steps that were not skipped."""

    params: Params
    opt_state: optax.OptState
    step: Int[Array, ""]

    def replace(self, **changes: Any) -> "TrainState":
        """A copy with some fields changed."""
        return replace(self, **changes)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Adapted:
    """The state of a role with adapters: its own, and the base, which others share."""

    own: Any  # a TrainState, or the parameters that learn
    base: Params

    @property
    def joined(self) -> Params:
        """All parameters."""
        return join(self.base, params_of(self.own))


def own_of(state: Any) -> Any:
    """The part of a state that belongs to its role alone."""
    return state.own if isinstance(state, Adapted) else state


def params_of(state: Any) -> Params:
    """The parameters of a state, including its base."""
    if isinstance(state, Adapted):
        return state.joined
    return state.params if isinstance(state, TrainState) else state


def init_state(params: Params, optimizer: Any) -> TrainState:
    """A fresh state around `params`, for ours or optax's; pure, so it can be traced and sharded."""
    return TrainState(
        params=params, opt_state=optimizer.init(params), step=jnp.zeros((), jnp.int32)
    )


def is_balance(path: Any) -> bool:
    """True if the parameter at this path of keys is a bias that balances a router."""
    return bool(path) and getattr(path[-1], "key", "") == BALANCE


def of_moments(make: Callable[[Any], Any], params: Any) -> Any:
    """`make` of every parameter that has moments, and None for a balance bias, which has none."""

    def one(path: Any, x: Any) -> Any:
        return None if is_balance(path) else make(x)

    return jax.tree.map_with_path(one, params)


def state_shardings(shapes: TrainState, param_shardings: Params, *, offload: bool) -> TrainState:
    """Shardings of a TrainState, whose `shapes` are abstract. Moments follow their parameters.

    An array of the optimizer state belongs to a parameter if it has its shape, and the end of its
    path. Other matrices are split over `fsdp` along the first dim that divides, the rest is
    replicated. `offload` places what belongs to parameters in the memory of the devices' hosts.
    """
    shardings = dict(jax.tree_util.tree_leaves_with_path(param_shardings))
    params = {
        path: (x.shape, shardings[path])
        for path, x in jax.tree_util.tree_leaves_with_path(shapes.params)
    }
    mesh: Mesh = next(iter(shardings.values())).mesh

    def one(path: Any, x: Any) -> Any:
        for first in range(len(path)):
            shape, sharding = params.get(path[first:], (None, None))
            if sharding is not None and shape == x.shape:
                return sharding.with_memory_kind(HOST_MEMORY) if offload else sharding
        return NamedSharding(mesh, _divided(x.shape, mesh.shape.get("fsdp", 1)))

    # Any: the same record, with a sharding where a state has an array.
    replicated: Any = NamedSharding(mesh, PartitionSpec())
    opt_state = jax.tree.map_with_path(one, shapes.opt_state)
    return TrainState(params=param_shardings, opt_state=opt_state, step=replicated)


def _divided(shape: tuple[int, ...], parts: int) -> PartitionSpec:
    """The first dim of a matrix that divides is split over `fsdp`."""
    for place, size in enumerate(shape if len(shape) > 1 and parts > 1 else ()):
        if size % parts == 0:
            return PartitionSpec(*[None] * place, "fsdp")
    return PartitionSpec()


@dataclass(frozen=True, kw_only=True)
class CastAhead:
    """Weights are cast to `dtype`, the dtype of computation, once an optimizer step.

    `float32_gradients` keeps the gradients of projection kernels in float32 until they are added
    up; see `Weight`. It is for one device, because several devices send gradients in `dtype`. It is
    for layers that are not scanned: a scan would hold all its gradients in float32 until its end.
    """

    dtype: str
    float32_gradients: bool
