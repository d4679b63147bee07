"""Tensor names and config keys that Hugging Face's Llama-like families have in common.

The module of a family calls these functions and adds its own features. Nothing here reads a file or
imports transformers: the functions take and return dicts.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from jaxrl_llm.models.config import Kind, Mixture, ModelConfig
from jaxrl_llm.models.rope import ROPE_KINDS, RopeScaling, is_positive

Path = tuple[str, ...]  # path of a leaf in the nested dict of parameters


@dataclass(frozen=True, slots=True)
class HFTensor:
    """Name and layout of one of our parameters in a Hugging Face checkpoint.

    Their array has `shape`. Ours is theirs, transposed if `transpose`, then reshaped to
    `our_shape`. Arrays may be numpy's or jax's. A fused tensor of theirs holds several of ours:
    then `shape` is our part's, which begins at `first_row` of `of_rows`. Or it holds columns of
    several in turn: then `shape` is our part's, every `of_turns`-th column from `turn` on.
    With `groups`, their rows are as many equal groups, in each of which our part has rows.

    Guarantees: both directions only move elements, so a round trip is exact in any dtype.
    """

    name: str
    shape: tuple[int, ...]
    our_shape: tuple[int, ...]
    transpose: bool = False
    first_row: int = 0
    of_rows: int | None = None
    groups: int = 1
    turn: int = 0
    of_turns: int = 1
    dtype: str | None = None  # dtype of both arrays; None: the model's
    kept_from_float16: bool = False  # whether a folder in float16 has their array in float32

    @property
    def is_part(self) -> bool:
        """True if their tensor holds other parameters of ours too."""
        return self.of_rows is not None or self.of_turns > 1

    @property
    def rows(self) -> dict[str, Any]:
        """Where our part has its rows in their tensor, as keyword arguments."""
        return {name: getattr(self, name) for name in ("first_row", "of_rows", "groups")}

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """The shape of their whole tensor."""
        if self.of_turns > 1:
            return (*self.shape[:-1], self.shape[-1] * self.of_turns)
        return self.shape if self.of_rows is None else (self.of_rows, *self.shape[1:])

    def to_ours(self, array: Any) -> Any:
        """From their layout to ours. Raises: ValueError for another shape than theirs."""
        if tuple(array.shape) != self.whole_shape:
            raise ValueError(
                f"tensor {self.name} has shape {tuple(array.shape)}, the config says "
                f"{self.whole_shape}: config.json and the weights are not of the same model"
            )
        if self.of_rows is not None:
            by_group = array.reshape(self.groups, -1, *array.shape[1:])
            rows = self.shape[0] // self.groups
            own = by_group[:, self.first_row : self.first_row + rows]
            array = own.reshape(self.shape)
        if self.of_turns > 1:
            array = array[..., self.turn :: self.of_turns]
        return (array.T if self.transpose else array).reshape(self.our_shape)

    def to_hf(self, array: Any) -> Any:
        """From our layout to theirs; our part of a fused tensor."""
        if not self.transpose:
            return array.reshape(self.shape)
        return array.reshape(self.shape[::-1]).T

    def in_groups(self, arrays: Sequence[Any]) -> Any:
        """Their whole tensor from the parts of its rows, in numpy."""
        parts = [x.reshape(self.groups, -1, *x.shape[1:]) for x in arrays]
        return np.concatenate(parts, axis=1).reshape(self.whole_shape)

    def in_turns(self, arrays: Sequence[Any]) -> Any:
        """Their whole tensor from the array of each turn, in numpy."""
        return np.stack(arrays, axis=-1).reshape(self.whole_shape)

    @property
    def parts(self) -> tuple["HFTensor", ...]:
        """The tensors of a file that make up our parameter."""
        return (self,)

    def joined(self, arrays: Sequence[Any]) -> Any:
        """Our parameter from the parts of it, in our layout."""
        (array,) = arrays
        return array


@dataclass(frozen=True)
class HFStack:
    """One of our parameters whose first dim counts tensors of a checkpoint, one an expert."""

    parts: tuple[HFTensor, ...]

    @property
    def name(self) -> str:
        """The name of the first tensor."""
        return self.parts[0].name

    @property
    def our_shape(self) -> tuple[int, ...]:
        return (len(self.parts), *self.parts[0].our_shape)

    def joined(self, arrays: Sequence[Any]) -> Any:
        """Our parameter from the parts of it, in our layout."""
        return np.stack(arrays)


Names = dict[Path, HFTensor | HFStack]
NORMS = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}


def hf_names(config: ModelConfig, kind: Kind, *, norms: Mapping[str, str] = NORMS) -> Names:
    """The Hugging Face tensor of each parameter path, for a Llama-like layout.

    `norms` has their name of each norm of a layer. A tied model has no head, so it has no
    `lm_head.weight`.
    """
    D, F, V = config.hidden_size, config.intermediate_size, config.vocab_size
    names: Names = {
        ("decoder", "embed", "table"): HFTensor("model.embed_tokens.weight", (V, D), (V, D)),
        ("decoder", "norm", "scale"): HFTensor("model.norm.weight", (D,), (D,)),
    }
    for i in range(config.num_layers):
        layer, prefix = ("decoder", "layers", str(i)), f"model.layers.{i}"
        for ours, theirs in norms.items():
            names[*layer, ours, "scale"] = HFTensor(f"{prefix}.{theirs}.weight", (D,), (D,))
        if (mixture := config.mixture_of(i)) is not None:
            names |= _expert_names(config, mixture, (*layer, "mlp"), prefix)
        else:
            names |= mlp_names((*layer, "mlp"), f"{prefix}.mlp", D, F)
        if config.latent is None and not config.is_linear(i):
            names |= _attention_names(config, (*layer, "attention"), f"{prefix}.self_attn")
    if kind == "scalar":
        names["score", "kernel"] = HFTensor("score.weight", (1, D), (D, 1), transpose=True)
    elif not config.tie_word_embeddings:
        names["head", "table"] = HFTensor("lm_head.weight", (V, D), (V, D))
    return names


def mlp_names(path: Path, prefix: str, hidden: int, inner: int) -> Names:
    """The three projections of an MLP."""
    D, F = hidden, inner
    names: Names = {}
    for name in ("gate", "up"):
        names[*path, name, "kernel"] = HFTensor(
            f"{prefix}.{name}_proj.weight", (F, D), (D, F), transpose=True
        )
    names[*path, "down", "kernel"] = HFTensor(
        f"{prefix}.down_proj.weight", (D, F), (F, D), transpose=True
    )
    return names


# Where a file keeps the experts of a layer: the module, and the names of gate, up and down.
_EXPERTS = {"mixtral": ("block_sparse_moe", ("w1", "w3", "w2"))}
_USUAL_EXPERTS = ("mlp", ("gate_proj", "up_proj", "down_proj"))


def _expert_names(config: ModelConfig, mixture: Mixture, path: Path, layer: str) -> Names:
    """The router and the stacked experts. Files have a tensor for each projection and expert."""
    D, F, E = config.hidden_size, mixture.expert_size, mixture.num_experts
    module, theirs = _EXPERTS.get(config.family, _USUAL_EXPERTS)
    prefix = f"{layer}.{module}"
    names: Names = {
        (*path, "router", "kernel"): HFTensor(f"{prefix}.gate.weight", (E, D), (D, E), True)
    }
    for ours, name in zip(("gate", "up", "down"), theirs, strict=True):
        inputs, outputs = (F, D) if ours == "down" else (D, F)
        names[*path, ours, "kernel"] = HFStack(
            tuple(
                HFTensor(
                    f"{prefix}.experts.{e}.{name}.weight",
                    (outputs, inputs),
                    (inputs, outputs),
                    transpose=True,
                )
                for e in range(E)
            )
        )
    return names


def _attention_names(config: ModelConfig, path: Path, prefix: str) -> Names:
    D, H = config.hidden_size, config.head_dim
    names: Names = {}
    for name, heads in (
        ("q", config.num_heads),
        ("k", config.num_kv_heads),
        ("v", config.num_kv_heads),
    ):
        # A gated query's projection has its gate, too, behind it in each head.
        size = 2 * H if name == "q" and config.attention_gate else H
        names[*path, name, "kernel"] = HFTensor(
            f"{prefix}.{name}_proj.weight", (heads * size, D), (D, heads, size), transpose=True
        )
        if config.attention_bias:
            names[*path, name, "bias"] = HFTensor(
                f"{prefix}.{name}_proj.bias", (heads * H,), (heads, H)
            )
    N = config.num_heads
    names[*path, "o", "kernel"] = HFTensor(
        f"{prefix}.o_proj.weight", (D, N * H), (N, H, D), transpose=True
    )
    if config.attention_out_bias:
        names[*path, "o", "bias"] = HFTensor(f"{prefix}.o_proj.bias", (D,), (D,))
    if config.attention_sinks:
        names[*path, "sinks"] = HFTensor(f"{prefix}.sinks", (N,), (N,))
    for name, heads in (("q_norm", N), ("k_norm", config.num_kv_heads)) if config.qk_norm else ():
        theirs, ours = ((heads * H,), (heads, H)) if config.qk_norm_whole else ((H,), (H,))
        names[*path, name, "scale"] = HFTensor(f"{prefix}.{name}.weight", theirs, ours)
    return names


def fused(names: Names, **parts: tuple[str, ...]) -> Names:
    """The names with fused projections: `gate_up_proj=("gate", "up")` holds both, in that order."""
    renamed = dict(names)
    for name, own in parts.items():
        for path in [path for path in names if path[-2:] == (own[0], "kernel")]:
            paths = [(*path[:-2], part, "kernel") for part in own]
            tensors = [tensor for each in paths for tensor in names[each].parts]
            rows = [tensor.shape[0] for tensor in tensors]
            for i, (each, tensor) in enumerate(zip(paths, tensors, strict=True)):
                theirs = tensor.name.replace(f"{own[i]}_proj", name)
                renamed[each] = replace(
                    tensor, name=theirs, first_row=sum(rows[:i]), of_rows=sum(rows)
                )
    return renamed


@dataclass(frozen=True, slots=True)
class StoredPart:
    """One of our parameters that a tensor of theirs holds, or a part of one."""

    path: Path
    index: int  # number of the expert; 0 where the tensor holds the whole parameter
    tensor: HFTensor


def stored_parts(names: Mapping[Path, HFTensor | HFStack]) -> dict[str, list[StoredPart]]:
    """The parameters of each tensor of theirs, in the order of their rows or columns."""
    parts_of: dict[str, list[StoredPart]] = {}
    for path, ours in names.items():
        for index, tensor in enumerate(ours.parts):
            parts_of.setdefault(tensor.name, []).append(StoredPart(path, index, tensor))
    return {
        name: sorted(parts, key=lambda part: (part.tensor.first_row, part.tensor.turn))
        for name, parts in parts_of.items()
    }


def whole_tensor(parts: Sequence[StoredPart], arrays: Sequence[Any]) -> Any:
    """A tensor of theirs from `HFTensor.to_hf` of each part of it, in numpy."""
    if len(arrays) == 1:
        return arrays[0]
    tensor = parts[0].tensor
    if tensor.of_turns > 1:
        return tensor.in_turns(arrays)
    return tensor.in_groups(arrays)


def common_from_hf(hf: Mapping[str, Any], family: str, **defaults: Any) -> dict[str, Any]:
    """The ModelConfig fields that all families read in the same way, as keyword arguments.

    `defaults` holds the family's values of optional keys, under their Hugging Face names. A
    config.json omits keys that equal them.

    Raises: ValueError for a missing size, or a feature that no family here has.
    """
    refuse_unless(hf, family, hidden_act="silu", quantization_config=None)
    for key in ("vocab_size", "hidden_size", "intermediate_size"):
        require(hf, key, family)
    heads = require(hf, "num_attention_heads", family)
    kv_heads = hf.get("num_key_value_heads", defaults.get("num_key_value_heads")) or heads
    head_dim = hf.get("head_dim", defaults.get("head_dim")) or hf["hidden_size"] // heads
    positions = "max_position_embeddings"
    max_positions = value_of(hf, positions, defaults[positions])
    rotary_factor = 1.0
    if "partial_rotary_factor" in defaults:
        rotary_factor = _partial_rotary(hf) or defaults["partial_rotary_factor"]
    elif (factor := _partial_rotary(hf) or 1.0) != 1.0:
        raise ValueError(f"partial_rotary_factor {factor} is not supported: only 1.0 is")
    theta, scaling = rope_from_hf(hf, max_positions, defaults.get("rope_theta", 10000.0))
    return {
        "family": family,
        "vocab_size": hf["vocab_size"],
        "hidden_size": hf["hidden_size"],
        "intermediate_size": hf["intermediate_size"],
        "num_layers": require(hf, "num_hidden_layers", family),
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
        "rope_theta": theta,
        "rope_scaling": scaling,
        "rotary_factor": float(rotary_factor),
        "rms_norm_eps": float(value_of(hf, "rms_norm_eps", defaults.get("rms_norm_eps", 1e-6))),
        "tie_word_embeddings": bool(
            hf.get("tie_word_embeddings", defaults.get("tie_word_embeddings", False))
        ),
        "max_position_embeddings": max_positions,
        "initializer_range": float(value_of(hf, "initializer_range", 0.02)),
    }


def common_to_hf(config: ModelConfig, kind: Kind, architectures: Mapping[Kind, str]) -> dict:
    """The keys of config.json that all families write in the same way."""
    hf = {
        "architectures": [architectures[kind]],
        "model_type": config.family,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "tie_word_embeddings": config.tie_word_embeddings,
        "initializer_range": config.initializer_range,
        "attention_dropout": 0.0,
        "use_cache": True,
        **rope_to_hf(config),
    }
    if kind == "scalar":
        # One label makes transformers build a head with one output, like ours.
        hf |= {
            "id2label": {"0": "LABEL_0"},
            "label2id": {"LABEL_0": 0},
            "problem_type": "regression",
        }
    return hf


def _rope_keys(hf: Mapping[str, Any]) -> Any:
    # As in transformers, a legacy rope_scaling has precedence over rope_parameters.
    return hf.get("rope_scaling") or hf.get("rope_parameters") or {}


def _partial_rotary(hf: Mapping[str, Any]) -> float | None:
    """The share of a head that rope rotates, if the config gives one."""
    rope, key = _rope_keys(hf), "partial_rotary_factor"
    factor = (rope.get(key) if isinstance(rope, Mapping) else None) or hf.get(key)
    return None if factor is None else positive({key: factor}, key, 1.0)


def positive(hf: Mapping[str, Any], key: str, default: float) -> Any:
    """The number of a key; null counts as absent. Raises: ValueError if it is not positive."""
    value = value_of(hf, key, default)
    if not is_positive(value):
        raise ValueError(f"config.json has {key}={value!r}: give a positive number")
    return value


def entries(hf: Mapping[str, Any], key: str, kind: type, default: Any) -> Any:
    """The list or the map of a key. Raises: ValueError for a value of another type."""
    value = hf.get(key) or default
    if not isinstance(value, kind):
        raise ValueError(f"config.json has {key}={value!r}: give a {kind.__name__}")
    return value


def rope_from_hf(
    hf: Mapping[str, Any], max_positions: int, default_theta: float = 10000.0
) -> tuple[float, RopeScaling | None]:
    """Theta and scaling from `rope_parameters` (transformers 5) or `rope_theta`/`rope_scaling`.

    Raises: ValueError for a rope type that is not implemented, and for a bad or missing value.
    """
    rope = _rope_keys(hf)
    if not isinstance(rope, Mapping):
        raise ValueError(f"rope parameters are {rope!r}: give a table of keys and values")
    if any(isinstance(value, Mapping) for value in rope.values()):
        raise ValueError(
            f"rope parameters by layer type ({', '.join(rope)}) are not supported: "
            "one set for all layers is"
        )
    theta = rope.get("rope_theta") or hf.get("rope_theta") or default_theta
    if not is_positive(theta):
        raise ValueError(f"config.json has rope_theta={theta!r}: give a positive number")
    theta = float(theta)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return theta, None
    if not isinstance(kind, str) or kind not in ROPE_KINDS:
        raise ValueError(
            f"rope type {kind!r} is not supported (supported: default, {', '.join(ROPE_KINDS)})"
        )
    return theta, _scaling_from_hf(ROPE_KINDS[kind], rope, hf, max_positions)


def _scaling_from_hf(
    scaling: type[RopeScaling], rope: Mapping[str, Any], hf: Mapping[str, Any], max_positions: int
) -> RopeScaling:
    """The scaling with transformers' values for absent keys. A null value counts as absent."""
    values = {field.name: rope.get(field.name) for field in fields(scaling)}
    key = "original_max_position_embeddings"
    if key in values:
        # Phi-3's configs have this key outside, where transformers gives it precedence.
        lengths = (hf.get(key), values[key], max_positions)
        original = values[key] = next(length for length in lengths if length is not None)
        if not is_positive(original):
            raise ValueError(f"config.json has {key}={original!r}: give a positive number")
        if scaling.kind in ("yarn", "longrope") and values["factor"] is None:
            values["factor"] = max_positions / original
    present: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value
        for key, value in values.items()
        if value is not None
    }
    if missing := [key for key in scaling.required() if key not in present]:
        raise ValueError(
            f"config.json has rope type {scaling.kind!r} without {', '.join(missing)}: add it"
        )
    return scaling(**present)


