"""Rows from disk (parquet, arrow, JSON, CSV) and from a user's dataset class. Imports no jax.

A file that cannot be opened ends the run at once. A row that cannot be read is returned as a
`BadRow`, in its place among the others. Rows can be read by their place: parquet by row groups,
arrow and JSON lines row by row. A JSON list, CSV and the rows of a class are in memory.
"""

import csv
import inspect
import json
import os
import threading
from abc import ABC, abstractmethod
from array import array
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO

from jaxrl_llm.data_files import DataFile
from jaxrl_llm.references import call

BATCH_ROWS = 1024
MESSAGE_KEYS = {"role", "from", "function", "parameters"}  # keys of messages and tools
ROW_GROUPS = 8  # row groups of a parquet file that stay in memory


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


class Rows(ABC):
    """The rows of one source, by place. It can be pickled: no file stays open in it."""

    @abstractmethod
    def __len__(self) -> int:
        """How many rows there are."""

    @property
    def bytes_of_one(self) -> int:
        """Most bytes that are decoded to read one row, where that is more than the row; else 0."""
        return 0

    @abstractmethod
    def read(self, start: int, stop: int) -> Iterator[RawRow | BadRow]:
        """The rows from `start` to before `stop`."""

    def one(self, place: int) -> RawRow | BadRow:
        """One row. What was read around it may be kept for the next."""
        return next(self.read(place, place + 1))

    def only(self, columns: Collection[str]) -> "Rows":
        """The rows for a reader of these columns: others are left out where that saves work."""
        return self


@dataclass(frozen=True)
class ListedRows(Rows):
    """Rows that are in memory."""

    rows: Sequence[RawRow | BadRow]

    def __len__(self) -> int:
        return len(self.rows)

    def read(self, start: int, stop: int) -> Iterator[RawRow | BadRow]:
        return iter(self.rows[start:stop])


@dataclass(frozen=True)
class ObjectRows(Rows):
    """Rows of a Python program: a list of dicts, or a `datasets.Dataset`, which reads its files."""

    name: str
    rows: Sequence[Mapping[str, Any]]

    def __len__(self) -> int:
        return len(self.rows)

    def read(self, start: int, stop: int) -> Iterator[RawRow | BadRow]:
        features = getattr(self.rows, "features", None)  # a datasets.Dataset has them
        nested = () if features is None else _message_columns(features.arrow_schema)
        for place in range(start, min(stop, len(self))):
            row = self.rows[place]
            if isinstance(row, Mapping):
                yield RawRow(self.name, place, _without_nulls(dict(row), nested))
            else:
                yield BadRow(self.name, place, f"expected a dict, got {type(row).__name__}")


def open_rows(file: DataFile) -> Rows:
    """The rows of the file. ValueError for a damaged file."""
    return _READERS[file.kind](file.path)


def read_rows(file: DataFile) -> Iterator[RawRow | BadRow]:
    """Every row of the file, in order. ValueError for a damaged file."""
    rows = open_rows(file)
    return rows.read(0, len(rows))


def parse_json(text: str) -> Any:
    """The value of a JSON text.

    Raises:
        ValueError: the text is not JSON, nests too deeply, or an object has the same key twice.
    """
    try:
        return json.loads(text, object_pairs_hook=_object)
    except RecursionError:
        raise ValueError("the JSON is nested too deeply") from None


def takes_split(dataset_class: Callable[..., Any]) -> bool:
    """True if the class (or function) has a parameter `split`, so that it can give two splits."""
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
    rows = call(name, lambda: list(dataset_class(tuple(files), **named)))
    return [
        RawRow(name, i, row)
        if isinstance(row, dict)
        else BadRow(name, i, f"expected a dict, got {type(row).__name__}")
        for i, row in enumerate(rows)
    ]


