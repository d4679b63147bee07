"""Qwen3 mixture of experts: Qwen3's attention, and experts in every layer (arXiv:2505.09388)."""

from collections.abc import Mapping
from typing import Any

from jaxrl_llm.models import hf as common
from jaxrl_llm.models.config import Kind, ModelConfig
from jaxrl_llm.models.hf import hf_names

__all__ = ["ARCHITECTURES", "config_from_hf", "hf_names", "to_hf_config"]

ARCHITECTURES: dict[Kind, str] = {
    "causal_lm": "Qwen3MoeForCausalLM",
    "scalar": "Qwen3MoeForSequenceClassification",
}


def config_from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """The config from config.json's keys. Raises: ValueError for an unsupported feature."""
    common.refuse_unless(hf, "qwen3_moe", attention_bias=False, decoder_sparse_step=1)
    common.refuse_unless(hf, "qwen3_moe", mlp_only_layers=[])
    fields = common.common_from_hf(
        hf, "qwen3_moe", max_position_embeddings=32768, num_key_value_heads=4
    )
    mixture = common.mixture_from_hf(
        {"num_experts_per_tok": 8, "moe_intermediate_size": 768} | _with_num_experts(hf),
        "qwen3_moe",
        experts="num_experts",
        size="moe_intermediate_size",
        normalized=bool(hf.get("norm_topk_prob", False)),
    )
    # Unlike Qwen3, one window for all layers.
    window = hf.get("sliding_window", 4096) if hf.get("use_sliding_window", False) else None
    windows = (window,) * fields["num_layers"]
    return ModelConfig(**fields, qk_norm=True, sliding_window=windows, mixture=mixture)


def _with_num_experts(hf: Mapping[str, Any]) -> dict[str, Any]:
    """transformers 5 also writes the number as `num_local_experts`."""
    return {"num_experts": hf.get("num_local_experts", 128)} | dict(hf)


def to_hf_config(config: ModelConfig, kind: Kind = "causal_lm") -> dict[str, Any]:
    """The keys of config.json, without the tokenizer's."""
    mixture = common.mixture_of(config)
    window = common.single_window(config)
    return {
        **common.common_to_hf(config, kind, ARCHITECTURES),
        "attention_bias": False,
        "use_sliding_window": window is not None,
        "sliding_window": window,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "num_experts": mixture.num_experts,
        "num_experts_per_tok": mixture.experts_per_token,
        "moe_intermediate_size": mixture.expert_size,
        "norm_topk_prob": mixture.normalized,
    }
