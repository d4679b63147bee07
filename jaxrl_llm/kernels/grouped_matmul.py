"""Grouped matmul: runs of rows, each times the weights of its group.

On a Hopper GPU in bfloat16 it is computed by the Mosaic kernels that come with jax
(`jax.experimental.pallas.ops.gpu`). Everywhere else by `jax.lax.ragged_dot`, of which XLA makes on
a GPU and on a CPU a dense matmul with the weights of every group.

Shape letters: M rows, G groups, D inputs, F outputs.
"""

from typing import Any, Literal

import jax
import jax.numpy as jnp

from jaxrl_llm.kernels.hopper import on_hopper

Implementation = Literal["auto", "xla", "pallas"]
TILE = 128  # outputs of a tile, and in the gradient of the weights its inputs
_STEPS: dict[str, Any] = {
    "block_n": TILE,
    "block_k": 64,
    "max_concurrent_steps": 4,
    "grid_block_n": 8,
}


def grouped_matmul(
    x_MD: jax.Array,
    weights_GDF: jax.Array,
    sizes_G: jax.Array,
    implementation: Implementation = "auto",
) -> jax.Array:
    """The first `sizes_G[0]` rows times the first weights, the next ones times the next, and so on.

    Rows after the last group's are 0. "pallas" needs bfloat16, and D and F that are multiples of
    `TILE`; "auto" takes it where it can.

    Requires: the sizes add up to at most M.
    """
    if implementation == "auto":
        implementation = "pallas" if on_hopper() and _fits(x_MD, weights_GDF) else "xla"
    if implementation == "xla":
        return jax.lax.ragged_dot(x_MD, weights_GDF, sizes_G)
    rows = x_MD.shape[0]
    x_MD = jnp.pad(x_MD, ((0, -rows % TILE), (0, 0)))  # the kernels read whole tiles
    return _by_kernel(x_MD, weights_GDF, sizes_G)[:rows]


def _fits(x_MD: jax.Array, weights_GDF: jax.Array) -> bool:
    _, D, F = weights_GDF.shape
    dtypes = {x_MD.dtype, weights_GDF.dtype}
    return dtypes == {jnp.dtype(jnp.bfloat16)} and D % TILE == 0 and F % TILE == 0


@jax.custom_vjp
def _by_kernel(x_MD: jax.Array, weights_GDF: jax.Array, sizes_G: jax.Array) -> jax.Array:
    return _rows(x_MD, weights_GDF, sizes_G, transpose_rhs=False)


def _rows(
    x: jax.Array, weights: jax.Array, sizes_G: jax.Array, *, transpose_rhs: bool
) -> jax.Array:
    """The kernel for rows. It writes nothing after the last group: what is there may be NaN."""
    # Here, because the module also imports jax's tools for tests.
    from jax.experimental.pallas.ops.gpu.ragged_dot_mgpu import ragged_dot

    y = ragged_dot(
        x,
        weights,
        group_sizes=sizes_G,
        block_m=_tile_rows(x.shape[0], sizes_G.shape[0]),
        transpose_rhs=transpose_rhs,
        **_STEPS,
    )
    return jnp.where(jnp.arange(x.shape[0])[:, None] < sizes_G.sum(), y, 0)


def _tile_rows(rows: int, groups: int) -> int:
    """Rows of a tile. A tile has rows of one group alone, so small groups take small tiles."""
    return 128 if rows >= 128 * groups else 64


def _forward(x_MD: jax.Array, weights_GDF: jax.Array, sizes_G: jax.Array) -> tuple[jax.Array, Any]:
    return _by_kernel(x_MD, weights_GDF, sizes_G), (x_MD, weights_GDF, sizes_G)


def _backward(residuals: Any, gradient_MF: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    from jax.experimental.pallas.ops.gpu.transposed_ragged_dot_mgpu import transposed_ragged_dot

    x_MD, weights_GDF, sizes_G = residuals
    x_gradient = _rows(gradient_MF, weights_GDF, sizes_G, transpose_rhs=True)
    of_weights = transposed_ragged_dot(
        x_MD, gradient_MF, group_sizes=sizes_G, block_m=TILE, **_STEPS
    )
    return x_gradient, of_weights, None


_by_kernel.defvjp(_forward, _backward)
