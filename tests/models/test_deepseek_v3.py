"""The published config.json of DeepSeek-V3, and what is refused of it."""

import pytest

from jaxrl_llm.models import families
from jaxrl_llm.models.shapes import SHAPES

PUBLISHED = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "initializer_range": 0.02,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-6,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "v_head_dim": 128,
    "vocab_size": 129280,
}


def test_the_published_config_is_the_shape_and_goes_back():
    config = families.config_from_hf(PUBLISHED)
    assert config == SHAPES["deepseek-v3"]
    written = families.to_hf_config(config)
    assert families.config_from_hf(written) == config
    assert written["num_nextn_predict_layers"] == 0  # its layer is not exported
    # Another published model_type of the same architecture.
    assert families.config_from_hf(PUBLISHED | {"model_type": "kimi_k2"}) == config


def test_only_the_part_of_a_head_with_rope_must_be_even():
    config = families.config_from_hf(PUBLISHED | {"qk_nope_head_dim": 127})
    assert config.head_dim == 191 and config.rotary_dim == 64
    assert families.config_from_hf(families.to_hf_config(config)) == config
    with pytest.raises(ValueError, match="rotates 63 dims: take an even number"):
        families.config_from_hf(PUBLISHED | {"qk_rope_head_dim": 63})


def test_layers_that_predict_further_tokens_are_not_read():
    config = SHAPES["deepseek-v3"]
    for name, ignored in {"61.eh_proj": True, "60.mlp.other": False, "6.mlp.other": False}.items():
        found = families.ignored_tensor(config, "causal_lm", f"model.layers.{name}.weight")
        assert found == ignored, name


GLM = PUBLISHED | {"architectures": ["Glm4MoeLiteForCausalLM"], "model_type": "glm4_moe_lite"}


def test_glm_has_defaults_and_a_list_of_its_own():
    given = {key: value for key, value in GLM.items() if not key.startswith(("n_", "first_k"))}
    given |= {"v_head_dim": 128, "topk_group": 1}
    config = families.config_from_hf(given)
    assert config.mixture is not None and config.latent is not None
    assert (config.mixture.num_experts, config.mixture.num_groups) == (64, 1)
    assert (config.mixture.dense_layers, config.latent.value_dim) == (1, 128)
    types = ["dense"] * 2 + ["sparse"] * 59
    config = families.config_from_hf(GLM | {"mlp_layer_types": types})
    assert config.mixture is not None and config.mixture.dense_layers == 2
    assert families.config_from_hf(families.to_hf_config(config)) == config
    with pytest.raises(ValueError, match="first_k_dense_replace=3"):
        families.config_from_hf(GLM)
    with pytest.raises(ValueError, match="the first ones 'dense'"):
        families.config_from_hf(GLM | {"mlp_layer_types": types[::-1]})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quantization_config": {"quant_method": "fp8"}}, "weight_scale_inv.*to bfloat16 first"),
        ({"scoring_func": "softmax"}, "scoring_func='softmax'.*only 'sigmoid' is"),
        ({"topk_method": "greedy"}, "topk_method='greedy'"),
        ({"moe_layer_freq": 2}, "moe_layer_freq=2"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"num_key_value_heads": 64}, "num_kv_heads 64 with latent attention.*take 128"),
        ({"topk_group": 9}, "groups_per_token 9 of 8 groups"),
        ({"n_group": 3}, "do not make 3 groups"),
        ({"first_k_dense_replace": 61}, "at least one layer has experts"),
        ({"architectures": ["DeepseekV2ForCausalLM"]}, "DeepseekV2ForCausalLM is not supported"),
    ],
)
def test_what_is_not_done_is_refused_by_name(changes, message):
    with pytest.raises(ValueError, match=message):
        families.config_from_hf(PUBLISHED | changes)
