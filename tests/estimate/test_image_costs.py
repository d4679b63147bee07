"""The planner on images: weights and pixels of real arrays, memory of compiled programs."""

from dataclasses import replace
from typing import Any

import jax
import pytest
from tiny_images import MODELS, image_config

from jaxrl_llm import config as c
from jaxrl_llm.config import Config, MeshConfig
from jaxrl_llm.configs.grpo_vision import MODEL as SMOLVLM
from jaxrl_llm.estimate.compiled import RealPrograms
from jaxrl_llm.estimate.devices import Devices
from jaxrl_llm.estimate.estimate import estimate
from jaxrl_llm.estimate.images import pixel_bytes
from jaxrl_llm.estimate.rates import rates_of
from jaxrl_llm.estimate.work import work_of
from jaxrl_llm.models.families import config_from_hf
from jaxrl_llm.models.flops import image_flops

WIDE = {"hidden_size": 128, "intermediate_size": 256, "depth": 3, "num_hidden_layers": 3}


def wide_config(model: str, train: str, algorithm: Any, **changes: Any) -> Config:
    """An encoder that takes more than its small decoder."""
    config = image_config(model, train, algorithm, **changes)
    hf = config.actor.hf_config
    sizes = WIDE | ({"image_size": 32} if model == "smolvlm" else {})
    vision = hf["vision_config"] | sizes
    actor = replace(config.actor, hf_config={**hf, "vision_config": vision}, micro_batch_size=4)
    data = replace(config.data, max_image_tokens=64, max_prompt_length=72, max_images=1)
    critic = replace(config.critic, micro_batch_size=4)
    return replace(config, actor=actor, data=data, critic=critic)


def without_images(config: Config) -> Config:
    """The same run of the language half."""
    data, actor = replace(config.data, max_images=0), replace(config.actor, vision=c.VisionConfig())
    return replace(config, data=data, actor=actor)


def planned(config: Config):
    devices = Devices(mesh=config.mesh, hosts=1, rates=rates_of("h200"))
    return estimate(work_of(config), devices)


def programs(config: Config) -> RealPrograms:
    return RealPrograms(config, tuple(jax.devices()[: config.mesh.num_devices]), (4,))


@pytest.mark.parametrize("train", ["none", "projector", "all"])
@pytest.mark.parametrize("mesh", [MeshConfig(), MeshConfig(fsdp=2, tensor=2)], ids=str)
def test_the_encoder_that_roles_keep_is_the_arrays_of_a_run(mesh, train):
    config = wide_config("qwen2_5_vl", train, c.PPO(use_kl_loss=True), mesh=mesh)
    real, kept = programs(config).resident(), planned(config).kept
    assert set(kept) == {"actor", "critic", "reference"}
    for role, size in kept.items():
        assert size == pytest.approx(real[role], rel=0.02), role
    model = work_of(config).models["actor"]
    assert 4 * model.encoder > real["reference"] / 3
    fewest, most = {"none": (0, 0), "projector": (1, model.encoder - 1)}.get(
        train, (model.encoder, model.encoder)
    )
    assert fewest <= model.encoder_learns <= most


def test_pixels_are_the_array_of_a_batch():
    config = wide_config("qwen2_5_vl", "none", c.GRPO())
    work = work_of(config)
    assert pixel_bytes(work, work.samples) == 16 * 1 * 64 * 4 * 3 * 2 * 2
    assert pixel_bytes(work_of(without_images(config)), work.samples) == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "train"), [("smolvlm", "all"), ("smolvlm", "none"), ("qwen2_5_vl", "none")]
)
def test_an_update_needs_about_what_its_program_needs(model, train):
    """Where Qwen's encoder learns, its layers are computed again, which CPU programs undo."""
    config = wide_config(model, train, c.GRPO())
    both, stage = (config, without_images(config)), "update_actor"
    real = [programs(x).stage(stage).temporaries for x in both]
    guess = [planned(x).temporaries[stage] for x in both]
    assert 0.5 < (guess[0] - guess[1]) / (real[0] - real[1]) < 2, (guess, real)


def test_flops_by_hand():
    config = config_from_hf(SMOLVLM, images=True)
    # 36 patches: two layers of width 64 and 128, and nine tokens of four patches each.
    matmuls = 36 * 2 * (4 * 64 * 64 + 2 * 64 * 128) + 9 * (4 * 64) * 64
    assert image_flops(config, 36) == 2 * matmuls + 2 * 2 * 2 * 36 * 36 * 64
    config = config_from_hf(MODELS["qwen2_5_vl"], images=True)
    # Gated layers of width 16 and 24, and a projector of two matrices, from 64 to 64 to 32.
    matmuls = 36 * 2 * (4 * 16 * 16 + 3 * 16 * 24) + 9 * (64 * 64 + 64 * 32)
    assert image_flops(config, 36) == 2 * matmuls + 2 * 2 * 2 * 36 * 36 * 16
