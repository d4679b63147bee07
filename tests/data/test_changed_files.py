"""Data files with changed bytes: rows, bad rows, or an error that names the file. No traceback."""

import json
import random

import pyarrow as pa
import pytest
from pyarrow import parquet

from jaxrl_llm.data.sources import BadRow, open_rows, read_rows
from jaxrl_llm.data_files import resolve_files

ROWS = [{"prompt": f"p{i}", "answer": str(i), "extra_info": {"a": i, "b": [1]}} for i in range(40)]
CHANGES = 150
INSERTED = (b"[", b"{", b"null", b"1e999", b'"', b"9" * 5000, b"[" * 3000, b"\xff\xfe", bytes(8))


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


def changed(good, draw):
    """Some bytes set, cut, repeated or put in."""
    out = bytearray(good)
    for _ in range(draw.choice([1, 1, 3])):
        place, other = draw.randrange(len(good)), draw.randrange(len(good))
        match draw.randrange(5):
            case 0:
                out[place : place + 1] = bytes([draw.randrange(256)])
            case 1:
                out[place : place + 1] = bytes([good[place] ^ 1 << draw.randrange(8)])
            case 2:
                del out[place : place + draw.choice([1, 8, 64, 10**6])]
            case 3:
                out[place:place] = good[other : other + draw.choice([1, 16, 200])]
            case _:
                out[place:place] = draw.choice(INSERTED)
    return bytes(out)


@pytest.mark.parametrize("kind", ["parquet", "arrow", "json", "jsonl"])
def test_a_changed_file_gives_rows_or_a_sentence(tmp_path, kind):
    good, draw, refused = write(tmp_path / f"good.{kind}"), random.Random(0), 0
    for number in range(CHANGES):
        # Another name each time: a file that is mapped must not be overwritten.
        path = tmp_path / f"{number}.{kind}"
        path.write_bytes(changed(good, draw))
        try:
            rows = [row for file in resolve_files(str(path)) for row in read_rows(file)]
        except ValueError as error:
            assert path.name in str(error)
            refused += 1
        else:
            refused += any(isinstance(row, BadRow) for row in rows)
        path.unlink()
    assert refused > CHANGES // 4


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
