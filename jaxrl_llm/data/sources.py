"""Rows from disk (parquet, arrow, JSON) and from a user's dataset class. Imports no jax.

A file that cannot be opened ends the run at once. A row that cannot be read is returned as a
`BadRow`, in its place among the others.
"""

import inspect
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxrl_llm.data_files import DataFile

BATCH_ROWS = 1024


@dataclass(frozen=True)
class RawRow:
    """One row as its source gives it. `row` is 0-based: line `row + 1` of a JSON-lines file."""

    source: str
    row: int
    data: dict[str, Any]


@dataclass(frozen=True)
class BadRow:
    """A row that is set aside."""

    source: str
    row: int
    reason: str


def read_rows(file: DataFile) -> Iterator[RawRow | BadRow]:
    """Every row of the file, in order. ValueError for a file that cannot be read."""
    return _READERS[file.kind](file.path)


def parse_json(text: str) -> Any:
    """The value of a JSON text.

    Raises:
        ValueError: the text is not JSON, or an object has the same key twice.
    """
    return json.loads(text, object_pairs_hook=_object)


def takes_split(dataset_class: Callable[..., Any]) -> bool:
    """Whether the class (or function) has a parameter `split`, so that it can give two splits."""
    try:
        parameters = inspect.signature(dataset_class).parameters
    except ValueError:  # some classes written in C have no signature
        return False
    return "split" in parameters and parameters["split"].kind is not inspect.Parameter.VAR_KEYWORD


def custom_rows(
    dataset_class: Callable[..., Iterable[Any]], name: str, files: Sequence[str], split: str
) -> list[RawRow | BadRow]:
    """Rows of `dataset_class(files)`, or of `dataset_class(files, split=split)` if it takes one.

    A row that is not a dict is a bad row. `name` stands for the class in messages.
    """
    named = {"split": split} if takes_split(dataset_class) else {}
    return [
        RawRow(name, i, row)
        if isinstance(row, dict)
        else BadRow(name, i, f"expected a dict, got {type(row).__name__}")
        for i, row in enumerate(dataset_class(tuple(files), **named))
    ]


def _read_parquet(path: str) -> Iterator[RawRow | BadRow]:
    import pyarrow as pa
    from pyarrow import parquet

    try:
        file = parquet.ParquetFile(path)
    except pa.ArrowInvalid as error:
        raise ValueError(f"{path!r} is not a readable parquet file: {error}") from error
    with file:
        _refuse_double_columns(path, file.schema_arrow)
        yield from _table_rows(path, file.iter_batches(batch_size=BATCH_ROWS))


def _read_arrow(path: str) -> Iterator[RawRow | BadRow]:
    import pyarrow as pa

    with pa.memory_map(path) as file:
        try:
            batches = pa.ipc.open_stream(file)
        except pa.ArrowInvalid as error:
            raise ValueError(f"{path!r} is not a readable arrow stream: {error}") from error
        _refuse_double_columns(path, batches.schema)
        yield from _table_rows(path, batches)


def _refuse_double_columns(path: str, fields: Iterable[Any], where: str = "") -> None:
    """ValueError for two columns of one name, also inside a struct: pyarrow keeps the last one."""
    names: set[str] = set()
    for field in fields:
        if field.name in names:
            raise ValueError(
                f"{path!r} has two columns {where + field.name!r}: rename or drop one of them"
            )
        names.add(field.name)
        kind = field.type
        children = [kind.field(i) for i in range(kind.num_fields)]
        _refuse_double_columns(path, children, f"{where}{field.name}.")


def _table_rows(path: str, batches: Iterable[Any]) -> Iterator[RawRow | BadRow]:
    start = 0
    for batch in batches:
        try:
            rows = batch.to_pylist()
        except UnicodeDecodeError:  # raised for the whole batch, though only some rows are bad
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
        rows = parse_json(Path(path).read_bytes().decode("utf-8-sig"))
    except ValueError as error:  # a UnicodeDecodeError is one too
        raise ValueError(f"{path!r} is not a readable JSON file: {error}") from error
    for i, data in enumerate(rows):
        yield _json_object(path, i, data)


def _json_row(path: str, row: int, line: bytes) -> RawRow | BadRow:
    try:
        data = parse_json(line.decode("utf-8").rstrip("\r\n"))
    except UnicodeDecodeError as error:
        return BadRow(path, row, f"not UTF-8: {error.reason} at byte {error.start}")
    except json.JSONDecodeError as error:
        return BadRow(path, row, f"not JSON: {error.msg} at character {error.pos}")
    except ValueError as error:
        return BadRow(path, row, str(error))
    return _json_object(path, row, data)


def _json_object(path: str, row: int, data: Any) -> RawRow | BadRow:
    if isinstance(data, dict):
        return RawRow(path, row, data)
    return BadRow(path, row, f"expected a JSON object, got {type(data).__name__}")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object. Python's parser would keep the last of several equal keys."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice!r} stands twice in one object")
    return found


_READERS: dict[str, Callable[[str], Iterator[RawRow | BadRow]]] = {
    "parquet": _read_parquet,
    "jsonl": _read_jsonl,
    "json": _read_json,
    "arrow": _read_arrow,
}