def rope_to_hf(config: ModelConfig) -> dict[str, Any]:
    """`rope_parameters` for transformers 5, and the two older keys for other readers."""
    scaling = config.rope_scaling
    described: dict[str, Any] = {"rope_type": "default"}
    if scaling is not None:
        described = {"rope_type": scaling.kind}
        for field in fields(scaling):
            value = getattr(scaling, field.name)
            if value is not None:
                described[field.name] = list(value) if isinstance(value, tuple) else value
    partial: dict[str, Any] = {}
    if config.rotary_factor != 1.0:
        partial = {"partial_rotary_factor": config.rotary_factor}
    described |= partial
    return {
        "rope_theta": config.rope_theta,
        **partial,
        "rope_scaling": None if scaling is None else dict(described),
        "rope_parameters": {**described, "rope_theta": config.rope_theta},
    }


def windows_from_hf(hf: Mapping[str, Any], num_layers: int) -> tuple[int | None, ...]:
    """Qwen's window of each layer, from `layer_types`, or else from `max_window_layers`.

    `sliding_window` has an effect only with `use_sliding_window`.

    Raises: ValueError for a layer type that is not supported.
    """
    window = hf.get("sliding_window", 4096) if hf.get("use_sliding_window", False) else None
    first = hf.get("max_window_layers", 28)
    types = hf.get("layer_types") or [
        "sliding_attention" if window is not None and i >= first else "full_attention"
        for i in range(num_layers)
    ]
    known = ("full_attention", "sliding_attention")
    if unknown := sorted(set(types) - set(known)):
        raise ValueError(f"layer types {', '.join(unknown)} are not supported: {known} are")
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def windows_to_hf(config: ModelConfig) -> dict[str, Any]:
    """Qwen's four window keys."""
    window = single_window(config)
    windowed = [i for i, size in enumerate(config.sliding_window) if size is not None]
    return {
        "use_sliding_window": window is not None,
        "sliding_window": window,
        "max_window_layers": min(windowed, default=config.num_layers),
        "layer_types": [
            "full_attention" if size is None else "sliding_attention"
            for size in config.sliding_window
        ],
    }


