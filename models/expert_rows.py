"""Rows of tokens through the grouped matmuls of their experts, and moves of rows.

Shape letters: D hidden, F inner size of an expert, E experts, M rows.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from jaxrl_llm.distributed.sharding import LogicalAxis
from jaxrl_llm.kernels.float8 import FLOAT8
from jaxrl_llm.kernels.grouped_matmul import (
    TILE,
    frozen_matmul,
    frozen_matmul_pays,
    grouped_matmul,
)
from jaxrl_llm.kernels.hopper import on_hopper
from jaxrl_llm.models.config import SWIGLU_ALPHA
from jaxrl_llm.models.frozen import Quantized, weights_when_due
from jaxrl_llm.models.layers import PROJECTION, Layer, parameter


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Stacked:
    """The weights of one projection of all experts, as a pass computes with them.

    With `a` and `b` only these learn. Then the weights are `kernel` where `merged`, which holds the
    sum, and `kernel` + `scale` * a b otherwise.
    """

    kernel: Any  # [E, inputs, outputs]: an array, or a frozen `Quantized`
    a: Any = None  # [E, inputs, R]
    b: Any = None  # [E, R, outputs]
    scale: float = field(default=1.0, metadata={"static": True})
    merged: bool = field(default=False, metadata={"static": True})
    bias: Any = None  # [E, outputs]; `down` has none here, see `Experts`
    # Limit of `gate`: with one, experts compute `clamped_swiglu`.
    limit: float | None = field(default=None, metadata={"static": True})

    @property
    def learned(self) -> tuple[Any, ...]:
        """The arrays that have a gradient."""
        return tuple(getattr(self, name) for name in self._learned_names)

    @property
    def _learned_names(self) -> tuple[str, ...]:
        if self.a is not None:
            return ("a", "b")
        if isinstance(self.kernel, Quantized):
            return ()
        return ("kernel",) if self.bias is None else ("kernel", "bias")

    def with_learned(self, learned: tuple[Any, ...]) -> "Stacked":
        names = self._learned_names
        return replace(self, **dict(zip(names, learned, strict=True)))

    def __call__(self, x_M: jax.Array, sizes_E: jax.Array) -> jax.Array:
        """Each run of `sizes_E` rows times the weights of its expert."""
        if self.merged:
            y_M = _merged(x_M, self.kernel, self.a, self.b * self.scale, sizes_E)
        elif self.a is None:
            y_M = _multiplied(x_M, self.kernel, sizes_E)
        else:
            y_M = _adapted(x_M, self.kernel, self.a, self.b * self.scale, sizes_E)
        y_M = checkpoint_name(y_M, PROJECTION)
        return y_M if self.bias is None else with_biases(y_M, self.bias, sizes_E)


# Rows times the rank of adapters, up to which dense matmuls of all experts are used. At this size
# they took 64 us on an H200, and padded factors 119 (2,048 rows, 128 experts of 2,048 by 768).
FEW_ROWS = 32_768

Kernels = tuple[Stacked, Stacked, Stacked]  # gate, up [E, D, F] and down [E, F, D]


class Stack(Layer):
    """One projection of all experts, [E, inputs, outputs], and a bias [E, outputs].

    With `float8` the weights are a `Quantized`: below adapters, and in generation in float8.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        axes: tuple[LogicalAxis, ...],
        dtype: DTypeLike,
        *,
        float8: bool,
        bias: bool,
    ) -> None:
        self.kernel = parameter(shape, axes, "normal", FLOAT8 if float8 else dtype)
        # The hidden size is whole, as in other vectors of it.
        outputs: LogicalAxis = "mlp" if axes[2] == "mlp" else "norm"
        E, _, F = shape
        scales = ("expert", "norm", outputs)
        self.scale = parameter((E, 1, F), scales, "ones", jnp.float32) if float8 else None
        self.bias = parameter((E, F), ("expert", outputs), "zeros", dtype) if bias else None

    adapter: Any = None  # see lora.py

    def weights(self, dtype: DTypeLike) -> Stacked:
        """The weights of a pass in `dtype`."""
        bias = None if self.bias is None else self.bias[...]
        kernel: Any = self.kernel.get_value()
        if self.scale is not None and isinstance(kernel, jax.Array):
            kernel = Quantized(kernel, self.scale[...])
        if self.adapter is not None:
            adapted: Stacked = self.adapter.weights(kernel, dtype)
            return replace(adapted, bias=bias)
        if not isinstance(kernel, Quantized):
            kernel = self.kernel[...].astype(dtype)
        return Stacked(kernel, bias=bias)


