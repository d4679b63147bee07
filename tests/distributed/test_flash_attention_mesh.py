"""The Hopper attention on a mesh: which rows and heads each device computes.

The interpreter keeps one state for all devices, so a float32 sum stands in for the kernels here.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxrl_llm.distributed.mesh import make_mesh
from jaxrl_llm.kernels import flash_attention
from jaxrl_llm.kernels.flash_attention import (
    Visibility,
    attention,
    attention_reference,
    packed_visibility,
)

LOCAL_SHAPES = []


def in_place_of_the_kernels(q, k, v, ranges, tuning, interpret):
    LOCAL_SHAPES.append((q.shape[0], q.shape[2], k.shape[2]))
    names = ("start_BT", "prefix_start_BT", "prefix_end_BT")
    visibility = None  # plain causal
    if ranges.values_RCT is not None:
        values = jnp.asarray(ranges.values_RCT).swapaxes(0, 1)
        visibility = Visibility(**dict(zip(names, values, strict=False)))
    return attention_reference(q, k, v, visibility=visibility).astype(q.dtype)


@pytest.fixture(autouse=True)
def no_kernels(monkeypatch):
    LOCAL_SHAPES.clear()
    monkeypatch.setattr(flash_attention.kernel, "mosaic_attention", in_place_of_the_kernels)


def run(mesh_sizes, heads, *, rows=4, set_mesh=True):
    """One gradient on a mesh, compared with one device; the shapes that a device computed."""
    LOCAL_SHAPES.clear()
    mesh = make_mesh(*mesh_sizes)
    segments = jnp.tile(jnp.repeat(jnp.array([1, 2, 3, 0]), 32), (rows, 1))
    visibility = packed_visibility(segments, jnp.where(segments > 1, 1, 0))
    q, k, v = (
        jax.random.normal(jax.random.key(i), (rows, 128, n, 64)).astype(jnp.bfloat16)
        for i, n in enumerate((heads[0], heads[1], heads[1]))
    )

    def loss(implementation, q, k, v, visibility):
        out = attention(q, k, v, visibility=visibility, implementation=implementation)
        return jnp.sum(out.astype(jnp.float32) ** 2)

    gradient = jax.grad(partial(loss, "pallas"), argnums=(0, 1, 2))

    def on_the_mesh(*operands):
        # A jitted function may name the mesh itself, as one that is given its mesh would.
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return gradient(*operands)

    divides = rows % (mesh_sizes[0] * mesh_sizes[1]) == 0
    placed = NamedSharding(mesh, PartitionSpec(("data", "fsdp") if divides else None))
    operands = jax.device_put((q, k, v, visibility), placed)
    if set_mesh:
        with jax.set_mesh(mesh):
            ours = jax.jit(gradient)(*operands)
    else:
        ours = jax.jit(on_the_mesh)(*operands)
    expected = jax.grad(partial(loss, "xla"), argnums=(0, 1, 2))(q, k, v, visibility)
    for a, b in zip(ours, expected, strict=True):
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        assert np.linalg.norm(a - b) <= 2e-2 * np.linalg.norm(b)
    (shape,) = set(LOCAL_SHAPES)
    return shape


def test_rows_and_heads_are_split_and_scarce_kv_heads_copied():
    assert run((2, 1, 4), (8, 4)) == (2, 2, 1)
    assert run((1, 2, 4), (8, 2), set_mesh=False) == (2, 2, 1)
    assert run((2, 2, 2), (3, 1)) == (1, 3, 1)  # 3 heads over 2 devices: each computes all
    assert run((1, 8, 1), (2, 1)) == (4, 2, 1)  # 4 rows over 8 devices: each computes all


def test_inside_a_shard_map_each_device_runs_the_kernels_as_they_are():
    q = jnp.ones((2, 128, 4, 64), jnp.bfloat16)
    local = partial(attention, implementation="pallas")
    spec = PartitionSpec(("data", "fsdp"), None, "tensor")
    mapped = jax.shard_map(
        local, mesh=make_mesh(2, 1, 4), in_specs=(spec,) * 3, out_specs=spec, check_vma=False
    )
    out = jax.jit(mapped)(q, q, q)
    assert LOCAL_SHAPES == [(1, 1, 1)]
    np.testing.assert_array_equal(out, q)