FULL, LOCAL = "full_attention", "sliding_attention"  # transformers' layer types


def by_layer_type_from_hf(
    hf: Mapping[str, Any], family: str, **defaults: Any
) -> tuple[dict[str, Any], float, tuple[int | None, ...]]:
    """Keys with the rope of full attention, theta of layers with a window, and the windows.

    `defaults` holds the family's `sliding_window` and `sliding_window_pattern`.

    Raises: ValueError for a scaled rope of layers with a window.
    """
    both = entries(hf, "rope_parameters", dict, {})
    if other := sorted(both.keys() - {FULL, LOCAL}):
        raise ValueError(
            f"{family} has rope_parameters by type of layer ({FULL}, {LOCAL}), not {other[0]!r}"
        )
    local = entries(both, LOCAL, dict, {})
    refuse_unless(local, f"{family} with a window", rope_type="default")
    theta = positive(local, "rope_theta", positive(hf, "rope_local_base_freq", 10000.0))
    rope = entries(both, FULL, dict, {}) | entries(hf, "rope_scaling", dict, {})
    period = positive(hf, "sliding_window_pattern", defaults["sliding_window_pattern"])
    layers = require(hf, "num_hidden_layers", family)
    types = hf.get("layer_types") or [LOCAL if (i + 1) % period else FULL for i in range(layers)]
    window = hf.get("sliding_window", defaults["sliding_window"])
    keys = {"use_sliding_window": True, "sliding_window": window, "layer_types": types}
    whole = {**hf, "rope_scaling": None, "rope_parameters": rope}
    return whole, float(theta), windows_from_hf(keys, layers)


