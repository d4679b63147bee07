"""Meshes that the planner proposes for hybrids, and the bytes of one rule against its program."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from test_planner import EVERY_AXIS, H200, WIDE, collectives
from test_planner import tiny as tiny_config
from tiny import HYBRID

from jaxrl_llm import config as c
from jaxrl_llm.distributed.mesh import make_mesh
from jaxrl_llm.kernels.gated_delta import Inputs, Runs, Streams, chunking_of, gated_delta
from jaxrl_llm.kernels.mesh_split import MeshSplit
from jaxrl_llm.launch.described_models import check_models
from jaxrl_llm.planner.devices import Devices
from jaxrl_llm.planner.packing import Rows
from jaxrl_llm.planner.search import _meshes
from jaxrl_llm.planner.traffic import of_update
from jaxrl_llm.planner.work import work_of

HALVES = WIDE | HYBRID | {"num_hidden_layers": 4}  # a rule in every second layer


def hybrid(mesh=None, **changes):
    config = tiny_config(c.GRPO(), mesh)
    return replace(config, actor=replace(config.actor, hf_config=HALVES | changes))


def test_the_search_tries_every_axis_and_nothing_that_is_refused():
    config = hybrid()
    meshes = list(_meshes(work_of(config), 8, 4))
    assert {axis for mesh in meshes for axis, size in mesh.sizes.items() if size > 1} == EVERY_AXIS
    for mesh in meshes:
        check_models(replace(config, mesh=mesh))


WHOLE = pytest.param(2, marks=pytest.mark.slow)


@pytest.mark.parametrize("key_heads", [1, WHOLE])
def test_tokens_go_to_the_devices_of_their_heads_and_back(key_heads):
    """Key heads that two devices do not divide are sent for each value head."""
    mesh = c.MeshConfig(sequence=2)
    work = work_of(hybrid(mesh, linear_num_key_heads=key_heads, linear_num_value_heads=4))
    model, tokens = work.actor.config, 16
    delta = model.delta
    assert delta is not None
    shapes = {"q": (key_heads, delta.key_dim), "k": (key_heads, delta.key_dim)}
    shapes["v"] = (delta.value_heads, delta.value_dim)
    rates = jnp.zeros((1, tokens, delta.value_heads))
    inputs = Inputs(
        Streams(**{name: jnp.zeros((1, tokens, *shape)) for name, shape in shapes.items()}),
        Streams(**{name: jnp.zeros((*shape, delta.conv_size)) for name, shape in shapes.items()}),
        rates,
        rates,
    )
    chunking = chunking_of(Runs(jnp.zeros((1, tokens), jnp.int32)), delta.conv_size)
    split = MeshSplit(tokens=("sequence",))

    def loss(inputs):
        return jnp.square(gated_delta(inputs, chunking, split)).sum()

    with jax.sharding.use_abstract_mesh(make_mesh(sequence=2).abstract_mesh):
        made = jax.make_jaxpr(jax.value_and_grad(loss))(inputs)
    devices = Devices(mesh=mesh, hosts=1, rates=H200)
    rows = Rows(micro_batches=1, tokens=tokens, targets=8, pairs=8.0, row_tokens=tokens)
    found = of_update(work.actor, rows, devices).received["sequence"]
    attentions = model.num_attention_layers
    keys = attentions * tokens * 2 * model.num_kv_heads * model.head_dim * (2 * 2 + 4) / 2
    rules = model.num_layers - attentions
    assert found - keys == rules * collectives(made.jaxpr)
