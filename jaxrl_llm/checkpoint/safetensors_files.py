"""Reads and writes the weights of a model directory, one tensor at a time.

The safetensors library writes a file from a dictionary of all its arrays. To save memory, writing
is done here. A file is an eight-byte length, a JSON header with the place of each tensor, and the
raw little-endian data (https://huggingface.co/docs/safetensors).
"""

import json
import math
import os
import shutil
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
FORMAT_NAMES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}

_SINGLE_FILE = "model.safetensors"
_INDEX_FILE = "model.safetensors.index.json"
# The bits of the exponent: all are 1 in NaN and infinity, and in no other number.
_EXPONENTS = {
    "float64": (np.uint64, 0x7FF0_0000_0000_0000),
    "float32": (np.uint32, 0x7F80_0000),
    "bfloat16": (np.uint16, 0x7F80),
    "float16": (np.uint16, 0x7C00),
}
_CHECKED_AT_ONCE = 1 << 20  # elements; a few MB stay in the processor's cache


def float_dtype(name: str) -> np.dtype:
    """The numpy dtype of "float32", "bfloat16" or "float16"; ValueError for any other name."""
    if name not in DTYPES:
        raise ValueError(f"dtype {name!r} is not known; use one of {', '.join(DTYPES)}")
    return DTYPES[name]


@dataclass(frozen=True)
class LazyTensor:
    """A tensor that is fetched when it is written. `fetch()` returns an array of `shape`."""

    name: str
    shape: tuple[int, ...]
    fetch: Callable[[], np.ndarray]
    own_dtype: str | None = None  # dtype in the file; None: the dtype of the others

    def written_in(self, dtype: np.dtype) -> np.dtype:
        """Its dtype in a file of `dtype`."""
        return float_dtype(self.own_dtype) if self.own_dtype else dtype

    def nbytes(self, dtype: np.dtype) -> int:
        return math.prod(self.shape) * self.written_in(dtype).itemsize


