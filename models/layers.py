"""Layers that every family shares.

Shape letters: B batch, T tokens, D hidden (embed), F feed-forward (mlp), V vocabulary,
N query heads, K KV heads, H head dim.

Modules are built without arrays. They declare a parameter's shape, dtype, logical axes and initial
values (`init`: "normal", "ones" or "zeros"); `base.init_params` draws them. Every layer computes in
the dtype of its parameters and statistics in float32.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from jaxrl_llm.distributed.layout import Layout, layout_in_scope
from jaxrl_llm.distributed.sharding import LogicalAxis
from jaxrl_llm.kernels.float8 import FLOAT8, Scaled, gated_float8, rms_norm_float8, to_float8
from jaxrl_llm.kernels.hopper import on_gpu
from jaxrl_llm.kernels.strict import strict_in_scope
from jaxrl_llm.kernels.strict_matmul import fits as strict_matmul_fits
from jaxrl_llm.kernels.strict_matmul import strict_dot
from jaxrl_llm.kernels.strict_norm import strict_norm
from jaxrl_llm.models.config import ModelConfig, QwenVision
from jaxrl_llm.models.frozen import Quantized, quantized_matmul
from jaxrl_llm.models.rope import rope_powers
from jaxrl_llm.models.weight import Weight, weight_matmul
from jaxrl_llm.numerics import rms_norm, to_every_token

# The form of a model's projections. "separate": one kernel each. "merged": one kernel for several
# that read the same input. "float8": merged and in float8. "float8_separate": one kernel each, in
# float8, for heads that are split. See `base.merge_projections` and `base.quantize_projections`.
# "frozen_separate": one kernel each, frozen in float8 below adapters; see frozen.py.
# A module without a float8 form keeps the model's dtype: see `without_float8`.
Form = Literal["separate", "merged", "float8", "float8_separate", "frozen_separate"]
FROZEN: Form = "frozen_separate"
PROJECTION = "projection"  # checkpoint name of a projection's output; see decoder.py


class Layer(nnx.Module, pytree=False):
    """A module that is split into its arrays and merged again, and never mapped over.

    As a pytree it would look at every attribute that is set: more than half of the time that it
    takes to describe a model.
    """

    def __init_subclass__(cls) -> None:
        super().__init_subclass__(pytree=False)


def parameter(
    shape: tuple[int, ...], axes: tuple[LogicalAxis, ...], init: str, dtype: DTypeLike
) -> nnx.Param:
    """A parameter with one logical axis a dim; `base.init_params` gives it its values.

    Until then it is a shape and a dtype: a model is described without tracing arrays of zeros.
    """
    assert len(shape) == len(axes), (shape, axes)
    return nnx.Param(jax.ShapeDtypeStruct(shape, dtype), axes=axes, init=init)


class Projection(Layer):
    """Contract the last `contract` dims of x with the kernel's first ones, and add a bias."""

    def __init__(
        self,
        shape: tuple[int, ...],
        axes: tuple[LogicalAxis, ...],
        *,
        contract: int = 1,
        bias: bool = False,
        init: str = "normal",
        dtype: DTypeLike,
    ) -> None:
        self.contract = contract
        self.kernel = parameter(shape, axes, init, dtype)
        self.bias = parameter(shape[contract:], axes[contract:], "zeros", dtype) if bias else None

    adapter: Any = None  # see lora.py

    def __call__(self, x: jax.Array) -> jax.Array:
        kernel = self._weights()
        shape = getattr(kernel, "computed", kernel).shape
        dot = self._dot(shape, x.dtype)
        if self.bias is None and self.adapter is None:
            return checkpoint_name(multiply(x, kernel, self.contract, dot=dot), PROJECTION)
        # The output dims are joined: a GPU matmul adds a bias of one dim itself, but XLA would
        # broadcast a bias of several dims to every token in memory.
        if self.adapter is None:
            y = multiply(x, kernel, self.contract, joined=True, dot=dot)
        else:
            y = self.adapter(x, kernel, dot)
        if self.bias is not None:
            y += to_every_token(self.bias[...].reshape(-1), y.shape)
        return checkpoint_name(y.reshape(*y.shape[:-1], *shape[self.contract :]), PROJECTION)

    def _weights(self) -> Any:
        """The kernel: an array, a `Weight`, a `Quantized`, or `lora.Merged`."""
        return self.kernel.get_value()

    def _dot(self, shape: tuple[int, ...], dtype: DTypeLike) -> Any:
        strict, contract = strict_in_scope(), self.contract
        if strict is None or not strict.kernels:
            return jnp.tensordot
        depth, outputs = math.prod(shape[:contract]), math.prod(shape[contract:])
        if not strict_matmul_fits(depth, outputs, dtype):
            raise ValueError(
                f"config.exact=strict: a projection of {depth} by {outputs} in {dtype}; on a GPU "
                "sizes are multiples of 64 and the dtype is bfloat16; set --config.exact=repeatable"
            )
        return strict_dot


