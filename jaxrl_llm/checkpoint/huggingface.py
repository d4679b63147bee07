"""Imports and exports Hugging Face directories, without torch.

Import reads one tensor at a time and places it by its sharding, so host memory stays below one
weight file plus the largest tensor. Export fetches one tensor at a time from the devices. The file
of each family in `models/` has the names of its tensors.
"""

import functools
import itertools
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxrl_llm.checkpoint.mxfp4 import MXFP4, read_packed, with_unpacked
from jaxrl_llm.checkpoint.safetensors_files import (
    FORMAT_NAMES,
    LazyTensor,
    StoredTensor,
    float_dtype,
    read_tensors,
    stored_tensors,
    write_model_files,
)
from jaxrl_llm.distributed import multihost
from jaxrl_llm.distributed.sharding import second_array
from jaxrl_llm.models import qwen_vision_files
from jaxrl_llm.models.base import ModelSpec, Params
from jaxrl_llm.models.config import Kind, ModelConfig, QwenVision
from jaxrl_llm.models.config_json import read_config_json
from jaxrl_llm.models.families import (
    config_from_hf,
    find_architecture,
    hf_names,
    ignored_tensor,
    to_hf_config,
)
from jaxrl_llm.models.frozen import KERNEL, SCALE, freeze, inputs_of, is_frozen
from jaxrl_llm.models.hf import Names, StoredPart, stored_parts, whole_tensor
from jaxrl_llm.models.image_files import to_processor, with_processor
from jaxrl_llm.models.image_models import HEAD, image_model_of, stored_names
from jaxrl_llm.references import is_hub_name
from jaxrl_llm.tokenizer import Tokenizer

MAX_SHARD_BYTES = 5_000_000_000
PROCESSOR = "preprocessor_config.json"
_PROCESSOR_FILES = (
    PROCESSOR,
    "processor_config.json",
    "video_preprocessor_config.json",
)
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
)
_VOCABULARY_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")  # one of them is needed
_HUB_PATTERNS = ["*.safetensors", "*.json", "*.jinja", "*.txt", "tokenizer.model"]
CARD_MARK = "\n- jaxrl_llm\n"  # in the card of each export of ours
_COMPARED_ROWS = 1024  # rows of a table that are compared at once
_MOST_NAMED = 4  # tensors in a message
_READABLE = ("F64", "F32", "F16", "BF16", MXFP4)