def computed_experts(x_MD: jax.Array, kernels: Kernels, sizes_E: jax.Array) -> jax.Array:
    """down(silu(gate(x)) * up(x)), each run of `sizes_E` rows by its expert.

    Rows after the last expert's are 0.
    """
    gate, up, down = kernels
    if gate.limit is not None:
        return down(clamped_swiglu(gate(x_MD, sizes_E), up(x_MD, sizes_E), gate.limit), sizes_E)
    return down(jax.nn.silu(gate(x_MD, sizes_E)) * up(x_MD, sizes_E), sizes_E)


def with_biases(y_MF: jax.Array, bias_EF: jax.Array, sizes_E: jax.Array) -> jax.Array:
    """Each row plus the bias of its expert; 0 in rows of no expert.

    A matmul, because the gradient of a gather has no fixed order on a GPU.
    """
    hot_ME = _chosen(len(y_MF), sizes_E)
    bias_MF = jnp.dot(
        hot_ME.astype(y_MF.dtype),
        bias_EF.astype(y_MF.dtype),
        precision=jax.lax.Precision.HIGHEST,
    )
    # Whatever a kernel left in the other rows, in either pass, must not reach the biases.
    return jnp.where(hot_ME.any(axis=1, keepdims=True), y_MF + bias_MF, 0)


def clamped_swiglu(gate: jax.Array, up: jax.Array, limit: float) -> jax.Array:
    """gpt-oss's activation: (up + 1) * gate * sigmoid(1.702 gate), of clamped gate and up."""
    gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
    return (up + 1) * gate * jax.nn.sigmoid(SWIGLU_ALPHA * gate)


def _multiplied(x_M: jax.Array, kernel: Any, sizes_E: jax.Array) -> jax.Array:
    """The rows times the weights of their experts, which are an array or a `Quantized`."""
    if isinstance(kernel, Quantized):
        y_M: jax.Array = _quantized(x_M, kernel.values, kernel.scale, sizes_E)
        return y_M
    return grouped_matmul(x_M, kernel, sizes_E)


@jax.custom_vjp
def _quantized(
    x_M: jax.Array, values: jax.Array, scale: jax.Array, sizes_E: jax.Array
) -> jax.Array:
    """The rows times frozen weights, with the gradient of the rows alone. It keeps no weights."""
    if frozen_matmul_pays(x_M, values):
        return frozen_matmul(x_M, values, sizes_E, scale_GF=scale[:, 0])
    x_M, weights = weights_when_due(x_M, values, scale)
    return grouped_matmul(x_M, weights, sizes_E)


def _quantized_backward(residuals: Any, gradient_M: jax.Array) -> Any:
    values, scale, sizes_E = residuals
    gradient_M, weights = weights_when_due(gradient_M, values, scale)
    x_M = jnp.zeros((len(gradient_M), values.shape[1]), gradient_M.dtype)  # only its shape is read
    _, of_x = jax.vjp(lambda x_M: grouped_matmul(x_M, weights, sizes_E), x_M)
    return *of_x(gradient_M), None, None, None


_quantized.defvjp(lambda *operands: (_quantized(*operands), operands[1:]), _quantized_backward)


def _adapted(
    x_M: jax.Array, kernel: Any, a: jax.Array, b: jax.Array, sizes_E: jax.Array
) -> jax.Array:
    """x times the weights of experts, an array or a `Quantized`, plus x a b."""
    values = kernel.values if isinstance(kernel, Quantized) else kernel
    if frozen_matmul_pays(x_M, values, a.shape[2]):
        y_M: jax.Array = _adapted_at_once(x_M, kernel, a, b, sizes_E)
        return y_M
    return _multiplied(x_M, kernel, sizes_E) + _low_rank(x_M, a, b, sizes_E)


@jax.custom_vjp
def _adapted_at_once(
    x_M: jax.Array, kernel: Any, a: jax.Array, b: jax.Array, sizes_E: jax.Array
) -> jax.Array:
    """`_adapted` in one kernel, with the gradients of x, a and b by several."""
    if isinstance(kernel, Quantized):
        scale = kernel.scale[:, 0]
        return frozen_matmul(x_M, kernel.values, sizes_E, scale_GF=scale, factors=(a, b))
    return frozen_matmul(x_M, kernel, sizes_E, factors=(a, b))