class FrozenProjection(Projection):
    """A projection whose kernel is frozen in float8_e4m3fn, with a scale for each output."""

    def __init__(
        self,
        shape: tuple[int, ...],
        axes: tuple[LogicalAxis, ...],
        *,
        contract: int = 1,
        init: str = "normal",
        **others: Any,
    ) -> None:
        super().__init__(shape, axes, contract=contract, init=init, **others)
        self.kernel = parameter(shape, axes, init, FLOAT8)
        self.scale = parameter(shape[contract:], axes[contract:], "ones", jnp.float32)

    def _weights(self) -> Any:
        kernel = self.kernel.get_value()
        return Quantized(kernel, self.scale[...]) if isinstance(kernel, jax.Array) else kernel


def multiply(
    x: jax.Array,
    kernel: Any,
    contract: int,
    *,
    joined: bool = False,
    dot: Callable[..., jax.Array] = jnp.tensordot,
) -> jax.Array:
    """The last `contract` dims of x times the first ones of a kernel.

    It is an array, a `Weight` or a `Quantized`.

    With `joined` the output dims of the kernel become one. `dot` computes it, as `jnp.tensordot`.
    """
    matmul: Any = dot
    if isinstance(kernel, Quantized):
        return quantized_matmul(kernel.joined(contract) if joined else kernel, x, contract, dot)
    if isinstance(kernel, jax.Array) and not on_gpu():
        kernel = Weight(kernel, kernel)  # see weight.py: the gradient's matmul is faster
    if isinstance(kernel, Weight):
        matmul, kernel = partial(weight_matmul, kernel, dot=dot), kernel.computed
    if joined:
        kernel = kernel.reshape(*kernel.shape[:contract], -1)
    y: Any = matmul(x, kernel, contract)
    return y


class Float8Projection(Layer):
    """A projection with kernel and input in float8_e4m3fn, scaled for each output and each token.

    The kernel is [*outputs, *inputs], the layout that the tensor cores read fastest. The arguments
    are `Projection`'s; `dtype` is the dtype of the input and of the result.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        axes: tuple[LogicalAxis, ...],
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
        """The projection of an array, or of a `Scaled` one with joined input dims."""
        y, x_scale = self.unscaled(x)
        scale = self.scale[...]
        y = y.astype(jnp.float32) * x_scale * scale.reshape(-1)
        y = y.reshape(*y.shape[:-1], *scale.shape)
        return (y if self.bias is None else y + self.bias[...]).astype(self.dtype)

    def unscaled(self, x: jax.Array | Scaled) -> tuple[jax.Array, jax.Array]:
        """The matmul of the float8 values with joined output dims, and the scales of x's rows."""
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


def is_float8(form: Form) -> bool:
    """True if projections are in float8 for generation; frozen ones are not meant."""
    return form in ("float8", "float8_separate")


def without_float8(form: Form) -> Form:
    """The form of a module that stays in the model's dtype where others are in float8."""
    forms: dict[Form, Form] = {"float8": "merged", "float8_separate": "separate"}
    return forms.get(form, form)


def projection_of(form: Form) -> Callable[..., Any]:
    """The class of the projections of a model in this form."""
    if form == FROZEN:
        return FrozenProjection
    return Float8Projection if is_float8(form) else Projection


