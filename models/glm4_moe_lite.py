"""GLM-4.7-Flash: the layers of DeepSeek-V3 under names and defaults of their own."""

from collections.abc import Mapping
from typing import Any

from jaxrl_llm.models import deepseek_v3
from jaxrl_llm.models import hf as common
from jaxrl_llm.models.config import Kind, ModelConfig
from jaxrl_llm.models.deepseek_v3 import hf_names

__all__ = ["ARCHITECTURES", "config_from_hf", "hf_names", "to_hf_config"]

# transformers has no scalar model of this family.
ARCHITECTURES: dict[Kind, str] = {"causal_lm": "Glm4MoeLiteForCausalLM"}
NAME = "glm4_moe_lite"
# A missing key has another default than in DeepSeek-V3.
DEFAULTS = {
    "max_position_embeddings": 202752,
    "rms_norm_eps": 1e-5,
    "q_lora_rank": 768,
    "v_head_dim": 256,
    "qk_nope_head_dim": 192,
    "moe_intermediate_size": 1536,
    "n_routed_experts": 64,
    "num_experts_per_tok": 4,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.8,
}
DENSE, SPARSE = "dense", "sparse"  # transformers' types of MLP


def config_from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """The config from config.json's keys. Raises: ValueError for an unsupported feature."""
    common.refuse_unless(hf, NAME, partial_rotary_factor=1.0)
    return deepseek_v3.config_from_hf(
        DEFAULTS | dict(hf) | {"first_k_dense_replace": _dense_layers(hf)}, NAME
    )


def _dense_layers(hf: Mapping[str, Any]) -> int:
    """The number of dense layers, which are the first ones."""
    layers = common.require(hf, "num_hidden_layers", NAME)
    if not hf.get("mlp_layer_types"):  # transformers then takes one, whatever another key says
        common.refuse_unless(hf, NAME, first_k_dense_replace=1)
    types = common.entries(hf, "mlp_layer_types", list, _types(1, layers))
    dense = types.count(DENSE)
    if types != _types(dense, layers):
        raise ValueError(
            f"{NAME} with mlp_layer_types={types} is not supported: {layers} layers are, the "
            f"first ones {DENSE!r} and the others {SPARSE!r}"
        )
    return dense


def _types(dense: int, layers: int) -> list[str]:
    return [DENSE] * dense + [SPARSE] * (layers - dense)


def to_hf_config(config: ModelConfig, kind: Kind = "causal_lm") -> dict[str, Any]:
    """The keys of config.json, without the tokenizer's."""
    hf = deepseek_v3.to_hf_config(config, kind, ARCHITECTURES)
    return {**hf, "mlp_layer_types": _types(hf["first_k_dense_replace"], config.num_layers)}
