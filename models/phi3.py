"""Phi-3 and Phi-4: Llama with fused projections in its files (arXiv:2404.14219)."""

from collections.abc import Mapping
from typing import Any

from jaxrl_llm.models import hf as common
from jaxrl_llm.models.config import Kind, ModelConfig
from jaxrl_llm.models.hf import Names
from jaxrl_llm.models.rope import LongRope

__all__ = ["ARCHITECTURES", "config_from_hf", "hf_names", "to_hf_config"]

ARCHITECTURES: dict[Kind, str] = {
    "causal_lm": "Phi3ForCausalLM",
    "scalar": "Phi3ForSequenceClassification",
}


def config_from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """The config from config.json's keys. Raises: ValueError for an unsupported feature."""
    common.refuse_unless(hf, "phi3", attention_bias=False)
    fields = common.common_from_hf(
        _with_rope(hf),
        "phi3",
        max_position_embeddings=4096,
        rms_norm_eps=1e-5,
        partial_rotary_factor=1.0,
    )
    return ModelConfig(**fields, sliding_window=(hf.get("sliding_window"),) * fields["num_layers"])


def _with_rope(hf: Mapping[str, Any]) -> dict[str, Any]:
    """The keys with the present name of longrope and the default of its old length."""
    keys = {"original_max_position_embeddings": 4096, **hf}
    for key in ("rope_scaling", "rope_parameters"):
        rope = hf.get(key)
        if not isinstance(rope, Mapping):
            continue
        if any(rope.get(name) in ("su", "yarn") for name in ("type", "rope_type")):
            keys[key] = {**rope, "type": "longrope", "rope_type": "longrope"}
    return keys


def to_hf_config(config: ModelConfig, kind: Kind = "causal_lm") -> dict[str, Any]:
    """The keys of config.json, without the tokenizer's."""
    hf = common.common_to_hf(config, kind, ARCHITECTURES)
    window = common.single_window(config)
    if isinstance(scaling := config.rope_scaling, LongRope):
        original = scaling.original_max_position_embeddings
        hf["original_max_position_embeddings"] = original
    hf["pad_token_id"] = None  # transformers' default needs the published vocabulary
    return {**hf, "sliding_window": window, "attention_bias": False}


def hf_names(config: ModelConfig, kind: Kind) -> Names:
    """The Hugging Face tensor of each parameter path."""
    names = common.hf_names(config, kind)
    return common.fused(names, qkv_proj=("q", "k", "v"), gate_up_proj=("gate", "up"))
