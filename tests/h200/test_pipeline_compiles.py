"""The actor's update on a pipeline, compiled for H200s: what travels, and along which axis."""

import math
import re
from dataclasses import replace

import pytest
from target import CUBLAS, needs_compiler
from test_training_compiles import CONFIG, update, whole_logits

from jaxrl_llm.config import MeshConfig

pytestmark = needs_compiler

# Two layers a stage, which is enough to tell a gather of one layer from a stage's. No weight
# has as many elements as an activation.
LAYERS = replace(
    CONFIG, num_layers=8, vocab_size=8192, intermediate_size=3072, sliding_window=(None,) * 8
)
COLLECTIVE = re.compile(r" = (.*?) (all-gather|all-to-all|collective-permute)(?:-start)?\((.*)")


def found(text):
    """(collective, sizes of its arrays, rest of the line) of the compiled program."""
    for line in text.splitlines():
        match = COLLECTIVE.search(line)
        if match:
            arrays, name, rest = match.groups()
            shapes = re.findall(r"\w+\[([\d,]+)\]", arrays)
            yield name, [math.prod(map(int, shape.split(","))) for shape in shapes], rest


def moved(collectives):
    """Sizes of the arrays that travel between stages by all-to-all."""
    return [s for name, s, rest in collectives if name == "all-to-all" and "{'pipeline'}" in rest]


def check_ring(collectives):
    """Rows go to the next stage, the conveyor comes back. Card 2 s + i is card i of stage s."""
    pairs = [rest for name, _, rest in collectives if name == "collective-permute"]
    for expected in (
        "{{0,2},{2,4},{4,6},{1,3},{3,5},{5,7}}",
        "{{2,0},{4,2},{6,4},{3,1},{5,3},{7,5}}",
    ):
        assert any(f"source_target_pairs={expected}" in rest for rest in pairs)


@pytest.mark.slow
def test_four_stages_of_two_shards():
    how = {"config": LAYERS, "phases": MeshConfig(pipeline=4), "compiler_options": CUBLAS}
    compiled = update((1, 2, 1), **how, remat="full")
    text = compiled.as_text()
    assert 'custom_call_target="mosaic_gpu_v2"' in text
    assert not whole_logits(text)
    collectives = list(found(text))
    layer = LAYERS.hidden_size * (
        3 * LAYERS.intermediate_size
        + 2 * LAYERS.head_dim * (LAYERS.num_heads + LAYERS.num_kv_heads)
    )
    check_ring(collectives)
    # Each pass moves the weights of the layers to their stages, and the gradients back.
    assert max(map(max, moved(collectives))) == LAYERS.hidden_size // 2 * LAYERS.intermediate_size
    # A tick gathers one layer, never the two of the stage: they would be known before the loop.
    gathers = [(sizes, rest) for name, sizes, rest in collectives if name == "all-gather"]
    of_layers = [(s, r) for s, r in gathers if LAYERS.hidden_size * LAYERS.intermediate_size in s]
    assert of_layers
    for sizes, rest in of_layers:
        assert "shard_map/while/body" in rest
        assert sum(sizes) <= 1.6 * layer  # shards and results together
    memory = compiled.memory_analysis()
    assert memory.temp_size_in_bytes < 1.6 * 2**30
    # The float32 form of a weight exists as a gradient only.
    widened = re.findall(r"f32\[1,512,3072\]\S* convert\([^\n]*jvp\(\)/convert", text)
    assert not [line for line in widened if "transpose" not in line]


@pytest.mark.slow
def test_four_stages_with_two_rounds_on_tensor_2():
    """Weights that tensor splits are still split when they travel to their stages."""
    phases = MeshConfig(pipeline=4, pipeline_rounds=2, pipeline_micro_batches=2)
    text = update((1, 1, 2), config=LAYERS, phases=phases, remat="projections").as_text()
    assert 'custom_call_target="mosaic_gpu_v2"' in text
    collectives = list(found(text))
    kernel = LAYERS.hidden_size * LAYERS.intermediate_size // 2
    assert max(map(max, moved(collectives))) == 2 * kernel  # two groups of one layer
