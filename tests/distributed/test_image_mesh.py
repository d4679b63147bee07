"""Models that see, on a mesh of several devices and on one: the same step."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from tiny_images import image_config, image_step
from tiny_iteration import OF_THE_DECODE_LOOP, packed

from jaxrl_llm import config as c
from jaxrl_llm.config import MeshConfig
from jaxrl_llm.distributed.mesh import make_mesh

pytestmark = pytest.mark.slow

OF_A_MESH = {"actor/micro_batches", "actor/row_use", "actor/attention_balance"}
OF_A_MESH |= {"actor/pipeline_bubble", "critic/pipeline_bubble"}


@pytest.mark.parametrize(
    ("model", "train", "tokens", "algorithm", "sizes"),
    [
        ("qwen2_5_vl", "all", 40, c.GRPO(), {"data": 2, "fsdp": 2}),
        ("smolvlm", "projector", 0, c.PPO(), {"data": 2, "fsdp": 2}),
    ],
)
def test_a_step_is_the_same_on_four_devices(model, train, tokens, algorithm, sizes):
    config = image_config(model, train, algorithm)
    config = packed(config, tokens) if tokens else config
    _, _, state, batch, metrics = image_step(config)
    assert batch.image_places.max() > 0 and metrics["actor/grad_norm"] > 0
    mesh = MeshConfig(**sizes)
    devices = make_mesh(devices=jax.devices()[:4], **mesh.sizes)
    _, _, spread_state, spread, found = image_step(replace(config, mesh=mesh), devices)
    assert_close((state, batch, metrics), (spread_state, spread, found))


def assert_close(expected, found):
    (state, batch, metrics), (spread_state, spread, spread_metrics) = expected, found
    np.testing.assert_array_equal(spread.responses, batch.responses)
    for key in metrics.keys() - OF_THE_DECODE_LOOP - OF_A_MESH:
        pair = spread_metrics[key], metrics[key]
        np.testing.assert_allclose(*pair, rtol=1e-3, atol=1e-4, err_msg=key)
    for name in ("actor", "critic"):
        pairs = zip(*(jax.tree.leaves(x.get(name)) for x in (state, spread_state)), strict=True)
        for own, other in pairs:
            np.testing.assert_allclose(own, other, rtol=1e-3, atol=1e-4)
