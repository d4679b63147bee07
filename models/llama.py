"""Llama 1 to 3.x and models with the same architecture, such as SmolLM2.

Llama: arXiv:2302.13971. Llama 3: arXiv:2407.21783.
"""

from collections.abc import Mapping
from typing import Any

from jaxrl_llm.models import hf as common
from jaxrl_llm.models.config import Kind, ModelConfig
from jaxrl_llm.models.hf import hf_names

__all__ = ["ARCHITECTURES", "config_from_hf", "hf_names", "to_hf_config"]

ARCHITECTURES: dict[Kind, str] = {
    "causal_lm": "LlamaForCausalLM",
    "scalar": "LlamaForSequenceClassification",
}


def config_from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """The config from config.json's keys. Raises: ValueError for an unsupported feature."""
    common.refuse_unless(hf, "llama", attention_bias=False, mlp_bias=False)
    return ModelConfig(**common.common_from_hf(hf, "llama", max_position_embeddings=2048))


def to_hf_config(config: ModelConfig, kind: Kind = "causal_lm") -> dict[str, Any]:
    """The keys of config.json, without the tokenizer's."""
    hf = common.common_to_hf(config, kind, ARCHITECTURES)
    return {**hf, "attention_bias": False, "mlp_bias": False}
