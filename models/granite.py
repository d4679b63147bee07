"""Granite 3, dense: Llama with four multipliers (arXiv:2405.04324)."""

from collections.abc import Mapping
from typing import Any

from jaxrl_llm.models import hf as common
from jaxrl_llm.models.config import Kind, ModelConfig
from jaxrl_llm.models.hf import hf_names

__all__ = ["ARCHITECTURES", "config_from_hf", "hf_names", "to_hf_config"]

ARCHITECTURES: dict[Kind, str] = {
    "causal_lm": "GraniteForCausalLM",
    "scalar": "GraniteForSequenceClassification",
}


MULTIPLIERS = (
    "attention_multiplier",
    "embedding_multiplier",
    "residual_multiplier",
    "logits_scaling",
)


def config_from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """The config from config.json's keys. Raises: ValueError for an unsupported feature."""
    common.refuse_unless(hf, "granite", attention_bias=False, mlp_bias=False)
    fields = common.common_from_hf(hf, "granite", max_position_embeddings=2048)
    factors: dict[str, Any] = {name: float(common.positive(hf, name, 1.0)) for name in MULTIPLIERS}
    return ModelConfig(**fields, **factors)


def to_hf_config(config: ModelConfig, kind: Kind = "causal_lm") -> dict[str, Any]:
    """The keys of config.json, without the tokenizer's."""
    hf = common.common_to_hf(config, kind, ARCHITECTURES)
    factors = {name: getattr(config, name) for name in MULTIPLIERS}
    return {**hf, **factors, "attention_bias": False, "mlp_bias": False}
