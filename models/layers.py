"""Layers that every family shares.

Shape letters: B batch, T tokens, D hidden (embed), F feed-forward (mlp), V vocabulary,
N query heads, K KV heads, H head dim.

Modules are built with zeros: they declare shape, dtype, logical axes and how the parameter starts
(`init`, one of "normal", "ones", "zeros"); `base.init_params` fills them. Every layer computes in
the dtype of its parameters, statistics in float32.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AbstractMesh, AxisType, PartitionSpec
from jax.typing import DTypeLike

from jaxrl_llm.distributed.mesh import REPLICA_AXES, num_replicas
from jaxrl_llm.kernels.float8 import FLOAT8, Scaled, gated_float8, rms_norm_float8, to_float8
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.numerics import rms_norm, to_every_token

AXES = ("vocab", "embed", "q_heads", "kv_heads", "head_dim", "mlp", "norm", "value", "merged")
# How a model keeps its projections: one kernel each, those of one input as one kernel, or so and in
# float8; see `base.merge_projections` and `base.quantize_projections`.
Form = Literal["separate", "merged", "float8"]
PROJECTION = "projection"  # the name under which a projection's result may be kept, see decoder.py


def parameter(
    shape: tuple[int, ...], axes: tuple[str, ...], init: str, dtype: DTypeLike
) -> nnx.Param:
    """A parameter with one logical axis name a dim; `base.init_params` gives it its values."""
    assert len(shape) == len(axes), (shape, axes)
    assert all(axis in AXES for axis in axes), axes
    return nnx.Param(jnp.zeros(shape, dtype), axes=axes, init=init)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Weight:
    """A float32 parameter and its copy in the dtype of computation; its gradient is the first's.

    So the gradient of a projection's kernel is a product with float32 results, to which XLA adds
    the sum of the micro-batches before within the product itself, unless it has merged the product
    with another. What is read by `[...]` has a gradient of the copy's dtype, widened.
    """

    stored: jax.Array
    computed: jax.Array

    def __getitem__(self, index: Any) -> jax.Array:
        return _cast_from(self.stored, self.computed)[index]


@jax.custom_vjp
def _cast_from(stored: jax.Array, computed: jax.Array) -> jax.Array:
    return computed


_cast_from.defvjp(
    lambda stored, computed: (computed, stored),
    lambda stored, gradient: (gradient.astype(stored.dtype), None),
)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _product_of_weight(
    stored: jax.Array, x: jax.Array, computed: jax.Array, contract: int
) -> jax.Array:
    return jnp.tensordot(x, computed, axes=contract)


def _product_forward(
    stored: jax.Array, x: jax.Array, computed: jax.Array, contract: int
) -> tuple[jax.Array, Any]:
    # `stored` for its shape and dtype: nothing reads it.
    return _product_of_weight(stored, x, computed, contract), (stored, x, computed)


def _product_backward(contract: int, residuals: Any, gradient: jax.Array) -> tuple[Any, Any, None]:
    stored, x, computed = residuals
    size = math.prod(computed.shape[:contract])
    x_TD, gradient_TF = x.reshape(-1, size), gradient.reshape(-1, computed.size // size)
    gradient_DF = jnp.einsum("TD,TF->DF", x_TD, gradient_TF, preferred_element_type=stored.dtype)
    x_gradient = jnp.einsum("TF,DF->TD", gradient_TF, computed.reshape(size, -1))
    return gradient_DF.reshape(stored.shape), x_gradient.reshape(x.shape), None


_product_of_weight.defvjp(_product_forward, _product_backward)


class Projection(nnx.Module):
    """Contracts the last `contract` dims of x with the first of the kernel; bias if asked for."""

    def __init__(
        self,
        shape: tuple[int, ...],
        axes: tuple[str, ...],
        *,
        contract: int = 1,
        bias: bool = False,
        init: str = "normal",
        dtype: DTypeLike,
    ) -> None:
        self.contract = contract
        self.kernel = parameter(shape, axes, init, dtype)
        self.bias = parameter(shape[contract:], axes[contract:], "zeros", dtype) if bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        kernel = self.kernel.get_value()
        if isinstance(kernel, Weight):
            product = partial(_product_of_weight, kernel.stored)
            kernel = kernel.computed
        else:
            product = jnp.tensordot
        if self.bias is None:
            return checkpoint_name(product(x, kernel, self.contract), PROJECTION)
        # Outputs joined: on a GPU a product adds a bias of one dim itself, while one of several is
        # first written out for every token.
        inputs, outputs = kernel.shape[: self.contract], kernel.shape[self.contract :]
        y = product(x, kernel.reshape(*inputs, -1), self.contract)
        y += to_every_token(self.bias[...].reshape(-1), y.shape)
        return checkpoint_name(y.reshape(*y.shape[:-1], *outputs), PROJECTION)


class Float8Projection(nnx.Module):
    """A projection whose kernel and input are float8_e4m3fn, each output and each token scaled.

    The kernel is [*outputs, *inputs], the layout that the tensor cores read fastest. Takes the
    arguments of `Projection`; `dtype` is that of the input and of the result.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        axes: tuple[str, ...],
        *,
        contract: int = 1,
        bias: bool = False,
        dtype: DTypeLike,
    ) -> None:
        self.contract, self.dtype = contract, dtype
        outputs = shape[contract:]
        transposed = (*axes[contract:], *axes[:contract])
        self.kernel = parameter((*outputs, *shape[:contract]), transposed, "zeros", FLOAT8)
        self.scale = parameter(outputs, axes[contract:], "ones", jnp.float32)
        self.bias = parameter(outputs, axes[contract:], "zeros", dtype) if bias else None

    def __call__(self, x: jax.Array | Scaled) -> jax.Array:
        """Of an array that is still to be scaled, or of one that is, its inputs joined."""
        y, x_scale = self.unscaled(x)
        scale = self.scale[...]
        y = y.astype(jnp.float32) * x_scale * scale.reshape(-1)
        y = y.reshape(*y.shape[:-1], *scale.shape)
        return (y if self.bias is None else y + self.bias[...]).astype(self.dtype)

    def unscaled(self, x: jax.Array | Scaled) -> tuple[jax.Array, jax.Array]:
        """The product of the float8 values, outputs joined, and the scales of the inputs' rows."""
        if not isinstance(x, Scaled):
            x = to_float8(x.reshape(*x.shape[: x.ndim - self.contract], -1), axis=-1)
        kernel = self.kernel[...]
        y = jax.lax.dot_general(
            x.values,
            kernel.reshape(self.scale[...].size, -1),
            (((x.values.ndim - 1,), (1,)), ((), ())),
            preferred_element_type=self.dtype,
        )
        return y, x.scale