class ParquetRows(Rows):
    """A parquet file. A row group is decoded as a whole, and the last few stay in memory."""

    def __init__(self, path: str, columns: Collection[str] | None = None):
        """Of several `columns`, those that the file has are read; None reads all."""
        self._path = path
        self._file: Any = None
        self._groups: dict[int, Any] = {}  # the oldest first
        file = self._opened()
        names = file.schema_arrow.names
        self._columns = None if columns is None else [n for n in names if n in columns]
        groups = [file.metadata.row_group(i) for i in range(file.metadata.num_row_groups)]
        self._ends = list(accumulate(group.num_rows for group in groups))
        self._largest = max((self._bytes(group) for group in groups), default=0)

    def _bytes(self, group: Any) -> int:
        """Bytes of a row group that are decoded."""
        if self._columns is None:
            return group.total_byte_size
        chunks = [group.column(i) for i in range(group.num_columns)]
        read = [c for c in chunks if c.path_in_schema.partition(".")[0] in self._columns]
        return sum(chunk.total_uncompressed_size for chunk in read)

    def only(self, columns: Collection[str]) -> Rows:
        if any("." in name for name in self._opened().schema_arrow.names):
            return self  # pyarrow takes a dot for a part of a column
        return ParquetRows(self._path, columns)

    @property
    def bytes_of_one(self) -> int:
        return self._largest

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_file": None, "_groups": {}}

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def read(self, start: int, stop: int) -> Iterator[RawRow | BadRow]:
        groups = list(range(bisect_right(self._ends, start), len(self._ends)))
        if groups and start < stop:
            first = self._ends[groups[0] - 1] if groups[0] else 0
            batches = self._opened().iter_batches(batch_size=BATCH_ROWS, row_groups=groups)
            yield from _table_rows(self._path, _sound(self._path, batches), first, start, stop)

    def one(self, place: int) -> RawRow | BadRow:
        group = bisect_right(self._ends, place)
        first = self._ends[group - 1] if group else 0
        with _READING, _refusing(self._path, "parquet file"):
            table = self._groups.pop(group, None) or self._decoded(group)
            self._groups[group] = table
            if len(self._groups) > ROW_GROUPS:
                del self._groups[next(iter(self._groups))]
        return next(_table_rows(self._path, table.to_batches(), first, place, place + 1))

    def _decoded(self, group: int) -> Any:
        return self._opened().read_row_group(group, columns=self._columns)

    def _opened(self) -> Any:
        from pyarrow import parquet

        if self._file is None:
            with _refusing(self._path, "parquet file"):
                self._file = parquet.ParquetFile(self._path)
        return self._file


class ArrowRows(Rows):
    """An arrow stream, mapped into memory."""

    def __init__(self, path: str):
        self._path = path
        self._batches: list[Any] | None = None
        self._ends = list(accumulate(batch.num_rows for batch in self._opened()))

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_batches": None}

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def read(self, start: int, stop: int) -> Iterator[RawRow | BadRow]:
        number = bisect_right(self._ends, start)
        first = self._ends[number - 1] if number else 0
        yield from _table_rows(self._path, self._opened()[number:], first, start, stop)

    def _opened(self) -> list[Any]:
        """The batches of the stream; their memory is the mapped file's."""
        import pyarrow as pa

        if self._batches is None:
            with _refusing(self._path, "arrow stream"):
                self._batches = list(pa.ipc.open_stream(pa.memory_map(self._path)))
        return self._batches


class JsonLines(Rows):
    """A file of JSON lines. The whole file is searched once for the starts of its lines."""

    def __init__(self, path: str):
        self._path = path
        self._starts, self._lines = array("q"), array("q")  # places of the lines with text
        with open(path, "rb") as file:
            self._version = _version(file)
            start = 0
            for number, line in enumerate(file):
                if line.strip():
                    self._starts.append(start)
                    self._lines.append(number)
                start += len(line)

    def __len__(self) -> int:
        return len(self._starts)

    def read(self, start: int, stop: int) -> Iterator[RawRow | BadRow]:
        with open(self._path, "rb") as file:
            if _version(file) != self._version:  # its lines would be read at wrong places
                raise ValueError(f"{self._path!r} was changed after the run began to read it")
            for i in range(start, min(stop, len(self))):
                file.seek(self._starts[i])
                line, number = file.readline(), self._lines[i]
                text = line.removeprefix(b"\xef\xbb\xbf") if number == 0 else line
                yield _json_row(self._path, number, text)


def _version(file: BinaryIO) -> tuple[int, ...]:
    """Facts that change where a file is written or replaced."""
    status = os.fstat(file.fileno())
    return (status.st_ino, status.st_size, status.st_mtime_ns)


# Errors of single values: text that is not UTF-8, a date beyond Python's, a time zone that does not
# exist, a type that Python does not have.
_UNREADABLE = (ValueError, OverflowError, KeyError, NotImplementedError)


@contextmanager
def _refusing(path: str, what: str) -> Iterator[None]:
    """ValueError, with the file's name, for what pyarrow raises over a damaged file."""
    import pyarrow as pa

    try:
        yield
    except (pa.ArrowException, OSError, UnicodeDecodeError, OverflowError) as error:
        raise ValueError(f"{path!r} is not a readable {what}: {str(error).strip()}") from error


