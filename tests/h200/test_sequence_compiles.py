"""A long row on eight H200s: the update of a 7B model on 131,072 tokens fits their memory."""

from dataclasses import replace

import pytest
from scale import MEMORY, SHAPES, Scaled, peak
from target import CUBLAS, needs_compiler

from jaxrl_llm import config as c

pytestmark = needs_compiler

ROW, SEQUENCE = 131_072, 8
QWEN2_5_7B = SHAPES["7B"]
LAYERS = QWEN2_5_7B.layers


def update(num_layers, **settings):
    """The update of a step, compiled for a mesh whose devices share a row."""
    shape = replace(QWEN2_5_7B, layers=num_layers)
    algorithm, mesh = c.PPO(entropy_coef=0.01), {"sequence": SEQUENCE}
    scaled = Scaled(shape, algorithm, mesh, row=ROW, prompts=SEQUENCE, **settings)
    return scaled.compiled("update_actor", CUBLAS)


# What a device must hold of each layer more: its share of weights, two moments and gradients in
# float32, and the layer's input in float32.
WEIGHTS = 3584 * (3 * 18_944 + 2 * 3584 + 2 * 512)
A_LAYER = 4 * (4 * WEIGHTS + 3584 * ROW) / SEQUENCE


@pytest.mark.slow
def test_131072_tokens_of_7b_fit_eight_cards():
    """Two layers; the other 26 add what must be held. The whole model is the slow test's."""
    compiled = update(2, scan_layers=False)
    text = compiled.as_text()
    assert text.count('custom_call_target="mosaic_gpu_v2"') >= 3 * 2
    # Whole rows: keys and values of a layer, and hidden states once, for the head.
    assert f"[1,{ROW},4,128]" in text and f"[{ROW},3584]" in text
    assert f"{ROW},18944]" not in text and f"{ROW},152064]" not in text
    assert peak(compiled) + (LAYERS - 2) * A_LAYER < 0.3 * MEMORY


@pytest.mark.slow
def test_all_layers_of_7b_fit_eight_cards():
    two, whole = (peak(update(n, scan_layers=n > 2)) for n in (2, LAYERS))
    assert whole < 0.3 * MEMORY  # 32.5 GB of 141 when this was written
    assert whole == pytest.approx(two + (LAYERS - 2) * A_LAYER, rel=0.1)
