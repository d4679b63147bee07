"""Models that see, on a mesh of several devices and on one: the same step."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from tiny_images import image_config, image_step
from tiny_iteration import FAST, OF_THE_DECODE_LOOP, packed

from jaxrl_llm import config as c
from jaxrl_llm.config import MeshConfig
from jaxrl_llm.distributed.mesh import make_mesh
from jaxrl_llm.plan.models import open_meshes
from jaxrl_llm.tokenizer import load_tokenizer

pytestmark = pytest.mark.slow

OF_A_MESH = {f"{role}/{n}" for role in ("actor", "critic") for n in ("micro_batches", "row_use")}

PLAIN = c.OptimizerConfig(name="sgd", learning_rate=1.0)  # whose step is the gradient


@pytest.mark.parametrize(
    ("model", "train", "tokens", "algorithm", "sizes", "optimizer"),
    [
        ("qwen2_5_vl", "all", 40, c.GRPO(), {"data": 2, "fsdp": 2}, FAST),
        ("smolvlm", "projector", 0, c.PPO(), {"data": 2, "fsdp": 2}, FAST),
        ("qwen2_5_vl", "all", 40, c.PPO(), {"data": 2, "tensor": 2}, PLAIN),
        ("smolvlm", "all", 40, c.GRPO(), {"fsdp": 2, "sequence": 2}, PLAIN),
        ("qwen2_5_vl", "all", 0, c.GRPO(), {"sequence": 2, "tensor": 2}, PLAIN),
        ("qwen2_5_vl", "projector", 0, c.GRPO(), {"data": 2, "pipeline": 2}, PLAIN),
    ],
)
def test_a_step_is_the_same_on_four_devices(model, train, tokens, algorithm, sizes, optimizer):
    config = with_optimizer(image_config(model, train, algorithm), optimizer)
    config = packed(config, tokens) if tokens else config
    _, _, state, batch, metrics = image_step(config)
    assert batch.image_places.max() > 0 and metrics["actor/grad_norm"] > 0
    mesh = MeshConfig(**sizes)
    devices = make_mesh(devices=jax.devices()[:4], **mesh.sizes)
    _, _, spread_state, spread, found = image_step(replace(config, mesh=mesh), devices)
    assert_close((state, batch, metrics), (spread_state, spread, found))


def with_optimizer(config, optimizer):
    actor, critic = (replace(x, optimizer=optimizer) for x in (config.actor, config.critic))
    return replace(config, actor=actor, critic=critic)


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


def test_roles_on_other_devices_see_the_images():
    config = with_optimizer(image_config("smolvlm", "all", c.PPO()), PLAIN)
    placement = {"critic": "2-3", "rollout": "4-5"}
    apart = replace(config, mesh=MeshConfig(fsdp=2), placement=placement)
    meshes = open_meshes(apart, load_tokenizer("char"))
    _, _, *expected = image_step(config)
    _, _, *found = image_step(apart, meshes.pop("actor"), role_meshes=meshes)
    assert_close(expected, found)
