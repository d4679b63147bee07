"""Adapters in PEFT's files: adapter_config.json and adapter_model.safetensors, both ways."""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.checkpoint.digests import text_digest
from jaxrl_llm.checkpoint.safetensors_files import (
    LazyTensor,
    StoredTensor,
    float_dtype,
    metadata_of,
    read_tensors,
    stored_in,
    write_safetensors,
)
from jaxrl_llm.config import ConfigError
from jaxrl_llm.distributed import multihost
from jaxrl_llm.models.base import ModelSpec, Params
from jaxrl_llm.models.config import Kind, ModelConfig
from jaxrl_llm.models.families import hf_names
from jaxrl_llm.models.hf import HFStack, HFTensor, Names, StoredPart, stored_parts, whole_tensor
from jaxrl_llm.models.lora import ADAPTER, HEAD, MAGNITUDE, Lora
from jaxrl_llm.models.lora_targets import is_stack

__all__ = [
    "CONFIG",
    "WEIGHTS",
    "adapter_tensors",
    "base_of_adapter",
    "base_embeddings",
    "export_adapter",
    "import_adapter",
    "is_ours",
    "lost_by_peft",
    "read_lora",
]

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
BASE_WEIGHT = ".base_layer.weight"  # PEFT writes it for adapted embeddings and heads
BASE_FORM, BASE_BITS = "base_form", "base_bits"  # digests in the header of WEIGHTS
TASKS: dict[Kind, str] = {"causal_lm": "CAUSAL_LM", "scalar": "SEQ_CLS"}
_LINEAR = {"a": ".lora_A.weight", "b": ".lora_B.weight", MAGNITUDE: ".lora_magnitude_vector"}
_TABLE = {"a": ".lora_embedding_A", "b": ".lora_embedding_B"}  # an embedding's
# Keys that change the function of an adapter, and the values that ours has.
_PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "fan_in_fan_out": (False, None),
    "lora_bias": (False, None),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "layer_replication": (None,),
    "trainable_token_indices": (None,),
    "use_qalora": (False, None),
    "use_bdlora": (False, None),
    "alora_invocation_tokens": (None,),
    # Other ways to begin change the base's weights too.
    "init_lora_weights": (True, False, None, "gaussian", "eva", "orthogonal"),
}

Leaf = tuple[str, ...]  # path of a parameter
_LOST_EXPERTS = ("qwen3_5_moe_text",)  # families whose experts PEFT 0.21.2 does not join
# PEFT nests the module of `gate_up_proj` inside the module of `down_proj`.
_STACKS, _INNER = ("gate_up_proj", "down_proj"), ".base_layer"


@dataclass(frozen=True, slots=True)
class OfStack(HFTensor):
    """A or B of one tensor for all experts of a layer, as PEFT's `ParamWrapper` has them.

    Ours are [experts, inputs, rank] and [experts, rank, outputs]. Theirs are
    [experts * rank, inputs] and [outputs, rank * experts]; outputs of several of ours take turns.
    """

    is_a: bool = False

    @property
    def whole_shape(self) -> tuple[int, ...]:
        return (self.shape[0] * self.of_turns, *self.shape[1:])

    def to_ours(self, array: Any) -> Any:
        E, *matrix = self.our_shape
        if self.is_a:
            return array.reshape(E, *matrix[::-1]).swapaxes(1, 2)
        return array[self.turn :: self.of_turns].reshape(-1, matrix[0], E).T

    def to_hf(self, array: Any) -> Any:
        return (array.swapaxes(1, 2) if self.is_a else array.T).reshape(self.shape)

    def in_turns(self, arrays: Sequence[Any]) -> Any:
        return np.stack(arrays, axis=1).reshape(self.whole_shape)


