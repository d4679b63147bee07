"""Digests that tell a whole checkpoint from a damaged or mixed one.

The digest of an array is computed on its devices when it is saved, and again when it is loaded. It
is stored with the loop state. So it covers the way to the disk and back.

The digests of files are in `digests.json` of each folder, written once its files are on disk. All
processes share the reading. Damaged files are named before anything is loaded. A kill may come
before the digests of files are written; such a checkpoint has the digests of its arrays alone.
"""

import hashlib
import json
import math
import os
import re
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.distributed.multihost import fetch
from jaxrl_llm.distributed.sharding import in_host_memory, second_array

DIGESTS = "digests.json"
PART = "digests-{}.json"  # the share of a process, until process 0 has taken it over
OWN_FILES = re.compile(r"digests(-\d+)?\.json(\.tmp)?")
PATIENCE_S, PATIENCE = 60.0, 3.0  # for shares: seconds, and times what the own one took
POLL_S = 0.05
SHOWN = 3  # damaged files or arrays in a message
THREADS = 8  # threads that read files; hashing lets other threads run
PIECE = 2**24  # bytes read at once
MOST_ON_HOST = 2**14  # numbers of an array that the host measures in less than a millisecond


class DamagedCheckpoint(ValueError):
    """A checkpoint does not hold what was saved. The message names the files or arrays."""


# ------------------------------------------------------------------------- files


def write_digests(folder: Path, part: tuple[int, int] = (0, 1)) -> None:
    """Write `digests.json`: size and digest of every other file in `folder`.

    With `part` (k, n), n processes share the work and each calls this. Process 0 takes over a share
    that does not come in time.
    """
    (own, count), names = part, _files(folder)
    started = time.monotonic()
    files = _digests(folder, names[own::count])
    if own:
        _write(folder / PART.format(own), files)
        return
    patience_s = PATIENCE_S + PATIENCE * (time.monotonic() - started)
    for other in range(1, count):
        share, deadline = names[other::count], started + patience_s
        files |= _part(folder / PART.format(other), share, deadline) or _digests(folder, share)
    _write(folder / DIGESTS, {"files": files, "digest": text_digest(files)})
    for file in folder.glob(PART.format("*")):
        file.unlink(missing_ok=True)


def _digests(folder: Path, names: list[str]) -> dict[str, list[Any]]:
    with ThreadPoolExecutor(THREADS) as threads:
        digests = threads.map(_digest, [folder / name for name in names])
        return dict(zip(names, digests, strict=True))


def _write(file: Path, content: Any) -> None:
    temporary = file.with_name(f"{file.name}.tmp")
    temporary.write_text(json.dumps(content))
    os.replace(temporary, file)


def _part(file: Path, names: list[str], deadline: float) -> dict[str, list[Any]]:
    """The share of another process; empty where it does not come, or is of other files."""
    while not file.exists() and time.monotonic() < deadline:
        time.sleep(POLL_S)
    try:
        share = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    return share if sorted(share) == names else {}


def damaged_files(folder: Path, part: tuple[int, int] = (0, 1), item: str = "") -> list[str] | None:
    """The damages of the files of `folder`, a line each; None where it has no digests.

    With `part` (k, n), only every n-th file from the k-th on is read. `item` is a folder in it,
    when only that is of interest.
    """
    path = folder / DIGESTS
    if not path.exists():
        return None
    try:
        stored = json.loads(path.read_bytes())
        files = stored["files"]
        if stored["digest"] != text_digest(files):
            return [f"{DIGESTS} was changed"]
    except (ValueError, KeyError, TypeError, RecursionError, OSError) as error:
        return [f"{DIGESTS} cannot be read ({type(error).__name__})"]
    files = {name: each for name, each in files.items() if name.startswith(item)}
    present = {name for name in _files(folder) if name.startswith(item)}
    wrong = [f"{name} is missing" for name in files.keys() - present]
    wrong += [f"{name} does not belong to it" for name in present - files.keys()]
    names = sorted(files.keys() & present)[part[0] :: part[1]]
    with ThreadPoolExecutor(THREADS) as threads:
        again = threads.map(_digest_or_error, [folder / name for name in names])
    wrong += [
        f"{name} has {_change(files[name], now)}"
        for name, now in zip(names, again, strict=True)
        if files[name] != now
    ]
    return sorted(wrong)


