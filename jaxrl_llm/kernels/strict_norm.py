"""An RMS norm for Hopper whose rows have the same bits for any number of rows, in Pallas.

A CTA computes one row. XLA adds up a row in an order of its own, or in a written one by three
kernels (`strict.strict_sum`).

Shape letters: M rows, D features.
"""

import math
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxrl_llm.kernels.hopper import Interpret, Ref
from jaxrl_llm.kernels.mosaic import plgpu
from jaxrl_llm.kernels.strict import strict_sum
from jaxrl_llm.numerics import rms_norm

THREADS = 128  # threads of a CTA
FEWEST, MOST = 512, 16384  # features: fewer leave a CTA idle, more exceed its registers


def strict_norm(x: Float[Array, "*M D"], weight_D: Float[Array, " D"], eps: float) -> Array:
    """`rms_norm` on a GPU, in the weight's dtype, with its ordinary gradient.

    Guarantees: a row of the result has the same bits for any number of rows.
    """
    return _norm(x, weight_D, eps)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _norm(x: Array, weight_D: Array, eps: float) -> Array:
    if not _fits(x, weight_D):
        return rms_norm(x, weight_D, eps, strict_sum)
    return norm_kernel(x.reshape(-1, x.shape[-1]), weight_D, eps).reshape(x.shape)


def _backward(eps: float, residuals: tuple[Array, Array], gradient: Array) -> tuple[Array, Array]:
    return jax.vjp(partial(rms_norm, eps=eps), *residuals)[1](gradient)


_norm.defvjp(lambda x, weight, eps: (_norm(x, weight, eps), (x, weight)), _backward)


def _fits(x: Array, weight_D: Array) -> bool:
    """Depends on the model only: sampler and trainer take the same branch."""
    dtypes = (x.dtype, weight_D.dtype) == (jnp.float32, jnp.bfloat16)
    return dtypes and FEWEST <= x.shape[-1] <= MOST and x.shape[-1] % THREADS == 0


def norm_kernel(
    x_MD: Float[Array, "M D"],
    weight_D: Float[Array, " D"],
    eps: float,
    *,
    interpret: Interpret = None,
) -> Float[Array, "M D"]:
    """The kernel: float32 rows to bfloat16.

    Requires: D is a multiple of 128 up to 16,384, and M at least 1.
    """
    run = _lowered_once if interpret is None else _call  # no jit in interpret mode
    return run(x_MD, weight_D, eps, interpret)


def _call(x_MD: Array, weight_D: Array, eps: float, interpret: Interpret) -> Array:
    kernel = plgpu.kernel(
        partial(_kernel, eps=eps, interpreted=interpret is not None),
        out_type=jax.ShapeDtypeStruct(x_MD.shape, weight_D.dtype),
        grid=(x_MD.shape[0],),
        grid_names=("row",),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=interpret,
        kernel_name="strict_norm",
    )
    return kernel(x_MD, weight_D)


_lowered_once = jax.jit(_call, static_argnums=(2, 3))  # for all layers


def _kernel(x_ref: Ref, weight_ref: Ref, out_ref: Ref, *, eps: float, interpreted: bool) -> None:
    row, D = lax.axis_index("row"), x_ref.shape[1]

    def held(x: Array) -> Array:
        """x in registers: each thread holds as many neighbours as it can read at once."""
        if interpreted:
            return x
        return plgpu.layout_cast(x, plgpu.Layout.WG_STRIDED(x.shape, math.gcd(D // THREADS, 4)))

    x_D, weight_D = held(x_ref[row]), held(weight_ref[...])
    factor = lax.rsqrt(jnp.sum(x_D * x_D) / D + eps)
    out_ref[row] = (x_D * factor).astype(out_ref.dtype) * weight_D