def adapter_tensors(spec: ModelSpec) -> Names:
    """PEFT's tensors of each parameter of `spec` that learns: one of each expert in a stack.

    Parts of a tensor share A, and have parts of its B.
    """
    names = hf_names(spec.config, spec.kind)
    assert spec.lora is not None
    modules = spec.lora.modules
    tensors: Names = {}
    for path, leaf in _leaves(spec.learned):
        if path[0] == HEAD:
            (theirs,) = names[path].parts
            tensors[path] = HFTensor(PREFIX + theirs.name, theirs.shape, leaf.shape, transpose=True)
            continue
        assert path[-2] == ADAPTER, path
        weights = next(p for end in ("kernel", "table") if (p := (*path[:-2], end)) in names)
        suffixes = _TABLE if weights == ("decoder", "embed", "table") else _LINEAR
        stacked = isinstance(names[weights], HFStack)
        (whole, *_) = names[weights].parts
        if is_stack(whole.name):
            tensors[path] = _of_stack(path[-1], whole, leaf.shape, modules)
            continue
        shape = leaf.shape[1:] if stacked else leaf.shape
        rows = {} if path[-1] == "a" else whole.rows
        parts = tuple(
            HFTensor(
                PREFIX + tensor.name.removesuffix(".weight") + suffixes[path[-1]],
                _their_shape(path[-1], shape),
                shape,
                transpose=path[-1] != MAGNITUDE,
                **rows,
            )
            for tensor in names[weights].parts
        )
        tensors[path] = HFStack(parts) if stacked else parts[0]
    return tensors


def _of_stack(
    leaf: str, tensor: HFTensor, shape: tuple[int, ...], modules: frozenset[str]
) -> OfStack:
    """The tensor of A or B of all experts of a layer."""
    experts, _, own = tensor.name.rpartition(".")
    inner = own != _STACKS[-1] and f"{experts}.{_STACKS[-1]}" in modules
    name = PREFIX + experts + (_INNER if inner else "") + _LINEAR[leaf]
    E, first, second = shape
    if leaf == "a":
        return OfStack(name, (E * second, first), shape, is_a=True)
    theirs = (second, first * E)
    return OfStack(name, theirs, shape, turn=tensor.turn, of_turns=tensor.of_turns)


