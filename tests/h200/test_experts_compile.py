"""What moves for a split layer of experts, in the program that a card gets."""

import jax
import jax.numpy as jnp
import pytest
from scale import ALGORITHMS, Scaled, Shape
from target import needs_compiler

from jaxrl_llm.distributed.communication import collectives
from jaxrl_llm.distributed.device_groups import MeshAxes
from jaxrl_llm.distributed.layout import train_layout
from jaxrl_llm.distributed.mesh import make_mesh
from jaxrl_llm.estimate.topology import COMPILER_OPTIONS, compile_devices
from jaxrl_llm.models.expert_rows import Stacked
from jaxrl_llm.models.experts import experts_of_tokens

pytestmark = needs_compiler
B, T, D, F, E = 8, 32, 256, 128, 8


@pytest.mark.nightly
def test_gradients_of_weights_are_scattered_before_they_are_summed_over_data():
    """An all-reduce over both axes would move twice the bytes on many devices."""
    mesh = make_mesh(data=2, fsdp=2, expert=2, devices=compile_devices(8))
    layout = train_layout(mesh, 2)
    into = layout.sharding("expert", "expert_embed", "mlp")
    out = layout.sharding("expert", "mlp", "expert_embed")
    rows = layout.sharding("batch", None, None)

    def loss(x, weights, kernels, chosen):
        with layout.scope():
            stacks = tuple(Stacked(kernel.astype(jnp.bfloat16)) for kernel in kernels)
            y = experts_of_tokens(x, weights, chosen, stacks)
        return (y.astype(jnp.float32) ** 2).sum()

    def array(shape, dtype, sharding):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    kernels = [array((E, D, F), jnp.float32, into)] * 2 + [array((E, F, D), jnp.float32, out)]
    arguments = (
        array((B, T, D), jnp.bfloat16, rows),
        array((B, T, 1), jnp.float32, rows),
        kernels,
        array((B, T, 1), jnp.int32, rows),
    )
    gradient = jax.jit(jax.grad(loss, 2), out_shardings=[into, into, out])
    compiled = gradient.lower(*arguments).compile(compiler_options=dict(COMPILER_OPTIONS))
    axes = MeshAxes(names=mesh.axis_names, sizes=mesh.axis_sizes)
    found = collectives(compiled.as_text(), axes, ())
    moved = {(x.kind, x.axis): x.bytes for x in found if x.bytes > 1e5}
    whole = 3 * E // 2 * D * F * 2  # bytes of a device's experts in bf16
    assert moved == {
        ("all-gather", "fsdp"): whole / 2,
        ("reduce-scatter", "fsdp"): whole / 2,
        ("all-reduce", "data"): 2 * whole / 2 / 2,
    }


@pytest.mark.slow
def test_an_update_on_stages_of_split_experts_and_rows():
    """A stage brings its tokens to the experts once a pass: a part of each row, in bf16."""
    hidden, row, chosen = 1024, 2048, 8
    shape = Shape(hidden, 256, 2, 8, 4, 8192, 16)
    mesh = {"pipeline": 2, "expert": 2, "sequence": 2}
    scaled = Scaled(shape, ALGORITHMS["GRPO"], mesh, row=row, prompts=2, scan_layers=False)
    text = scaled.compiled("update_actor").as_text()
    assert "grouped_matmul_rows" in text
    axes = MeshAxes(names=tuple(mesh), sizes=tuple(mesh.values()))
    moved: dict[tuple[str, str], float] = {}
    for each in collectives(text, axes, ()):  # of one tick
        key = each.kind, each.axis
        moved[key] = moved.get(key, 0) + each.bytes
    tokens = row // 2
    # Forward, again in the backward pass, and the gradients of outputs.
    there = 3 * tokens * hidden * 2 + 2 * tokens * chosen * 8
    assert moved["all-gather", "expert"] == there
    # Sums in float32; the gradients of tokens and of their weights.
    assert moved["reduce-scatter", "expert"] == 2 * tokens * hidden * 4 + tokens * chosen * 4
