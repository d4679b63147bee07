"""Qwen3.5, the dense text model: three layers of a gated delta rule to one of gated attention.

Folders of the whole model, with its image encoder: `image_models.py`.
"""

from collections.abc import Mapping
from typing import Any

from jaxrl_llm.models import hybrid_files
from jaxrl_llm.models.config import Kind, ModelConfig
from jaxrl_llm.models.hybrid_files import hf_names

__all__ = ["ARCHITECTURES", "config_from_hf", "hf_names", "to_hf_config"]

ARCHITECTURES: dict[Kind, str] = {
    "causal_lm": "Qwen3_5ForCausalLM",
    "scalar": "Qwen3_5TextForSequenceClassification",
}
NAME = "qwen3_5_text"


def config_from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """The config from config.json's keys. Raises: ValueError for an unsupported feature."""
    return ModelConfig(**hybrid_files.fields_from_hf(hf, NAME, num_key_value_heads=4))


def to_hf_config(config: ModelConfig, kind: Kind = "causal_lm") -> dict[str, Any]:
    """The keys of config.json, without the tokenizer's."""
    return hybrid_files.to_hf(config, kind, ARCHITECTURES)
