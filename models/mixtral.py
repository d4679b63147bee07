"""Mixtral: Mistral's attention, and experts in every layer (arXiv:2401.04088)."""

from collections.abc import Mapping
from typing import Any

from jaxrl_llm.models import hf as common
from jaxrl_llm.models.config import Kind, ModelConfig
from jaxrl_llm.models.hf import hf_names

__all__ = ["ARCHITECTURES", "config_from_hf", "hf_names", "to_hf_config"]

ARCHITECTURES: dict[Kind, str] = {
    "causal_lm": "MixtralForCausalLM",
    "scalar": "MixtralForSequenceClassification",
}


def config_from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """The config from config.json's keys. Raises: ValueError for an unsupported feature."""
    common.refuse_unless(hf, "mixtral", router_jitter_noise=0.0)
    # A missing key has another default than in the other families.
    hf = {"rms_norm_eps": 1e-5, "num_local_experts": 8, "num_experts_per_tok": 2} | dict(hf)
    fields = common.common_from_hf(
        hf, "mixtral", max_position_embeddings=131072, num_key_value_heads=8, rope_theta=1e6
    )
    mixture = common.mixture_from_hf(
        hf, "mixtral", experts="num_local_experts", size="intermediate_size", normalized=True
    )
    windows = (hf.get("sliding_window"),) * fields["num_layers"]
    return ModelConfig(**fields, sliding_window=windows, mixture=mixture)


def to_hf_config(config: ModelConfig, kind: Kind = "causal_lm") -> dict[str, Any]:
    """The keys of config.json, without the tokenizer's."""
    mixture = common.mixture_of(config)
    return {
        **common.common_to_hf(config, kind, ARCHITECTURES),
        "sliding_window": common.single_window(config),
        "num_local_experts": mixture.num_experts,
        "num_experts_per_tok": mixture.experts_per_token,
        "router_jitter_noise": 0.0,
    }