def _their_shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a tensor of theirs: transposed, with joined inputs or outputs."""
    if name == "a":
        return shape[-1], math.prod(shape[:-1])
    if name == "b":
        return math.prod(shape[1:]), shape[0]
    return (math.prod(shape),)


# ------------------------------------------------------------------------- write


def export_adapter(
    directory: str | Path,
    spec: ModelSpec,
    own: Params,
    *,
    base: str,
    base_digests: Mapping[str, str] | None = None,
    dtype: str | None = None,
) -> Path:
    """Write the adapters that `PeftModel.from_pretrained(base_model, DIR)` reads.

    `base` is the path or the hub name of the base, as adapter_config.json keeps it. Where the
    digests of its arrays are given, `base_of_adapter` reads what they say. Returns the directory.

    Requires: all processes call this. Process 0 writes.
    Raises: ConfigError for an adapter that PEFT would lose or not open.
    """
    directory, lora = Path(directory), spec.lora
    assert lora is not None
    if halves := _lone_halves(spec.config, spec.kind, lora.modules):
        raise ConfigError(
            f"PEFT joins gate and up of experts, and {halves[0]} has an adapter without the other. "
            "Write the merged model, without --adapter"
        )
    if lost := lost_by_peft(spec.config, spec.kind, lora.modules):
        raise ConfigError(
            f"PEFT loses the adapter of {lost[0]}: with transformers 5 it takes each module of "
            "that name for one of the experts. Write the merged model, without --adapter"
        )

    if lora.adapts_experts and spec.config.family in _LOST_EXPERTS:
        raise ConfigError(
            f"PEFT loses adapters of experts of {spec.config.family}: it has no rule that joins "
            "them. Write the merged model, without --adapter"
        )

    @lru_cache(maxsize=1)  # the experts of a stack follow each other
    def fetched(path: Leaf) -> np.ndarray:
        value = own
        for part in path:
            value = value[part]
        return np.asarray(multihost.fetch(value))

    names = adapter_tensors(spec)

    def part_of(part: StoredPart) -> np.ndarray:
        value = fetched(part.path)
        stacked = isinstance(names[part.path], HFStack)
        return part.tensor.to_hf(value[part.index] if stacked else value)

    def lazy(name: str, parts: list[StoredPart]) -> LazyTensor:
        def fetch() -> np.ndarray:
            return whole_tensor(parts, [part_of(part) for part in parts])

        return LazyTensor(name, parts[0].tensor.whole_shape, fetch)

    tensors = [lazy(name, parts) for name, parts in stored_parts(names).items()]
    if multihost.is_main():
        directory.mkdir(parents=True, exist_ok=True)
        mark = mark_of(base_digests) if base_digests else {}
        write_safetensors(directory / WEIGHTS, tensors, float_dtype(dtype or lora.dtype), mark)
        text = json.dumps(peft_config(spec, base), indent=2)
        (directory / CONFIG).write_text(text + "\n")
    else:
        for tensor in tensors:
            tensor.fetch()  # fetching from several processes is a collective
    multihost.barrier(f"export {directory}")
    return directory


def lost_by_peft(config: ModelConfig, kind: Kind, modules: Iterable[str]) -> list[str]:
    """The modules that PEFT 0.21 takes for experts by their end, and that are not experts.

    They are in dense layers and in shared experts.
    """
    names = hf_names(config, kind).values()
    experts = {_module(each.name) for each in names if isinstance(each, HFStack)}
    ends = {module.rpartition(".")[2] for module in experts}
    return sorted(m for m in modules if m not in experts and m.rpartition(".")[2] in ends)


def _lone_halves(config: ModelConfig, kind: Kind, modules: frozenset[str]) -> list[str]:
    """Gates and ups of experts among `modules` whose counterpart is not."""
    pairs: dict[Leaf, set[str]] = {}
    for path, ours in hf_names(config, kind).items():
        if isinstance(ours, HFStack) and path[-2] in ("gate", "up"):
            pairs.setdefault(path[:-2], set()).add(_module(ours.name))
    return [min(alone) for pair in pairs.values() if len(alone := pair & modules) == 1]


def peft_config(spec: ModelSpec, base: str) -> dict[str, Any]:
    """The content of adapter_config.json."""
    lora = spec.lora
    assert lora is not None
    if lora.adapts_experts:  # PEFT joins gate and up with twice the rank, so not by its root
        lora = replace(lora, rslora=False, alpha=lora.scale * lora.rank)
    modules = set(_every_module(spec.config, spec.kind, lora.modules))
    return {
        "peft_type": "LORA",
        "task_type": TASKS[spec.kind],
        "base_model_name_or_path": base or None,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "target_modules": sorted(m for m in modules if not is_stack(m)),
        "target_parameters": sorted(filter(is_stack, modules)),
        "modules_to_save": [HEAD] if spec.kind == "scalar" else None,
        "use_rslora": lora.rslora,
        "use_dora": lora.dora,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }


def _every_module(config: ModelConfig, kind: Kind, modules: Iterable[str]) -> Iterator[str]:
    """PEFT's names of modules: all experts where ours has the first one."""
    of_stacks = {
        _module(ours.name): [_module(each.name) for each in ours.parts]
        for ours in hf_names(config, kind).values()
    }
    for module in modules:
        yield from of_stacks[module]


def _module(tensor: str) -> str:
    return tensor.removesuffix(".weight")


# ------------------------------------------------------------------------- read