def check_files(folder: Path, item: str = "") -> None:
    """Raises: DamagedCheckpoint when a file of `folder`, or of an item in it, was changed."""
    wrong = damaged_files(folder, item=item)
    if wrong:
        raise DamagedCheckpoint(f"{folder} is damaged: {listed(wrong)}")


def text_digest(value: Any) -> str:
    """The digest of a value as JSON keeps it, whatever the order of its keys."""
    plain = json.loads(json.dumps(value))  # keys that are numbers become texts
    return hashlib.blake2b(json.dumps(plain, sort_keys=True).encode(), digest_size=16).hexdigest()


def listed(lines: list[str]) -> str:
    """The first few of `lines`, and how many there are more."""
    more = f" and {len(lines) - SHOWN} more" if len(lines) > SHOWN else ""
    return ", ".join(lines[:SHOWN]) + more


def _files(folder: Path) -> list[str]:
    """Names of all files below `folder` without files of digests. A link counts as its target."""
    files: list[str] = []
    for parent, _, names in os.walk(folder):
        files += [str((Path(parent) / name).relative_to(folder)) for name in names]
    return sorted(name for name in set(files) if not OWN_FILES.fullmatch(name))


def _digest(file: Path) -> list[Any]:
    """[bytes, digest] of a file."""
    digest, size = hashlib.blake2b(digest_size=16), 0
    with open(file, "rb", buffering=0) as stream:
        while piece := stream.read(PIECE):
            digest.update(piece)
            size += len(piece)
    return [size, digest.hexdigest()]


def _digest_or_error(file: Path) -> list[Any]:
    try:
        return _digest(file)
    except FileNotFoundError as error:  # a link to a file that is gone
        return [-1, error.strerror]


def _change(saved: list[Any], now: list[Any]) -> str:
    if now[0] < 0:
        return f"become unreadable ({now[1]})"
    return f"{now[0]} bytes instead of {saved[0]}" if now[0] != saved[0] else "other bytes"


