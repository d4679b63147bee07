"""DeepSeek-V3: latent attention, experts with a sigmoid router, shared experts (arXiv:2412.19437).

The first layers are dense. Multi-token prediction layers of the files are not read.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxrl_llm.models import hf as common
from jaxrl_llm.models.config import BALANCE, CENTROIDS, Kind, Latent, Mixture, ModelConfig
from jaxrl_llm.models.hf import HFTensor, Names, Path, value_of

__all__ = ["ARCHITECTURES", "config_from_hf", "hf_names", "to_hf_config"]

ARCHITECTURES: dict[Kind, str] = {
    "causal_lm": "DeepseekV3ForCausalLM",
    "scalar": "DeepseekV3ForSequenceClassification",
}
Sizes = tuple[int, ...]
NAME = "deepseek_v3"
FIXED = {"attention_bias": False, "moe_layer_freq": 1}
ROUTER = {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}


def config_from_hf(hf: Mapping[str, Any], family: str = NAME) -> ModelConfig:
    """The config from config.json's keys. Raises: ValueError for an unsupported feature."""
    common.refuse_unless(hf, family, **FIXED, **ROUTER)
    if hf.get("quantization_config"):
        raise ValueError(
            f"{family} with quantization_config is not supported: the weights are float8 with "
            "scales of blocks (weight_scale_inv); convert the folder to bfloat16 first"
        )
    heads = common.require(hf, "num_attention_heads", family)
    latent = Latent(
        kv_rank=value_of(hf, "kv_lora_rank", 512),
        query_rank=hf.get("q_lora_rank", 1536),
        rope_dim=value_of(hf, "qk_rope_head_dim", 64),
        value_dim=value_of(hf, "v_head_dim", 128),
    )
    # The files' head_dim counts the dims with rope.
    whole = value_of(hf, "qk_nope_head_dim", 128) + latent.rope_dim
    keys = {"num_key_value_heads": heads} | dict(hf) | {"head_dim": whole}
    return ModelConfig(
        **common.common_from_hf(keys, family, max_position_embeddings=4096),
        interleaved_rope=bool(hf.get("rope_interleave", True)),
        latent=latent,
        mixture=_mixture(hf),
    )


def _mixture(hf: Mapping[str, Any]) -> Mixture:
    size = value_of(hf, "moe_intermediate_size", 2048)
    experts = value_of(hf, "n_routed_experts", hf.get("num_local_experts"))
    return Mixture(
        num_experts=256 if experts is None else experts,
        experts_per_token=value_of(hf, "num_experts_per_tok", 8),
        expert_size=size,
        normalized=bool(hf.get("norm_topk_prob", True)),
        scores="sigmoid",
        num_groups=value_of(hf, "n_group", 8),
        groups_per_token=value_of(hf, "topk_group", 4),
        scaling=float(common.positive(hf, "routed_scaling_factor", 2.5)),
        shared_size=size * value_of(hf, "n_shared_experts", 1),
        dense_layers=value_of(hf, "first_k_dense_replace", 3),
    )


def to_hf_config(
    config: ModelConfig,
    kind: Kind = "causal_lm",
    architectures: Mapping[Kind, str] = ARCHITECTURES,
) -> dict[str, Any]:
    """The keys of config.json, without the tokenizer's."""
    latent, mixture = _parts(config)
    return {
        **common.common_to_hf(config, kind, architectures),
        **FIXED,
        **ROUTER,
        "head_dim": latent.rope_dim,
        "q_lora_rank": latent.query_rank,
        "kv_lora_rank": latent.kv_rank,
        "qk_nope_head_dim": config.head_dim - latent.rope_dim,
        "qk_rope_head_dim": latent.rope_dim,
        "v_head_dim": latent.value_dim,
        "rope_interleave": config.interleaved_rope,
        "n_routed_experts": mixture.num_experts,
        "num_experts_per_tok": mixture.experts_per_token,
        "moe_intermediate_size": mixture.expert_size,
        "norm_topk_prob": mixture.normalized,
        "n_group": mixture.num_groups,
        "topk_group": mixture.groups_per_token,
        "routed_scaling_factor": mixture.scaling,
        "n_shared_experts": mixture.shared_size // mixture.expert_size,
        "first_k_dense_replace": mixture.dense_layers,
        "num_nextn_predict_layers": 0,
    }


def hf_names(config: ModelConfig, kind: Kind) -> Names:
    """The Hugging Face tensor of each parameter path."""
    latent, mixture = _parts(config)
    names = common.hf_names(config, kind)
    for i in range(config.num_layers):
        layer, prefix = ("decoder", "layers", str(i)), f"model.layers.{i}"
        names |= _attention_names(config, latent, (*layer, "attention"), f"{prefix}.self_attn")
        if config.mixture_of(i) is not None:
            mlp, E = (*layer, "mlp"), mixture.num_experts
            gate = names.pop((*mlp, "router", "kernel")).parts[0]
            names[*mlp, "router", CENTROIDS] = replace(gate, dtype="float32")
            names[*mlp, "router", BALANCE] = HFTensor(
                f"{prefix}.mlp.gate.e_score_correction_bias", (E,), (E,), dtype="float32"
            )
            shared = f"{prefix}.mlp.shared_experts"
            D, F = config.hidden_size, mixture.shared_size
            names |= common.mlp_names((*mlp, "shared"), shared, D, F)
    return names


def _attention_names(config: ModelConfig, latent: Latent, path: Path, prefix: str) -> Names:
    D, N, H = config.hidden_size, config.num_heads, config.head_dim
    R, P, V, S = latent.kv_rank, latent.rope_dim, latent.value_dim, latent.query_rank
    names: Names = {}

    def projection(ours: str, theirs: str, inputs: Sizes, outputs: Sizes) -> None:
        rows, columns = math.prod(outputs), math.prod(inputs)
        name = f"{prefix}.{theirs}.weight"
        names[*path, ours, "kernel"] = HFTensor(name, (rows, columns), (*inputs, *outputs), True)

    def norm(ours: str, theirs: str, size: int) -> None:
        names[*path, ours, "scale"] = HFTensor(f"{prefix}.{theirs}.weight", (size,), (size,))

    if S is None:
        projection("q", "q_proj", (D,), (N, H))
    else:
        projection("q_a", "q_a_proj", (D,), (S,))
        norm("q_norm", "q_a_layernorm", S)
        projection("q_b", "q_b_proj", (S,), (N, H))
    projection("kv_a", "kv_a_proj_with_mqa", (D,), (R + P,))
    norm("kv_norm", "kv_a_layernorm", R)
    projection("kv_b", "kv_b_proj", (R,), (N, H - P + V))
    projection("o", "o_proj", (N, V), (D,))
    return names


def predicts_further(config: ModelConfig, name: str) -> bool:
    """True if a tensor belongs to a multi-token prediction layer."""
    layer = re.match(r"model\.layers\.(\d+)\.", name)
    return layer is not None and int(layer[1]) >= config.num_layers


def _parts(config: ModelConfig) -> tuple[Latent, Mixture]:
    """The latent attention and the experts, which every such model has."""
    assert config.latent is not None and config.mixture is not None
    return config.latent, config.mixture