def _sound(path: str, batches: Iterable[Any]) -> Iterator[Any]:
    """The batches, with `_refusing` around the reading of each."""
    rest = iter(batches)
    while True:
        with _refusing(path, "parquet file"):
            batch = next(rest, None)
        if batch is None:
            return
        yield batch


_READING = threading.Lock()  # a parquet file is read by one thread at a time


def _table_rows(
    path: str, batches: Iterable[Any], first: int, start: int, stop: int
) -> Iterator[RawRow | BadRow]:
    """Rows `start` to `stop` of batches, of which the first begins with row `first`."""
    for batch in batches:
        if first >= stop:
            return
        begin, end = max(start - first, 0), min(stop - first, batch.num_rows)
        if begin < end:
            part, nested = batch.slice(begin, end - begin), _message_columns(batch.schema)
            try:
                part.validate(full=True)  # wrong offsets would read outside of the file
                rows = [_without_nulls(row, nested) for row in part.to_pylist()]
            except _UNREADABLE:  # raised for the whole batch, though only some rows are bad
                yield from _single_rows(path, part, first + begin)
            else:
                yield from (RawRow(path, first + begin + i, data) for i, data in enumerate(rows))
        first += batch.num_rows


def _single_rows(path: str, batch: Any, start: int) -> Iterator[RawRow | BadRow]:
    for i in range(batch.num_rows):
        one = batch.slice(i, 1)
        try:
            one.validate(full=True)
            data = _without_nulls(one.to_pylist()[0], _message_columns(one.schema))
            row = RawRow(path, start + i, data)
        except UnicodeDecodeError as error:
            row = BadRow(path, start + i, f"not UTF-8: {error.reason}")
        except _UNREADABLE as error:
            reason = "not UTF-8" if "UTF8" in str(error) else f"unreadable: {error}"
            row = BadRow(path, start + i, reason)
        yield row


def _message_columns(schema: Any) -> list[str]:
    """Columns of messages or tools: lists of structs with one of their keys."""
    import pyarrow as pa

    names = []
    for column in schema:
        kind = column.type
        while pa.types.is_list(kind) or pa.types.is_large_list(kind):
            kind = kind.value_type
        if kind != column.type and pa.types.is_struct(kind):
            if MESSAGE_KEYS.intersection(field.name for field in kind):
                names.append(column.name)
    return names


def _without_nulls(row: dict[str, Any], columns: Collection[str]) -> dict[str, Any]:
    """The row without nulls inside these columns.

    A struct of Arrow has the keys of all rows, so a null stands for a key that a row lacks.
    """
    return row | {name: _filled(row[name]) for name in columns}


def _filled(value: Any) -> Any:
    """Objects without their nulls, at any depth; nulls in a list stay."""
    if isinstance(value, dict):
        return {key: _filled(part) for key, part in value.items() if part is not None}
    return [_filled(part) for part in value] if isinstance(value, list) else value


def _open_csv(path: str) -> Rows:
    """A .csv file with a line of column names. Every value is text; an empty one is missing."""
    csv.field_size_limit(2**31 - 1)  # the default is 131,072 characters
    with open(path, newline="", encoding="utf-8-sig") as file:
        names, *lines = [line for line in csv.reader(file, strict=True) if line] or [[]]
    if not names or len(set(names)) < len(names) or not all(names):
        raise ValueError(f"{path!r} needs a first line with a name of its own for each column")
    return ListedRows([_csv_row(path, i, names, line) for i, line in enumerate(lines)])


def _csv_row(path: str, row: int, names: list[str], line: list[str]) -> RawRow | BadRow:
    if len(line) != len(names):
        return BadRow(path, row, f"{len(line)} values for {len(names)} columns")
    return RawRow(path, row, {n: value or None for n, value in zip(names, line, strict=True)})


def _open_json(path: str) -> Rows:
    """A .json file: one list of objects, or JSON lines under another name."""
    with open(path, "rb") as file:
        start = file.read(64).lstrip(b"\xef\xbb\xbf \t\r\n")
    if not start.startswith(b"["):
        return JsonLines(path)
    try:
        rows = parse_json(Path(path).read_bytes().decode("utf-8-sig"))
    except ValueError as error:  # a UnicodeDecodeError is one too
        raise ValueError(f"{path!r} is not a readable JSON file: {error}") from error
    return ListedRows([_json_object(path, i, data) for i, data in enumerate(rows)])


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
    value = dict(pairs)
    if len(value) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice!r} stands twice in one object")
    return value


_READERS: dict[str, Callable[[str], Rows]] = {
    "parquet": ParquetRows,
    "jsonl": JsonLines,
    "json": _open_json,
    "arrow": ArrowRows,
    "csv": _open_csv,
}
