"""Qwen3-Next: gated delta rules between layers of gated attention, and experts.

The files have the projections of a layer in two tensors. Layers that predict further tokens are not
read.
"""

from collections.abc import Mapping
from typing import Any

from jaxrl_llm.models import hf as common
from jaxrl_llm.models import hybrid_files
from jaxrl_llm.models.config import Kind, ModelConfig
from jaxrl_llm.models.hf import Names

__all__ = ["ARCHITECTURES", "config_from_hf", "hf_names", "to_hf_config"]

ARCHITECTURES: dict[Kind, str] = {
    "causal_lm": "Qwen3NextForCausalLM",
    "scalar": "Qwen3NextForSequenceClassification",
}
NAME = "qwen3_next"
TENSORS = {"in_proj_qkvz": ("q", "k", "v", "gate"), "in_proj_ba": ("rate", "decay")}
EXPERTS = {"num_experts": 512, "num_experts_per_tok": 10}


def config_from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """The config from config.json's keys. Raises: ValueError for an unsupported feature."""
    common.refuse_unless(hf, NAME, decoder_sparse_step=1, mlp_only_layers=[])
    fields = hybrid_files.fields_from_hf(
        {"intermediate_size": 5632} | dict(hf), NAME, num_key_value_heads=2
    )
    return ModelConfig(**fields, mixture=hybrid_files.mixture_from_hf(hf, **EXPERTS))


def to_hf_config(config: ModelConfig, kind: Kind = "causal_lm") -> dict[str, Any]:
    """The keys of config.json, without the tokenizer's."""
    return {
        **hybrid_files.to_hf(config, kind, ARCHITECTURES),
        **hybrid_files.mixture_to_hf(config),
        "norm_topk_prob": common.mixture_of(config).normalized,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def hf_names(config: ModelConfig, kind: Kind) -> Names:
    """The Hugging Face tensor of each parameter path."""
    return hybrid_files.hf_names(config, kind, TENSORS)
