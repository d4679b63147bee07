"""Mistral: Llama with a sliding window on every layer, or on none (arXiv:2310.06825)."""

from collections.abc import Mapping
from typing import Any

from jaxrl_llm.models import hf as common
from jaxrl_llm.models.config import Kind, ModelConfig
from jaxrl_llm.models.hf import hf_names

__all__ = ["ARCHITECTURES", "check", "config_from_hf", "hf_names", "to_hf_config"]

ARCHITECTURES: dict[Kind, str] = {
    "causal_lm": "MistralForCausalLM",
    "scalar": "MistralForSequenceClassification",
}


def config_from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """From the keys of config.json; raises ValueError for a feature that is not supported."""
    fields = common.common_from_hf(
        hf, "mistral", max_position_embeddings=131072, num_key_value_heads=8
    )
    # An absent key means 4096, and null means no window.
    window = hf.get("sliding_window", 4096)
    return ModelConfig(**fields, sliding_window=(window,) * fields["num_layers"])


def to_hf_config(config: ModelConfig, kind: Kind = "causal_lm") -> dict[str, Any]:
    """The keys of config.json, without those that belong to the tokenizer."""
    hf = common.common_to_hf(config, kind, ARCHITECTURES)
    return {**hf, "sliding_window": common.single_window(config)}


def check(config: ModelConfig) -> None:
    """Raises ValueError where Mistral has no such model."""
    every = (config.sliding_window[0],) * config.num_layers
    common.check_features(config, attention_bias=False, qk_norm=False, sliding_window=every)