def by_layer_type_to_hf(config: ModelConfig) -> dict[str, Any]:
    """The keys of `by_layer_type_from_hf`."""
    theta = config.local_rope_theta
    local = {"rope_type": "default", "rope_theta": theta}
    return {
        "rope_local_base_freq": theta,
        "rope_parameters": {FULL: rope_to_hf(config)["rope_parameters"], LOCAL: local},
        **layer_types_to_hf(config),
    }


def layer_types_to_hf(config: ModelConfig) -> dict[str, Any]:
    """The window and the type of each layer, of families whose layers differ by default.

    transformers makes a mask of their window even where no layer has one, and refuses null.
    """
    windows = windows_to_hf(config)
    size = windows["sliding_window"] or config.max_position_embeddings
    return {"sliding_window": size, "layer_types": windows["layer_types"]}


def single_window(config: ModelConfig) -> int | None:
    """The size of all windows, which is one; None without windows."""
    return next((size for size in config.sliding_window if size is not None), None)


def linear_names(path: Path, name: str, inputs: tuple[int, ...], outputs: tuple[int, ...]) -> Names:
    """The kernel and the bias of a linear layer of theirs, as a projection of ours."""
    rows, columns = math.prod(outputs), math.prod(inputs)
    kernel = HFTensor(f"{name}.weight", (rows, columns), (*inputs, *outputs), True)
    return {
        (*path, "kernel"): kernel,
        (*path, "bias"): HFTensor(f"{name}.bias", (rows,), outputs),
    }


