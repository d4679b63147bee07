"""SmolLM3: Llama without rope in some layers, by default in every fourth."""

from collections.abc import Mapping
from typing import Any

from jaxrl_llm.models import hf as common
from jaxrl_llm.models.config import Kind, ModelConfig
from jaxrl_llm.models.hf import hf_names

__all__ = ["ARCHITECTURES", "config_from_hf", "hf_names", "to_hf_config"]

ARCHITECTURES: dict[Kind, str] = {
    "causal_lm": "SmolLM3ForCausalLM",
    "scalar": "SmolLM3ForSequenceClassification",
}


def config_from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """The config from config.json's keys. Raises: ValueError for an unsupported feature."""
    common.refuse_unless(hf, "smollm3", attention_bias=False, mlp_bias=False)
    fields = common.common_from_hf(
        hf,
        "smollm3",
        max_position_embeddings=32768,
        num_key_value_heads=4,
        rope_theta=2e6,
        tie_word_embeddings=True,
    )
    if "sliding_attention" in (hf.get("layer_types") or ()):
        # transformers' masks have the window without this key, and its flash attention has none.
        common.refuse_unless(
            {"use_sliding_window": False} | _without_none(hf),
            "smollm3 with sliding_attention in layer_types",
            use_sliding_window=True,
        )
    layers, interval = fields["num_layers"], common.positive(hf, "no_rope_layer_interval", 4)
    every = [(i + 1) % interval for i in range(layers)]
    rope = common.entries(hf, "no_rope_layers", list, every)  # 1 where a layer has rope
    # transformers puts its window on the layers without rope.
    types = ["full_attention" if rotates else "sliding_attention" for rotates in rope]
    windows = common.windows_from_hf(
        {"layer_types": types, **_without_none(hf), "sliding_window": hf.get("sliding_window")},
        layers,
    )
    rope_layers = tuple(bool(rotates) for rotates in rope[:layers])
    return ModelConfig(**fields, rope_layers=rope_layers, sliding_window=windows)


def _without_none(hf: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in hf.items() if value is not None}


def to_hf_config(config: ModelConfig, kind: Kind = "causal_lm") -> dict[str, Any]:
    """The keys of config.json, without the tokenizer's."""
    hf = common.common_to_hf(config, kind, ARCHITECTURES)
    return {
        **hf,
        **common.windows_to_hf(config),
        "pad_token_id": None,  # transformers' default needs the published vocabulary
        "no_rope_layers": [int(rotates) for rotates in config.rope_layers],
        "attention_bias": False,
        "mlp_bias": False,
    }
