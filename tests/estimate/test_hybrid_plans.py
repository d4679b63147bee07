"""Meshes that the planner proposes for hybrids, and their bytes against compiled programs."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from test_estimate import EVERY_AXIS, H200, WIDE, collectives
from test_estimate import tiny as tiny_config
from tiny import HYBRID

from jaxrl_llm import config as c
from jaxrl_llm.config import load_config
from jaxrl_llm.distributed.mesh import make_mesh
from jaxrl_llm.estimate.devices import Devices
from jaxrl_llm.estimate.estimate import estimate
from jaxrl_llm.estimate.packing import Rows
from jaxrl_llm.estimate.search import _meshes
from jaxrl_llm.estimate.traffic import update_traffic
from jaxrl_llm.estimate.work import work_of
from jaxrl_llm.kernels.gated_delta import Inputs, Runs, Streams, chunking_of, gated_delta
from jaxrl_llm.kernels.mesh_split import MeshSplit

HALVES = WIDE | HYBRID | {"num_hidden_layers": 4}  # a rule in every second layer


def hybrid(mesh=None, **changes):
    config = tiny_config(c.GRPO(), mesh)
    return replace(config, actor=replace(config.actor, hf_config=HALVES | changes))


def test_the_search_tries_every_axis_and_nothing_that_is_refused():
    config = hybrid()
    meshes = list(_meshes(work_of(config), 8, 4))
    assert {axis for mesh in meshes for axis, size in mesh.sizes.items() if size > 1} == EVERY_AXIS
    (model,) = {model.config for model in work_of(config).models.values()}
    for mesh in meshes:
        assert model.splits_alike(mesh.pipeline * mesh.pipeline_rounds)
        for tensor in (mesh.tensor, mesh.generation.tensor or 1, mesh.passes.tensor or 1):
            assert model.delta.key_heads % tensor == 0


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
    found = update_traffic(work.actor, rows, devices).received["sequence"]
    attentions = model.num_attention_layers
    keys = attentions * tokens * 2 * model.num_kv_heads * model.head_dim * (2 * 2 + 4) / 2
    rules = model.num_layers - attentions
    assert found - keys == rules * collectives(made.jaxpr)


def temporaries(mesh: c.MeshConfig, **changes: Any) -> dict[str, float]:
    """Bytes of each stage for a model of Qwen3.5-2B sizes with a small vocabulary."""
    model: dict[str, Any] = {
        "model_type": "qwen3_5_text",
        "vocab_size": 32768,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": changes.pop("layers"),
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "linear_num_value_heads": 16,
        "tie_word_embeddings": True,
    }
    actor = {"micro_batch_tokens": 8192, "dtype": "bfloat16", "hf_config": model}
    given = {f"actor.{key}": value for key, value in actor.items()}
    given |= {key.replace("__", "."): value for key, value in changes.items()}
    work = work_of(load_config("grpo", given | {"rollout.n": 8, "warmup": "null"}))
    return estimate(work, Devices(mesh=mesh, hosts=1, rates=H200)).temporaries


@pytest.mark.parametrize(("remat", "compiled"), [("projections", 5.177), ("none", 10.085)])
def test_an_update_takes_what_the_compiler_says(remat, compiled):
    """GiB of four layers, compiled for an H200."""
    sizes = {"data__max_prompt_length": 512, "data__max_response_length": 512}
    sizes |= {"data__train_batch_size": 8, "actor__ppo_mini_batch_size": 8}
    found = temporaries(c.MeshConfig(), layers=4, actor__remat=remat, **sizes)
    assert found["update_actor"] / 2**30 == pytest.approx(compiled, rel=0.1)


@pytest.mark.parametrize(("layers", "compiled"), [(4, 2.525), (8, 4.075)])
def test_generation_takes_what_the_compiler_says(layers, compiled):
    """GB of 128 x 8 samples on four cards, compiled for an H100. Prompts count, chunks once."""
    sizes = {"data__max_prompt_length": 256, "data__max_response_length": 256}
    sizes |= {"data__train_batch_size": 128, "actor__ppo_mini_batch_size": 128}
    found = temporaries(c.MeshConfig(fsdp=4), layers=layers, **sizes)
    assert found["gen"] / 1e9 == pytest.approx(compiled, rel=0.05)
