"""Hybrid models: what their configs may say, and the projections that may have adapters."""

import pytest
from tiny import HYBRID, MODEL
from tiny_models import described_models

from jaxrl_llm.config import load_config
from jaxrl_llm.models.families import hf_names
from jaxrl_llm.models.lora_targets import chosen_modules

OF_ACTOR = {f"actor.hf_config.{key}": value for key, value in (MODEL | HYBRID).items()}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"linear_num_key_heads": 3}, "value_heads 4 is not a multiple"),
        ({"linear_conv_kernel_dim": 1}, "conv_size is 1: it must be at least 2"),
        ({"num_hidden_layers": 1}, "at least one layer has attention"),
        (
            {"layer_types": ["full_attention", "linear_attention"]},
            "layer_types=.* is not supported: full_attention in every layer whose number is",
        ),
    ],
)
def test_what_a_hybrid_model_cannot_be(changes, message):
    of_actor = {f"actor.hf_config.{key}": value for key, value in changes.items()}
    with pytest.raises(ValueError, match=message):
        described_models(load_config("grpo", OF_ACTOR | of_actor))


@pytest.mark.parametrize("target", ["in_proj_z", "in_proj_zz"])
def test_projections_of_the_rule_have_adapters(target):
    model = described_models(load_config("grpo", OF_ACTOR))["actor"]
    tensors = [tensor.name for tensor in hf_names(model, "causal_lm").values()]
    if target == "in_proj_z":
        assert chosen_modules((target,), tensors)
    else:
        with pytest.raises(ValueError, match="no module is called 'in_proj_zz'.*in_proj_qkv"):
            chosen_modules((target,), tensors)
