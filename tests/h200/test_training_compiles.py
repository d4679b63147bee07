"""The actor's update compiled for H200s: our attention on several cards, memory, collectives."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from target import CUBLAS, h200_mesh, needs_compiler

from jaxrl_llm import config as c
from jaxrl_llm.algorithms.build import build_online
from jaxrl_llm.config import MeshConfig, ModelSettings, OptimizerConfig
from jaxrl_llm.config.schema import REPLICA_AXES
from jaxrl_llm.distributed.communication import collectives
from jaxrl_llm.distributed.device_groups import MeshAxes
from jaxrl_llm.distributed.layout import shard_rows
from jaxrl_llm.learner.losses import PolicyLoss
from jaxrl_llm.learner.micro_batches import Packed
from jaxrl_llm.learner.train_step import mini_batches, train_step
from jaxrl_llm.models.base import model_spec
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.shapes import num_parameters
from jaxrl_llm.plan.roles import make_role

pytestmark = needs_compiler

CONFIG = ModelConfig(
    family="qwen2",
    vocab_size=131072,
    hidden_size=1024,
    intermediate_size=4096,
    num_layers=1,
    num_heads=8,
    num_kv_heads=2,
    head_dim=128,
    attention_bias=True,
    tie_word_embeddings=True,
)
# As a run compiles it, Triton's products among the rest: those are an error without tuning.
TUNED = {"xla_gpu_autotune_level": 4}
ROW, SAMPLES, PROMPT, RESPONSE, GROUP = 4096, 32, 256, 1024, 8


def update(sizes, *, compiler_options=None, config=CONFIG, phases=None, **settings):
    """One optimizer step on packed groups, compiled for a mesh of these sizes.

    `phases` is a MeshConfig with the sizes of sequence and pipeline.
    """
    phases = phases or MeshConfig()
    mesh = h200_mesh(sizes, sequence=phases.sequence, pipeline=phases.pipeline)
    model = ModelSettings(dtype="bfloat16", attention="pallas", **settings)
    role = make_role("actor", model_spec(config), model, mesh, phases=phases, exact=True)
    role = role.with_optimizer(OptimizerConfig(), 100)
    optimizer = role.learning
    loss = PolicyLoss(
        algorithm=build_online(c.PPO(entropy_coef=0.01)),
        spec=role.spec,
        settings=role.forward,
        temperature=1.0,
    )
    packed = Packed(
        row_tokens=ROW,
        group=GROUP,
        num_replicas=role.layout.num_replicas,
        rows=role.forward.rows_of_pass,
        shard=shard_rows(role.layout),
    )

    def step(state, fields):
        return train_step(
            state,
            0,
            batches=mini_batches(fields, num_mini_batches=1, num_epochs=1, shard=lambda x: x),
            loss=loss,
            optimizer=optimizer,
            learning_rate=optimizer.learning_rate,
            max_grad_norm=1.0,
            cast_ahead=role.forward.cast_ahead,
            micro_batches=packed,
            groups=role.data_groups,
        )

    by_row = partial(
        jax.ShapeDtypeStruct, sharding=NamedSharding(mesh, PartitionSpec(REPLICA_AXES))
    )
    fields = {
        "prompts": by_row((SAMPLES, PROMPT), jnp.int32),
        "prompt_lengths": by_row((SAMPLES,), jnp.int32),
        "responses": by_row((SAMPLES, RESPONSE), jnp.int32),
        "response_lengths": by_row((SAMPLES,), jnp.int32),
    }
    for name in ("mask", "old_logprobs", "advantages"):
        fields[name] = by_row((SAMPLES, RESPONSE), jnp.float32)
    program = jax.jit(step, donate_argnums=0)
    options = TUNED | (compiler_options or {})
    return program.lower(role.abstract(), fields).compile(compiler_options=options)


@pytest.mark.slow
def test_on_one_card():
    compiled = update((1, 1, 1))
    text = compiled.as_text()
    assert text.count('custom_call_target="mosaic_gpu_v2"') >= 3 * CONFIG.num_layers
    assert not whole_logits(text)
    # Weights are cast to bf16 before the loop over micro-batches, not in each of them.
    weight = rf"bf16\[{CONFIG.hidden_size},{CONFIG.intermediate_size}\]\S* convert\([^\n]*op_name="
    assert re.search(weight + r'"jit\(step\)/convert', text)
    assert not re.search(weight + r'"[^"]*while/body', text)
    # The gradient of a kernel is added to the sum of the parts before by the product itself.
    added = re.findall(r"%\S*add\S* = f32\[([\d,]+)\]\S* fusion\([^\n]*while/body/add\"", text)
    assert f"{CONFIG.vocab_size},{CONFIG.hidden_size}" in added  # not so for tables
    assert f"{CONFIG.intermediate_size},{CONFIG.hidden_size}" not in added
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes > 0.9 * memory.output_size_in_bytes  # the state is donated


@pytest.mark.nightly
@pytest.mark.parametrize("sizes", [pytest.param((1, 4, 1), marks=pytest.mark.slow), (1, 2, 2)])
def test_on_four_cards(sizes):
    text = update(sizes, compiler_options=CUBLAS).as_text()
    assert 'custom_call_target="mosaic_gpu_v2"' in text
    assert not whole_logits(text)
    # Weights and their gradients travel in bf16, the tables' too, whose tokens each device sums in
    # float32; what travels in float32 is small, e.g. norms, scores and activations.
    collective = re.compile(r" (?:all-gather|all-reduce|reduce-scatter)(?:-start)?\(")
    lines = (line for line in text.splitlines() if collective.search(line))
    arrays = [re.findall(r"(\w+)\[([\d,]+)\]", collective.split(line)[0]) for line in lines]
    travels = {array for of_line in arrays for array in of_line}
    assert ("bf16", f"{CONFIG.vocab_size // sizes[2]},{CONFIG.hidden_size}") in travels
    for dtype, shape in travels:
        assert dtype != "f32" or np.prod([int(d) for d in shape.split(",")]) < 2**22, shape


@pytest.mark.slow
def test_gradients_are_summed_over_data_once():
    """Behind the loop over micro-batches, by a program that is otherwise a single card's."""
    compiled = update((2, 1, 1))
    axes = MeshAxes(names=("data",), sizes=(2,))
    sums = [x for x in collectives(compiled.as_text(), axes, []) if x.kind == "all-reduce"]
    parameters = num_parameters(CONFIG)
    assert sum(x.bytes for x in sums if not x.loops) == pytest.approx(4 * parameters, rel=0.01)
    assert sum(x.bytes for x in sums if x.loops) < 1000
    alone = update((1, 1, 1)).memory_analysis().temp_size_in_bytes
    assert compiled.memory_analysis().temp_size_in_bytes <= 1.02 * alone


@pytest.mark.slow
def test_without_operations_that_differ_from_run_to_run():
    """What `config.exact` asks of the compiler: our attention passes, where cuDNN's does not."""
    # Without a card nothing can be tuned, and the flag wants products whose algorithm is settled.
    options = {"xla_gpu_exclude_nondeterministic_ops": True, **CUBLAS}
    text = update((1, 1, 1), compiler_options=options).as_text()
    assert text.count('custom_call_target="mosaic_gpu_v2"') >= 3 * CONFIG.num_layers


@pytest.mark.slow
def test_remat_takes_less_memory():
    temporary = [
        update((1, 1, 1), remat=remat).memory_analysis().temp_size_in_bytes
        for remat in ("none", "projections", "full")
    ]
    assert temporary[0] > temporary[1] > temporary[2]


def whole_logits(text):
    """Arrays of a row of tokens times the vocabulary."""
    return re.findall(rf"\w+\[(?:\d+,)*{ROW},{CONFIG.vocab_size}\]", text)
