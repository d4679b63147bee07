"""Reading and writing the weights of a model directory one tensor at a time.

The safetensors library writes a file from a dictionary that holds all of it, so writing is done
here: the format is an eight-byte length, a JSON header with the place of each tensor, and the raw
little-endian data (https://huggingface.co/docs/safetensors).
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

DTYPES: Mapping[str, np.dtype] = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
}
_FORMAT_NAMES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}

_SINGLE_FILE = "model.safetensors"
_INDEX_FILE = "model.safetensors.index.json"


def float_dtype(name: str) -> np.dtype:
    """The numpy dtype of "float32", "bfloat16" or "float16"; ValueError for any other name."""
    if name not in DTYPES:
        raise ValueError(f"dtype {name!r} is not known; use one of {', '.join(DTYPES)}")
    return DTYPES[name]


@dataclass(frozen=True)
class LazyTensor:
    """A tensor that is fetched only when it is written: `fetch()` returns an array of `shape`."""

    name: str
    shape: tuple[int, ...]
    fetch: Callable[[], np.ndarray]

    def nbytes(self, dtype: np.dtype) -> int:
        return math.prod(self.shape) * dtype.itemsize


def write_safetensors(path: Path, tensors: Sequence[LazyTensor], dtype: np.dtype) -> None:
    """Write `tensors` to `path`, each cast to `dtype` (rounding to nearest even)."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in tensors:
        end = offset + tensor.nbytes(dtype)
        header[tensor.name] = {
            "dtype": _FORMAT_NAMES[dtype.name],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)  # the data must start on a multiple of eight
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little"))
        file.write(encoded)
        for tensor in tensors:
            value = np.ascontiguousarray(tensor.fetch(), dtype=dtype)
            assert value.shape == tensor.shape, (tensor.name, value.shape, tensor.shape)
            file.write(value.view(np.uint8).data)
            del value  # before the next one is fetched


def split_into_shards(
    tensors: Sequence[LazyTensor], dtype: np.dtype, max_shard_bytes: int
) -> list[list[LazyTensor]]:
    """Fill shards in order up to `max_shard_bytes`; a tensor above the limit gets its own shard."""
    if max_shard_bytes <= 0:
        raise ValueError(f"max_shard_bytes is {max_shard_bytes}; give a positive number of bytes")
    shards: list[list[LazyTensor]] = []
    used = 0
    for tensor in tensors:
        size = tensor.nbytes(dtype)
        if not shards or used + size > max_shard_bytes:
            shards.append([])
            used = 0
        shards[-1].append(tensor)
        used += size
    return shards


def write_model_files(
    directory: Path, tensors: Sequence[LazyTensor], dtype: np.dtype, max_shard_bytes: int
) -> list[str]:
    """Write model.safetensors, or shards with an index above the limit; returns the file names.

    Weights that an earlier export left in `directory` are removed: a reader must never mix two.
    """
    for old in [*directory.glob("model*.safetensors"), *directory.glob("model*.index.json")]:
        old.unlink()
    shards = split_into_shards(tensors, dtype, max_shard_bytes)
    if len(shards) == 1:
        write_safetensors(directory / _SINGLE_FILE, shards[0], dtype)
        return [_SINGLE_FILE]
    names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    for name, shard in zip(names, shards, strict=True):
        write_safetensors(directory / name, shard, dtype)
    index = {
        "metadata": {"total_size": sum(t.nbytes(dtype) for t in tensors)},
        "weight_map": {
            t.name: name for name, shard in zip(names, shards, strict=True) for t in shard
        },
    }
    (directory / _INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")
    return [*names, _INDEX_FILE]


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a model directory, known by the header of its file."""

    name: str
    shape: tuple[int, ...]
    dtype: str  # as safetensors writes it: "F32", "BF16", ...
    path: Path


def stored_tensors(directory: Path) -> dict[str, StoredTensor]:
    """Every tensor of a model directory by name; reads headers only.

    ValueError when there are no safetensors, a shard that the index names is missing, a file is
    damaged, or two shards hold the same tensor.
    """
    found: dict[str, StoredTensor] = {}
    for path in _weight_files(directory):
        try:
            with safe_open(path, framework="numpy") as file:
                for name in file.keys():
                    if name in found:
                        raise ValueError(
                            f"tensor {name!r} is in {found[name].path.name} and in {path.name}; "
                            f"remove the files of {directory} that its index does not need"
                        )
                    piece = file.get_slice(name)
                    shape = tuple(piece.get_shape())
                    found[name] = StoredTensor(name, shape, piece.get_dtype(), path)
        except SafetensorError as error:
            raise ValueError(f"{path} cannot be read ({error}); fetch it again") from error
    return found


def read_tensors(tensors: Iterable[StoredTensor]) -> Iterator[tuple[str, np.ndarray]]:
    """Name and values of each tensor, with one file open and one tensor in memory at a time."""
    by_file: dict[Path, list[str]] = {}
    for tensor in tensors:
        by_file.setdefault(tensor.path, []).append(tensor.name)
    for path, names in by_file.items():
        with safe_open(path, framework="numpy") as file:
            for name in names:
                yield name, file.get_tensor(name)


def _weight_files(directory: Path) -> list[Path]:
    index = directory / _INDEX_FILE
    if index.is_file():
        weight_map = json.loads(index.read_text())["weight_map"]
        paths = [directory / name for name in sorted(set(weight_map.values()))]
    else:
        paths = [directory / _SINGLE_FILE]
    for path in paths:
        if not path.is_file():
            raise ValueError(
                f"{path} does not exist; the weights must be in safetensors (in transformers: "
                f"save_pretrained) and complete"
            )
    return paths
