"""Compiled programs on disk: what a start reads in place of compiling, and of lowering.

A file holds one executable, under a digest of the lowered program. So it is right wherever that
program is lowered again. A start also keeps the names of its files, under a key of what decides
its programs. The next start with this key runs them before it has lowered them, and lowers them
afterwards, to compare.

Beyond a size the files go that were not used for longest. Any process may delete them at any time:
one that misses a file compiles.
"""

import contextlib
import hashlib
import json
import logging
import os
import pickle
import site
import sys
import sysconfig
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jaxlib.lapack
import jaxlib.version
from jax._src.lib import xla_client  # pyright: ignore[reportPrivateImportUsage]
from jax.experimental import serialize_executable

from jaxrl_llm.kernels.mosaic import find_kernel_runtime

_log = logging.getLogger(__name__)

PROGRAMS, STARTS = "programs", "starts"  # folders of a compile cache
PACKAGES = ("jaxrl_llm", "jaxrl_llm.models")  # whose code decides programs
DIGEST = 32  # bytes of a digest in front of an executable
MOST_BYTES = 10 * 10**9  # bytes of all executables, where jax has no limit for its own cache
# What was used or written in this time stays: a start reads its programs, or writes them.
IN_USE_S = 3600.0


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
        """True if there is a file; False where the folder may not be read."""
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
            _note_use(self._file(name))
            if hashlib.sha256(data[DIGEST:]).digest() != data[:DIGEST]:
                _delete(self._file(name))
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
        """Write an executable that has no file.

        A folder that takes none ends no run, nor does a program that cannot be written. On a CPU
        that is one that sorts, once it has run. Of others a warning says why.
        """
        if not name or self.has(name):
            return
        devices = _device_ids(compiled)
        try:
            data = pickle.dumps((devices, *serialize_executable.serialize(compiled)))
        except jax.errors.JaxRuntimeError:
            return
        except (pickle.PicklingError, AttributeError, TypeError, ValueError) as error:
            _log.warning("a program is not kept, and compiles again at each start: %s", error)
            return
        with contextlib.suppress(OSError):
            _write(self._file(name), hashlib.sha256(data).digest() + data)

    def bound(self) -> None:
        """Delete executables that were not used for longest, down to a size.

        The size is `jax_compilation_cache_max_size` where that is set. It also deletes lists of
        deleted files and files of killed writers. Errors of the disk end no run. Several processes
        may do it at the same time.
        """
        if self._folder is None:
            return
        settings: Any = jax.config
        limit = settings.jax_compilation_cache_max_size
        most, now = limit if limit > 0 else MOST_BYTES, time.time()
        kept, deleted = 0, False
        for file, used, size in sorted(_files(self._folder), key=lambda entry: -entry[1]):
            is_part, is_old = "." in file.name, now - used > IN_USE_S
            kept += size
            if is_old and (is_part or kept > most):
                deleted |= not is_part
                kept -= size
                _delete(file)
        starts = _files(self._folder.with_name(STARTS)) if deleted else ()
        for file, used, _ in starts:
            if now - used > IN_USE_S and not all(map(self.has, Start(file.stem).names() or [""])):
                _delete(file)

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
            names = json.loads(self._file.read_bytes()) if self._file is not None else []
        except (OSError, ValueError):
            return []
        return names if isinstance(names, list) and all(isinstance(x, str) for x in names) else []

    def write(self, names: Sequence[str]) -> None:
        """Keep the names. A folder that takes no files ends no run."""
        if self._file is not None and all(names):
            with contextlib.suppress(OSError):
                _write(self._file, json.dumps(list(names)).encode())

    def forget(self) -> None:
        """Delete what `write` kept."""
        if self._file is not None:
            _delete(self._file)


def start_of(*known: Any) -> Start:
    """A digest of `known`, the imported code and jax's settings.

    `known` has JSON's types. The code is all of this package, and what was imported from outside of
    Python's own folders.
    """
    text = json.dumps([*known, settings_of_jax(), _code()], sort_keys=True, default=str)
    return Start(hashlib.sha256(text.encode()).hexdigest()[:32])


def settings_of_jax() -> list[Any]:
    """Options of jax and its environment, which decide how programs are compiled."""
    read = {key: os.environ[key] for key in os.environ if key.startswith(("JAX_", "XLA_"))}
    options: dict[str, Any] = jax.config.values
    return [
        {key: value for key, value in values.items() if "cache" not in key.lower()}
        for values in (read, options)
    ]


def _code() -> dict[str, str]:
    """The digest of each source file."""
    packages = [Path(folder) for name in PACKAGES for folder in sys.modules[name].__path__]
    files = {str(file): file for folder in packages for file in folder.rglob("*.py")}
    theirs = {sysconfig.get_path("stdlib"), *site.getsitepackages(), site.getusersitepackages()}
    for name, module in list(sys.modules.items()):
        text = vars(module).get("__file__") if isinstance(module, ModuleType) else None
        file = Path(text) if isinstance(text, str) else Path()
        is_code = file.suffix == ".py" and file.is_absolute()
        if is_code and not any(map(file.is_relative_to, theirs)):
            files[name] = file
    return {name: _digest(file) for name, file in files.items()}


def _digest(file: Path) -> str:
    """Empty for a file that is not there, such as one of a zip."""
    with contextlib.suppress(OSError):
        return hashlib.sha256(file.read_bytes()).hexdigest()
    return ""


def _open_libraries() -> None:
    """Load the libraries that an executable calls, as lowering it would have done."""
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


def _files(folder: Path) -> Iterator[tuple[Path, float, int]]:
    """Each file of a folder, its last use and its size; others may delete them meanwhile."""
    with contextlib.suppress(OSError):
        for file in list(folder.iterdir()):
            with contextlib.suppress(OSError):
                status = file.stat()
                yield file, max(status.st_atime, status.st_mtime), status.st_size


def _note_use(file: Path) -> None:
    """For `bound`, on file systems that note no reads too."""
    with contextlib.suppress(OSError):  # a folder that may only be read
        os.utime(file, ns=(time.time_ns(), file.stat().st_mtime_ns))


def _delete(file: Path) -> None:
    with contextlib.suppress(OSError):
        file.unlink()


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
