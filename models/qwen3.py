"""Qwen3, dense: a norm on each q and k head, and no biases (arXiv:2505.09388)."""

from collections.abc import Mapping
from typing import Any

from jaxrl_llm.models import hf as common
from jaxrl_llm.models.config import Kind, ModelConfig
from jaxrl_llm.models.hf import hf_names

__all__ = ["ARCHITECTURES", "config_from_hf", "hf_names", "to_hf_config"]

ARCHITECTURES: dict[Kind, str] = {
    "causal_lm": "Qwen3ForCausalLM",
    "scalar": "Qwen3ForSequenceClassification",
}


def config_from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """The config from config.json's keys. Raises: ValueError for an unsupported feature."""
    common.refuse_unless(hf, "qwen3", attention_bias=False)
    fields = common.common_from_hf(
        hf, "qwen3", max_position_embeddings=32768, num_key_value_heads=32, head_dim=128
    )
    windows = common.windows_from_hf(hf, fields["num_layers"])
    return ModelConfig(**fields, qk_norm=True, sliding_window=windows)


def to_hf_config(config: ModelConfig, kind: Kind = "causal_lm") -> dict[str, Any]:
    """The keys of config.json, without the tokenizer's."""
    hf = common.common_to_hf(config, kind, ARCHITECTURES)
    return {**hf, **common.windows_to_hf(config), "attention_bias": False}
