"""Parameters in the dtype of computation, and those that stay float32."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxrl_llm.kernels.float8 import FLOAT8
from jaxrl_llm.models.config import BALANCE, CENTROIDS
from jaxrl_llm.models.gated_delta import DECAY
from jaxrl_llm.models.layers import Weight
from jaxrl_llm.models.lora import MAGNITUDE

Params = Any  # nested dict of arrays


def stays_float32(path: Any) -> bool:
    """True if the parameter at this path of keys is float32 in every dtype of computation."""
    # A norm is divided by the float32 norm of a module: rounded, it would scale the output. The
    # steps of a balance bias are smaller than what bfloat16 resolves, and nearly equal experts
    # change places where centroids are rounded. Decays go through exp twice.
    names = (MAGNITUDE, BALANCE, CENTROIDS, *DECAY)
    return bool(path) and getattr(path[-1], "key", "") in names


def is_at(path: Any, names: tuple[str, ...]) -> bool:
    """True if a path of keys is `names`; none is the empty one."""
    return bool(names) and tuple(getattr(key, "key", "") for key in path) == names


def cast(params: Params, dtype: str, float32_head: tuple[str, ...] = ()) -> Params:
    """Parameters in the dtype of computation; gradients flow back in the stored dtype.

    Kernels that are frozen in float8 stay so: a matmul makes its weights itself. The head is
    float32 if `ModelSpec.float32_head` is its path.

    Requires: a leaf that is a `Weight` was cast to `dtype` before.
    """

    def one(path: Any, x: Array | Weight) -> Array | Weight:
        if isinstance(x, Weight):
            assert x.computed.dtype == dtype, (x.computed.dtype, dtype)
            return x
        if is_at(path, float32_head):
            return x.astype(jnp.float32)
        keeps = stays_float32(path) or x.dtype == FLOAT8
        return x if keeps else x.astype(dtype)

    return jax.tree.map_with_path(one, params, is_leaf=lambda x: isinstance(x, Weight))