class RMSNorm(nnx.Module):
    """x / rms(x) * scale over the last dim, statistics in float32 (arXiv:1910.07467).

    With `float8` the result is a `Scaled` in float8, the input of a `Float8Projection`.
    """

    def __init__(
        self,
        size: int,
        *,
        axis: str = "norm",
        eps: float,
        dtype: DTypeLike,
        float8: bool = False,
    ) -> None:
        self.eps, self.float8 = eps, float8
        self.scale = parameter((size,), (axis,), "ones", dtype)

    def __call__(self, x: jax.Array) -> Any:
        scale = self.scale[...]
        if self.float8:
            rows = rms_norm_float8(x.reshape(-1, x.shape[-1]), scale, eps=self.eps)
            return jax.tree.map(lambda y: y.reshape(*x.shape[:-1], y.shape[-1]), rows)
        return rms_norm(x, scale, self.eps)


class Embedding(nnx.Module):
    """A table of token vectors. A token id outside the table gives NaN, not another token."""

    def __init__(self, config: ModelConfig, *, dtype: DTypeLike) -> None:
        shape = (config.vocab_size, config.hidden_size)
        self.table = parameter(shape, ("vocab", "embed"), "normal", dtype)

    def __call__(self, tokens_BT: jax.Array) -> jax.Array:
        return _lookup(_replicas(tokens_BT.shape[0]), self.table[...], tokens_BT)


def _replicas(num_rows: int) -> AbstractMesh | None:
    """The mesh in scope, where XLA would divide this many rows over it."""
    mesh = jax.sharding.get_abstract_mesh()
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    if any(kinds.get(axis) is not AxisType.Auto for axis in REPLICA_AXES):
        return None
    size = num_replicas(mesh)
    return mesh if size > 1 and num_rows % size == 0 else None


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _lookup(mesh: AbstractMesh | None, table_VD: jax.Array, tokens_BT: jax.Array) -> jax.Array:
    return jnp.take(table_VD, tokens_BT, axis=0)


def _lookup_forward(
    mesh: AbstractMesh | None, table_VD: jax.Array, tokens_BT: jax.Array
) -> tuple[jax.Array, Any]:
    return _lookup(mesh, table_VD, tokens_BT), (table_VD, tokens_BT)