def read_lora(
    directory: str | Path, config: ModelConfig, kind: Kind, *, dtype: str, dropout: float
) -> Lora:
    """The adapters that a PEFT directory describes; reads no weights.

    Raises: ConfigError for files that are missing, and for what ours cannot do; names the key.
    """
    directory = Path(directory)
    theirs = _read_config(directory)
    stored = _stored(directory)
    known = {  # no norms, and no convolution of a gated delta rule
        _module(ours.name)
        for path, ours in hf_names(config, kind).items()
        if path[-1] in ("kernel", "table") and "router" not in path
    }
    stacks = theirs.get("target_parameters") or []
    if stacks and not any(map(is_stack, known)):
        raise ConfigError(f"{directory / CONFIG} has target_parameters={stacks}: {_SINGLE}")
    named = {_module_of(name) for name in stored if not _is_head(name)}
    modules = {_our_module(name, named, stacks) for name in named}
    chosen = modules & known
    every = set(_every_module(config, kind, chosen))
    if missing := sorted(every - modules):
        raise ConfigError(
            f"{directory} has no adapter of {missing[0]}, and has one of another expert of that "
            "layer; experts have adapters together"
        )
    strange = sorted(modules - every)
    if strange:
        raise ConfigError(
            f"{directory} has an adapter of {strange[0]}, which this model does not have, or which "
            "has no adapters here, as routers and convolutions. Give another adapter, or merge it "
            "into the model with PEFT first"
        )
    return Lora(
        rank=theirs["r"],
        alpha=theirs["lora_alpha"],
        modules=frozenset(chosen),
        rslora=bool(theirs.get("use_rslora")),
        dora=bool(theirs.get("use_dora")),
        dropout=dropout,
        dtype=dtype,
    )


_SINGLE = (
    "the experts of this model are single modules in its files; merge the adapter into the model "
    "with PEFT first"
)


def _our_module(name: str, named: set[str], parameters: Sequence[str]) -> str:
    """The tensor of experts that PEFT's name of a module stands for; other names stay."""
    if name.endswith(_INNER):
        return f"{name.removesuffix(_INNER)}.{_STACKS[0]}"
    if not name.endswith(".experts"):
        return name
    ends = {parameter.rpartition(".")[2] for parameter in parameters}
    alone = name + _INNER not in named and _STACKS[1] not in ends
    return f"{name}.{_STACKS[0] if alone else _STACKS[1]}"


def mark_of(base_digests: Mapping[str, str]) -> dict[str, str]:
    """The marks of a base in a file of adapters: digests of shapes and dtypes, and of bits."""
    forms = {path: digest.partition(" ")[0] for path, digest in base_digests.items()}
    return {BASE_FORM: text_digest(forms), BASE_BITS: text_digest(dict(base_digests))}


def base_of_adapter(directory: str | Path) -> tuple[str, dict[str, str]]:
    """The name of the base, and its mark if an export of ours wrote it; both may be empty."""
    theirs = _read_config(Path(directory))
    metadata = metadata_of(Path(directory) / WEIGHTS)
    mark = {key: metadata[key] for key in (BASE_FORM, BASE_BITS) if key in metadata}
    return theirs.get("base_model_name_or_path") or "", mark


def is_ours(directory: str | Path) -> bool:
    """True if the weights of a PEFT directory are of an export of ours."""
    try:
        return BASE_FORM in metadata_of(Path(directory) / WEIGHTS)
    except (OSError, ValueError):  # no such file, or another one under its name
        return False


def import_adapter(directory: str | Path, spec: ModelSpec, shardings: Any = None) -> Params:
    """The parameters of `spec` that learn, of a PEFT directory, in their dtype.

    Raises: ConfigError for a tensor that is missing, has another shape, or would not be read.
    """
    directory, stored = Path(directory), _stored(Path(directory))
    ours = adapter_tensors(spec)
    wanted = stored_parts(ours)
    _check_tensors(directory, spec, stored, wanted)
    read: dict[Leaf, dict[int, Any]] = {}
    for name, value in read_tensors([stored[name] for name in wanted]):
        for part in wanted[name]:
            read.setdefault(part.path, {})[part.index] = part.tensor.to_ours(value)
    params: Params = {}
    for path, each in ours.items():
        node = params
        for part in path[:-1]:
            node = node.setdefault(part, {})
        parts = read.pop(path)
        node[path[-1]] = each.joined([parts[i] for i in range(len(each.parts))])

    def place(abstract: Any, value: Any) -> jax.Array:
        return jnp.asarray(value, abstract.dtype)

    placed = jax.tree.map(place, spec.learned, params)
    return placed if shardings is None else jax.device_put(placed, shardings)


