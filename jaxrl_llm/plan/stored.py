"""Compiled programs on disk: what a start reads in place of compiling, and of lowering.

A file holds one executable, under a digest of the lowered program. So it is right wherever that
program is lowered again. A start also keeps the names of its files, under a key of what decides
its programs. The next start with this key runs them before it has lowered them, and lowers them
afterwards, to compare.
"""

import contextlib
import hashlib
import json
import os
import pickle
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jaxlib.lapack
import jaxlib.version
from jax._src.lib import xla_client  # pyright: ignore[reportPrivateImportUsage]
from jax.experimental import serialize_executable

from jaxrl_llm.kernels.mosaic import find_kernel_runtime

PROGRAMS, STARTS = "programs", "starts"  # folders of a compile cache
DIGEST = 32  # bytes of a digest in front of an executable


class StoredPrograms:
    """The executables in the compile cache's folder."""

    def __init__(self) -> None:
        self._folder = _folder(PROGRAMS)
        devices: Any = jax.local_devices()
        # A CPU's instructions and a GPU's drivers are in these, and in no name of a device.
        topology = xla_client.get_topology_for_devices(devices).fingerprint()
        client = devices[0].client.platform_version
        versions = f"{jax.__version__} {jaxlib.version.__version__} {client} {topology}"
        self._where = f"{versions} {json.dumps(settings_of_jax(), sort_keys=True, default=str)}"

    def name_of(self, lowered: Any, setting: str) -> str:
        """The file of a lowered program; empty without a folder.

        `setting` is what decides the executable and is not in the program: options and devices.
        """
        if self._folder is None:
            return ""
        # jax drops arguments that are not used, and calls by position.
        how = lowered._lowering.compile_args
        results = [(str(aval), aval.weak_type) for aval in how["global_out_avals"]]
        called = f"{sorted(how['kept_var_idx'])} {lowered.args_info} {results} {lowered.out_tree}"
        text = f"{self._where} {setting} {called} {lowered.as_text()}"
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    def has(self, name: str) -> bool:
        """Whether there is a file; False where the folder may not be read."""
        try:
            return bool(name) and self._file(name).is_file()
        except OSError:
            return False

    def load(self, name: str) -> Any:
        """The executable of a file.

        Raises: UnreadableProgram. A file that is damaged is deleted; another may be right, such as
            one that finds no memory now.
        """
        _open_libraries()
        try:
            data = self._file(name).read_bytes()
            if hashlib.sha256(data[DIGEST:]).digest() != data[:DIGEST]:
                with contextlib.suppress(OSError):
                    self._file(name).unlink()
                raise ValueError("its digest is another")
            devices, *stored = pickle.loads(data[DIGEST:])
            by_id = {device.id: device for device in jax.local_devices()}
            return serialize_executable.deserialize_and_load(
                *stored, execution_devices=[by_id[number] for number in devices]
            )
        except Exception as error:  # XLA, pickle and the disk have errors of their own
            raise UnreadableProgram(
                f"the compiled program {self._file(name)} cannot be read: {error}"
            ) from error

    def save(self, name: str, compiled: Any) -> None:
        """Write an executable that has no file. A folder that takes none ends no run."""
        if not name or self.has(name):
            return
        stored = serialize_executable.serialize(compiled)
        data = pickle.dumps((_device_ids(compiled), *stored))
        with contextlib.suppress(OSError):
            _write(self._file(name), hashlib.sha256(data).digest() + data)

    def _file(self, name: str) -> Path:
        assert self._folder is not None
        return self._folder / name


class UnreadableProgram(RuntimeError):
    """A file of an executable that is cut, or of another version."""


class Start:
    """The programs of a start by a key: what decides them, as far as it can be known at once."""

    def __init__(self, key: str) -> None:
        folder = _folder(STARTS)
        self._file = None if folder is None else folder / f"{key}.json"

    def names(self) -> list[str]:
        """The files of its programs, in their order; empty where it is not known."""
        try:
            found = json.loads(self._file.read_bytes()) if self._file is not None else []
        except (OSError, ValueError):
            return []
        return found if isinstance(found, list) and all(isinstance(x, str) for x in found) else []

    def write(self, names: Sequence[str]) -> None:
        """Keep the names. A folder that takes no files ends no run."""
        if self._file is not None and all(names):
            with contextlib.suppress(OSError):
                _write(self._file, json.dumps(list(names)).encode())

    def forget(self) -> None:
        """Delete what `write` kept."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.unlink()


def settings_of_jax() -> list[Any]:
    """What decides how programs are lowered and compiled: options of jax and its environment."""
    read = {key: os.environ[key] for key in os.environ if key.startswith(("JAX_", "XLA_"))}
    options: dict[str, Any] = jax.config.values
    return [
        {key: value for key, value in given.items() if "cache" not in key.lower()}
        for given in (read, options)
    ]


def _open_libraries() -> None:
    """What an executable calls must be there before it is read. Lowering would see to it."""
    if jax.default_backend() == "gpu":
        find_kernel_runtime()
    if jax.default_backend() == "cpu":
        lapack: Any = jaxlib.lapack
        lapack._lapack.initialize()


def _folder(name: str) -> Path | None:
    """A folder of the compile cache; None without one on this machine's disks."""
    settings: Any = jax.config  # its attributes are made at run time
    cache: str = settings.jax_compilation_cache_dir or ""
    # A cache in the cloud has none: asking for each file would take long.
    return Path(cache) / name if cache and "://" not in cache else None


def _write(file: Path, data: bytes) -> None:
    """Whole or not at all, also when several processes write the same file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(f"{file.name}.{uuid.uuid4().hex}")
    try:
        part.write_bytes(data)
        part.replace(file)
    except OSError:
        part.unlink(missing_ok=True)
        raise


def _device_ids(compiled: Any) -> list[int]:
    """The devices of an executable, in its order. Requires: its results lie on a mesh."""
    sharding = jax.tree.leaves(compiled.output_shardings)[0]
    return [device.id for device in sharding.mesh.devices.flat]
