"""GLM-4-0414, dense: norms on both sides, and rope on neighbouring dims of half a head."""

from collections.abc import Mapping
from typing import Any

from jaxrl_llm.models import hf as common
from jaxrl_llm.models.config import Kind, ModelConfig
from jaxrl_llm.models.hf import Names

__all__ = ["ARCHITECTURES", "config_from_hf", "hf_names", "to_hf_config"]

ARCHITECTURES: dict[Kind, str] = {
    "causal_lm": "Glm4ForCausalLM",
    "scalar": "Glm4ForSequenceClassification",
}


NORMS = {
    "attention_norm": "input_layernorm",
    "attention_out_norm": "post_self_attn_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "mlp_out_norm": "post_mlp_layernorm",
}


def config_from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """The config from config.json's keys. Raises: ValueError for an unsupported feature."""
    fields = common.common_from_hf(
        hf,
        "glm4",
        max_position_embeddings=131072,
        num_key_value_heads=2,
        head_dim=128,
        rms_norm_eps=1.5625e-7,
        partial_rotary_factor=0.5,
    )
    bias = bool(hf.get("attention_bias", True))
    return ModelConfig(**fields, norms="both", interleaved_rope=True, attention_bias=bias)


def to_hf_config(config: ModelConfig, kind: Kind = "causal_lm") -> dict[str, Any]:
    """The keys of config.json, without the tokenizer's."""
    hf = common.common_to_hf(config, kind, ARCHITECTURES)
    # An absent factor means 0.5 in this family.
    partial = {"partial_rotary_factor": config.rotary_factor}
    hf["rope_parameters"] |= partial
    hf["pad_token_id"] = None  # transformers' default needs the published vocabulary
    return {**hf, **partial, "attention_bias": config.attention_bias}


def hf_names(config: ModelConfig, kind: Kind) -> Names:
    """The Hugging Face tensor of each parameter path."""
    names = common.hf_names(config, kind, norms=NORMS)
    return common.fused(names, gate_up_proj=("gate", "up"))
