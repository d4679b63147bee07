"""gpt-oss: attention sinks, windows on every other layer, and experts with biases.

The model is described in arXiv:2508.10925.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxrl_llm.models import hf as common
from jaxrl_llm.models.config import SWIGLU_ALPHA, Kind, Mixture, ModelConfig
from jaxrl_llm.models.hf import FULL, LOCAL, HFTensor, Names, Path

__all__ = ["ARCHITECTURES", "config_from_hf", "hf_names", "to_hf_config"]

ARCHITECTURES: dict[Kind, str] = {
    "causal_lm": "GptOssForCausalLM",
    "scalar": "GptOssForSequenceClassification",
}
NAME = "gpt_oss"
OWN = {
    "attention_bias": True,
    "attention_out_bias": True,
    "attention_sinks": True,
    "expert_bias": True,
}
# Values of missing keys, as in transformers.
DEFAULTS = {"num_local_experts": 128, "num_experts_per_tok": 4, "rms_norm_eps": 1e-5}
YARN = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096}


def config_from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """The config from config.json's keys. Raises: ValueError for an unsupported feature."""
    common.refuse_unless(hf, NAME, attention_bias=True, swiglu_alpha=SWIGLU_ALPHA)
    hf = DEFAULTS | dict(hf)
    packed = common.entries(hf, "quantization_config", dict, {})
    if packed.get("quant_method") == "mxfp4":  # an import unpacks it
        hf["quantization_config"] = None
    if not (hf.get("rope_parameters") or hf.get("rope_scaling")):
        hf["rope_parameters"] = YARN | {"truncate": False}
    fields = common.common_from_hf(
        hf,
        NAME,
        max_position_embeddings=131072,
        num_key_value_heads=8,
        head_dim=64,
        rope_theta=150000.0,
    )
    mixture = common.mixture_from_hf(
        hf, NAME, experts="num_local_experts", size="intermediate_size", normalized=True
    )
    layers = range(fields["num_layers"])
    keys = {
        "use_sliding_window": True,
        "sliding_window": hf.get("sliding_window", 128),
        "layer_types": hf.get("layer_types") or [(LOCAL, FULL)[i % 2] for i in layers],
    }
    own = {"swiglu_limit": float(common.positive(hf, "swiglu_limit", 7.0)), **OWN}
    windows = common.windows_from_hf(keys, fields["num_layers"])
    return ModelConfig(**fields, **own, sliding_window=windows, mixture=mixture)


def to_hf_config(config: ModelConfig, kind: Kind = "causal_lm") -> dict[str, Any]:
    """The keys of config.json, without the tokenizer's."""
    mixture = common.mixture_of(config)
    return {
        **common.common_to_hf(config, kind, ARCHITECTURES),
        "attention_bias": True,
        **common.layer_types_to_hf(config),
        "num_local_experts": mixture.num_experts,
        "num_experts_per_tok": mixture.experts_per_token,
        "swiglu_alpha": SWIGLU_ALPHA,
        "swiglu_limit": config.swiglu_limit,
    }


def hf_names(config: ModelConfig, kind: Kind) -> Names:
    """The Hugging Face tensor of each parameter path."""
    names, mixture = common.hf_names(config, kind), common.mixture_of(config)
    for i in range(config.num_layers):
        path, prefix = ("decoder", "layers", str(i), "mlp"), f"model.layers.{i}.mlp"
        names |= _expert_names(config.hidden_size, mixture, path, prefix)
    for path, norm in names.items():
        if path[-1] == "scale":
            names[path] = replace(norm.parts[0], kept_from_float16=True)  # as in transformers
    return names


def _expert_names(D: int, mixture: Mixture, path: Path, prefix: str) -> Names:
    """The router, and one tensor for all experts, in which gate and up have columns in turn."""
    E, F, experts = mixture.num_experts, mixture.expert_size, f"{prefix}.experts"
    names: Names = {
        (*path, "router", "kernel"): HFTensor(f"{prefix}.router.weight", (E, D), (D, E), True),
        (*path, "router", "bias"): HFTensor(f"{prefix}.router.bias", (E,), (E,)),
    }
    for leaf, end, inputs in (("kernel", "", (D,)), ("bias", "_bias", ())):
        for turn, ours in enumerate(("gate", "up")):
            shape = (E, *inputs, F)
            names[*path, ours, leaf] = HFTensor(
                f"{experts}.gate_up_proj{end}", shape, shape, turn=turn, of_turns=2
            )
    for leaf, end, shape in (("kernel", "", (E, F, D)), ("bias", "_bias", (E, D))):
        names[*path, "down", leaf] = HFTensor(f"{experts}.down_proj{end}", shape, shape)
    return names
