"""Grouped matmul: runs of rows, each times the weights of its group.

On a Hopper GPU in bfloat16 it is computed by the kernels of this package. Everywhere else by
`jax.lax.ragged_dot`, of which XLA makes on a GPU and on a CPU a dense matmul with the weights of
every group.

Shape letters: M rows, G groups, D inputs, F outputs.
"""

from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jaxrl_llm.kernels.float8 import FLOAT8
from jaxrl_llm.kernels.grouped_matmul.common import CHUNK, COLUMN_TILES
from jaxrl_llm.kernels.grouped_matmul.factors import RANKS
from jaxrl_llm.kernels.grouped_matmul.rows import Extras, multiply_rows
from jaxrl_llm.kernels.grouped_matmul.weights import ALIGNED, weights_gradient
from jaxrl_llm.kernels.hopper import Interpret, on_hopper

Implementation = Literal["auto", "xla", "pallas"]
TILE = min(COLUMN_TILES)
# From so many rows on, weights of other sizes than multiples of TILE are padded for the kernels: a
# copy of all groups' weights then takes less time than the dense matmul with every group.
PADDED_ROWS = 1024
# Rows of a group up to which float8 weights are read as they are. At 256 that takes 0.6 of the time
# of a conversion and a matmul in bfloat16 (H100, 128 groups), and its time grows faster.
FLOAT8_ROWS = 512
# Rows of a group up to which low-rank factors go with weights in bfloat16 through one kernel.
ADAPTED_ROWS = 256


def grouped_matmul(
    x_MD: jax.Array,
    weights_GDF: jax.Array,
    sizes_G: jax.Array,
    implementation: Implementation = "auto",
    *,
    interpret: Interpret = None,
) -> jax.Array:
    """The first `sizes_G[0]` rows times the first weights, the next ones times the next, and so on.

    Rows after the last group's are 0, and what x has there reaches no result and no gradient.
    "pallas" needs bfloat16. D and F that are no multiples of `TILE` are padded with zeros, which
    copies the weights; "auto" does so from `PADDED_ROWS` rows on.

    Requires: the sizes add up to at most M.
    Guarantees: the kernels' sums have one order, so that they have the same bits in every run.
    """
    if implementation == "auto":
        implementation = "pallas" if on_hopper() and _pays(x_MD, weights_GDF) else "xla"
    if implementation == "xla":
        return jax.lax.ragged_dot(x_MD, weights_GDF, sizes_G)
    y_MF: jax.Array = _by_kernel(x_MD, weights_GDF, sizes_G, interpret)
    return y_MF


def frozen_matmul(
    x_MD: jax.Array,
    weights_GDF: jax.Array,
    sizes_G: jax.Array,
    *,
    scale_GF: jax.Array | None = None,
    factors: tuple[jax.Array, jax.Array] | None = None,
    interpret: Interpret = None,
) -> jax.Array:
    """`grouped_matmul` of few bfloat16 rows by the kernel, without a gradient.

    The weights are bfloat16 or float8_e4m3fn, of which the kernel reads a byte a weight. The
    outputs of weights are multiplied by `scale_GF`, float32. `factors`, a [G, D, R] and
    b [G, R, F], add x a b to them; x a is rounded to bfloat16.

    Requires: `frozen_matmul_pays`, or `interpret`.
    Guarantees: without factors, and with scales that are powers of two, the result has the bits of
    `grouped_matmul` with the weights times their scales in bfloat16.
    """
    extras = Extras(scale_GF, *(() if factors is None else _whole_factors(*factors)))
    y_MF = multiply_rows(_whole_rows(x_MD), weights_GDF, sizes_G, extras, interpret=interpret)
    return y_MF[: x_MD.shape[0]]


def frozen_matmul_pays(x_MD: jax.Array, weights_GDF: jax.Array, rank: int = 0) -> bool:
    """Check that `frozen_matmul` takes these, and is faster than other matmuls."""
    G, D, F = weights_GDF.shape
    most = FLOAT8_ROWS if weights_GDF.dtype == FLOAT8 else ADAPTED_ROWS if rank else 0
    fits = x_MD.dtype == jnp.bfloat16 and D % TILE == 0 and F % TILE == 0 and rank <= max(RANKS)
    return on_hopper() and fits and x_MD.shape[0] <= most * G


def _whole_factors(a_GDR: jax.Array, b_GRF: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The factors as the kernel reads them: the inputs of `a` last, zeros up to one of RANKS."""
    rank = a_GDR.shape[2]
    missing = ((0, 0), (0, min(r for r in RANKS if r >= rank) - rank), (0, 0))
    return jnp.pad(a_GDR.swapaxes(1, 2), missing), jnp.pad(b_GRF, missing)


def _pays(x_MD: jax.Array, weights_GDF: jax.Array) -> bool:
    _, D, F = weights_GDF.shape
    if {x_MD.dtype, weights_GDF.dtype} != {jnp.dtype(jnp.bfloat16)}:
        return False
    return (D % TILE == 0 and F % TILE == 0) or x_MD.shape[0] >= PADDED_ROWS


def _whole_rows(x_MD: jax.Array) -> jax.Array:
    """The rows with as many zeros after them, and after each, as the kernels need."""
    M, D = x_MD.shape
    padded = max(CHUNK, -(-M // ALIGNED) * ALIGNED)
    return jnp.pad(x_MD, ((0, padded - M), (0, -D % TILE)))


def _whole_weights(weights_GDF: jax.Array) -> jax.Array:
    _, D, F = weights_GDF.shape
    return jnp.pad(weights_GDF, ((0, 0), (0, -D % TILE), (0, -F % TILE)))


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _by_kernel(
    x_MD: jax.Array, weights_GDF: jax.Array, sizes_G: jax.Array, interpret: Interpret
) -> jax.Array:
    weights = _whole_weights(weights_GDF)
    y = multiply_rows(_whole_rows(x_MD), weights, sizes_G, interpret=interpret)
    return y[: x_MD.shape[0], : weights_GDF.shape[2]]


def _backward(
    interpret: Interpret, residuals: Any, gradient_MF: jax.Array
) -> tuple[jax.Array, jax.Array, None]:
    x_MD, weights_GDF, sizes_G = residuals  # without padding, so that no copy is kept
    (M, D), F = x_MD.shape, weights_GDF.shape[2]
    gradient, weights = _whole_rows(gradient_MF), _whole_weights(weights_GDF)
    of_x = multiply_rows(gradient, weights, sizes_G, transposed=True, interpret=interpret)
    of_weights = weights_gradient(_whole_rows(x_MD), gradient, sizes_G, interpret=interpret)
    return of_x[:M, :D], of_weights[:, :D, :F], None


_by_kernel.defvjp(lambda *operands: (_by_kernel(*operands), operands[:3]), _backward)