def _adapted_backward(residuals: Any, gradient: jax.Array) -> Any:
    x_M, kernel, a, b, sizes_E = residuals
    _, of_x = jax.vjp(lambda x: _multiplied(x, kernel, sizes_E), x_M)
    _, of_low = jax.vjp(lambda x, a, b: _low_rank(x, a, b, sizes_E), x_M, a, b)
    of_low_x, of_a, of_b = of_low(gradient)
    return of_x(gradient)[0] + of_low_x, None, of_a, of_b, None


_adapted_at_once.defvjp(
    lambda *operands: (_adapted_at_once(*operands), operands), _adapted_backward
)


def _low_rank(x_M: jax.Array, a: jax.Array, b: jax.Array, sizes_E: jax.Array) -> jax.Array:
    """x a b, where each row takes the factors of its expert.

    The kernel takes whole tiles, so there the rank is padded with zeros. That copies the factors of
    all experts, which costs more than `low_rank_of_all` where rows are few, as in a decode step.
    """
    if not on_hopper():
        return grouped_matmul(grouped_matmul(x_M, a, sizes_E), b, sizes_E)
    rank = a.shape[2]
    if len(x_M) * rank <= FEW_ROWS:
        return low_rank_of_all(x_M, a, b, sizes_E)
    missing = -rank % TILE
    a = jnp.pad(a, ((0, 0), (0, 0), (0, missing)))
    b = jnp.pad(b, ((0, 0), (0, missing), (0, 0)))
    return grouped_matmul(grouped_matmul(x_M, a, sizes_E), b, sizes_E)


def low_rank_of_all(x_M: jax.Array, a: jax.Array, b: jax.Array, sizes_E: jax.Array) -> jax.Array:
    """The same by two dense matmuls with the factors of all experts; a row keeps what is its own.

    Rows after the last expert's are 0.
    """
    chosen_ME = _chosen(len(x_M), sizes_E)
    # What the other rows hold must not reach a gradient.
    x_M = jnp.where(chosen_ME.any(axis=1, keepdims=True), x_M, 0)
    low_MER = jnp.einsum("mi,eir->mer", x_M, a)
    own_MER = jnp.where(chosen_ME[:, :, None], low_MER, 0)
    return jnp.einsum("mer,ero->mo", own_MER, b)


def _chosen(rows: int, sizes_E: jax.Array) -> jax.Array:
    """True if a row is one of the `sizes_E` rows of an expert, bool [M, E]."""
    ends_E, row_M1 = jnp.cumsum(sizes_E), jnp.arange(rows)[:, None]
    chosen: jax.Array = (row_M1 >= ends_E - sizes_E) & (row_M1 < ends_E)
    return chosen


@jax.custom_vjp
def _merged(
    x_M: jax.Array, kernel: jax.Array, a: jax.Array, b: jax.Array, sizes_E: jax.Array
) -> jax.Array:
    """x times `kernel`, which is some weights + a b; gradients go to x, a and b."""
    return grouped_matmul(x_M, kernel, sizes_E)


def _merged_backward(residuals: Any, gradient: jax.Array) -> Any:
    x_M, kernel, a, b, sizes_E = residuals
    _, of_x = jax.vjp(lambda x: grouped_matmul(x, kernel, sizes_E), x_M)
    _, of_adapter = jax.vjp(lambda a, b: _low_rank(x_M, a, b, sizes_E), a, b)
    return *of_x(gradient), jnp.zeros_like(kernel), *of_adapter(gradient), None


_merged.defvjp(lambda *operands: (_merged(*operands), operands), _merged_backward)


@jax.custom_vjp
def permuted(x: jax.Array, source: jax.Array, target: jax.Array) -> jax.Array:
    """Row `source[i]` of x as row i, and 0 where there is none. Row j of x goes to `target[j]`.

    The gradient moves rows back by a gather. A scatter would add with atomics on a GPU, in another
    order in every run.
    """
    return jnp.take(x, source, axis=0, mode="fill", fill_value=0)


def _permuted_backward(residuals: Any, gradient: jax.Array) -> tuple[jax.Array, None, None]:
    source, target = residuals
    return permuted(gradient, target, source), None, None


permuted.defvjp(lambda *operands: (permuted(*operands), operands[1:]), _permuted_backward)