def check_adapter(directory: str | Path, spec: ModelSpec) -> None:
    """Raises what `import_adapter` raises before it reads a tensor. Reads headers only."""
    directory = Path(directory)
    _check_tensors(directory, spec, _stored(directory), stored_parts(adapter_tensors(spec)))


def _check_tensors(
    directory: Path,
    spec: ModelSpec,
    stored: Mapping[str, StoredTensor],
    wanted: Mapping[str, Sequence[StoredPart]],
) -> None:
    for name, parts in wanted.items():
        shape = parts[0].tensor.whole_shape
        if name not in stored or stored[name].shape != shape:
            has = "no such tensor" if name not in stored else f"shape {stored[name].shape}"
            raise ConfigError(
                f"{directory / WEIGHTS} has {has} for {name}, and the model wants "
                f"{shape}; give the adapter of this model"
            )
    if unread := sorted(name for name in stored if name not in wanted and not _is_head(name)):
        raise ConfigError(
            f"{directory / WEIGHTS} has {unread[0]}, which {CONFIG} does not ask for (its use_dora "
            f"is {spec.lora is not None and spec.lora.dora}); save the adapter again"
        )


def _read_config(directory: Path) -> dict[str, Any]:
    path = directory / CONFIG
    try:
        theirs = json.loads(path.read_text())
        rank, alpha = int(theirs["r"]), float(theirs["lora_alpha"])
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is no adapter's config ({error!r}); save it again") from None
    if rank < 1 or not 0 < alpha < math.inf:
        raise ConfigError(
            f"{path} has r={rank} and lora_alpha={alpha}; both are positive and finite"
        )
    for key, plain in _PLAIN.items():
        if key in theirs and theirs[key] not in plain:
            raise ConfigError(f"{path} has {key}={theirs[key]}, which is not supported")
    return theirs | {"r": rank, "lora_alpha": alpha}


def _stored(directory: Path) -> Mapping[str, StoredTensor]:
    """The tensors of adapters, without the weights of embeddings that PEFT adds."""
    tensors = stored_in([directory / WEIGHTS])
    return {name: tensor for name, tensor in tensors.items() if not name.endswith(BASE_WEIGHT)}


def base_embeddings(directory: str | Path, spec: ModelSpec) -> dict[Leaf, np.ndarray]:
    """The weights of adapted embeddings that PEFT wrote with the adapter, by our paths.

    They are the base's, unless the vocabulary was changed.
    """
    stored = stored_in([Path(directory) / WEIGHTS])
    paths = {
        f"{PREFIX}{_module(ours.name)}{BASE_WEIGHT}": (path, ours.parts[0])
        for path, ours in hf_names(spec.config, spec.kind).items()
    }
    stored_bases = [tensor for name, tensor in stored.items() if name in paths]
    return {
        paths[name][0]: paths[name][1].to_ours(value) for name, value in read_tensors(stored_bases)
    }


def _is_head(name: str) -> bool:
    return name == f"{PREFIX}{HEAD}.weight"


def _module_of(name: str) -> str:
    """The module whose adapter a tensor is a part of."""
    for suffix in (*_LINEAR.values(), *_TABLE.values()):
        if name.startswith(PREFIX) and name.endswith(suffix):
            return name.removeprefix(PREFIX).removesuffix(suffix)
    raise ConfigError(f"{name} is no tensor of a LoRA adapter; {CONFIG} may ask for other parts")


def _leaves(tree: Params) -> list[tuple[Leaf, Any]]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [(tuple(entry.key for entry in path), leaf) for path, leaf in leaves]
