"""Data files with changed bytes: rows, bad rows, or an error that names the file. No traceback."""

import json

import pyarrow as pa
import pytest
from byte_changes import changed, refused_changes
from pyarrow import parquet

from jaxrl_llm.data.sources import BadRow, open_rows, read_rows
from jaxrl_llm.data_files import resolve_files

ROWS = [{"prompt": f"p{i}", "answer": str(i), "extra_info": {"a": i, "b": [1]}} for i in range(40)]


def write(path):
    table = pa.Table.from_pylist(ROWS)
    if path.suffix == ".parquet":
        parquet.write_table(table, path, row_group_size=16)
    elif path.suffix == ".arrow":
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
            stream.write_table(table, max_chunksize=16)
    elif path.suffix == ".json":
        path.write_text(json.dumps(ROWS))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path.read_bytes()


@pytest.mark.parametrize("changes", [150, pytest.param(2000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["parquet", "arrow", "json", "jsonl"])
def test_a_changed_file_gives_rows_or_a_sentence(tmp_path, kind, changes):
    path = tmp_path / f"d.{kind}"
    write(path)

    def read():
        try:
            rows = [row for file in resolve_files(str(path)) for row in read_rows(file)]
        except ValueError as error:
            assert path.name in str(error)
            raise
        if any(isinstance(row, BadRow) for row in rows):
            raise ValueError("bad rows are named when they are read")

    assert refused_changes(path, read, changes, changed) > changes // 4


def test_values_that_python_cannot_hold_are_bad_rows(tmp_path):
    path = tmp_path / "d.parquet"
    far = pa.array([0, 2**60], pa.int64()).cast(pa.timestamp("us"))  # the year 38,000
    parquet.write_table(pa.table({"prompt": ["a", "b"], "when": far}), path)
    (file,) = resolve_files(str(path))
    first, second = read_rows(file)
    assert not isinstance(first, BadRow)
    assert isinstance(second, BadRow) and "unreadable" in second.reason
    zone = pa.array([0], pa.timestamp("s", tz="Mars/Base"))
    parquet.write_table(pa.table({"prompt": ["a"], "when": zone}), path)
    assert isinstance(next(open_rows(file).read(0, 1)), BadRow)
