"""The Hopper attention on a mesh: which rows and heads each device computes.

The interpreter keeps one state for all devices, so a float32 sum stands in for the kernels here.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from tiny_models import tiny_config

from jaxrl_llm.distributed.layout import cuts_for, train_layout
from jaxrl_llm.distributed.mesh import make_mesh
from jaxrl_llm.kernels import flash_attention
from jaxrl_llm.kernels.flash_attention import (
    Visibility,
    attention,
    attention_reference,
    packed_visibility,
)
from jaxrl_llm.kernels.mesh_split import MeshSplit
from jaxrl_llm.learner.forward import ForwardSettings, hidden_states
from jaxrl_llm.models.base import bind, init_params, model_spec
from jaxrl_llm.models.casting import cast

LOCAL_SHAPES = []


def in_place_of_the_kernels(q, k, v, ranges, softcap, tuning, interpret):
    LOCAL_SHAPES.append((q.shape[0], q.shape[2], k.shape[2]))
    names = ("start_BT", "prefix_start_BT", "prefix_end_BT")
    visibility = None  # plain causal
    if ranges.values_RCT is not None:
        values = jnp.asarray(ranges.values_RCT).swapaxes(0, 1)
        visibility = Visibility(**dict(zip(names, values, strict=False)))
    return attention_reference(q, k, v, visibility=visibility, softcap=softcap).astype(q.dtype)


@pytest.fixture(autouse=True)
def no_kernels(monkeypatch):
    LOCAL_SHAPES.clear()
    monkeypatch.setattr(flash_attention.kernel, "mosaic_attention", in_place_of_the_kernels)


def run(mesh, split, heads, *, rows=4):
    """One gradient on a mesh, compared with one device; the shapes that a device computed."""
    LOCAL_SHAPES.clear()
    segments = jnp.tile(jnp.repeat(jnp.array([1, 2, 3, 0]), 32), (rows, 1))
    visibility = jax.jit(packed_visibility)(segments, jnp.where(segments > 1, 1, 0))
    q, k, v = (
        jax.random.normal(jax.random.key(i), (rows, 128, n, 64)).astype(jnp.bfloat16)
        for i, n in enumerate((heads[0], heads[1], heads[1]))
    )

    def loss(implementation, split, q, k, v, visibility):
        out = attention(q, k, v, visibility=visibility, implementation=implementation, split=split)
        return jnp.sum(out.astype(jnp.float32) ** 2)

    def gradient(*operands):
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return jax.grad(partial(loss, "pallas", split), argnums=(0, 1, 2))(*operands)

    whole = NamedSharding(mesh, PartitionSpec())
    ours = jax.jit(gradient)(*jax.device_put((q, k, v, visibility), whole))
    one_device = jax.jit(jax.grad(partial(loss, "xla", None), argnums=(0, 1, 2)))
    expected = one_device(q, k, v, visibility)
    for a, b in zip(ours, expected, strict=True):
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        assert np.linalg.norm(a - b) <= 2e-2 * np.linalg.norm(b)
    (shape,) = set(LOCAL_SHAPES)
    return shape


def test_rows_and_heads_are_split_and_scarce_kv_heads_copied():
    by = MeshSplit(rows=("data", "fsdp"), heads=("tensor",))
    assert run(make_mesh(2, 1, 4), by, (8, 4)) == (2, 2, 1)
    assert run(make_mesh(1, 2, 4), by, (8, 2)) == (2, 2, 1)
    assert run(make_mesh(2, 2, 2), by, (3, 1)) == (1, 3, 1)  # 3 heads over 2 devices: all on each
    assert run(make_mesh(1, 8, 1), by, (2, 1)) == (4, 2, 1)  # 4 rows over 8 devices: all on each


@pytest.mark.parametrize("tensor, shape", [(0, (2, 4, 2)), (1, (1, 8, 4)), (4, (4, 2, 1))])
def test_heads_are_split_by_the_tensor_size_of_a_phase_or_a_model(tensor, shape):
    """4 samples of 8 heads and 4 KV heads on fsdp=2, tensor=2."""
    sizes = {"fsdp": 2, "tensor": 2}
    mesh = make_mesh(**sizes, cuts=cuts_for(sizes, (tensor,), (4,)))
    spec = model_spec(tiny_config(num_heads=8, num_kv_heads=4, head_dim=64))
    settings = ForwardSettings(
        dtype=jnp.bfloat16, attention="pallas", layout=train_layout(mesh, 4, tensor=tensor)
    )

    def run(params, tokens):
        return hidden_states(bind(spec, cast(params, jnp.bfloat16)), tokens, settings)

    params = jax.eval_shape(lambda: init_params(spec, jax.random.key(0)))
    jax.eval_shape(run, params, jax.ShapeDtypeStruct((4, 128), jnp.int32))
    assert set(LOCAL_SHAPES) == {shape}


def test_a_sink_goes_with_its_head_and_a_soft_cap_with_all(monkeypatch):
    def with_sinks(q, k, v, sinks, ranges, softcap, tuning, interpret):
        LOCAL_SHAPES.append(sinks.shape)
        return attention_reference(q, k, v, sinks=sinks, softcap=softcap).astype(q.dtype)

    monkeypatch.setattr(flash_attention.kernel, "mosaic_attention_with_sinks", with_sinks)
    q, k, v = (
        jax.random.normal(jax.random.key(n), (2, 128, n, 64)).astype(jnp.bfloat16)
        for n in (8, 2, 2)
    )
    sinks, mesh = jnp.linspace(-2.0, 4.0, 8), make_mesh(1, 2, 4)
    by = MeshSplit(rows=("fsdp",), heads=("tensor",))

    def how(sinks):
        return {"sinks": sinks, "softcap": 0.7}

    def split(q, k, v, sinks):
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return attention(q, k, v, implementation="pallas", split=by, **how(sinks))

    whole = NamedSharding(mesh, PartitionSpec())
    found = jax.jit(split)(*jax.device_put((q, k, v, sinks), whole))
    assert set(LOCAL_SHAPES) == {(2,)}
    expected = attention(q, k, v, implementation="xla", **how(sinks))
    np.testing.assert_allclose(*(x.astype(jnp.float32) for x in (found, expected)), atol=0.02)


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
