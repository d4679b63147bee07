"""Frozen projections in float8_e4m3fn, below adapters (QLoRA's place: arXiv:2305.14314).

A kernel is stored as float8 values, and a float32 scale for each output; experts have scales of
their own. The scales are powers of two, so the dequantised weights are exact in bfloat16.
The model computes with these weights; they have no gradient. A matmul dequantises them in the
forward and in the backward pass, so no pass holds more than a few such copies. A matmul of few
rows, as in a decode step, reads the values in float8 and scales its outputs, which gives the same
bits.

Experts of a rollout in float8 are stored and read in the same way: see `base.quantize_projections`.

In a tree of parameters, a frozen projection is a dict with "kernel" and "scale".
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Sharding
from jax.typing import DTypeLike

from jaxrl_llm.kernels.float8 import FLOAT8, to_float8

KERNEL, SCALE = "kernel", "scale"
OF_EXPERTS = 0  # dims of the inputs of a kernel that begins with a dim of experts

# Up to so many rows a matmul is bound by the bytes of its weights.
FEW_ROWS = 256

Tree = Any  # nested dicts of arrays with str keys
Dot = Callable[[jax.Array, jax.Array, int], jax.Array]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Quantized:
    """A kernel without a gradient: float8 values [*inputs, *outputs] times scales [*outputs].

    Of experts: values [E, inputs, outputs] times scales [E, 1, outputs].
    """

    values: jax.Array
    scale: jax.Array

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    def astype(self, dtype: DTypeLike) -> jax.Array:
        """The weights, exact in float32 and bfloat16."""
        return self.values.astype(dtype) * self.scale.astype(dtype)

    def joined(self, contract: int) -> "Quantized":
        """The same kernel with its output dims as one."""
        values = self.values.reshape(*self.values.shape[:contract], -1)
        return Quantized(values, self.scale.reshape(-1))


def quantize(kernel: jax.Array, contract: int) -> Quantized:
    """A kernel whose first `contract` dims are inputs, in float8; `OF_EXPERTS` is for theirs."""
    axis = 1 if contract == OF_EXPERTS else tuple(range(contract))
    scaled = to_float8(kernel, axis=axis, powers_of_two=True)
    if contract == OF_EXPERTS:
        return Quantized(*scaled)
    return Quantized(scaled.values, scaled.scale.reshape(kernel.shape[contract:]))


def quantized_matmul(
    kernel: Quantized, x: jax.Array, contract: int, dot: Dot = jnp.tensordot
) -> jax.Array:
    """`dot(x, weights, contract)`, with the gradient of x alone. It keeps no weights."""
    return _matmul(x, kernel.values, kernel.scale, contract, dot)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _matmul(
    x: jax.Array, values: jax.Array, scale: jax.Array, contract: int, dot: Dot
) -> jax.Array:
    if math.prod(x.shape[: x.ndim - contract]) <= FEW_ROWS:
        # XLA converts the values inside of its matmul. Scales before it would need a copy.
        x, values = jax.lax.optimization_barrier((x, values))
        return dot(x, values.astype(x.dtype), contract) * scale.astype(x.dtype)
    x, weights = weights_when_due(x, values, scale)
    return dot(x, weights, contract)


def _matmul_backward(
    contract: int, dot: Dot, residuals: Any, gradient: jax.Array
) -> tuple[jax.Array, None, None]:
    values, scale = residuals
    gradient, weights = weights_when_due(gradient, values, scale)
    outputs = tuple(range(contract, weights.ndim))
    last = tuple(range(gradient.ndim - len(outputs), gradient.ndim))
    return jax.lax.dot_general(gradient, weights, ((last, outputs), ((), ()))), None, None


_matmul.defvjp(lambda *operands: (_matmul(*operands), operands[1:3]), _matmul_backward)


def weights_when_due(
    x: jax.Array, values: jax.Array, scale: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """x, and weights in its dtype that are made when x is there.

    Without the barrier XLA would make the weights once for both passes, and before a loop over
    micro-batches: a whole base in bfloat16.
    """
    x, values = jax.lax.optimization_barrier((x, values))
    return x, Quantized(values, scale).astype(x.dtype)


# ------------------------------------------------------------------------- trees


def is_frozen(module: Any) -> bool:
    """True if a part of the parameters, arrays or their shapes, is a projection in float8."""
    return isinstance(module, dict) and getattr(module.get(KERNEL), "dtype", None) == FLOAT8


def inputs_of(module: Tree) -> int:
    """The number of input dims of a frozen projection's kernel, or `OF_EXPERTS`.

    They are the first ones of a frozen projection.
    """
    return module[KERNEL].ndim - module[SCALE].ndim


def weights_of(module: Tree) -> Any:
    """The kernel of a projection: an array or a `Quantized`, which both have `astype`."""
    return Quantized(module[KERNEL], module[SCALE]) if is_frozen(module) else module[KERNEL]


def dequantized(tree: Tree, dtype: DTypeLike) -> Tree:
    """Parameters whose frozen projections have weights in `dtype`; the others are as they were."""
    if is_frozen(tree):
        kernel = weights_of(tree).astype(dtype)
        return {name: x for name, x in tree.items() if name != SCALE} | {KERNEL: kernel}
    if not isinstance(tree, dict):
        return tree
    return {name: dequantized(value, dtype) for name, value in tree.items()}


def freeze(kernel: jax.Array, inputs: int, place: Sharding, scale_place: Sharding) -> Quantized:
    """`quantize` outside of jit, where a role keeps the results."""
    return _freezing(inputs, place, scale_place)(kernel)


@functools.cache
def _freezing(inputs: int, place: Sharding, scale_place: Sharding) -> Callable[..., Quantized]:
    out = Quantized(place, scale_place)  # pyright: ignore[reportArgumentType]
    return jax.jit(functools.partial(quantize, contract=inputs), out_shardings=out)


def quantized_as(abstract: Tree, tree: Tree) -> Tree:
    """Parameters with frozen projections where `abstract` has them. Call it inside jit."""
    if is_frozen(abstract):
        kernel = quantize(tree[KERNEL], inputs_of(abstract))
        return tree | {KERNEL: kernel.values, SCALE: kernel.scale}
    if not isinstance(tree, dict):
        return tree
    return {name: quantized_as(abstract[name], value) for name, value in tree.items()}
