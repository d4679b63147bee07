"""config.json keys and tensor names of hybrid families: layers of a gated delta rule.

The module of a family calls these functions, as it calls those of hf.py. Imports no jax.

Shape letters: D hidden, G key heads, N value heads, H dims of a key, V of a value, W tokens of the
convolution.
"""

import math
from collections.abc import Mapping
from typing import Any

from jaxrl_llm.models import hf as common
from jaxrl_llm.models.config import GatedDelta, Kind, ModelConfig
from jaxrl_llm.models.hf import HFTensor, Names, Path

LINEAR, FULL = "linear_attention", "full_attention"  # transformers' layer types
# What a hybrid family has in common with no other one.
FEATURES: dict[str, Any] = {
    "attention_bias": False,
    "qk_norm": True,
    "unit_offset": True,
    "attention_gate": True,
    "rotary_factor": common.ANY,
    "delta": common.ANY,
}


def fields_from_hf(hf: Mapping[str, Any], family: str, **defaults: Any) -> dict[str, Any]:
    """The ModelConfig fields of a hybrid family; `defaults` are values of missing keys.

    Raises: ValueError for what is not implemented.
    """
    common.refuse_unless(hf, family, attention_bias=False)
    own = {"head_dim": 256, "partial_rotary_factor": 0.25, "max_position_embeddings": 32768}
    fields = common.common_from_hf(hf, family, **own, **defaults)
    features = {"qk_norm": True, "unit_offset": True, "attention_gate": True}
    return fields | features | {"delta": _delta_from_hf(hf, family, fields["num_layers"])}


def _delta_from_hf(hf: Mapping[str, Any], family: str, layers: int) -> GatedDelta:
    types = common.entries(hf, "layer_types", list, [])
    period = common.value_of(hf, "full_attention_interval", 4)
    if types:
        period = types.index(FULL) + 1 if FULL in types else layers + 1
        if types != _types(period, layers) or period < 2:
            raise ValueError(
                f"{family} with layer_types={types} is not supported: {FULL} in every layer whose "
                f"number is a multiple of a period of 2 or more is, and {LINEAR} in the others"
            )
    return GatedDelta(
        period=period,
        key_heads=common.value_of(hf, "linear_num_key_heads", 16),
        value_heads=common.value_of(hf, "linear_num_value_heads", 32),
        key_dim=common.value_of(hf, "linear_key_head_dim", 128),
        value_dim=common.value_of(hf, "linear_value_head_dim", 128),
        conv_size=common.value_of(hf, "linear_conv_kernel_dim", 4),
    )


def _types(period: int, layers: int) -> list[str]:
    return [LINEAR if (i + 1) % period else FULL for i in range(layers)]


def to_hf(config: ModelConfig, kind: Kind, architectures: Mapping[Kind, str]) -> dict[str, Any]:
    """The keys of config.json that hybrid families have, without the tokenizer's."""
    delta = delta_of(config)
    return {
        **common.common_to_hf(config, kind, architectures),
        "attention_bias": False,
        "partial_rotary_factor": config.rotary_factor,
        "layer_types": _types(delta.period, config.num_layers),
        "full_attention_interval": delta.period,
        "linear_num_key_heads": delta.key_heads,
        "linear_num_value_heads": delta.value_heads,
        "linear_key_head_dim": delta.key_dim,
        "linear_value_head_dim": delta.value_dim,
        "linear_conv_kernel_dim": delta.conv_size,
    }


def delta_of(config: ModelConfig) -> GatedDelta:
    """Raises: ValueError for a model without layers of a gated delta rule."""
    if config.delta is None:
        raise ValueError(f"{config.family} has layers of a gated delta rule: give delta")
    return config.delta


def hf_names(config: ModelConfig, kind: Kind) -> Names:
    """The Hugging Face tensor of each parameter path."""
    delta, names = delta_of(config), common.hf_names(config, kind)
    for i in range(config.num_layers):
        if config.is_linear(i):
            path = ("decoder", "layers", str(i), "attention")
            names |= _layer_names(config, delta, path, f"model.layers.{i}.linear_attn")
    return names


def _layer_names(config: ModelConfig, delta: GatedDelta, path: Path, prefix: str) -> Names:
    D, W = config.hidden_size, delta.conv_size
    G, N, H, V = delta.key_heads, delta.value_heads, delta.key_dim, delta.value_dim
    streams, names = {"q": (G, H), "k": (G, H), "v": (N, V)}, Names()
    of_rows, first = sum(map(math.prod, streams.values())), 0
    for name, shape in streams.items():
        part: dict[str, Any] = {"first_row": first, "of_rows": of_rows}
        rows = math.prod(shape)
        names[*path, name, "kernel"] = HFTensor(
            f"{prefix}.in_proj_qkv.weight", (rows, D), (D, *shape), True, **part
        )
        names[*path, f"{name}_conv"] = HFTensor(
            f"{prefix}.conv1d.weight", (rows, 1, W), (*shape, W), **part
        )
        first += rows
    for ours, theirs, shape in (("gate", "z", (N, V)), ("rate", "b", (N,)), ("decay", "a", (N,))):
        names[*path, ours, "kernel"] = HFTensor(
            f"{prefix}.in_proj_{theirs}.weight", (math.prod(shape), D), (D, *shape), True
        )
    for ours, theirs, size in (
        ("log_speed", "A_log", N),
        ("decay_bias", "dt_bias", N),
        ("norm", "norm.weight", V),
    ):
        names[*path, ours] = HFTensor(f"{prefix}.{theirs}", (size,), (size,))
    names[*path, "o", "kernel"] = HFTensor(f"{prefix}.out_proj.weight", (D, N * V), (N, V, D), True)
    return names
