"""Gemma 1: norms that add 1 to their weights, a scaled embedding and GELU (arXiv:2403.08295)."""

import math
from collections.abc import Mapping
from typing import Any

from jaxrl_llm.models import hf as common
from jaxrl_llm.models.config import Kind, ModelConfig
from jaxrl_llm.models.hf import hf_names

__all__ = ["ARCHITECTURES", "config_from_hf", "features", "hf_names", "to_hf_config"]

ARCHITECTURES: dict[Kind, str] = {
    "causal_lm": "GemmaForCausalLM",
    "scalar": "GemmaForSequenceClassification",
}


def features(hidden_size: int) -> dict[str, Any]:
    """The features of every Gemma."""
    return {
        "unit_offset": True,
        "activation": "gelu_tanh",
        "embedding_multiplier": math.sqrt(hidden_size),
    }


def config_from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """The config from config.json's keys. Raises: ValueError for an unsupported feature."""
    # Published files say "gelu"; transformers reads that as its approximation by tanh.
    if hf.get("hidden_act") != "gelu":
        common.refuse_unless(hf, "gemma", hidden_act="gelu_pytorch_tanh")
    common.refuse_unless(hf, "gemma", attention_bias=False, use_bidirectional_attention=False)
    fields = common.common_from_hf(
        {**hf, "hidden_act": None},
        "gemma",
        max_position_embeddings=8192,
        num_key_value_heads=16,
        head_dim=256,
        tie_word_embeddings=True,
    )
    return ModelConfig(**fields, **features(hf["hidden_size"]))


def to_hf_config(config: ModelConfig, kind: Kind = "causal_lm") -> dict[str, Any]:
    """The keys of config.json, without the tokenizer's."""
    hf = common.common_to_hf(config, kind, ARCHITECTURES)
    return {**hf, "hidden_act": "gelu_pytorch_tanh", "attention_bias": False}