class RMSNorm(Layer):
    """x / rms(x) * scale over the last dims, with statistics in float32 (arXiv:1910.07467).

    With `float8` the result is a `Scaled` in float8, which a `Float8Projection` reads. With
    `unit_offset` the factor is 1 + scale, in float32. With two axes, x ends in dims of `shape`.
    """

    def __init__(
        self,
        *shape: int,
        axes: tuple[LogicalAxis, ...] = ("norm",),
        eps: float,
        dtype: DTypeLike,
        float8: bool = False,
        unit_offset: bool = False,
    ) -> None:
        self.eps, self.float8, self.unit_offset = eps, float8, unit_offset
        self.scale = parameter(shape, axes, "zeros" if unit_offset else "ones", dtype)

    def __call__(self, x: jax.Array) -> Any:
        scale = self.scale[...]
        if scale.ndim > 1:
            joined = x.reshape(*x.shape[: x.ndim - scale.ndim], -1)
            return self._normed(joined, scale.reshape(-1)).reshape(x.shape)
        return self._normed(x, scale)

    def _normed(self, x: jax.Array, scale: jax.Array) -> Any:
        dtype = scale.dtype
        if self.unit_offset:
            scale = 1 + scale.astype(jnp.float32)
        if self.float8:
            rows = rms_norm_float8(x.reshape(-1, x.shape[-1]), scale, eps=self.eps)
            return jax.tree.map(lambda y: y.reshape(*x.shape[:-1], y.shape[-1]), rows)
        strict = strict_in_scope()
        if strict is not None and strict.kernels:
            return strict_norm(x, scale, self.eps).astype(dtype)
        return rms_norm(x, scale, self.eps).astype(dtype)


class Embedding(Layer):
    """A table of token vectors. A token id outside the table gives NaN, not another token's row."""

    def __init__(self, config: ModelConfig, *, dtype: DTypeLike) -> None:
        shape = (config.vocab_size, config.hidden_size)
        self.vocab_size = config.vocab_size
        self.table = parameter(shape, ("vocab", "embed"), "normal", dtype)

    adapter: Any = None  # see lora.py

    def __call__(self, tokens_BT: jax.Array) -> jax.Array:
        layout = layout_in_scope()
        split = None if layout is None else _split_of(layout, tokens_BT.shape, self.vocab_size)

        def lookup(table_V: jax.Array) -> Any:
            return _lookup(split, table_V, tokens_BT)

        if self.adapter is None:
            return lookup(self.table[...])
        return self.adapter(self.table.get_value(), lookup)

    def weights(self) -> jax.Array:
        """The table [V, D] as the weights of a head."""
        return self.table[...] if self.adapter is None else self.adapter(self.table.get_value())


def over_sequence(x_BTD: Any) -> Any:
    """The residual stream or an addend of it, as the layout in scope splits it between blocks."""
    layout = layout_in_scope()
    return x_BTD if layout is None else layout.constrain(x_BTD, "batch", "residual", None)


def scattered(x_BTD: Any) -> Any:
    """An addend of the residual stream: devices of a tensor group hold parts of the sum.

    Each keeps its share of the tokens. The backward pass gathers the gradient; left to itself, the
    partitioner gathers the weights of the projection before.
    """
    layout = layout_in_scope()
    if layout is None or layout.size("residual") == layout.size("tokens"):
        return over_sequence(x_BTD)
    return _scattered(layout, x_BTD)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _scattered(layout: Layout, x_BTD: jax.Array) -> jax.Array:
    return layout.constrain(x_BTD, "batch", "residual", None)


def _scattered_backward(layout: Layout, _: None, gradient_BTD: jax.Array) -> tuple[jax.Array]:
    gradient_BTD = layout.constrain(gradient_BTD, "batch", "residual", None)
    return (layout.constrain(gradient_BTD, "batch", "tokens", None),)


_scattered.defvjp(lambda layout, x: (_scattered(layout, x), None), _scattered_backward)


def gathering(project: Callable[[jax.Array], Any]) -> Callable[[jax.Array], Any]:
    """`project` of the tokens of a whole tensor group, of which its input is one device's share.

    The backward pass gathers them again: kept, they would be as many copies as the group has
    devices.
    """
    layout = layout_in_scope()
    if layout is None or layout.size("residual") == layout.size("tokens"):
        return project
    run = jax.checkpoint(lambda x_BTD: project(layout.constrain(x_BTD, "batch", "tokens", None)))
    # The kept value has a layout of its own. Otherwise the partitioner gives it its user's.
    return lambda x_BTD: run(layout.constrain(x_BTD, "batch", "residual", None))


