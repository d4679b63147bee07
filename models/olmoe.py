"""OLMoE: experts in every layer, and a norm over all heads of q and of k (arXiv:2409.02060)."""

from collections.abc import Mapping
from typing import Any

from jaxrl_llm.models import hf as common
from jaxrl_llm.models.config import Kind, ModelConfig
from jaxrl_llm.models.hf import hf_names

__all__ = ["ARCHITECTURES", "config_from_hf", "hf_names", "to_hf_config"]

# transformers has no scalar model of this family.
ARCHITECTURES: dict[Kind, str] = {"causal_lm": "OlmoeForCausalLM"}


def config_from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """The config from config.json's keys. Raises: ValueError for an unsupported feature."""
    common.refuse_unless(hf, "olmoe", attention_bias=False, clip_qkv=None)
    # A missing key has another default than in the other families.
    hf = {"rms_norm_eps": 1e-5, "num_experts_per_tok": 8, "intermediate_size": 2048} | dict(hf)
    hf = {"num_experts": hf.get("num_local_experts", 64)} | hf
    mixture = common.mixture_from_hf(
        hf,
        "olmoe",
        experts="num_experts",
        size="intermediate_size",
        normalized=bool(hf.get("norm_topk_prob", False)),
    )
    fields = common.common_from_hf(hf, "olmoe", max_position_embeddings=4096)
    return ModelConfig(**fields, qk_norm=True, qk_norm_whole=True, mixture=mixture)


def to_hf_config(config: ModelConfig, kind: Kind = "causal_lm") -> dict[str, Any]:
    """The keys of config.json, without the tokenizer's."""
    mixture = common.mixture_of(config)
    return {
        **common.common_to_hf(config, kind, ARCHITECTURES),
        "attention_bias": False,
        "clip_qkv": None,
        "num_experts": mixture.num_experts,
        "num_experts_per_tok": mixture.experts_per_token,
        "norm_topk_prob": mixture.normalized,
    }
