"""Folders and configs of hybrid families: what is ignored, kept in its rows, and refused."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file
from tiny_models import CONFIGS, HYBRID_EXPERTS, random_tensors, write_directory

from jaxrl_llm.checkpoint.huggingface import import_params
from jaxrl_llm.checkpoint.peft import CONFIG, WEIGHTS, read_lora
from jaxrl_llm.config import ConfigError
from jaxrl_llm.models import families
from jaxrl_llm.models.base import frozen_spec

EXPERTS = HYBRID_EXPERTS.mixture
assert EXPERTS is not None


def test_published_configs_have_their_defaults():
    """Sizes of Qwen3-Next-80B-A3B as its config class has them."""
    sizes = {"vocab_size": 151936, "hidden_size": 2048, "num_hidden_layers": 48}
    given = sizes | {"model_type": "qwen3_next", "num_attention_heads": 16}
    config = families.config_from_hf(given)
    assert config.num_attention_layers == 12 and config.rotary_dim == 64
    assert [config.is_linear(i) for i in range(4)] == [True, True, True, False]
    assert config.delta is not None and config.mixture is not None
    assert (config.delta.key_heads, config.delta.value_heads) == (16, 32)
    assert (config.mixture.num_experts, config.mixture.shared_size) == (512, 512)


def test_rows_of_a_key_head_lie_together():
    """in_proj_qkvz has q, k, v and the gate of one key head after the other."""
    names = families.hf_names(HYBRID_EXPERTS, "causal_lm")
    layer = ("decoder", "layers", "0", "attention")
    theirs = np.arange(2 * (6 + 6 + 10 + 10))  # key heads, and rows of each
    parts = {
        name: names[*layer, name, "kernel"].parts[0] for name in ("q", "k", "v", "gate", "rate")
    }
    tensor = np.broadcast_to(theirs[:, None], (64, 48))
    found = {name: parts[name].to_ours(tensor)[0] for name in ("q", "k", "v", "gate")}
    np.testing.assert_array_equal(found["q"], [range(0, 6), range(32, 38)])
    np.testing.assert_array_equal(found["k"], [range(6, 12), range(38, 44)])
    np.testing.assert_array_equal(found["v"].reshape(2, 10), [range(12, 22), range(44, 54)])
    np.testing.assert_array_equal(found["gate"].reshape(2, 10), [range(22, 32), range(54, 64)])
    rates = parts["rate"].to_ours(np.broadcast_to(np.arange(8)[:, None], (8, 48)))
    np.testing.assert_array_equal(rates[0], [0, 1, 4, 5])


def test_layers_that_predict_further_tokens_are_not_read():
    for config, ignored in ((CONFIGS["qwen3_5"], True), (CONFIGS["qwen3"], False)):
        assert families.ignored_tensor(config, "causal_lm", "mtp.fc.weight") == ignored


@pytest.mark.parametrize("stored", ["bfloat16", "float8"])
def test_decays_stay_float32_in_frozen_weights(tmp_path, stored):
    """They go through exp: read in float32, whatever the dtype of the other weights."""
    config, theirs = CONFIGS["qwen3_5"], random_tensors(CONFIGS["qwen3_5"])
    folder = write_directory(tmp_path, config, tensors=theirs)
    params = import_params(folder, frozen_spec(config, "causal_lm", stored, "bfloat16"))
    own = params["decoder"]["layers"]["0"]["attention"]
    assert own["q_conv"].dtype == own["norm"].dtype == "bfloat16"
    for ours, name in (("log_speed", "A_log"), ("decay_bias", "dt_bias")):
        expected = theirs[f"model.layers.0.linear_attn.{name}"]
        np.testing.assert_array_equal(own[ours], expected, strict=True)


def test_an_adapter_of_the_convolution_is_refused(tmp_path):
    config = CONFIGS["qwen3_5"]
    module = "base_model.model.model.layers.0.linear_attn.conv1d"
    channels, rank = 2 * 2 * 6 + 4 * 5, 2
    tensors = {
        f"{module}.lora_A.weight": np.zeros((rank, 1, 4), np.float32),
        f"{module}.lora_B.weight": np.zeros((channels, rank, 1), np.float32),
    }
    save_file(tensors, tmp_path / WEIGHTS)
    (tmp_path / CONFIG).write_text(json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": 4}))
    with pytest.raises(ConfigError, match="linear_attn.conv1d, .* convolutions.* merge it"):
        read_lora(tmp_path, config, "causal_lm", dtype="float32", dropout=0)
