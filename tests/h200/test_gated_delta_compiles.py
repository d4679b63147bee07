"""The gated delta rule, compiled for H200s: its kernels, its gradient, and heads of a mesh."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from further import further
from jax.sharding import NamedSharding, PartitionSpec
from target import CUBLAS, abstract, h200_mesh, needs_compiler
from test_training_compiles import ROW, update

from jaxrl_llm.config import MeshConfig
from jaxrl_llm.kernels.gated_delta import (
    Begin,
    DeltaState,
    Inputs,
    Runs,
    Streams,
    chunking_of,
    gated_delta,
    gated_delta_states,
    gated_delta_step,
)
from jaxrl_llm.kernels.hopper import compiling_for_hopper
from jaxrl_llm.kernels.mesh_split import MeshSplit
from jaxrl_llm.models.config import GatedDelta, ModelConfig

pytestmark = needs_compiler
T, G, N, H, V, W = 256, 2, 4, 128, 128, 4
HYBRID = ModelConfig(
    family="qwen3_5_text",
    vocab_size=8192,
    hidden_size=1024,
    intermediate_size=3072,
    num_layers=4,
    num_heads=8,
    num_kv_heads=2,
    head_dim=128,
    tie_word_embeddings=True,
    unit_offset=True,
    qk_norm=True,
    attention_gate=True,
    rotary_factor=0.5,
    delta=GatedDelta(period=2, key_heads=8, value_heads=8, key_dim=H, value_dim=V, conv_size=W),
)
# Of an exact run, whose Triton matmuls are an error without a card.
OPTIONS = {"xla_gpu_exclude_nondeterministic_ops": True, "xla_gpu_enable_triton_gemm": False}


def array(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def inputs_of(rows, tokens, values=V):
    shapes = ((G, H), (G, H), (N, values))
    return Inputs(
        streams=Streams(*(array(rows, tokens, *shape, dtype=jnp.bfloat16) for shape in shapes)),
        kernels=Streams(*(array(*shape, W, dtype=jnp.bfloat16) for shape in shapes)),
        log_decay_BTN=array(rows, tokens, N),
        rate_BTN=array(rows, tokens, N),
    )


def states_of(number, values=V):
    channels = 2 * G * H + N * values
    window = array(number, W - 1, channels, dtype=jnp.bfloat16)
    return DeltaState(array(number, N, values, H), window)


def compiled(run, traced, **how):
    with compiling_for_hopper():
        return jax.jit(run, **how).lower(*traced).compile(compiler_options=OPTIONS)


def outputs_of(program, kernel):
    """The shapes that each call of a kernel gives."""
    return re.findall(rf"= (\(?[^=]*?) custom-call\([^\n]*{kernel}", program.as_text())


@pytest.mark.slow
def test_a_gradient_has_no_scatter():
    """Of rows with shared prompts; an exact run would sort the updates of a scatter.

    One kernel takes the states from chunk to chunk, and another one their gradients back.
    """
    runs = Runs(*[array(1, T, dtype=jnp.int32)] * 3)

    def total(inputs, runs, given):
        return (gated_delta(inputs, chunking_of(runs, W)) * given).sum()

    traced = abstract((inputs_of(1, T), runs, array(1, T, N, V)))
    program = compiled(jax.grad(total), traced)
    assert "while" not in operations(program)
    assert len(outputs_of(program, "gated_delta_scan")) == 2


@pytest.mark.nightly
def test_a_prefill_keeps_the_chunks_of_one_layer():
    """The states after a prompt are computed in their layer, and not after all of them."""
    tokens = 2048

    def run(inputs, start, last, layers):
        found = []
        for _ in range(layers):
            out, states = gated_delta_states(inputs, chunking_of(Runs(start), W), last)
            streams = inputs.streams._replace(v=jnp.tanh(out).astype(jnp.bfloat16))
            inputs = inputs._replace(streams=streams)
            found.append(states)
        return out, found

    rows = (array(1, tokens, dtype=jnp.int32), array(1, 1, dtype=jnp.int32))
    one, four = (
        compiled(partial(run, layers=layers), abstract((inputs_of(1, tokens), *rows)))
        .memory_analysis()
        .temp_size_in_bytes
        for layers in (1, 4)
    )
    assert four - one < tokens // 64 * N * H * V * 4, "chunks of a second layer"


def operations(program):
    """The operations of a gradient, all deterministic."""
    found = set(re.findall(r" (\w[\w-]*)\(", program.as_text()))
    assert "fusion" in found
    assert not found & {"scatter", "sort", "select-and-scatter"}
    return found


@pytest.mark.parametrize("begins", [False, True])
def test_a_token_writes_states_in_place(begins):
    """No copy of all states: a kernel reads and writes each one once."""
    slots, prompts = 16, 4
    begin = None
    if begins:
        at = array(slots, dtype=jnp.bool), array(slots, dtype=jnp.int32)
        begin = Begin(states_of(prompts), *at)
    traced = abstract((inputs_of(slots, 1), states_of(slots), array(slots, dtype=jnp.bool), begin))
    program = compiled(gated_delta_step, traced, donate_argnums=1)
    assert len(outputs_of(program, "gated_delta_step")) == 1
    assert program.memory_analysis().temp_size_in_bytes < slots * N * H * V * 4 / 2


@pytest.mark.parametrize("values", further([448, 512]))
def test_a_token_of_large_heads(values):
    """XLA computes a step whose memory of a head is larger than shared memory."""
    traced = abstract((inputs_of(2, 1, values), states_of(2, values), array(2, dtype=jnp.bool)))
    program = compiled(gated_delta_step, traced)
    assert len(outputs_of(program, "gated_delta_step")) == (values == 448)


@pytest.mark.nightly
def test_each_device_has_its_rows_and_heads():
    """The kernels of four devices: two halves of the rows and two of the heads. No scatter here."""
    mesh = h200_mesh((1, 2, 2))
    split = MeshSplit(rows=("fsdp",), heads=("tensor",))

    def total(inputs, runs, given):
        return (gated_delta(inputs, chunking_of(runs, W), split) * given).sum()

    by_head = NamedSharding(mesh, PartitionSpec("fsdp", None, "tensor"))
    inputs = abstract(inputs_of(2, T), by_head)
    inputs = inputs._replace(
        kernels=abstract(inputs.kernels, NamedSharding(mesh, PartitionSpec("tensor")))
    )
    runs = abstract(Runs(array(2, T, dtype=jnp.int32)), NamedSharding(mesh, PartitionSpec("fsdp")))
    with jax.set_mesh(mesh):
        program = compiled(jax.grad(total), (inputs, runs, abstract(array(2, T, N, V), by_head)))
    chunks, local = T // 64, (1, N // 2)
    states = ",".join(map(str, (chunks, *local, H, 1, V)))
    kernels = outputs_of(program, "gated_delta_scan")
    assert len(kernels) == 2 and all(f"f32[{states}]" in shapes for shapes in kernels)
    assert "all-gather" not in operations(program)


@pytest.mark.slow
def test_devices_that_share_a_row_have_all_tokens_of_some_heads():
    """Tokens come by exchanges, each way once; the kernels see whole rows of one head."""
    mesh = h200_mesh((1, 1, 2), sequence=2)
    split = MeshSplit(tokens=("sequence",), heads=("tensor",))

    def total(inputs, runs, given):
        return (gated_delta(inputs, chunking_of(runs, W), split) * given).sum()

    by_head = NamedSharding(mesh, PartitionSpec(None, "sequence", "tensor"))
    inputs = abstract(inputs_of(1, T), by_head)
    inputs = inputs._replace(
        kernels=abstract(inputs.kernels, NamedSharding(mesh, PartitionSpec("tensor")))
    )
    runs = abstract(Runs(array(1, T, dtype=jnp.int32)), NamedSharding(mesh, PartitionSpec()))
    with jax.set_mesh(mesh):
        program = compiled(jax.grad(total), (inputs, runs, abstract(array(1, T, N, V), by_head)))
    states = ",".join(map(str, (T // 64, 1, 1, H, 1, V)))
    kernels = outputs_of(program, "gated_delta_scan")
    assert len(kernels) == 2 and all(f"f32[{states}]" in shapes for shapes in kernels)
    # A sum needs no outputs: none go back, only their gradients, and the gradients of what came.
    exchanges = re.findall(r" all-to-all(?:-start)?\(", program.as_text())
    assert len(exchanges) == 2 * 2 + 1
    assert "all-gather" not in operations(program)


@pytest.mark.slow
def test_stages_whose_devices_share_a_row():
    """An update. A stage has one rule: forward, again for its gradient, and the gradient."""
    phases = MeshConfig(pipeline=2, sequence=2)
    with compiling_for_hopper():
        how = {"compiler_options": CUBLAS, "remat": "full"}
        program = update((1, 1, 1), config=HYBRID, phases=phases, **how)
    kernels = outputs_of(program, "gated_delta_scan")
    states = ",".join(map(str, (ROW // 64, 1, 8 // 2, H, 2, V)))
    assert len(kernels) == 3 and all(f"f32[{states}]" in shapes for shapes in kernels)
