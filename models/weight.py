"""`Weight`: a parameter that is stored in float32 and computed in another dtype.

Training in bf16 casts the float32 parameters once a step. With plain casting, each micro-batch's
gradient is rounded to bf16 before it is added to the float32 sum. To avoid that, the learner puts a
`Weight` where a layer expects an array. It stays inside one loss function: `learner/train_step.py`
makes it, and nobody stores it, saves it or puts it across a jit boundary.

A layer reads a `Weight` in one of two ways:

- `Projection` calls `weight_matmul`. The gradient of the kernel is a matmul with float32 results.
  XLA adds the sum of earlier micro-batches inside that matmul, unless it fused it with another one.
- Every other layer reads `parameter[...]`, which works for a `Weight` and for an array alike. The
  gradient then has the dtype of computation and is cast to float32.

Off a GPU `multiply` makes a `Weight` of every kernel. The gradient of a kernel is then x' g, where
jax's own rule computes (g' x)'. XLA's CPU backend writes g' out, column by column, and computes the
activation's gradient again for each element.

The trap: `parameter.get_value()` may return a `Weight`, so use `parameter[...]` unless the layer
handles both.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Weight:
    """A stored parameter and its copy in the dtype of computation; gradients go to `stored`."""

    stored: jax.Array
    computed: jax.Array

    def __getitem__(self, index: Any) -> jax.Array:
        """Part of the copy, in the dtype of computation."""
        return _cast_from(self.stored, self.computed)[index]


Dot = Callable[[jax.Array, jax.Array, int], jax.Array]


def weight_matmul(
    weight: Weight, x: jax.Array, kernel: jax.Array, contract: int, dot: Dot = jnp.tensordot
) -> jax.Array:
    """`dot(x, kernel, contract)`, with the gradient of `weight.stored` in its own dtype.

    Requires: `kernel` is `weight.computed`, perhaps with its output dims joined. `dot` computes
    `jnp.tensordot`, in an order of its own.
    """
    return _matmul(weight.stored, x, kernel, contract, dot)


@jax.custom_vjp
def _cast_from(stored: jax.Array, computed: jax.Array) -> jax.Array:
    return computed


_cast_from.defvjp(
    lambda stored, computed: (computed, stored),
    lambda stored, gradient: (gradient.astype(stored.dtype), None),
)


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _matmul(
    stored: jax.Array, x: jax.Array, computed: jax.Array, contract: int, dot: Dot
) -> jax.Array:
    return dot(x, computed, contract)


def _matmul_backward(
    contract: int, dot: Dot, residuals: Any, gradient: jax.Array
) -> tuple[Any, Any, None]:
    stored, x, computed = residuals
    size = math.prod(computed.shape[:contract])
    x_TD, gradient_TF = x.reshape(-1, size), gradient.reshape(-1, computed.size // size)
    gradient_DF = jnp.einsum("TD,TF->DF", x_TD, gradient_TF, preferred_element_type=stored.dtype)
    x_gradient = jnp.einsum("TF,DF->TD", gradient_TF, computed.reshape(size, -1))
    return gradient_DF.reshape(stored.shape), x_gradient.reshape(x.shape), None


# `stored` is kept for its shape and dtype only; nothing reads its values.
_matmul.defvjp(lambda *operands: (_matmul(*operands), operands[:3]), _matmul_backward)
