"""Rows from disk: parquet, JSON lines, and Hugging Face dataset folders. Imports no jax.

A file that cannot be opened ends the run at once. A row that cannot be read comes back as a
`BadRow`, in its place among the others.
"""

import difflib
import glob
import importlib
import importlib.util
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

KINDS = {".parquet": "parquet", ".arrow": "arrow", ".jsonl": "jsonl", ".json": "json"}
SPLIT_NAMES = ("train", "test", "validation", "valid", "val", "dev", "eval")
BATCH_ROWS = 1024


@dataclass(frozen=True)
class RawRow:
    """One row as its source gives it. `row` is 0-based; line `row + 1` of a JSON-lines file."""

    source: str
    row: int
    data: dict[str, Any]


@dataclass(frozen=True)
class BadRow:
    """A row that is set aside."""

    source: str
    row: int
    reason: str


@dataclass(frozen=True)
class FileSource:
    """One file of rows, known to exist."""

    path: str
    kind: str  # parquet | jsonl | json | arrow

    def rows(self) -> Iterator[RawRow | BadRow]:
        """Every row of the file, in order."""
        return _READERS[self.kind](self.path)


def resolve_files(files: Sequence[str]) -> list[FileSource]:
    """The files behind paths, globs and dataset folders; reads no row.

    A folder is what `Dataset.save_to_disk` writes, or holds parquet or JSON files. `FOLDER#SPLIT`
    picks one split where there are several.

    Raises:
        ValueError: nothing there (with the nearest name), an unknown kind of file, or a folder
            with several splits and none picked.
    """
    found = []
    for name in files:
        base, _, split = name.partition("#")
        if Path(base).is_dir():
            found.extend(_folder_files(Path(base), split))
        elif Path(base).is_file():
            found.append(_file(Path(base)))
        else:
            matches = sorted(glob.glob(base, recursive=True))
            if not matches:
                raise ValueError(_missing(name))
            found.extend(_file(Path(match)) for match in matches)
    return found


def load_attribute(path: str) -> Any:
    """What `package.module:name` or `file.py:name` names; ValueError if there is nothing."""
    place, separator, name = path.rpartition(":")
    if not separator or not place or not name:
        raise ValueError(f"{path!r} must read 'package.module:name' or 'file.py:name'")
    if place.endswith(".py"):
        if not Path(place).is_file():
            raise ValueError(_missing(place))
        name_here = f"jaxrl_llm_data_{Path(place).stem}"
        spec = importlib.util.spec_from_file_location(name_here, place)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name_here] = module  # where dataclasses of the file look themselves up
        spec.loader.exec_module(module)
    else:
        try:
            module = importlib.import_module(place)
        except ModuleNotFoundError as error:
            raise ValueError(f"{path!r}: {error}; is its folder on the Python path?") from error
    if not hasattr(module, name):
        near = difflib.get_close_matches(name, dir(module), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"{place!r} has no {name!r}{hint}")
    return getattr(module, name)


def custom_rows(dataset_class: str, files: Sequence[str]) -> Iterator[RawRow | BadRow]:
    """Rows of `Class(files)`: any iterable of dicts. What is no dict is a bad row."""
    dataset: Iterable[Any] = load_attribute(dataset_class)(tuple(files))
    for i, row in enumerate(dataset):
        if isinstance(row, dict):
            yield RawRow(dataset_class, i, row)
        else:
            yield BadRow(dataset_class, i, f"expected a dict, got {type(row).__name__}")


def _file(path: Path) -> FileSource:
    if path.suffix not in KINDS:
        raise ValueError(
            f"{str(path)!r} is no data file that can be read: its name must end in "
            f"{', '.join(KINDS)}"
        )
    return FileSource(path.as_posix(), KINDS[path.suffix])


def _missing(name: str) -> str:
    parent = Path(name).parent
    names = [entry.name for entry in parent.glob("*")] if parent.is_dir() else []
    near = difflib.get_close_matches(Path(name).name, names, n=1)
    hint = f"; did you mean {(parent / near[0]).as_posix()!r}?" if near else ""
    return f"no file or folder {name!r}{hint}"


def _folder_files(folder: Path, split: str) -> list[FileSource]:
    if (folder / "dataset_dict.json").is_file():
        splits = json.loads((folder / "dataset_dict.json").read_text())["splits"]
        return _saved_files(folder / _pick(folder, splits, split))
    if (folder / "state.json").is_file():
        if split:
            raise ValueError(f"{str(folder)!r} is one split: leave out '#{split}'")
        return _saved_files(folder)
    visible = [
        path
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not any(part[0] == "." for part in path.relative_to(folder).parts)
    ]
    # Of one kind only: beside parquet files a .json file is about the data, not data.
    kinds = [[path for path in visible if path.suffix == suffix] for suffix in KINDS]
    files = next((paths for paths in kinds if paths), None)
    if files is None:
        raise ValueError(f"the folder {str(folder)!r} holds no {', '.join(KINDS)} file")
    by_split: dict[str, list[Path]] = {}
    for path in files:
        by_split.setdefault(_split_of(path.relative_to(folder)), []).append(path)
    chosen = _pick(folder, list(by_split), split) if split or len(by_split) > 1 else ""
    return [_file(path) for path in (by_split[chosen] if chosen else files)]


