"""Conversion of activations to float8_e4m3fn with a scale per row, fused with what comes before.

XLA reads and computes its input twice: for a row's largest value, and to convert it. The kernels
keep a row in shared memory.

Shape letters: B rows, D or F features.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Literal, NamedTuple, TypeVar

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxrl_llm.kernels.hopper import Interpret, Ref, on_hopper
from jaxrl_llm.kernels.mosaic import plgpu
from jaxrl_llm.numerics import rms_norm

FLOAT8 = jnp.float8_e4m3fn
FLOAT8_MAX = 448.0
Float8Implementation = Literal["auto", "pallas", "xla"]
_LANE = 128  # threads of a CTA, and features of a line
_MAX_LINES = 8  # lines of a step
_STEPS_TOGETHER = 6
_MIN_GATED_ROWS = 256  # measured on an H200: 64 rows of 7B take 21 us, and 13 us with XLA
_MAX_SMEM = 226 * 1024

Carry = TypeVar("Carry")
Index = jax.Array | int


class Scaled(NamedTuple):
    """An array as float8_e4m3fn values [..., D] times float32 scales [..., 1], one per row."""

    values: jax.Array
    scale: jax.Array


def to_float8(x: jax.Array, axis: int | tuple[int, ...], *, powers_of_two: bool = False) -> Scaled:
    """x / scale in float8_e4m3fn, and the scale with `axis` kept. The largest value becomes 448.

    With `powers_of_two` it becomes 224 to 448, and the values times their scales are exact in
    bfloat16.
    """
    x32 = x.astype(jnp.float32)
    scale = _scale_of(jnp.max(jnp.abs(x32), axis=axis, keepdims=True))
    if powers_of_two:
        fraction, exponent = jnp.frexp(scale)  # scale = fraction * 2^exponent, from a half to 1
        scale = jnp.ldexp(jnp.float32(1), jnp.where(fraction > 0.5, exponent, exponent - 1))
    return Scaled((x32 / scale).astype(FLOAT8), scale)


def rms_norm_float8(
    x_BD: Float[Array, "B D"],
    weight_D: Float[Array, " D"],
    *,
    eps: float,
    implementation: Float8Implementation = "auto",
    interpret: Interpret = None,
) -> Scaled:
    """x / rms(x) * weight (arXiv:1910.07467) in float8_e4m3fn, and the scales of the rows.

    "auto" takes the Pallas kernel on a Hopper GPU for float32 x and bfloat16 weights with D a
    multiple of 128, XLA elsewhere. `interpret` runs the kernel on a CPU.

    Guarantees: computes and rounds as `numerics.rms_norm` does.
    Raises: ValueError if the implementation is "pallas" and the kernel cannot take the input.
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
    interpret: Interpret = None,
) -> Scaled:
    """silu(gate) * up in float8_e4m3fn, and the scales of the rows, from a float8 matmul's result.

    The first F columns are the gate's. Both float32 scales multiply the input first. All that
    follows is float32, but the kernel rounds the activation to bfloat16 once. "auto" takes the
    Pallas kernel on a Hopper GPU for 256 rows or more of bfloat16 with F a multiple of 128, XLA
    elsewhere. `interpret` and errors are as in `rms_norm_float8`.
    """
    B, F2 = gate_up_B2F.shape
    F = F2 // 2
    fits = gate_up_B2F.dtype == jnp.bfloat16 and B > 0
    if implementation == "auto" and B < _MIN_GATED_ROWS:
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
            f"{x.dtype} of shape {x.shape}: the kernel takes the dtypes of its docstring, at least "
            f"one row, and features in multiples of {_LANE} that fit {_MAX_SMEM} bytes; use 'xla'"
        )
    return implementation == "pallas"