@dataclass(frozen=True)
class _Split:
    """The axes that split tokens [B, T] and the table, none where they do not divide a dim."""

    layout: Layout
    rows: tuple[str, ...]
    tokens: tuple[str, ...]
    vocab: tuple[str, ...]


def _split_of(layout: Layout, shape: tuple[int, ...], vocab_size: int) -> _Split | None:
    """The split of tokens of this shape; None where one device has them all and the table."""

    def axes(logical: LogicalAxis, size: int) -> tuple[str, ...]:
        parts = layout.size(logical)
        return layout.axes(logical) if parts > 1 and size % parts == 0 else ()

    split = _Split(
        layout, axes("batch", shape[0]), axes("tokens", shape[1]), axes("vocab", vocab_size)
    )
    return split if split.rows or split.tokens or split.vocab else None


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _lookup(split: _Split | None, table_VD: jax.Array, tokens_BT: jax.Array) -> jax.Array:
    if split is None or not split.vocab:
        return jnp.take(table_VD, tokens_BT, axis=0)

    def own(table_VD: jax.Array, tokens_BT: jax.Array) -> jax.Array:
        """The rows that this device has, and zeros; every token is on one device."""
        size, first = len(table_VD), jax.lax.axis_index(split.vocab) * len(table_VD)
        index_BT = tokens_BT - first
        mine_BT = (index_BT >= 0) & (index_BT < size)
        found_BTD = jnp.take(table_VD, jnp.where(mine_BT, index_BT, 0), axis=0)
        found_BTD = jnp.where(mine_BT[..., None], found_BTD, 0)
        outside_BT = (tokens_BT < 0) | (tokens_BT >= split.layout.size("vocab") * size)
        return jnp.where(outside_BT[..., None], jnp.nan, found_BTD)[None]

    parts_BTD = jax.shard_map(
        own,
        mesh=split.layout.mesh.abstract_mesh,
        in_specs=(PartitionSpec(split.vocab), PartitionSpec()),
        out_specs=PartitionSpec(split.vocab),
        axis_names=set(split.vocab),
        check_vma=False,
    )(table_VD, tokens_BT)
    return jax.lax.reduce(parts_BTD, jnp.zeros((), parts_BTD.dtype), jax.lax.add, (0,))


def _lookup_backward(
    split: _Split | None, residuals: Any, gradient_BTD: jax.Array
) -> tuple[jax.Array, None]:
    """Add up each token's gradients in float32: a bf16 sum stops growing after 256 equal terms.

    Each device adds its own tokens. The sum over devices is in the table's dtype.
    """
    table_VD, tokens_BT = residuals

    def add(gradient_BTD: jax.Array, tokens_BT: jax.Array) -> jax.Array:
        # The barrier ties this zero to the gradient. Otherwise XLA shares the zeros of the head's
        # gradient, which exist earlier, and keeps that buffer through the whole backward pass.
        gradient_BTD, zero = jax.lax.optimization_barrier((gradient_BTD, jnp.float32(0)))
        sums_VD = jnp.full(table_VD.shape, zero).at[tokens_BT].add(gradient_BTD.astype(jnp.float32))
        return sums_VD.astype(table_VD.dtype)[None]

    if split is None or not (split.rows or split.tokens):
        return add(gradient_BTD, tokens_BT)[0], None
    both = (*split.rows, *split.tokens)
    by_row = PartitionSpec(split.rows, split.tokens) if split.tokens else PartitionSpec(split.rows)
    each_VD = jax.shard_map(
        add,
        mesh=split.layout.mesh.abstract_mesh,
        in_specs=(by_row, by_row),
        out_specs=PartitionSpec(both),
        axis_names=set(both),
        check_vma=False,
    )(gradient_BTD, tokens_BT)
    return jax.lax.reduce(each_VD, jnp.zeros((), each_VD.dtype), jax.lax.add, (0,)), None


_lookup.defvjp(lambda *operands: (_lookup(*operands), operands[1:]), _lookup_backward)