def write_safetensors(
    path: Path,
    tensors: Sequence[LazyTensor],
    dtype: np.dtype,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write `tensors` to `path`, each cast to `dtype` or its own (rounding to nearest even)."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"} | dict(metadata or {})}
    offset = 0
    for tensor in tensors:
        end = offset + tensor.nbytes(dtype)
        header[tensor.name] = {
            "dtype": FORMAT_NAMES[tensor.written_in(dtype).name],
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
            value = np.ascontiguousarray(tensor.fetch(), dtype=tensor.written_in(dtype))
            assert value.shape == tensor.shape, (tensor.name, value.shape, tensor.shape)
            file.write(value.view(np.uint8).data)
            del value  # before the next one is fetched


def split_into_shards(
    tensors: Sequence[LazyTensor], dtype: np.dtype, max_shard_bytes: int
) -> list[list[LazyTensor]]:
    """Fill shards in order up to `max_shard_bytes`. A larger tensor gets its own shard."""
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
    """Write model.safetensors, or several shards and their index. Returns the file names.

    Weights of an earlier export in `directory` are removed, so that no reader mixes the two. Its
    config.json goes first: a folder without it was interrupted.

    Raises: ValueError, before anything is removed, where the disk has no room for them.
    """
    weights = [*directory.glob("model*.safetensors"), *directory.glob("model*.index.json")]
    needed = sum(tensor.nbytes(dtype) for tensor in tensors)
    room = shutil.disk_usage(directory).free + sum(old.lstat().st_size for old in weights)
    if room < needed:
        raise ValueError(
            f"{directory} needs {needed / 1e9:.2f} GB, and its disk has {room / 1e9:.2f} GB free: "
            "delete old runs, or give a folder on another disk"
        )
    (directory / "config.json").unlink(missing_ok=True)
    for old in weights:
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


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a model directory, as the header of its file describes it."""

    name: str
    shape: tuple[int, ...]
    dtype: str  # as safetensors writes it: "F32", "BF16", ...
    path: Path


def stored_tensors(directory: Path) -> dict[str, StoredTensor]:
    """Every tensor of a model directory by name. Reads headers only.

    Raises:
        ValueError: there are no safetensors, the index names a file that is missing or outside of
            the directory, a file is damaged, or two shards hold the same tensor.
    """
    return stored_in(_weight_files(directory))


def metadata_of(path: Path) -> dict[str, str]:
    """The metadata of a safetensors file. Raises: ValueError as `stored_tensors`."""
    try:
        with safe_open(path, framework="numpy") as file:
            return dict(file.metadata() or {})
    except SafetensorError as error:
        raise ValueError(f"{path} cannot be read ({error}); fetch it again") from error


def stored_in(files: Sequence[Path]) -> dict[str, StoredTensor]:
    """Every tensor of safetensors files by name. Raises: ValueError as `stored_tensors`."""
    tensors: dict[str, StoredTensor] = {}
    for path in files:
        try:
            with safe_open(path, framework="numpy") as file:
                for name in file.keys():
                    if name in tensors:
                        raise ValueError(
                            f"tensor {name!r} is in {tensors[name].path.name} and in {path.name}; "
                            f"remove the files of {path.parent} that its index does not need"
                        )
                    piece = file.get_slice(name)
                    shape = tuple(piece.get_shape())
                    tensors[name] = StoredTensor(name, shape, piece.get_dtype(), path)
        except SafetensorError as error:
            raise ValueError(f"{path} cannot be read ({error}); fetch it again") from error
    return tensors


def read_tensors(tensors: Iterable[StoredTensor]) -> Iterator[tuple[str, np.ndarray]]:
    """Name and values of each tensor, with one file open and one tensor in memory at a time.

    Raises:
        ValueError: a tensor holds NaN or infinity; names file and tensor.
    """
    by_file: dict[Path, list[str]] = {}
    for tensor in tensors:
        by_file.setdefault(tensor.path, []).append(tensor.name)
    for path, names in by_file.items():
        with safe_open(path, framework="numpy") as file:
            for name in names:
                value = file.get_tensor(name)
                if not is_finite(value):
                    raise ValueError(
                        f"tensor {name!r} of {path} holds NaN or infinity: the weights are of a "
                        "run that diverged, or damaged; take another checkpoint or fetch it again"
                    )
                yield name, value


def is_finite(value: np.ndarray) -> bool:
    """True if no element is NaN or infinite.

    Looks at the exponents' bits in pieces, which is several times faster than np.isfinite.
    """
    kind, exponent = _EXPONENTS[value.dtype.name]
    bits = np.ascontiguousarray(value).view(kind).reshape(-1)
    pieces = (bits[i : i + _CHECKED_AT_ONCE] for i in range(0, bits.size, _CHECKED_AT_ONCE))
    return all((piece & kind(exponent)).max() != exponent for piece in pieces)


def _weight_files(directory: Path) -> list[Path]:
    index = directory / _INDEX_FILE
    if index.is_file():
        names = _shard_names(index)
        for name in names:
            # Not `resolve`: in a hub's cache the files are links to another folder.
            if Path(name).is_absolute() or ".." in Path(name).parts:
                raise ValueError(
                    f"{index} names the weight file {name!r}, which is outside of its folder; "
                    "fetch the model again from a source that you trust"
                )
        if _SINGLE_FILE not in names and (directory / _SINGLE_FILE).is_file():
            raise ValueError(
                f"{directory} holds {_SINGLE_FILE}, and {_INDEX_FILE} of other files: remove the "
                "weights that do not belong to the model"
            )
        paths = [directory / name for name in names]
    else:
        paths = [directory / _SINGLE_FILE]
    for path in paths:
        if not os.path.isfile(path):  # Path.is_file raises for a name that is too long
            raise ValueError(
                f"{path} does not exist; the weights must be in safetensors (in transformers: "
                f"save_pretrained) and complete"
            )
    return paths


def _shard_names(index: Path) -> list[str]:
    try:
        names = list(json.loads(index.read_text())["weight_map"].values())
        if all(isinstance(name, str) for name in names):
            return sorted(set(names))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        pass
    raise ValueError(
        f"{index} is not an index of weights (a JSON object whose 'weight_map' has a file name for "
        "each tensor); fetch it again"
    )