def model_directory(path: str | Path) -> Path:
    """The directory at `path`, or the downloaded model of that name ("owner/name") on a hub.

    ValueError with the remedy if it is neither.
    """
    directory = Path(path)
    if directory.is_dir():
        return directory
    if not is_hub_name(str(path)):
        raise ValueError(
            f"there is no model directory {str(path)!r}; give a directory with config.json and "
            f"model.safetensors, or the owner/name of a model on a hub"
        )
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(str(path), allow_patterns=_HUB_PATTERNS))
    except (OSError, ValueError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(
            f"{str(path)!r} is no directory, and no such model could be fetched from the hub: "
            f"{reason} Give the path of a model directory on disk."
        ) from error


def load_model_config(directory: str | Path, *, images: bool = False) -> ModelConfig:
    """The ModelConfig of a Hugging Face directory; with `images`, of the whole image model.

    Raises:
        ValueError: config.json is missing, names an architecture or a feature that is not
            supported, or has a NaN, infinite or non-positive number where none can be.
    """
    config = config_from_hf(read_config_json(Path(directory)), images=images)
    if config.vision is None:
        return config
    return replace(config, vision=with_processor(config.vision, _processor_in(Path(directory))))


def _processor_in(directory: Path) -> Mapping[str, Any]:
    """The settings of a folder's image processor, in one of two files; {} without any."""
    if (directory / PROCESSOR).is_file():
        return json.loads((directory / PROCESSOR).read_text())
    whole = directory / "processor_config.json"
    return json.loads(whole.read_text()).get("image_processor", {}) if whole.is_file() else {}


def load_model_kind(directory: str | Path) -> Kind:
    """True if a Hugging Face directory holds a language model or a scalar model."""
    return find_architecture(read_config_json(Path(directory)))[1]


def image_model_in(directory: str | Path) -> str | None:
    """The `model_type` of a folder that holds an image model; None for any other model."""
    return image_model_of(read_config_json(Path(directory)))


def _names_in(directory: Path, spec: ModelSpec, stored: Mapping[str, StoredTensor]) -> Names:
    """The tensor of each parameter as this folder names it."""
    names = hf_names(spec.config, spec.kind)
    half = spec.config.vision is None and image_model_in(directory) is not None
    if isinstance(spec.config.vision, QwenVision):
        return qwen_vision_files.as_stored(names, stored)
    return stored_names(names, stored) if half else names


def import_params(
    directory: str | Path,
    spec: ModelSpec,
    shardings: Any = None,
) -> Params:
    """Parameters of `spec` from a Hugging Face directory, as device arrays.

    `shardings` is a tree of jax.sharding.Sharding with the structure of `spec.params`; None puts
    everything on one device. Values are cast to the dtype of the spec. A scalar model is read from
    a sequence-classification directory with one label, or from a language model, with a head of
    zeros. Of an image model the language half is read.

    Raises:
        ValueError: a tensor is missing, unexpected, misshapen or quantised (checked before any
            weight is read), or holds NaN or infinity.
    """
    directory = Path(directory)
    in_files = stored_tensors(directory)
    stored = with_unpacked(in_files)
    names, wanted = _checked_names(directory, spec, stored)
    if spec.config.tie_word_embeddings and spec.kind == "causal_lm":
        table = names[("decoder", "embed", "table")].parts[0].name
        head = next((stored[name] for name in stored if name.endswith(HEAD)), None)
        _check_tied(directory, stored[table], head)

    placing = _Placing(spec, names, shardings)
    packed = [stored[name] for name in wanted if stored[name].dtype == MXFP4]
    plain = [stored[name] for name in wanted if stored[name].dtype != MXFP4]
    for name, value in itertools.chain(read_tensors(plain), read_packed(packed, in_files)):
        placing.take(wanted[name], value)
        del value  # before the next one is read
    return placing.params()


def placed_params(tree: Mapping[str, Any], spec: ModelSpec, shardings: Any = None) -> Params:
    """Parameters of `spec` from arrays of a program, copied: nested as ours, or by their names.

    Raises: ValueError for arrays that are missing, unexpected or misshapen.
    """
    names = hf_names(spec.config, spec.kind)
    placing = _Placing(spec, names, shardings)
    is_ours = any(isinstance(value, Mapping) for value in tree.values())
    given: dict[str, Any] = _flat(tree) if is_ours else dict(tree)
    wanted: dict[str, Any] = {".".join(path): path for path in names}
    if not is_ours:
        wanted = dict(stored_parts(names))
        given = {k: x for k, x in given.items() if not ignored_tensor(spec.config, spec.kind, k)}
    made = {name for name in wanted if spec.kind == "scalar" and name.startswith("score.")}
    missing = [name for name in wanted if name not in given and name not in made]
    unexpected = [name for name in given if name not in wanted]
    if missing or unexpected:
        raise ValueError(
            f"params are of another model than the config's {spec.config.family} {spec.kind}: "
            f"missing are {_some(missing) or 'none'}, unexpected {_some(unexpected) or 'none'}"
        )
    for name, value in given.items():
        array = np.array(value)  # a copy: a run consumes its weights
        if not is_ours:
            placing.take(wanted[name], array)
            continue
        shape = names[wanted[name]].our_shape
        if array.shape != shape:
            raise ValueError(f"params: {name} has shape {array.shape}, and the model's is {shape}")
        placing.place(wanted[name], array)
    return placing.params()


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The arrays of nested dicts, by their dotted path."""
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        more = isinstance(value, Mapping)
        flat |= _flat(value, f"{prefix}{name}.") if more else {f"{prefix}{name}": value}
    return flat


class _Placing:
    """Parameters of a model as they are placed, one by one."""

    def __init__(self, spec: ModelSpec, names: Names, shardings: Any) -> None:
        self._spec, self._names, self._shardings = spec, names, shardings
        self._abstract = spec.trees[0]  # read, not copied
        self._params: Params = {}
        # Parts of parameters that lie in several tensors, one for each expert.
        self._read: dict[tuple[str, ...], dict[int, Any]] = {}

    def place(self, path: tuple[str, ...], value: np.ndarray) -> None:
        """One parameter, in our layout."""
        spec = self._spec
        own, module = self._names[path].parts[0].dtype, _get(self._abstract, path[:-1])
        if module[path[-1]].dtype == np.float32 and spec.dtype != "float32":
            own = "float32"  # in every model
        kernel = _place(value, self._at(path), float_dtype(own or spec.dtype))
        if is_frozen(module) and path[-1] == KERNEL:
            scale = (*path[:-1], SCALE)
            frozen = freeze(kernel, inputs_of(module), self._at(path), self._at(scale))
            _put(self._params, scale, frozen.scale)
            kernel = frozen.values
        _put(self._params, path, kernel)

    def take(self, parts: Sequence[StoredPart], value: np.ndarray) -> None:
        """One tensor of theirs, with these parts of our parameters."""
        for part in parts:
            read = self._read.setdefault(part.path, {})
            read[part.index] = part.tensor.to_ours(value)
            ours = self._names[part.path]
            if len(read) == len(ours.parts):
                del self._read[part.path]
                self.place(part.path, ours.joined([read[i] for i in range(len(read))]))

    def params(self) -> Params:
        """All parameters; a head that no tensor has is zeros."""
        for path, tensor in self._names.items():
            if not _has(self._params, path):
                self.place(path, np.zeros(tensor.our_shape, float_dtype(self._spec.dtype)))
        # The order of `spec.params`, so that the two trees print and iterate in the same order.
        return jax.tree.map(lambda _, value: value, self._abstract, self._params)

    def _at(self, path: tuple[str, ...]) -> jax.sharding.Sharding:
        if self._shardings is None:
            return jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        return _get(self._shardings, path)


def check_weights(directory: str | Path, spec: ModelSpec) -> None:
    """Raises what `import_params` raises before it reads a weight. Reads headers only."""
    directory = Path(directory)
    _checked_names(directory, spec, with_unpacked(stored_tensors(directory)))


def export(
    directory: str | Path,
    spec: ModelSpec,
    params: Params,
    *,
    tokenizer_files_from: str | Path | Tokenizer,
    generation_config: Mapping[str, Any] | None = None,
    model_card: str = "",
    dtype: str | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    image_model: str | Path | None = None,
) -> Path:
    """Write a directory that `from_pretrained` opens. Returns its path.

    With the folder of an `image_model` whose language half this is, the whole model is written:
    its other tensors, its config.json and its processors are copied from there.

    The tokenizer's files are copied from a directory or saved by a Tokenizer. If no
    `generation_config` is given, it is copied from that directory or made from the tokenizer's ids.
    Its token ids are also written to config.json. Values are cast to `dtype`, by default the dtype
    of the spec; a few are float32 all the same, as in transformers. config.json is written last: a
    directory without it was interrupted.

    Requires: all processes call this. Process 0 writes.
    """
    directory = Path(directory)
    target = float_dtype(dtype or spec.dtype)
    source = _check_tokenizer_source(tokenizer_files_from, directory)
    others = Path(image_model) if image_model else None
    tensors = _export_tensors(spec, params, target, others)
    if not multihost.is_main():
        for tensor in tensors:
            tensor.fetch()  # fetching from several processes is a collective
    else:
        directory.mkdir(parents=True, exist_ok=True)
        write_model_files(directory, tensors, target, max_shard_bytes)
        _write_tokenizer(source, directory)
        if generation_config is None:
            generation_config = _generation_config(source)
        _write_json(directory / "generation_config.json", generation_config)
        (directory / "README.md").write_text(model_card or default_model_card(spec))
        special_ids = {
            key: value for key, value in generation_config.items() if key.endswith("_token_id")
        }
        described = to_hf_config(spec.config, spec.kind)
        if others is not None:
            described = read_config_json(others)
            described.pop("dtype", None)  # the other name of `torch_dtype`
            for name in _PROCESSOR_FILES:
                if (others / name).is_file():
                    shutil.copyfile(others / name, directory / name)
        elif spec.config.vision is not None:
            _write_json(directory / PROCESSOR, to_processor(spec.config.vision))
        config = described | special_ids | {"torch_dtype": target.name}
        _write_json(directory / "config.json", config)
    multihost.barrier(f"export {directory}")
    return directory


def default_model_card(
    spec: ModelSpec,
    *,
    base_model: str | None = None,
    license_id: str | None = None,
    description: str = "",
    facts: Mapping[str, object] | None = None,
) -> str:
    """A model card: front matter that a hub reads, then `description` and a table of `facts`.

    `base_model` is a hub name and `license_id` an SPDX-like id ("apache-2.0"), if they are known.
    """
    task = "text-generation" if spec.kind == "causal_lm" else "text-classification"
    front = {"library_name": "transformers", "pipeline_tag": task}
    if license_id:
        front["license"] = license_id
    if base_model:
        front["base_model"] = base_model
    what = "language model" if spec.kind == "causal_lm" else "scalar model (one score a token)"
    description = description or "Trained by reinforcement learning with jaxrl_llm."
    rows = {
        "architecture": to_hf_config(spec.config, spec.kind)["architectures"][0],
        "parameters": f"{spec.num_params:,}",
    } | dict(facts or {})
    lines = [
        "---",
        *(f"{key}: {value}" for key, value in front.items()),
        f"tags:\n- reinforcement-learning{CARD_MARK}".rstrip(),
        "---",
        f"# A {spec.config.family} {what}\n",
        f"{description}\n",
        "| | |\n|---|---|",
        *(f"| {key} | {value} |" for key, value in rows.items()),
    ]
    return "\n".join(lines) + "\n"


def _checked_names(
    directory: Path, spec: ModelSpec, stored: Mapping[str, StoredTensor]
) -> tuple[Names, dict[str, list[StoredPart]]]:
    """The tensor of each parameter, and the parameters that each tensor holds.

    ValueError as `import_params`.
    """
    names = _names_in(directory, spec, stored)
    new_head = _check_kind(directory, spec)
    wanted = stored_parts({p: t for p, t in names.items() if not (new_head and p[0] == "score")})
    shapes = {name: parts[0].tensor.whole_shape for name, parts in wanted.items()}
    _check_tensors(directory, spec, stored, shapes)
    return names, wanted


def _check_kind(directory: Path, spec: ModelSpec) -> bool:
    """True if the score head must be made. ValueError if the directory holds another kind."""
    kind = load_model_kind(directory)
    if kind == "scalar" and spec.kind == "causal_lm":
        raise ValueError(
            f"{directory} holds a sequence-classification model, which has no language-model head; "
            f"load it as a critic or a reward model, or give the language model's directory"
        )
    return kind == "causal_lm" and spec.kind == "scalar"


def _check_tensors(
    directory: Path,
    spec: ModelSpec,
    stored: Mapping[str, StoredTensor],
    wanted: Mapping[str, tuple[int, ...]],
) -> None:
    missing = [name for name in wanted if name not in stored]
    unexpected = [
        name
        for name in stored
        if name not in wanted and not ignored_tensor(spec.config, spec.kind, name)
    ]
    if spec.config.vision is None and image_model_in(directory) is not None:  # its encoder's
        unexpected = []
    if missing or unexpected:
        parts = [
            f"{w} {_some(n)}" for w, n in [("lacks", missing), ("also holds", unexpected)] if n
        ]
        raise ValueError(
            f"{directory} {' and '.join(parts)}; its config.json describes another model, a "
            f"{spec.config.family} {spec.kind}"
        )
    for name, shape in wanted.items():
        tensor = stored[name]
        if tensor.shape != shape:
            raise ValueError(
                f"tensor {name!r} of {directory} has shape {tensor.shape} where the model has "
                f"{shape}: its config.json describes another model; fetch both again"
            )
        if tensor.dtype not in _READABLE:
            raise ValueError(
                f"tensor {name!r} of {directory} is stored as {tensor.dtype}; quantised weights "
                f"are not supported, give a directory in bfloat16, float16 or float32"
            )


def _check_tied(directory: Path, table: StoredTensor, head: StoredTensor | None) -> None:
    """ValueError where a head that is stored next to a tied table is another one."""
    if head is None:
        return
    same = head.shape == table.shape
    if same:
        first, second = (value for _, value in read_tensors([table, head]))
        rows = range(0, len(first), _COMPARED_ROWS)
        pieces = (slice(row, row + _COMPARED_ROWS) for row in rows)
        same = all(np.array_equal(first[piece], second[piece]) for piece in pieces)
    if not same:
        raise ValueError(
            f"{directory} has tie_word_embeddings=true in its config.json, and a "
            f"{head.name!r} that is not its {table.name!r}: set tie_word_embeddings to false, or "
            "remove that tensor"
        )


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return ", ".join(repr(name) for name in names[:_MOST_NAMED]) + more


def _place(value: np.ndarray, sharding: jax.sharding.Sharding, dtype: np.dtype) -> jax.Array:
    """Cast `value` (often a transposed view) and copy it shard by shard to its devices."""
    pieces: dict[tuple[Any, ...], np.ndarray] = {}

    def piece(index: Any) -> np.ndarray:
        key = tuple((part.start, part.stop) for part in index)
        if key not in pieces:  # replicas share one host copy
            pieces[key] = np.ascontiguousarray(value[index], dtype=dtype)
        return pieces[key]

    # Copies to a GPU are asynchronous: without waiting, the host copies of many tensors add up.
    placed = jax.make_array_from_callback(value.shape, sharding, piece, dtype=dtype)
    return placed.block_until_ready()


def _export_tensors(
    spec: ModelSpec, params: Params, target: np.dtype, image_model: Path | None = None
) -> list[LazyTensor]:
    # Tensors are written in this order, so the tensors of one parameter are cut from one copy.
    fetched = functools.lru_cache(maxsize=1)(lambda path: _fetch(_get(params, path)))

    def part_of(part: StoredPart) -> np.ndarray:
        if len(names[part.path].parts) > 1:
            return part.tensor.to_hf(fetched(part.path)[part.index])
        return part.tensor.to_hf(_fetch(_get(params, part.path)))

    def lazy(name: str, parts: list[StoredPart]) -> LazyTensor:
        def fetch() -> np.ndarray:
            return whole_tensor(parts, [part_of(part) for part in parts])

        tensor = parts[0].tensor
        kept = target == np.float16 and tensor.kept_from_float16
        return LazyTensor(name, tensor.whole_shape, fetch, "float32" if kept else tensor.dtype)

    others: dict[str, StoredTensor] = {}
    names = hf_names(spec.config, spec.kind)
    if image_model is not None:
        others = stored_tensors(image_model)
        names = _names_in(image_model, spec, others)
    own = stored_parts(names)
    kept = [_copied(tensor) for name, tensor in others.items() if name not in own]
    return [*(lazy(name, parts) for name, parts in own.items()), *kept]


def _copied(tensor: StoredTensor) -> LazyTensor:
    """A tensor of another folder, as it is there."""

    def fetch() -> np.ndarray:
        ((_, value),) = read_tensors([tensor])
        return value

    dtypes = {theirs: ours for ours, theirs in FORMAT_NAMES.items()}
    return LazyTensor(tensor.name, tensor.shape, fetch, dtypes[tensor.dtype])


def _fetch(value: Any) -> np.ndarray:
    """The whole array on the host. `value` keeps no copy of it.

    Shards are read one by one: jax 0.12 keeps a copy of an array of several shards until Python
    collects garbage.
    """
    is_split = isinstance(value, jax.Array) and not value.is_fully_replicated
    if not is_split or not value.is_fully_addressable:
        return multihost.fetch(second_array(value))
    whole = np.empty(value.shape, value.dtype)
    for shard in value.addressable_shards:
        if shard.replica_id == 0:
            whole[shard.index] = multihost.fetch(second_array(shard.data))
    return whole


def _check_tokenizer_source(source: str | Path | Tokenizer, directory: Path) -> Path | Tokenizer:
    """`source` as a Path or Tokenizer. ValueError before anything is overwritten."""
    if not isinstance(source, str | Path):
        return source
    path = Path(source)
    if not any((path / name).is_file() for name in _VOCABULARY_FILES):
        raise ValueError(
            f"{path} holds no tokenizer ({', '.join(_VOCABULARY_FILES)}); give the directory of "
            f"the model that training started from"
        )
    if directory.exists() and directory.samefile(path):
        raise ValueError(
            f"the export would overwrite {path}, the model that it takes the tokenizer from; "
            f"give another output directory"
        )
    return path


def _write_tokenizer(source: Path | Tokenizer, directory: Path) -> None:
    if not isinstance(source, Path):
        source.save(directory)
        return
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, directory / name)
    templates = "additional_chat_templates"
    if (source / templates).is_dir():
        shutil.copytree(source / templates, directory / templates, dirs_exist_ok=True)


def _generation_config(source: Path | Tokenizer) -> dict[str, Any]:
    if isinstance(source, Path):
        path = source / "generation_config.json"
        if path.is_file():
            return json.loads(path.read_text())
        config = json.loads((source / "config.json").read_text())
        return {key: ids for key, ids in config.items() if key.endswith("_token_id")}
    stop_ids = list(source.stop_ids)
    config: dict[str, Any] = {
        "eos_token_id": stop_ids[0] if len(stop_ids) == 1 else stop_ids,
        "pad_token_id": source.pad_id,
    }
    if source.bos_id is not None:
        config["bos_token_id"] = source.bos_id
    return config


def _get(tree: Any, path: Sequence[str]) -> Any:
    for part in path:
        tree = tree[part]
    return tree


def _has(tree: Any, path: Sequence[str]) -> bool:
    for part in path:
        if part not in tree:
            return False
        tree = tree[part]
    return True


def _put(tree: Params, path: Sequence[str], value: Any) -> None:
    for part in path[:-1]:
        tree = tree.setdefault(part, {})
    tree[path[-1]] = value


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")