class MLP(Layer):
    """The gated feed-forward layer: down(act(gate(x)) * up(x)) (arXiv:2002.05202).

    In merged form, gate and up are one kernel [D, 2F]; see `base.merge_projections`. F is `size`,
    or else the config's.
    """

    def __init__(self, config: ModelConfig, *, size: int = 0, form: Form, dtype: DTypeLike) -> None:
        D, F = config.hidden_size, size or config.intermediate_size
        self.activation = config.activation
        projection = projection_of(form)
        if form.endswith("separate"):
            self.gate = projection((D, F), ("embed", "mlp"), dtype=dtype)
            self.up = projection((D, F), ("embed", "mlp"), dtype=dtype)
        else:
            self.gate_up = projection((D, 2 * F), ("embed", "merged"), dtype=dtype)
        self.down = projection((F, D), ("mlp", "embed"), dtype=dtype)

    def __call__(self, x_BTD: Any) -> jax.Array:
        merged = getattr(self, "gate_up", None)
        if isinstance(merged, Float8Projection) and self.activation == "silu":
            y, x_scale = merged.unscaled(x_BTD)
            batch, scale = y.shape[:-1], merged.scale[...]
            gated = gated_float8(y.reshape(-1, y.shape[-1]), x_scale.reshape(-1, 1), scale)
            return self.down(jax.tree.map(lambda z: z.reshape(*batch, z.shape[-1]), gated))
        if merged is not None:
            gate_BTF, up_BTF = jnp.split(merged(x_BTD), 2, axis=-1)
        else:
            gate_BTF, up_BTF = gathering(lambda x_BTD: (self.gate(x_BTD), self.up(x_BTD)))(x_BTD)
        return self.down(_ACTIVATIONS[self.activation](gate_BTF) * up_BTF)


_ACTIVATIONS = {"silu": jax.nn.silu, "gelu_tanh": partial(jax.nn.gelu, approximate=True)}


def rope_frequencies(config: ModelConfig) -> np.ndarray:
    """Angle per position of each rotated pair of a head, in radians, float32 (arXiv:2104.09864)."""
    powers = rope_powers(config.rope_theta, config.rotary_dim)
    if config.rope_scaling is None:
        return 1 / powers
    return config.rope_scaling.frequencies(powers, config.rope_theta)


def rope_tables(config: ModelConfig, positions_BT: jax.Array) -> tuple[jax.Array, ...]:
    """Cosine and sine for every position and rotated pair, float32 [B, T, 1, pairs].

    With `local_rope_theta`, the tables of layers with a window follow. Positions may also be
    [B, T, 3], on the axes of an image: each pair then has the position on its own axis.
    """
    at = positions_BT[..., None, None]
    if positions_BT.ndim == 3:
        assert isinstance(config.vision, QwenVision)
        at = positions_BT[..., None, np.array(config.vision.axes_of_pairs)]

    def tables(frequencies: np.ndarray) -> tuple[jax.Array, jax.Array]:
        angles = at.astype(jnp.float32) * frequencies
        return jnp.cos(angles), jnp.sin(angles)

    cos, sin = tables(rope_frequencies(config))
    scale = 1.0 if config.rope_scaling is None else config.rope_scaling.attention_scale
    whole = (cos, sin) if scale == 1.0 else (cos * scale, sin * scale)
    if config.local_rope_theta is None:
        return whole
    return *whole, *tables(1 / rope_powers(config.local_rope_theta, config.rotary_dim))


def apply_rope(
    x_BTNH: jax.Array, cos: jax.Array, sin: jax.Array, *, interleaved: bool = False
) -> jax.Array:
    """Rotate the pairs of each head by their angles, in float32; returns the dtype of x.

    Pair i of the R rotated dims is (i, i + R/2), or (2 i, 2 i + 1) if `interleaved`.
    """
    x32, rotated = x_BTNH.astype(jnp.float32), 2 * cos.shape[-1]
    whole = rotated == x_BTNH.shape[-1]
    turning, rest = (x32, None) if whole else (x32[..., :rotated], x32[..., rotated:])
    if interleaved:
        first, second = turning[..., 0::2], turning[..., 1::2]
    else:
        first, second = jnp.split(turning, 2, axis=-1)
    turned = [first * cos - second * sin, second * cos + first * sin]
    if interleaved:
        turned = [jnp.stack(turned, axis=-1).reshape(turning.shape)]
    return jnp.concatenate(turned if rest is None else [*turned, rest], -1).astype(x_BTNH.dtype)
