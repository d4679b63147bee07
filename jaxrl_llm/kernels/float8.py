"""Activations in float8_e4m3fn, each row with a scale of its own, found and applied in one pass.

XLA reads what it converts twice, once for a row's largest value and once to convert it, and
computes what comes before it twice as well. The kernels keep a row in shared memory.

Shape letters: B rows, D or F features.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxrl_llm.kernels.hopper import on_hopper
from jaxrl_llm.numerics import rms_norm

FLOAT8 = jnp.float8_e4m3fn
FLOAT8_MAX = 448.0
Float8Implementation = Literal["auto", "pallas", "xla"]
_LANE = 128  # threads of a program, and features of a line
_MOST_LINES = 8  # that a thread has a part of at a time
_STEPS_TOGETHER = 6
_FEWEST_GATED_ROWS = 256  # measured on an H200: 21 us for 64 rows of 7B, where XLA takes 13
_MAX_SMEM = 226 * 1024


class Scaled(NamedTuple):
    """An array as float8_e4m3fn values times float32 scales, one a row, [..., D] and [..., 1]."""

    values: jax.Array
    scale: jax.Array


def to_float8(x: jax.Array, axis: int | tuple[int, ...]) -> Scaled:
    """x / scale in float8_e4m3fn, and the scale with `axis` kept: the largest becomes 448."""
    x32 = x.astype(jnp.float32)
    scale = _scale_of(jnp.max(jnp.abs(x32), axis=axis, keepdims=True))
    return Scaled((x32 / scale).astype(FLOAT8), scale)


def rms_norm_float8(
    x_BD: Float[Array, "B D"],
    weight_D: Float[Array, " D"],
    *,
    eps: float,
    implementation: Float8Implementation = "auto",
    interpret: Any = None,
) -> Scaled:
    """x / rms(x) * weight (arXiv:1910.07467) in float8_e4m3fn, and the scales of the rows.

    Statistics and roundings are those of `numerics.rms_norm`. "auto" takes the Pallas kernel on a
    Hopper GPU for float32 x and bfloat16 weights with D a multiple of 128, XLA elsewhere;
    `interpret` runs the kernel on the CPU. Raises ValueError for what the kernel was asked for and
    cannot take.
    """
    B, D = x_BD.shape
    fits = x_BD.dtype == jnp.float32 and weight_D.dtype == jnp.bfloat16 and B > 0
    if not _take_kernel(implementation, fits, D, 4 * D, x_BD):
        return to_float8(rms_norm(x_BD, weight_D, eps), axis=-1)
    lines = D // _LANE
    return _call(
        x_BD.reshape(B, lines, _LANE),
        weight_D.reshape(lines, _LANE),
        eps=eps,
        row_shape=(lines, _LANE),
        row_dtype=jnp.float32,
        interpret=interpret,
    )


def gated_float8(
    gate_up_B2F: Float[Array, "B 2F"],
    row_scale_B1: Float[Array, "B 1"],
    column_scale_2F: Float[Array, " 2F"],
    *,
    implementation: Float8Implementation = "auto",
    interpret: Any = None,
) -> Scaled:
    """silu(gate) * up in float8_e4m3fn, and the scales of the rows, from a float8 product's result.

    The first F columns are the gate's. Both scales are float32 and multiply the result first; what
    follows is float32 (the kernel rounds the activation to bfloat16 once). "auto" takes the Pallas
    kernel on a Hopper GPU for 256 rows or more of bfloat16 with F a multiple of 128, XLA elsewhere;
    `interpret` and errors are those of `rms_norm_float8`.
    """
    B, F2 = gate_up_B2F.shape
    F = F2 // 2
    fits = gate_up_B2F.dtype == jnp.bfloat16 and B > 0
    if implementation == "auto" and B < _FEWEST_GATED_ROWS:
        implementation = "xla"
    if not _take_kernel(implementation, fits, F, 4 * F, gate_up_B2F):
        scaled = gate_up_B2F.astype(jnp.float32) * row_scale_B1 * column_scale_2F
        gate_BF, up_BF = jnp.split(scaled, 2, axis=-1)
        return to_float8(jax.nn.silu(gate_BF) * up_BF, axis=-1)
    lines = F // _LANE
    return _call(
        gate_up_B2F.reshape(B, 2, lines, _LANE),
        row_scale_B1[:, 0],
        column_scale_2F.reshape(2, lines, _LANE),
        eps=None,
        row_shape=(2, lines, _LANE),
        row_dtype=jnp.bfloat16,
        interpret=interpret,
    )


def _take_kernel(
    implementation: Float8Implementation, fits: bool, features: int, smem: int, x: jax.Array
) -> bool:
    fits = fits and features % _LANE == 0 and smem <= _MAX_SMEM
    if implementation == "auto":
        return fits and on_hopper()
    if implementation == "pallas" and not fits:
        raise ValueError(
            f"{x.dtype} of shape {x.shape}: the kernel takes the dtypes of its docstring, a row or "
            f"more, and features in multiples of {_LANE} that fit {_MAX_SMEM} bytes; use 'xla'"
        )
    return implementation == "pallas"


@partial(jax.jit, static_argnames=("eps", "row_shape", "row_dtype", "interpret"))
def _call(
    *arguments: jax.Array,
    eps: float | None,
    row_shape: tuple[int, ...],
    row_dtype: Any,
    interpret: Any,
) -> Scaled:
    """The norm (with `eps`) or the gate: a program for each row, which it takes to shared memory.

    Jitted, so that a kernel is lowered once for all layers.
    """
    B, lines = arguments[0].shape[0], row_shape[-2]
    settings = {"lines": lines, "interpreted": interpret is not None}
    body = partial(_gated, **settings) if eps is None else partial(_norm, eps=eps, **settings)
    values, scale_B = plgpu.kernel(
        body,
        out_type=[
            jax.ShapeDtypeStruct((B, lines, _LANE), FLOAT8),
            jax.ShapeDtypeStruct((B,), jnp.float32),
        ],
        scratch_types={
            "row_ref": plgpu.SMEM(row_shape, row_dtype),
            "barrier": plgpu.Barrier(num_arrivals=1),
        },
        grid=(B,),
        grid_names=("row",),
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
        interpret=interpret,
        kernel_name="gated_float8" if eps is None else "rms_norm_float8",
    )(*arguments)
    return Scaled(values.reshape(B, lines * _LANE), scale_B[:, None])


class _Row:
    """A row of `lines` lines, a few at a time."""

    def __init__(self, lines: int, interpreted: bool) -> None:
        self.at_once = max(n for n in range(1, _MOST_LINES + 1) if lines % n == 0)
        self.steps = lines // self.at_once
        self.interpreted = interpreted

    def at(self, step: Any) -> Any:
        """The lines of a step."""
        return pl.ds(step * self.at_once, self.at_once)

    def held(self, x: jax.Array) -> jax.Array:
        """In registers, with so many neighbours in each thread as it can read at once."""
        if self.interpreted:
            return x
        return plgpu.layout_cast(x, plgpu.Layout.WG_STRIDED(x.shape, math.gcd(self.at_once, 4)))

    def zeros(self) -> jax.Array:
        return self.held(jnp.zeros((self.at_once, _LANE), jnp.float32))

    def over(self, fn: Callable[[list[Any], Any], Any], carry: Any) -> Any:
        """carry = fn(steps, carry) over all steps, some at a time.

        A step waits for its loads, so those of several come before what is computed and stored.
        """
        together = min(self.steps, _STEPS_TOGETHER)
        whole = self.steps // together
        carry = lax.fori_loop(
            0,
            whole,
            lambda i, carry: fn([i * together + j for j in range(together)], carry),
            carry,
        )
        rest = range(whole * together, self.steps)
        return fn([jnp.int32(i) for i in rest], carry) if rest else carry

    def convert(
        self, peak: jax.Array, value: Callable[[Any], jax.Array], out_ref: Any, scale_ref: Any
    ) -> None:
        """Writes the row's values over the scale that its largest asks for."""
        row = lax.axis_index("row")
        scale = _scale_of(peak)
        scale_ref[row] = scale
        factor = 1.0 / scale

        def write(steps: list[Any], _: None) -> None:
            for i, x in [(i, value(i)) for i in steps]:
                out_ref[row, self.at(i)] = (x * factor).astype(FLOAT8)

        self.over(write, None)


