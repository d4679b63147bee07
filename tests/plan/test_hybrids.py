"""What a hybrid model refuses, before jax is imported and in the plan of a run."""

import re
from dataclasses import replace

import pytest
from tiny import HYBRID, MODEL
from tiny_iteration import open_iteration, tiny_config
from tiny_models import described_models

from jaxrl_llm.config import Config, ConfigError, MeshConfig, load_config
from jaxrl_llm.models.families import hf_names
from jaxrl_llm.models.lora_targets import chosen_modules
from jaxrl_llm.plan.model_rules import check_hybrids


def check(config: Config) -> None:
    check_hybrids(config, described_models(config))


OF_ACTOR = {f"actor.hf_config.{key}": value for key, value in (MODEL | HYBRID).items()}

EIGHT_LAYERS = {f"{role}.hf_config.num_hidden_layers": 8 for role in ("actor", "critic")}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mesh.pipeline": 2}, "2 layers in patterns of 2.*mesh.pipeline=1 --config.mesh.fsdp=2 w"),
        (
            EIGHT_LAYERS | {"mesh.pipeline": 4, "mesh.pipeline_rounds": 2},
            "8 layers in patterns of 2.*mesh.pipeline=2 --config.mesh.fsdp=2 works",
        ),
        (
            EIGHT_LAYERS
            | {"mesh.pipeline": 4, "mesh.pipeline_rounds": 2}
            | {"actor.hf_config.full_attention_interval": 4},
            "mesh.pipeline=2 --config.mesh.fsdp=2 --config.mesh.pipeline_rounds=1 works",
        ),
        ({"mesh.tensor": 4}, "tensor=4 with 2 key heads.*mesh.tensor=2 --config.mesh.fsdp=2 works"),
        ({"mesh.fsdp": 4, "mesh.generation.tensor": 4}, "--config.mesh.generation.tensor=2 works"),
        ({"mesh.fsdp": 4, "actor.tensor": 4}, "--config.actor.tensor=2 works"),
        ({"exact": "strict"}, "--config.exact=repeatable works"),
        ({"actor.hf_config.linear_num_key_heads": 3}, "value_heads 4 is not a multiple"),
        ({"actor.hf_config.linear_conv_kernel_dim": 1}, "conv_size is 1: it must be at least 2"),
        ({"actor.hf_config.num_hidden_layers": 1}, "at least one layer has attention"),
        (
            {"actor.hf_config.layer_types": ["full_attention", "linear_attention"]},
            "layer_types=.* is not supported: full_attention in every layer whose number is",
        ),
    ],
)
def test_what_a_hybrid_model_refuses(changes, message):
    config = load_config("grpo", OF_ACTOR | changes)
    with pytest.raises(ValueError, match=message):
        check(config)


def test_a_teacher_is_in_no_layout_of_generation():
    of_teacher = {f"teacher.hf_config.{key}": value for key, value in (MODEL | HYBRID).items()}
    own = {"mesh.fsdp": 4, "mesh.tensor": 4, "mesh.generation.tensor": 4, "actor.tensor": 1}
    config = load_config("distillation", of_teacher | own | {"teacher.tensor": 2})
    check(config)
    with pytest.raises(ConfigError, match="teacher.tensor=4 with 2 key heads"):
        check(load_config(config, {"teacher.tensor": 4}))


@pytest.mark.parametrize("target", ["in_proj_z", "in_proj_zz"])
def test_projections_of_the_rule_have_adapters(target):
    model = described_models(load_config("grpo", OF_ACTOR))["actor"]
    tensors = [tensor.name for tensor in hf_names(model, "causal_lm").values()]
    if target == "in_proj_z":
        assert chosen_modules((target,), tensors)
    else:
        with pytest.raises(ValueError, match="no module is called 'in_proj_zz'.*in_proj_qkv"):
            chosen_modules((target,), tensors)


def test_the_plan_asks_again():
    """A model of a hub is known only then."""
    config = tiny_config(model_reward=False)
    config = replace(config, actor=replace(config.actor, hf_config=MODEL | HYBRID))
    config = replace(config, mesh=MeshConfig(tensor=4))
    with pytest.raises(ConfigError, match=re.escape("mesh.tensor=2 --config.mesh.fsdp=2 works")):
        open_iteration(config)
