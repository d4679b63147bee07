"""Qwen3.5 with experts, the text model: the layers of Qwen3.5 and the experts of Qwen3-Next.

Folders of the whole model, with its image encoder, are not read.
"""

from collections.abc import Mapping
from typing import Any

from jaxrl_llm.models import hf as common
from jaxrl_llm.models import hybrid_files
from jaxrl_llm.models.config import Kind, ModelConfig
from jaxrl_llm.models.hybrid_files import hf_names

__all__ = ["ARCHITECTURES", "config_from_hf", "hf_names", "to_hf_config"]

# transformers has no scalar model of this family.
ARCHITECTURES: dict[Kind, str] = {"causal_lm": "Qwen3_5MoeForCausalLM"}
NAME = "qwen3_5_moe_text"
EXPERTS = {"num_experts": 256, "num_experts_per_tok": 8}


def config_from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """The config from config.json's keys. Raises: ValueError for an unsupported feature."""
    common.refuse_unless(hf, NAME, norm_topk_prob=True)
    mixture = hybrid_files.mixture_from_hf(hf, **EXPERTS)
    # Its configs have no size of a dense layer.
    sizes = {"intermediate_size": mixture.expert_size} | dict(hf)
    fields = hybrid_files.fields_from_hf(sizes, NAME, num_key_value_heads=2)
    return ModelConfig(**fields, mixture=mixture)


def to_hf_config(config: ModelConfig, kind: Kind = "causal_lm") -> dict[str, Any]:
    """The keys of config.json, without the tokenizer's."""
    return hybrid_files.to_hf(config, kind, ARCHITECTURES) | hybrid_files.mixture_to_hf(config)
