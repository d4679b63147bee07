"""Gemma 3, the text model: windows with a rope base of their own (arXiv:2503.19786)."""

from collections.abc import Mapping
from typing import Any

from jaxrl_llm.models import hf as common
from jaxrl_llm.models.config import Kind, ModelConfig
from jaxrl_llm.models.gemma import features
from jaxrl_llm.models.hf import Names

__all__ = ["ARCHITECTURES", "config_from_hf", "hf_names", "to_hf_config"]

ARCHITECTURES: dict[Kind, str] = {
    "causal_lm": "Gemma3ForCausalLM",
    "scalar": "Gemma3TextForSequenceClassification",
}
NAME = "gemma3_text"
NORMS = {
    "attention_norm": "input_layernorm",
    "attention_out_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_out_norm": "post_feedforward_layernorm",
}
PLAIN = {"attention_bias": False, "hidden_activation": "gelu_pytorch_tanh"}
ABSENT = ("final_logit_softcapping", "attn_logit_softcapping")


def config_from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """The config from config.json's keys. Raises: ValueError for an unsupported feature."""
    common.refuse_unless(hf, NAME, use_bidirectional_attention=False, **PLAIN)
    common.refuse_unless(hf, NAME, **dict.fromkeys(ABSENT))
    scaling = common.entries(hf, "rope_scaling", dict, {})
    if "rope_type" not in scaling:  # transformers 5 takes this old name for no scaling
        common.refuse_unless(scaling, f"{NAME} whose rope_scaling has no rope_type", type="default")
    hf, local, windows = common.by_layer_type_from_hf(
        hf, NAME, sliding_window=4096, sliding_window_pattern=6
    )
    fields = fields_from_hf(hf, NAME, max_position_embeddings=131072, rope_theta=1e6)
    scale = common.positive(hf, "query_pre_attn_scalar", 256) ** -0.5
    own = {"attention_multiplier": scale, "norms": "both", "qk_norm": True}
    own |= features(hf["hidden_size"])
    return ModelConfig(**fields, **own, sliding_window=windows, local_rope_theta=local)


def fields_from_hf(hf: Mapping[str, Any], name: str, **defaults: Any) -> dict[str, Any]:
    """The fields that families have in common; `defaults` are values of missing keys."""
    own = {"num_key_value_heads": 4, "head_dim": 256, "tie_word_embeddings": True}
    return common.common_from_hf({**hf, "hidden_act": None}, name, **own, **defaults)


def to_hf_config(config: ModelConfig, kind: Kind = "causal_lm") -> dict[str, Any]:
    """The keys of config.json, without the tokenizer's."""
    hf = common.common_to_hf(config, kind, ARCHITECTURES) | common.by_layer_type_to_hf(config)
    scalar = {"query_pre_attn_scalar": scalar_of(config)}
    return {key: value for key, value in hf.items() if key != "hidden_act"} | scalar | PLAIN


def hf_names(config: ModelConfig, kind: Kind) -> Names:
    """The Hugging Face tensor of each parameter path."""
    return common.hf_names(config, kind, norms=NORMS)


def scalar_of(config: ModelConfig) -> int:
    """`query_pre_attn_scalar`, whose inverse root is the attention multiplier."""
    return round((config.attention_multiplier or 1.0) ** -2)
