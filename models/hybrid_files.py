"""config.json keys and tensor names of hybrid families: layers of a gated delta rule.

The module of a family calls these functions, as it calls hf.py's. Imports no jax.

Shape letters: D hidden, G key heads, N value heads, H dims of a key, V of a value, W tokens of the
convolution.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from jaxrl_llm.models import hf as common
from jaxrl_llm.models.config import GatedDelta, Kind, Mixture, ModelConfig
from jaxrl_llm.models.hf import HFTensor, Names, Path, value_of

LINEAR, FULL = "linear_attention", "full_attention"  # transformers' layer types
SHARED_SIZE = "shared_expert_intermediate_size"
# Projections of a layer by the tensor that holds them, "q" to "decay", in the order of its rows.
Tensors = Mapping[str, tuple[str, ...]]
APART: Tensors = {
    "in_proj_qkv": ("q", "k", "v"),
    "in_proj_z": ("gate",),
    "in_proj_b": ("rate",),
    "in_proj_a": ("decay",),
}


def fields_from_hf(hf: Mapping[str, Any], family: str, **defaults: Any) -> dict[str, Any]:
    """The ModelConfig fields of a hybrid family; `defaults` are values of missing keys.

    Raises: ValueError for a feature that is not implemented.
    """
    common.refuse_unless(hf, family, attention_bias=False, attn_output_gate=True)
    own = {"head_dim": 256, "partial_rotary_factor": 0.25, "max_position_embeddings": 32768}
    fields = common.common_from_hf(hf, family, **own, **defaults)
    features = {"qk_norm": True, "unit_offset": True, "attention_gate": True}
    return fields | features | {"delta": _delta_from_hf(hf, family, fields["num_layers"])}


def _delta_from_hf(hf: Mapping[str, Any], family: str, layers: int) -> GatedDelta:
    types = common.entries(hf, "layer_types", list, [])
    period = value_of(hf, "full_attention_interval", 4)
    if types:
        period = types.index(FULL) + 1 if FULL in types else layers + 1
        if types != _types(period, layers) or period < 2:
            raise ValueError(
                f"{family} with layer_types={types} is not supported: {FULL} in every layer whose "
                f"number is a multiple of a period of 2 or more is, and {LINEAR} in the others"
            )
    return GatedDelta(
        period=period,
        key_heads=value_of(hf, "linear_num_key_heads", 16),
        value_heads=value_of(hf, "linear_num_value_heads", 32),
        key_dim=value_of(hf, "linear_key_head_dim", 128),
        value_dim=value_of(hf, "linear_value_head_dim", 128),
        conv_size=value_of(hf, "linear_conv_kernel_dim", 4),
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
    """The gated delta rule, which every hybrid model has."""
    assert config.delta is not None
    return config.delta


def mixture_from_hf(hf: Mapping[str, Any], **defaults: Any) -> Mixture:
    """The experts of every layer, one of them shared; `defaults` are values of missing keys."""
    hf = defaults | {key: value for key, value in hf.items() if value is not None}
    return Mixture(
        num_experts=hf["num_experts"],
        experts_per_token=hf["num_experts_per_tok"],
        expert_size=value_of(hf, "moe_intermediate_size", 512),
        normalized=bool(value_of(hf, "norm_topk_prob", True)),
        shared_size=value_of(hf, SHARED_SIZE, 512),
        shared_gate=True,
    )


def mixture_to_hf(config: ModelConfig) -> dict[str, Any]:
    """The keys of config.json of the experts."""
    mixture = common.mixture_of(config)
    return {
        "num_experts": mixture.num_experts,
        "num_experts_per_tok": mixture.experts_per_token,
        "moe_intermediate_size": mixture.expert_size,
        SHARED_SIZE: mixture.shared_size,
    }


def hf_names(config: ModelConfig, kind: Kind, tensors: Tensors = APART) -> Names:
    """The Hugging Face tensor of each parameter path.

    `tensors` other than APART have groups of rows, one a key head.
    """
    delta, names = delta_of(config), common.hf_names(config, kind)
    for i in range(config.num_layers):
        path, prefix = ("decoder", "layers", str(i)), f"model.layers.{i}"
        if config.is_linear(i):
            own = (*path, "attention"), f"{prefix}.linear_attn"
            names |= _layer_names(config, delta, *own, tensors)
        if config.mixture is not None:
            names |= _shared_names(config, config.mixture, (*path, "mlp"), f"{prefix}.mlp")
    return names


def _layer_names(
    config: ModelConfig, delta: GatedDelta, path: Path, prefix: str, tensors: Tensors
) -> Names:
    D, W = config.hidden_size, delta.conv_size
    G, N, H, V = delta.key_heads, delta.value_heads, delta.key_dim, delta.value_dim
    streams = {"q": (G, H), "k": (G, H), "v": (N, V)}
    shapes = streams | {"gate": (N, V), "rate": (N,), "decay": (N,)}
    names: Names = {}
    for tensor, parts in tensors.items():
        groups = 1 if tensors is APART else G
        rows = _rows_of([math.prod(shapes[part]) for part in parts], groups)
        for part, place in zip(parts, rows, strict=True):
            names[*path, part, "kernel"] = HFTensor(
                f"{prefix}.{tensor}.weight",
                (math.prod(shapes[part]), D),
                (D, *shapes[part]),
                transpose=True,
                **place,
            )
    rows = _rows_of([math.prod(shape) for shape in streams.values()], 1)
    for (part, shape), place in zip(streams.items(), rows, strict=True):
        names[*path, f"{part}_conv"] = HFTensor(
            f"{prefix}.conv1d.weight", (math.prod(shape), 1, W), (*shape, W), **place
        )
    for ours, theirs, size in (
        ("log_speed", "A_log", N),
        ("decay_bias", "dt_bias", N),
        ("norm", "norm.weight", V),
    ):
        names[*path, ours] = HFTensor(f"{prefix}.{theirs}", (size,), (size,))
    names[*path, "o", "kernel"] = HFTensor(f"{prefix}.out_proj.weight", (D, N * V), (N, V, D), True)
    return names


def _rows_of(sizes: Sequence[int], groups: int) -> list[dict[str, Any]]:
    """Where the parts of a tensor lie, which have so many rows each; one after the other."""
    firsts = [sum(sizes[:i]) // groups for i in range(len(sizes))]
    return [{"first_row": first, "of_rows": sum(sizes), "groups": groups} for first in firsts]


def _shared_names(config: ModelConfig, mixture: Mixture, path: Path, prefix: str) -> Names:
    D, F = config.hidden_size, mixture.shared_size
    names = common.mlp_names((*path, "shared"), f"{prefix}.shared_expert", D, F)
    gate = HFTensor(f"{prefix}.shared_expert_gate.weight", (1, D), (D, 1), True)
    return names | {(*path, "shared_gate", "kernel"): gate}