def _norm(
    x_ref: Any,
    weight_ref: Any,
    out_ref: Any,
    scale_ref: Any,
    *,
    row_ref: Any,
    barrier: Any,
    lines: int,
    eps: float,
    interpreted: bool,
) -> None:
    row = _Row(lines, interpreted)
    plgpu.copy_gmem_to_smem(x_ref.at[lax.axis_index("row")], row_ref, barrier)
    plgpu.barrier_wait(barrier)

    def square(steps: list[Any], total: jax.Array) -> jax.Array:
        for x in [row.held(row_ref[row.at(i)]) for i in steps]:
            total += x * x
        return total

    factor = lax.rsqrt(jnp.sum(row.over(square, row.zeros())) / (lines * _LANE) + eps)

    def value(i: Any) -> jax.Array:
        normed = (row.held(row_ref[row.at(i)]) * factor).astype(jnp.bfloat16)
        return (normed * row.held(weight_ref[row.at(i)])).astype(jnp.float32)

    def higher(steps: list[Any], peaks: jax.Array) -> jax.Array:
        for x in [value(i) for i in steps]:
            peaks = jnp.maximum(peaks, jnp.abs(x))
        return peaks

    row.convert(jnp.max(row.over(higher, row.zeros())), value, out_ref, scale_ref)


def _gated(
    gate_up_ref: Any,
    row_scale_ref: Any,
    column_scale_ref: Any,
    out_ref: Any,
    scale_ref: Any,
    *,
    row_ref: Any,
    barrier: Any,
    lines: int,
    interpreted: bool,
) -> None:
    row, index = _Row(lines, interpreted), lax.axis_index("row")
    plgpu.copy_gmem_to_smem(gate_up_ref.at[index], row_ref, barrier)
    row_scale = row_scale_ref[index]
    plgpu.barrier_wait(barrier)

    def activate(steps: list[Any], peaks: jax.Array) -> jax.Array:
        both = [
            [row.held(ref[part, row.at(i)]) for ref in (row_ref, column_scale_ref)]
            for i in steps
            for part in (0, 1)
        ]
        scaled = [x.astype(jnp.float32) * (scale * row_scale) for x, scale in both]
        for i, gate, up in zip(steps, scaled[::2], scaled[1::2], strict=True):
            activation = gate / (1.0 + jnp.exp(-gate)) * up
            row_ref[0, row.at(i)] = activation.astype(jnp.bfloat16)  # the gate is not read again
            peaks = jnp.maximum(peaks, jnp.abs(activation))
        return peaks

    def value(i: Any) -> jax.Array:
        return row.held(row_ref[0, row.at(i)]).astype(jnp.float32)

    row.convert(jnp.max(row.over(activate, row.zeros())), value, out_ref, scale_ref)


def _scale_of(peak: jax.Array) -> jax.Array:
    # Never so small that its inverse is infinite.
    return jnp.where(peak > 0, jnp.maximum(peak / FLOAT8_MAX, 2.0**-120), 1.0)
