"""Rules to shardings, their refusals, and the layout switch."""

import dataclasses
import re
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jaxrl_llm.config.schema import AXES
from jaxrl_llm.distributed.layout import generation_layout
from jaxrl_llm.distributed.mesh import (
    axis_parts,
    axis_size,
    check_mesh,
    make_mesh,
    num_replicas,
    parts_of,
)
from jaxrl_llm.distributed.reshard import switch_bytes, to_layout
from jaxrl_llm.distributed.sharding import (
    TRAIN_RULES,
    LogicalAxis,
    batch_sharding,
    partition_spec,
    shardings,
)

AXES_TREE = {
    "embed": ("vocab", "embed"),
    "layers": {"0": {"q": ("embed", "q_heads", "head_dim"), "norm": ("norm",)}},
}


def shapes(vocab=64, heads=4):
    float32 = jnp.float32
    return {
        "embed": jax.ShapeDtypeStruct((vocab, 32), float32),
        "layers": {
            "0": {
                "q": jax.ShapeDtypeStruct((32, heads, 8), float32),
                "norm": jax.ShapeDtypeStruct((32,), float32),
            }
        },
    }


def test_rules_give_the_partition_spec():
    assert partition_spec(("embed", "q_heads", "head_dim"), TRAIN_RULES) == PartitionSpec(
        ("pipeline", "fsdp", "expert", "sequence"), "tensor", None
    )
    generation = generation_layout(make_mesh(fsdp=2, tensor=2), num_kv_heads=4).rules
    assert partition_spec(("vocab", "embed"), generation) == PartitionSpec("tensor", None)
    assert partition_spec(("expert", "expert_embed", "mlp"), TRAIN_RULES) == PartitionSpec(
        "expert", ("pipeline", "fsdp", "sequence"), "tensor"
    )
    replicas = ("data", "pipeline", "fsdp", "expert")
    assert partition_spec(("batch",), TRAIN_RULES) == PartitionSpec(replicas)
    assert partition_spec((), TRAIN_RULES) == PartitionSpec()


def test_every_logical_axis_has_a_rule():
    fields = tuple(field.name for field in dataclasses.fields(TRAIN_RULES))
    assert fields == get_args(LogicalAxis)


def test_mesh_sizes_are_refused_with_the_remedy():
    check_mesh({"data": 2, "fsdp": 2, "tensor": 2}, 8)
    check_mesh({}, 8)
    with pytest.raises(ValueError, match="needs 16 devices, but 8.*data=2 fits"):
        check_mesh({"data": 4, "fsdp": 2, "tensor": 2}, 8)
    with pytest.raises(ValueError, match="needs 9 devices, but 8.*fsdp=8 --config.mesh.tensor=1"):
        check_mesh({"data": 1, "fsdp": 3, "tensor": 3}, 8)
    with pytest.raises(ValueError, match="sequence=4 needs 16 devices.*pipeline=2, .*data=1 fits"):
        check_mesh({"data": 2, "sequence": 4, "pipeline": 2}, 8)
    with pytest.raises(ValueError, match="with 2 processes every device"):
        check_mesh({"data": 2}, 8, num_processes=2)


def test_an_axis_has_parts_where_a_group_of_devices_ends_inside_it():
    assert axis_parts({"fsdp": 8, "tensor": 2}, [4]) == {
        "data": 1,
        "pipeline": 1,
        "fsdp.0": 4,
        "fsdp.1": 2,
        "expert": 1,
        "sequence": 1,
        "tensor": 2,
    }
    assert axis_parts({"fsdp": 8}, [2, 4])["fsdp.2"] == 2
    assert axis_parts({"fsdp": 8}) == {axis: 8 if axis == "fsdp" else 1 for axis in AXES}
    with pytest.raises(ValueError, match="groups of 3 neighbouring devices.*fsdp=8"):
        axis_parts({"fsdp": 8}, [3])
    with pytest.raises(ValueError, match="groups of 2, 3"):
        axis_parts({"fsdp": 6}, [2, 3])
    mesh = make_mesh(fsdp=4, tensor=2, cuts=[4])
    assert parts_of(mesh, "fsdp", "tensor") == ("fsdp.0", "fsdp.1", "tensor")
    assert axis_size(mesh, "fsdp") == 4 and num_replicas(mesh) == 4


def test_shardings_on_a_mesh_and_their_refusals():
    mesh = make_mesh(data=2, fsdp=2, tensor=2)
    assert mesh.axis_names == AXES and num_replicas(mesh) == 4
    assert all(kind == jax.sharding.AxisType.Auto for kind in mesh.axis_types)
    assert make_mesh(data=3).devices.size == 3  # one process may leave devices unused
    assert make_mesh(fsdp=2, devices=jax.devices()[6:]).devices.ravel()[0].id == 6

    tree = shardings(AXES_TREE, shapes(), mesh, TRAIN_RULES)
    assert tree["layers"]["0"]["q"].shard_shape((32, 4, 8)) == (16, 2, 8)
    assert tree["layers"]["0"]["norm"].is_fully_replicated
    assert batch_sharding(mesh).shard_shape((8, 5)) == (2, 5)

    with pytest.raises(ValueError, match=r"embed: its dim 'vocab' of 67.*tensor=2.*vocab=None"):
        shardings(AXES_TREE, shapes(vocab=67), mesh, TRAIN_RULES)
    wide = make_mesh(fsdp=2, tensor=4)
    with pytest.raises(ValueError, match=r"layers/0/q: its dim 'q_heads' of 6.*use tensor of 2"):
        shardings(AXES_TREE, shapes(heads=6), wide, TRAIN_RULES)


def test_layout_switch_is_an_all_gather_over_fsdp_and_its_bytes_are_counted():
    mesh = make_mesh(data=2, fsdp=2, tensor=2)
    source = shardings(AXES_TREE, shapes(), mesh, TRAIN_RULES)
    target = shardings(AXES_TREE, shapes(), mesh, generation_layout(mesh, num_kv_heads=4).rules)
    params = jax.tree.map(
        lambda s, where: jax.device_put(jnp.arange(np.prod(s.shape)).reshape(s.shape), where),
        shapes(),
        source,
    )
    switch = jax.jit(lambda p: to_layout(p, source, target))
    moved = switch(params)
    for before, after, where in zip(*map(jax.tree.leaves, (params, moved, target)), strict=True):
        assert after.sharding.is_equivalent_to(where, after.ndim)
        np.testing.assert_array_equal(before, after)

    text = switch.lower(params).compile().as_text()
    collectives = re.findall(r"= \S+ (all-\S+|collective-\S+|reduce-scatter\S*)\(", text)
    assert collectives == ["all-gather"] * 2  # the norm is whole in both layouts

    # The tensor half of 64*32 and 32*4*8 elements arrives; half of that was there already.
    assert switch_bytes(shapes(), source, target) == 4 * (64 * 32 + 32 * 4 * 8) // 4
    assert switch_bytes(shapes(), target, source) == 0
