"""Models that see, on a mesh of several devices and on one: the same step."""

import sys
from dataclasses import replace

import jax
import numpy as np
import pytest
from tiny_images import image_config, image_step
from tiny_iteration import FAST, OF_THE_DECODE_LOOP, packed
from tiny_run import REPOSITORY, TinyRun
from tiny_run import assert_close as assert_metrics_close

from jaxrl_llm import config as c
from jaxrl_llm.config import MeshConfig, PhaseMeshConfig
from jaxrl_llm.plan.models import open_meshes
from jaxrl_llm.tokenizer import load_tokenizer

pytestmark = pytest.mark.slow

OF_A_MESH = {f"{role}/{n}" for role in ("actor", "critic") for n in ("micro_batches", "row_use")}

PLAIN = c.OptimizerConfig(name="sgd", learning_rate=1.0)  # whose step is the gradient
REFERRED = c.PPO(use_kl_in_reward=True)


def phases(generation, passes):
    sizes = {"generation": generation, "passes": passes}
    return {phase: PhaseMeshConfig(tensor=size) for phase, size in sizes.items()}


@pytest.mark.parametrize(
    ("model", "train", "tokens", "algorithm", "sizes", "optimizer"),
    [
        ("qwen2_5_vl", "all", 40, c.GRPO(), {"data": 2, "fsdp": 2}, FAST),
        ("smolvlm", "projector", 0, c.PPO(), {"data": 2, "fsdp": 2}, FAST),
        ("qwen2_5_vl", "all", 40, c.PPO(), {"data": 2, "tensor": 2}, PLAIN),
        ("smolvlm", "all", 40, c.GRPO(), {"fsdp": 2, "sequence": 2}, PLAIN),
        ("qwen2_5_vl", "all", 0, c.GRPO(), {"sequence": 2, "tensor": 2}, PLAIN),
        ("qwen2_5_vl", "projector", 0, c.GRPO(), {"data": 2, "pipeline": 2}, PLAIN),
        # Generation, and the passes of reference and critic, in layouts of their own.
        ("qwen2_5_vl", "all", 40, REFERRED, {"fsdp": 4} | phases(2, 2), PLAIN),
        ("smolvlm", "all", 0, REFERRED, {"fsdp": 2, "tensor": 2} | phases(4, 1), PLAIN),
    ],
)
def test_a_step_is_the_same_on_four_devices(model, train, tokens, algorithm, sizes, optimizer):
    config = with_optimizer(image_config(model, train, algorithm), optimizer)
    config = packed(config, tokens) if tokens else config
    _, _, state, batch, metrics = image_step(config)
    assert batch.image_places.max() > 0 and metrics["actor/grad_norm"] > 0
    found = step_on_meshes(replace(config, mesh=MeshConfig(**sizes)))
    assert_close((state, batch, metrics), found)


def step_on_meshes(config):
    """A step on the meshes that a run of this config opens."""
    meshes = open_meshes(config, load_tokenizer("char"))
    _, _, *found = image_step(config, meshes.pop("actor"), role_meshes=meshes)
    return found


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
    _, _, *expected = image_step(config)
    assert_close(expected, step_on_meshes(apart))


RUN = """
from dataclasses import replace

from jaxrl_llm.config import *
from jaxrl_llm.configs.grpo_vision import get_config as count_dots


def get_config() -> Config:
    base, dots = count_dots(), CountDots(size=16)
    return replace(
        base,
        total_steps=2,
        warmup=None,
        data=replace(base.data, train_tasks=(dots,), val_tasks=(dots,), train_batch_size=4),
        actor=replace(base.actor, ppo_mini_batch_size=4),
        reward=RewardConfig(functions=(Custom(path="FOLDER/reward.py:digits"),)),
    )
"""


@pytest.mark.nightly
def test_generation_on_a_node_of_its_own_sees_the_images(tmp_path):
    groups = (
        "--config.placement.rollout=inference",
        "--config.node_groups.train={count: 1, gpus_per_node: 1}",
        "--config.node_groups.inference={count: 1, gpus_per_node: 1}",
    )
    one, nodes = (TinyRun(tmp_path / name) for name in ("one", "nodes"))
    for run in (one, nodes):
        (run.folder / "tiny.py").write_text(RUN.replace("FOLDER", str(run.folder)))
    one.finish()
    launcher = [sys.executable, "-m", "jaxrl_llm.launch.local", "--processes=2", "--"]
    nodes.finish(*groups, launcher=[*launcher, str(REPOSITORY / "scripts" / "train.py")])
    assert one.metrics()[2]["actor/grad_norm"] > 0 and one.metrics()[2]["images/per_row"] == 1
    for step, metrics in one.metrics().items():
        assert_metrics_close(nodes.metrics()[step], metrics, rtol=1e-4, atol=1e-5)