def _saved_files(folder: Path) -> list[FileSource]:
    """The arrow files of a `save_to_disk` folder, in the order that its state.json gives."""
    state = json.loads((folder / "state.json").read_text())
    if state.get("_indices_data_files"):
        raise ValueError(
            f"{str(folder)!r} keeps an index mapping beside its rows: call flatten_indices() "
            "before save_to_disk()"
        )
    files = [folder / entry["filename"] for entry in state["_data_files"]]
    for file in files:
        if not file.is_file():
            raise ValueError(f"{str(folder)!r} lacks {file.name!r}, which its state.json names")
    return [FileSource(file.as_posix(), "arrow") for file in files]


def _pick(folder: Path, splits: Sequence[str], split: str) -> str:
    if split in splits:
        return split
    what = f"has no split {split!r}" if split else "has several splits"
    raise ValueError(f"{str(folder)!r} {what}: give one as {folder}#{' or #'.join(splits)}")


def _split_of(path: Path) -> str:
    """`train` for train.parquet, train-00000-of-00002.parquet and train/x.parquet, else ""."""
    for name in (path.stem.split("-")[0], *(part.split("-")[0] for part in path.parts[:-1])):
        if name in SPLIT_NAMES:
            return name
    return ""


def _read_parquet(path: str) -> Iterator[RawRow | BadRow]:
    import pyarrow as pa
    from pyarrow import parquet

    try:
        file = parquet.ParquetFile(path)
    except pa.ArrowInvalid as error:
        raise ValueError(f"{path!r} is no readable parquet file: {error}") from error
    with file:
        yield from _table_rows(path, file.iter_batches(batch_size=BATCH_ROWS))


def _read_arrow(path: str) -> Iterator[RawRow | BadRow]:
    import pyarrow as pa

    with pa.memory_map(path) as file:
        try:
            batches = pa.ipc.open_stream(file)
        except pa.ArrowInvalid as error:
            raise ValueError(f"{path!r} is no readable arrow stream: {error}") from error
        yield from _table_rows(path, batches)


def _table_rows(path: str, batches: Iterable[Any]) -> Iterator[RawRow | BadRow]:
    start = 0
    for batch in batches:
        try:
            rows = batch.to_pylist()
        except UnicodeDecodeError:  # for the whole batch, though one row is at fault
            yield from _single_rows(path, batch, start)
        else:
            yield from (RawRow(path, start + i, data) for i, data in enumerate(rows))
        start += batch.num_rows


def _single_rows(path: str, batch: Any, start: int) -> Iterator[RawRow | BadRow]:
    for i in range(batch.num_rows):
        try:
            row = RawRow(path, start + i, batch.slice(i, 1).to_pylist()[0])
        except UnicodeDecodeError as error:
            row = BadRow(path, start + i, f"not UTF-8: {error.reason}")
        yield row


def _read_jsonl(path: str) -> Iterator[RawRow | BadRow]:
    with open(path, "rb") as file:
        for i, line in enumerate(file):
            if line.strip():
                yield _json_row(path, i, line.removeprefix(b"\xef\xbb\xbf") if i == 0 else line)


def _read_json(path: str) -> Iterator[RawRow | BadRow]:
    """A .json file: one list of objects, or JSON lines under another name."""
    with open(path, "rb") as file:
        is_list = file.read(64).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"[")
    if not is_list:
        yield from _read_jsonl(path)
        return
    try:
        rows = json.loads(Path(path).read_bytes().decode("utf-8-sig"))
    except ValueError as error:  # a UnicodeDecodeError is one too
        raise ValueError(f"{path!r} is no readable JSON file: {error}") from error
    for i, data in enumerate(rows):
        yield _json_object(path, i, data)


def _json_row(path: str, row: int, line: bytes) -> RawRow | BadRow:
    try:
        data = json.loads(line.decode("utf-8").rstrip("\r\n"))
    except UnicodeDecodeError as error:
        return BadRow(path, row, f"not UTF-8: {error.reason} at byte {error.start}")
    except json.JSONDecodeError as error:
        return BadRow(path, row, f"not JSON: {error.msg} at character {error.pos}")
    return _json_object(path, row, data)


def _json_object(path: str, row: int, data: Any) -> RawRow | BadRow:
    if isinstance(data, dict):
        return RawRow(path, row, data)
    return BadRow(path, row, f"expected a JSON object, got {type(data).__name__}")


_READERS: dict[str, Callable[[str], Iterator[RawRow | BadRow]]] = {
    "parquet": _read_parquet,
    "jsonl": _read_jsonl,
    "json": _read_json,
    "arrow": _read_arrow,
}