def _lookup_backward(
    mesh: AbstractMesh | None, residuals: Any, gradient_BTD: jax.Array
) -> tuple[jax.Array, None]:
    """A token's gradients add up in float32: a bf16 sum of 256 like ones grows no further.

    Each replica adds its own; what they send each other is in the table's dtype.
    """
    table_VD, tokens_BT = residuals

    def add(gradient_BTD: jax.Array, tokens_BT: jax.Array) -> jax.Array:
        # The zero comes with the gradient, or XLA would take the head's zeros, which are there
        # before, and keep them through the whole backward pass.
        gradient_BTD, zero = jax.lax.optimization_barrier((gradient_BTD, jnp.float32(0)))
        sums_VD = jnp.full(table_VD.shape, zero).at[tokens_BT].add(gradient_BTD.astype(jnp.float32))
        return sums_VD.astype(table_VD.dtype)[None]

    if mesh is None:
        return add(gradient_BTD, tokens_BT)[0], None
    by_row = PartitionSpec(REPLICA_AXES)
    each_VD = jax.shard_map(
        add,
        mesh=mesh,
        in_specs=(by_row, by_row),
        out_specs=by_row,
        axis_names=set(REPLICA_AXES),
        check_vma=False,
    )(gradient_BTD, tokens_BT)
    return jax.lax.reduce(each_VD, jnp.zeros((), each_VD.dtype), jax.lax.add, (0,)), None


_lookup.defvjp(_lookup_forward, _lookup_backward)


class MLP(nnx.Module):
    """The gated feed-forward layer: down(silu(gate(x)) * up(x)) (arXiv:2002.05202).

    Merged, gate and up are one kernel [D, 2F]; see `base.merge_projections`.
    """

    def __init__(self, config: ModelConfig, *, form: Form, dtype: DTypeLike) -> None:
        D, F = config.hidden_size, config.intermediate_size
        projection = Float8Projection if form == "float8" else Projection
        if form == "separate":
            self.gate = projection((D, F), ("embed", "mlp"), dtype=dtype)
            self.up = projection((D, F), ("embed", "mlp"), dtype=dtype)
        else:
            self.gate_up = projection((D, 2 * F), ("embed", "merged"), dtype=dtype)
        self.down = projection((F, D), ("mlp", "embed"), dtype=dtype)

    def __call__(self, x_BTD: Any) -> jax.Array:
        merged = getattr(self, "gate_up", None)
        if isinstance(merged, Float8Projection):
            y, x_scale = merged.unscaled(x_BTD)
            batch, scale = y.shape[:-1], merged.scale[...]
            gated = gated_float8(y.reshape(-1, y.shape[-1]), x_scale.reshape(-1, 1), scale)
            return self.down(jax.tree.map(lambda z: z.reshape(*batch, z.shape[-1]), gated))
        if merged is not None:
            gate_BTF, up_BTF = jnp.split(merged(x_BTD), 2, axis=-1)
        else:
            gate_BTF, up_BTF = self.gate(x_BTD), self.up(x_BTD)
        return self.down(jax.nn.silu(gate_BTF) * up_BTF)


def rope_frequencies(config: ModelConfig) -> np.ndarray:
    """Angle per position of each pair of a head, radians, float32 [H/2] (arXiv:2104.09864).

    Computed in float32 like transformers: a more exact table would turn by another angle than the
    one that the weights were trained with, and at long positions the difference shows.
    """
    exponents = np.arange(0, config.head_dim, 2, dtype=np.float32) / np.float32(config.head_dim)
    frequencies = np.float32(1.0) / np.power(np.float32(config.rope_theta), exponents)
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    stretched = frequencies / np.float32(scaling.factor)
    if scaling.kind == "linear":
        return stretched
    length = scaling.original_max_position_embeddings
    turns = length * frequencies / np.float32(2 * math.pi)  # of the pair over the old context
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return ((1 - smooth) * stretched + smooth * frequencies).astype(np.float32)


def rope_tables(config: ModelConfig, positions_BT: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine of every position and pair, float32 [B, T, 1, H/2]."""
    angles = positions_BT[..., None, None].astype(jnp.float32) * rope_frequencies(config)
    return jnp.cos(angles), jnp.sin(angles)


def apply_rope(x_BTNH: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates pair (i, i + H/2) of each head by its angle, in float32; the dtype of x is kept."""
    first, second = jnp.split(x_BTNH.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x_BTNH.dtype)