def refuse_unless(hf: Mapping[str, Any], family: str, **allowed: Any) -> None:
    """Raises: ValueError that names a key with another value than the implemented one."""
    for key, value in allowed.items():
        if key in hf and hf[key] is not None and hf[key] != value:
            raise ValueError(f"{family} with {key}={hf[key]!r} is not supported: only {value!r} is")


# The features of few families, with the values of the others.
FEW = {
    name: ModelConfig.__dataclass_fields__[name].default
    for name in (
        "mixture", "norms", "unit_offset", "qk_norm_whole", "activation", "rope_layers",
        "rotary_factor", "interleaved_rope", "local_rope_theta", "attention_multiplier",
        "attention_softcap", "logits_softcap", "embedding_multiplier", "residual_multiplier",
        "logits_scaling", "attention_out_bias", "attention_sinks", "expert_bias", "swiglu_limit",
        "latent", "attention_gate", "delta", "vision",
    )
}  # fmt: skip


def few_features(config: ModelConfig) -> list[str]:
    """The fields of `FEW` that this model uses."""
    return [name for name, usual in FEW.items() if getattr(config, name) != usual]


def mixture_from_hf(
    hf: Mapping[str, Any], family: str, *, experts: str, size: str, normalized: bool
) -> Mixture:
    """The experts of every layer; `experts` and `size` are the family's keys.

    Raises: ValueError for a missing key.
    """
    return Mixture(
        num_experts=require(hf, experts, family),
        experts_per_token=require(hf, "num_experts_per_tok", family),
        expert_size=require(hf, size, family),
        normalized=normalized,
    )


def mixture_of(config: ModelConfig) -> Mixture:
    """The experts of a family that always has some."""
    assert config.mixture is not None
    return config.mixture


def value_of(hf: Mapping[str, Any], key: str, default: Any) -> Any:
    """The value of a key. A null value counts as absent, as in transformers."""
    value = hf.get(key)
    return default if value is None else value


def require(hf: Mapping[str, Any], key: str, family: str) -> Any:
    """The value of a key. Raises: ValueError where there is none."""
    if hf.get(key) is None:
        raise ValueError(f"config.json of a {family} model lacks {key}: take a complete one")
    return hf[key]
