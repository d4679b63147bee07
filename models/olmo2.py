"""OLMo 2: norms behind attention and MLP, and over all heads of q and k (arXiv:2501.00656)."""

from collections.abc import Mapping
from typing import Any

from jaxrl_llm.models import hf as common
from jaxrl_llm.models.config import Kind, ModelConfig
from jaxrl_llm.models.hf import Names

__all__ = ["ARCHITECTURES", "config_from_hf", "hf_names", "to_hf_config"]

ARCHITECTURES: dict[Kind, str] = {
    "causal_lm": "Olmo2ForCausalLM",
    "scalar": "Olmo2ForSequenceClassification",
}


NORMS = {
    "attention_out_norm": "post_attention_layernorm",
    "mlp_out_norm": "post_feedforward_layernorm",
}


def config_from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """The config from config.json's keys. Raises: ValueError for an unsupported feature."""
    common.refuse_unless(hf, "olmo2", attention_bias=False)
    fields = common.common_from_hf(hf, "olmo2", max_position_embeddings=2048, rms_norm_eps=1e-5)
    return ModelConfig(**fields, norms="after", qk_norm=True, qk_norm_whole=True)


def to_hf_config(config: ModelConfig, kind: Kind = "causal_lm") -> dict[str, Any]:
    """The keys of config.json, without the tokenizer's."""
    hf = common.common_to_hf(config, kind, ARCHITECTURES)
    return {**hf, "attention_bias": False}


def hf_names(config: ModelConfig, kind: Kind) -> Names:
    """The Hugging Face tensor of each parameter path."""
    return common.hf_names(config, kind, norms=NORMS)
