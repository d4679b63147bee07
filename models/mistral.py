"""Mistral: Llama with a sliding window on all layers or on none (arXiv:2310.06825)."""

from collections.abc import Mapping
from typing import Any

from jaxrl_llm.models import hf as common
from jaxrl_llm.models.config import Kind, ModelConfig
from jaxrl_llm.models.hf import hf_names

__all__ = ["ARCHITECTURES", "config_from_hf", "hf_names", "to_hf_config"]

ARCHITECTURES: dict[Kind, str] = {
    "causal_lm": "MistralForCausalLM",
    "scalar": "MistralForSequenceClassification",
}


def config_from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """The config from config.json's keys. Raises: ValueError for an unsupported feature."""
    fields = common.common_from_hf(
        hf, "mistral", max_position_embeddings=131072, num_key_value_heads=8
    )
    # A missing key means 4096; null means no window.
    window = hf.get("sliding_window", 4096)
    return ModelConfig(**fields, sliding_window=(window,) * fields["num_layers"])


def to_hf_config(config: ModelConfig, kind: Kind = "causal_lm") -> dict[str, Any]:
    """The keys of config.json, without the tokenizer's."""
    hf = common.common_to_hf(config, kind, ARCHITECTURES)
    return {**hf, "sliding_window": common.single_window(config)}
