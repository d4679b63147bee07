"""Attention on a mesh: each device computes its own rows, heads and queries.

Tokens may be split too (context parallelism), in `token_order`. Keys and values are gathered over
the devices, which grouped heads make small.

Shape letters: see common.py.
"""

import math
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec
from jaxtyping import Array

from jaxrl_llm.kernels.flash_attention.visibility import Visibility
from jaxrl_llm.kernels.mesh_split import MeshSplit, axes_size, in_row_order


def split_attention(
    attend: Callable[..., Array],
    q_BTNH: Array,
    k_BTKH: Array,
    v_BTKH: Array,
    lengths_B: Array | None,
    visibility: Visibility | None,
    split: MeshSplit,
    sinks_N: Array | None = None,
) -> Array:
    """`attend` on each device of the mesh in scope: its own queries with all keys of their rows.

    It is called with q, k, v, lengths, visibility and sinks.

    Requires: where tokens are split, they are in `token_order`; `visibility` has `last`, and its
        ranges are positions in the row.
    """
    mesh = jax.sharding.get_abstract_mesh()
    automatic = {
        name
        for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
        if kind == AxisType.Auto
    }
    rows, heads = split.rows_of(q_BTNH.shape[0]), split.heads_of(q_BTNH.shape[2])
    repeats = math.lcm(k_BTKH.shape[2], axes_size(heads)) // k_BTKH.shape[2]
    if repeats > 1:  # each device gets the KV heads of its own query heads
        k_BTKH, v_BTKH = (jnp.repeat(x, repeats, axis=2) for x in (k_BTKH, v_BTKH))

    parts = split.num_token_parts

    def local(
        q_BTNH: Array,
        k_BTKH: Array,
        v_BTKH: Array,
        lengths_B: Array | None,
        visibility: Visibility | None,
        sinks_N: Array | None,
    ) -> Array:
        if parts > 1 and visibility is not None:
            real_BT11 = visibility.real()[:, :, None, None]
            k_BTKH, v_BTKH = (
                in_row_order(gathered(jnp.where(real_BT11, x, 0), split.tokens), parts)
                for x in (k_BTKH, v_BTKH)
            )
        return attend(q_BTNH, k_BTKH, v_BTKH, lengths_B, visibility, sinks_N)

    by_row = PartitionSpec(rows or None)
    by_token = PartitionSpec(*by_row, split.tokens if parts > 1 else None)
    by_head = PartitionSpec(*by_token, heads or None)
    return jax.shard_map(
        local,
        in_specs=(by_head, by_head, by_head, by_row, by_token, PartitionSpec(heads or None)),
        out_specs=by_head,
        axis_names=automatic,
        check_vma=False,
    )(q_BTNH, k_BTKH, v_BTKH, lengths_B, visibility, sinks_N)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def gathered(x_BT: Array, axes: tuple[str, ...]) -> Array:
    """The second dim of all devices along `axes`, inside a shard_map.

    The gradient is reduced and scattered in float32: the sum of many devices' bfloat16 is coarse.
    """
    return jax.lax.all_gather(x_BT, axes, axis=1, tiled=True)


def _gathered_backward(axes: tuple[str, ...], _: None, gradient: Array) -> tuple[Array]:
    total = jax.lax.psum_scatter(
        gradient.astype(jnp.float32), axes, scatter_dimension=1, tiled=True
    )
    return (total.astype(gradient.dtype),)


gathered.defvjp(lambda x, axes: (gathered(x, axes), None), _gathered_backward)