@partial(jax.jit, static_argnames=("eps", "row_shape", "row_dtype", "interpret"))
def _call(
    *arguments: jax.Array,
    eps: float | None,
    row_shape: tuple[int, ...],
    row_dtype: jax.typing.DTypeLike,
    interpret: Interpret,
) -> Scaled:
    """The norm (with `eps`) or the gate, with a CTA per row.

    The jit lowers a kernel once for all layers.
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
    """A row of `lines` lines of 128 features, processed a few lines per step."""

    def __init__(self, lines: int, interpreted: bool) -> None:
        self.at_once = max(n for n in range(1, _MAX_LINES + 1) if lines % n == 0)
        self.steps = lines // self.at_once
        self.interpreted = interpreted

    def at(self, step: Index) -> slice | pl.Slice:
        """The lines of a step."""
        return pl.ds(step * self.at_once, self.at_once)

    def held(self, x: jax.Array) -> jax.Array:
        """x in registers: each thread holds as many neighbours as it can read at once."""
        if self.interpreted:
            return x
        return plgpu.layout_cast(x, plgpu.Layout.WG_STRIDED(x.shape, math.gcd(self.at_once, 4)))

    def zeros(self) -> jax.Array:
        return self.held(jnp.zeros((self.at_once, _LANE), jnp.float32))

    def over(self, fn: Callable[[list[Index], Carry], Carry], carry: Carry) -> Carry:
        """carry = fn(steps, carry) over all steps, several per call.

        A step waits for its loads. With several steps all loads are issued before the arithmetic.
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
        self, peak: jax.Array, value: Callable[[Index], jax.Array], out_ref: Ref, scale_ref: Ref
    ) -> None:
        """Write the scale that follows from the row's largest value, and the values over it."""
        row = lax.axis_index("row")
        scale = _scale_of(peak)
        scale_ref[row] = scale
        factor = 1.0 / scale

        def write(steps: list[Index], _: None) -> None:
            for i, x in [(i, value(i)) for i in steps]:
                out_ref[row, self.at(i)] = (x * factor).astype(FLOAT8)

        self.over(write, None)


def _norm(
    x_ref: Ref,
    weight_ref: Ref,
    out_ref: Ref,
    scale_ref: Ref,
    *,
    row_ref: Ref,
    barrier: Ref,
    lines: int,
    eps: float,
    interpreted: bool,
) -> None:
    row = _Row(lines, interpreted)
    plgpu.copy_gmem_to_smem(x_ref.at[lax.axis_index("row")], row_ref, barrier)
    plgpu.barrier_wait(barrier)

    def square(steps: list[Index], total: jax.Array) -> jax.Array:
        for x in [row.held(row_ref[row.at(i)]) for i in steps]:
            total += x * x
        return total

    factor = lax.rsqrt(jnp.sum(row.over(square, row.zeros())) / (lines * _LANE) + eps)

    def value(i: Index) -> jax.Array:
        normed = (row.held(row_ref[row.at(i)]) * factor).astype(jnp.bfloat16)
        return (normed * row.held(weight_ref[row.at(i)])).astype(jnp.float32)

    def higher(steps: list[Index], peaks: jax.Array) -> jax.Array:
        for x in [value(i) for i in steps]:
            peaks = jnp.maximum(peaks, jnp.abs(x))
        return peaks

    row.convert(jnp.max(row.over(higher, row.zeros())), value, out_ref, scale_ref)


def _gated(
    gate_up_ref: Ref,
    row_scale_ref: Ref,
    column_scale_ref: Ref,
    out_ref: Ref,
    scale_ref: Ref,
    *,
    row_ref: Ref,
    barrier: Ref,
    lines: int,
    interpreted: bool,
) -> None:
    row, index = _Row(lines, interpreted), lax.axis_index("row")
    plgpu.copy_gmem_to_smem(gate_up_ref.at[index], row_ref, barrier)
    row_scale = row_scale_ref[index]
    plgpu.barrier_wait(barrier)

    def activate(steps: list[Index], peaks: jax.Array) -> jax.Array:
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

    def value(i: Index) -> jax.Array:
        return row.held(row_ref[0, row.at(i)]).astype(jnp.float32)

    row.convert(jnp.max(row.over(activate, row.zeros())), value, out_ref, scale_ref)


def _scale_of(peak: jax.Array) -> jax.Array:
    # The lower bound keeps the inverse finite.
    return jnp.where(peak > 0, jnp.maximum(peak / FLOAT8_MAX, 2.0**-120), 1.0)