# ------------------------------------------------------------------------- arrays


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The measurements of one array."""

    kind: str  # dtype and shape: float32[3,4]
    digest: str  # digest of its bits
    finite: bool  # no NaN and no infinity
    rms: float  # root mean square of numbers that are no integers; may overflow to infinity
    size: int

    @property
    def squares(self) -> float:
        """The sum of the squares."""
        return self.size * self.rms**2 if self.rms < 1e150 else math.inf

    def __str__(self) -> str:
        return f"{self.kind} {self.digest}"


def measure(items: Mapping[str, Any]) -> dict[str, dict[str, Measured]]:
    """The measurements of each array, by item and path.

    The digests do not depend on how the arrays are sharded. Every process must call it.
    """
    measured: dict[str, dict[str, Measured]] = {}
    for name, item in items.items():
        leaves = jax.tree_util.tree_leaves_with_path(item)
        paths = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in leaves]
        measured[name] = dict(zip(paths, _all_measured([x for _, x in leaves]), strict=True))
    return measured


def _all_measured(arrays: Sequence[Any]) -> list[Measured]:
    """Small arrays on the host, so that no program is compiled for each of their shapes.

    The others all at once where they are in the memory of one device: the host waits once for them.
    Otherwise one by one. An array in host memory needs room on a device. Many programs of small
    collectives at the same time can use up the threads of a CPU.
    """
    at_once = all(map(_is_in_one_device, arrays))
    small = list(map(_is_small, arrays))
    started: list[Any] = []
    for x, is_small in zip(arrays, small, strict=True):
        numbers = second_array(x) if is_small else _measure_array(x)
        started.append(numbers if at_once or is_small else fetch(numbers))
    for numbers in started:
        if isinstance(numbers, jax.Array):
            numbers.copy_to_host_async()
    return [
        _measured(x, numbers_of(np, fetch(numbers)) if is_small else fetch(numbers))
        for x, numbers, is_small in zip(arrays, started, small, strict=True)
    ]


def _is_small(x: Any) -> bool:
    """True if the host measures `x`. Of several processes each takes part, whoever holds it."""
    return jax.process_count() == 1 and x.size <= MOST_ON_HOST


def _is_in_one_device(x: Any) -> bool:
    on_device = isinstance(x, jax.Array) and not in_host_memory(x)
    return on_device and len(x.sharding.device_set) == 1


def _measured(x: Any, numbers: np.ndarray) -> Measured:
    """The record of the result of `numbers_of`."""
    one, other, finite = numbers[:3].tolist()
    rms = numbers[3:].view(np.float32)[0]
    return Measured(
        kind=f"{x.dtype}[{','.join(map(str, x.shape))}]",
        digest=f"{one:08x}{other:08x}",
        finite=bool(finite),
        rms=float(rms),
        size=int(x.size),
    )


def array_digests(items: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """For each item, the digest of each array by its path: `float32[3,4] 0123456789abcdef`."""
    return as_text(measure(items))


def as_text(items: Mapping[str, Mapping[str, Measured]]) -> dict[str, dict[str, str]]:
    """Measurements as the loop state keeps them."""
    return {name: {path: str(x) for path, x in arrays.items()} for name, arrays in items.items()}


def check_arrays(
    folder: Path,
    saved: Mapping[str, Mapping[str, str]],
    loaded: Mapping[str, Mapping[str, Measured]],
) -> None:
    """Compare the measurements of `loaded` items with the digests that were `saved`.

    Raises:
        DamagedCheckpoint: an array is not what was saved; names it.
        ValueError: the config wants another shape or dtype of an array.
    """
    wrong: list[str] = []
    for name, now in as_text(loaded).items():
        then = saved.get(name, {})
        for path in dict.fromkeys([*then, *now]):
            was, became = (each.get(path, "nothing").split() for each in (then, now))
            if was[0] != became[0]:
                raise ValueError(
                    f"{folder} has {was[0]} for {name}/{path}, and this config wants {became[0]}: "
                    "go on with the config that it was made with"
                )
            if was != became:
                wrong.append(f"array {name}/{path} has other values")
    if wrong:
        raise DamagedCheckpoint(f"{folder} is damaged: {listed(wrong)}")


@jax.jit
def _measure_array(x: jax.Array) -> jax.Array:
    """`numbers_of` an array on its devices."""
    if in_host_memory(x):
        x = jax.device_put(x, jax.memory.Space.Device)
    return numbers_of(jnp, x)


def numbers_of(xp: Any, x: Any) -> Any:
    """Two sums of the bits, mixed with their place; whether all is finite; root mean square.

    One pass over the array. Integers add up in any order. The four are uint32, the last by its
    bits: the host reads one small array for each. `xp` is numpy or jax.numpy, as `x` is; both give
    the same sums of the bits.
    """
    finite, rms = xp.bool_(True), xp.float32(0)
    if jnp.issubdtype(x.dtype, jnp.floating) and x.size:
        # Divided first: the sum of squares of a large array would overflow sooner than one square.
        finite = xp.isfinite(x).all()
        with np.errstate(over="ignore", invalid="ignore"):  # an infinite result says so
            rms = xp.sqrt(xp.sum(xp.square(x.astype(xp.float32) * x.size**-0.5)))
    if x.dtype == xp.bool_:
        x = x.astype(xp.uint8)
    bits = x.view(f"uint{8 * x.dtype.itemsize}").astype(xp.uint32)
    index, stride = xp.uint32(0), 1
    for axis in reversed(range(x.ndim)):
        along = [1] * x.ndim
        along[axis] = x.shape[axis]
        places = xp.arange(x.shape[axis], dtype=xp.uint32).reshape(along)
        index = index + places * xp.uint32(stride % 2**32)
        stride *= x.shape[axis]
    pair = (2, *(1,) * x.ndim)
    place = xp.array([0x9E3779B9, 0xB5297A4D], xp.uint32).reshape(pair)
    factor = xp.array([0x85EBCA6B, 0xC2B2AE35], xp.uint32).reshape(pair)
    # A step that can be undone follows another, so a flipped bit always changes the term.
    mixed = (bits ^ (index * place)) * factor
    mixed = (mixed ^ (mixed >> 15)) * xp.uint32(0x2C1B3C6D)
    mixed = mixed ^ (mixed >> 13)
    one, other = xp.sum(mixed, axis=tuple(range(1, x.ndim + 1)), dtype=xp.uint32)
    bits_of_rms = rms.astype(xp.float32).view(xp.uint32)
    return xp.stack([one, other, finite.astype(xp.uint32), bits_of_rms])
