"""Rows from every kind of file, and every way in which a row or a file can be broken."""

import json
import subprocess
import sys

import pyarrow as pa
import pytest
from pyarrow import parquet

from jaxrl_llm.data.sources import BadRow, RawRow, custom_rows, open_rows, read_rows
from jaxrl_llm.data_files import DataFile, resolve_files
from jaxrl_llm.references import load

ROWS = [{"prompt": f"{i}+1=", "answer": i + 1, "tags": ["é", "漢字 🙂"]} for i in range(5)]


def read(*names):
    files = [file for name in names for file in resolve_files(str(name))]
    return [row for file in files for row in read_rows(file)]


def data(*names):
    return [row.data if isinstance(row, RawRow) else row.reason for row in read(*names)]


def write_jsonl(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return path


def write_parquet(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pa.Table.from_pylist(rows), path)
    return path


def write_saved(folder, rows, num_shards=1):
    """What Dataset.save_to_disk writes: arrow streams, and state.json with their order."""
    folder.mkdir(parents=True)
    names = [f"data-{i:05}-of-{num_shards:05}.arrow" for i in range(num_shards)]
    for i, name in enumerate(names):
        table = pa.Table.from_pylist(rows[i::num_shards])
        with pa.OSFile(str(folder / name), "wb") as out, pa.ipc.new_stream(out, table.schema) as w:
            w.write_table(table)
    state = {"_data_files": [{"filename": name} for name in names], "_format_type": None}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text("{}")
    return folder


def test_parquet_and_jsonl_give_the_same_rows(tmp_path):
    assert data(write_jsonl(tmp_path / "a.jsonl", ROWS)) == ROWS
    assert data(write_parquet(tmp_path / "a.parquet", ROWS)) == ROWS
    rows = read(tmp_path / "a.parquet")
    assert [row.row for row in rows] == [0, 1, 2, 3, 4]
    assert rows[0].source == (tmp_path / "a.parquet").as_posix()


def test_several_files_and_globs_keep_their_order(tmp_path):
    write_jsonl(tmp_path / "b" / "2.jsonl", ROWS[2:])
    write_jsonl(tmp_path / "b" / "1.jsonl", ROWS[:2])
    assert data(tmp_path / "b" / "*.jsonl") == ROWS
    assert data(tmp_path / "b" / "2.jsonl", tmp_path / "b" / "1.jsonl") == ROWS[2:] + ROWS[:2]


def test_a_glob_may_match_folders_and_a_name_may_contain_a_hash(tmp_path):
    write_jsonl(tmp_path / "a1" / "train.jsonl", ROWS[:1])
    write_jsonl(tmp_path / "a2" / "train.jsonl", ROWS[1:2])
    write_jsonl(tmp_path / "a2" / "test.jsonl", ROWS[2:])
    write_jsonl(tmp_path / "b#1.jsonl", ROWS[3:])
    assert data(f"{tmp_path}/a*#train") == ROWS[:2]
    assert data(f"{tmp_path}/**/test.jsonl") == ROWS[2:]
    assert data(f"{tmp_path}/b#1.jsonl") == ROWS[3:]
    with pytest.raises(ValueError, match="is a file and has no splits: leave out '#train'"):
        read(f"{tmp_path}/a1/train.jsonl#train")
    assert resolve_files(f"{tmp_path}/a2#test") == [DataFile(f"{tmp_path}/a2/test.jsonl", "jsonl")]


def test_json_lists_json_lines_and_byte_order_marks(tmp_path):
    (tmp_path / "list.json").write_text(json.dumps(ROWS))
    (tmp_path / "mark.jsonl").write_bytes(b'\xef\xbb\xbf{"prompt": "1"}\r\n\n{"prompt": "2"}')
    write_jsonl(tmp_path / "lines.json", ROWS)
    assert data(tmp_path / "list.json") == data(tmp_path / "lines.json") == ROWS
    assert data(tmp_path / "mark.jsonl") == [{"prompt": "1"}, {"prompt": "2"}]
    assert [row.row for row in read(tmp_path / "mark.jsonl")] == [0, 2]  # line 2 is blank


def test_bad_json_lines_keep_their_place_and_say_why(tmp_path):
    path = tmp_path / "bad.jsonl"
    path.write_bytes(b'{"a": 1}\n{"a": "\xff"}\n{"a": \n[1, 2]\n"text"\n{"a": 2}\n')
    assert read(path) == [
        RawRow(str(path), 0, {"a": 1}),
        BadRow(str(path), 1, "not UTF-8: invalid start byte at byte 7"),
        BadRow(str(path), 2, "not JSON: Expecting value at character 6"),
        BadRow(str(path), 3, "expected a JSON object, got list"),
        BadRow(str(path), 4, "expected a JSON object, got str"),
        RawRow(str(path), 5, {"a": 2}),
    ]


def test_json_lines_that_change_while_they_are_read(tmp_path):
    """Streamed rows silently came from another file with lines of the same lengths."""
    path = write_jsonl(tmp_path / "rows.jsonl", ROWS)
    rows = open_rows(DataFile(str(path), "jsonl"))
    assert len(list(rows.read(0, 9))) == len(ROWS)
    path.write_text(path.read_text().replace("4+1", "77+1"))
    with pytest.raises(ValueError, match=r"rows.jsonl' was changed after the run"):
        list(rows.read(0, 1))


def test_a_key_that_stands_twice_spoils_its_row_or_file(tmp_path):
    path = tmp_path / "twice.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": "b", "prompt": "c"}\n{"a": {"b": 1, "b": 2}}\n')
    assert data(path) == [
        {"prompt": "a"},
        "the key 'prompt' stands twice in one object",
        "the key 'b' stands twice in one object",
    ]
    (tmp_path / "twice.json").write_text('[{"prompt": "b", "prompt": "c"}]')
    with pytest.raises(ValueError, match="twice.json' .*the key 'prompt' stands twice"):
        read(tmp_path / "twice.json")


def test_a_parquet_string_that_is_not_utf8_spoils_only_its_row(tmp_path):
    offsets, bytes_ = pa.array([0, 2, 4, 6], pa.int32()).buffers()[1], pa.py_buffer(b"ab\xff\xfecd")
    column = pa.Array.from_buffers(pa.string(), 3, [None, offsets, bytes_])
    path = tmp_path / "bad.parquet"
    parquet.write_table(pa.table({"prompt": column}), path)
    assert data(path) == [{"prompt": "ab"}, "not UTF-8", {"prompt": "cd"}]


def test_saved_dataset_folders(tmp_path):
    shards = ROWS[0::2] + ROWS[1::2]
    assert data(write_saved(tmp_path / "one", ROWS, num_shards=2)) == shards
    write_saved(tmp_path / "both" / "train", ROWS)
    write_saved(tmp_path / "both" / "test", ROWS[:1])
    (tmp_path / "both" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    assert data(f"{tmp_path}/both#test") == ROWS[:1]
    assert data(tmp_path / "both" / "train") == ROWS
    with pytest.raises(ValueError, match="has several splits: give one as .*both#train or #test"):
        read(tmp_path / "both")
    with pytest.raises(ValueError, match="has no split 'dev'"):
        read(f"{tmp_path}/both#dev")
    with pytest.raises(ValueError, match="is one split: leave out '#train'"):
        read(f"{tmp_path}/one#train")


def test_saved_dataset_folders_that_are_not_whole(tmp_path):
    folder = write_saved(tmp_path / "one", ROWS)
    state = json.loads((folder / "state.json").read_text())
    (folder / "state.json").write_text(json.dumps({**state, "_indices_data_files": [{}]}))
    with pytest.raises(ValueError, match="flatten_indices"):
        read(folder)
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "data-00000-of-00001.arrow").write_bytes(b"hello")
    with pytest.raises(ValueError, match="is not a readable arrow stream"):
        read(folder)


def test_folders_of_parquet_files(tmp_path):
    write_parquet(tmp_path / "hub" / "data" / "train-00000-of-00002.parquet", ROWS[:3])
    write_parquet(tmp_path / "hub" / "data" / "train-00001-of-00002.parquet", ROWS[3:])
    (tmp_path / "hub" / ".cache").mkdir()
    write_jsonl(tmp_path / "hub" / ".cache" / "x.jsonl", [{}])
    (tmp_path / "hub" / "dataset_infos.json").write_text("{}")
    assert data(tmp_path / "hub") == ROWS
    write_jsonl(tmp_path / "whole" / "rows.jsonl", ROWS)
    with pytest.raises(ValueError, match="has no splits: leave out '#train'"):
        read(f"{tmp_path}/whole#train")
    write_parquet(tmp_path / "hub" / "test" / "x.parquet", ROWS[:1])
    with pytest.raises(ValueError, match="has several splits: give one as .*hub#train or #test"):
        read(tmp_path / "hub")
    assert data(f"{tmp_path}/hub#train") == ROWS
    assert data(f"{tmp_path}/hub#test") == ROWS[:1]


@pytest.mark.parametrize(
    ("names", "splits"),
    [
        (("gsm8k_train.jsonl", "gsm8k_test.jsonl"), ("test", "train")),
        (("train.v1.jsonl", "Test.v1.jsonl"), ("test", "train")),
        (("train_sft-00000-of-00001.jsonl", "test_sft-00000-of-00001.jsonl"), ("t*_sft",)),
        (("x/train_1/a.jsonl", "x/dev 1/a.jsonl"), ("dev", "train")),
    ],
)
def test_splits_are_words_of_names(tmp_path, names, splits):
    for i, name in enumerate(names):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        write_jsonl(tmp_path / name, ROWS[i : i + 1])
    pattern = r" or #".join(splits).replace("t*_sft", "test_sft or #train_sft")
    with pytest.raises(ValueError, match=f"has several splits: give one as .*#{pattern}"):
        read(tmp_path)
    split = "train_sft" if "sft" in names[0] else "train"
    assert data(f"{tmp_path}#{split}") == ROWS[:1]


def test_files_of_no_split_are_not_mixed_with_a_split(tmp_path):
    for name in ("math.jsonl", "contested.jsonl"):  # a word, not a part of one
        write_jsonl(tmp_path / name, ROWS[:1])
    assert data(tmp_path) == ROWS[:1] * 2
    write_jsonl(tmp_path / "test.jsonl", ROWS[1:2])
    with pytest.raises(ValueError, match="has several splits: give one as .*#test"):
        read(tmp_path)
    assert data(f"{tmp_path}#test") == ROWS[1:2]


def test_missing_and_unreadable_files_end_the_run(tmp_path):
    write_jsonl(tmp_path / "train.jsonl", ROWS)
    with pytest.raises(ValueError, match=r"no file or folder .*; did you mean '.*train.jsonl'\?"):
        read(tmp_path / "trian.jsonl")
    with pytest.raises(ValueError, match="no file or folder"):
        read(tmp_path / "*.parquet")
    (tmp_path / "table.xls").write_text("a,b\n")
    with pytest.raises(ValueError, match=r"must end in .parquet, .arrow, .jsonl, .json, .csv"):
        read(tmp_path / "table.xls")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="holds no"):
        read(tmp_path / "empty")
    (tmp_path / "junk.parquet").write_text("hello")
    with pytest.raises(ValueError, match="is not a readable parquet file"):
        read(tmp_path / "junk.parquet")
    (tmp_path / "junk.json").write_text("[1, 2")
    with pytest.raises(ValueError, match="is not a readable JSON file"):
        read(tmp_path / "junk.json")


CUSTOM = """
from dataclasses import dataclass

@dataclass
class Doubled:
    files: tuple

    def __iter__(self):
        for name in self.files:
            yield {"prompt": name * 2}
            yield "no dict"
"""


def test_custom_dataset_class_by_file_and_by_module(tmp_path, monkeypatch):
    (tmp_path / "my_rows_for_test.py").write_text(CUSTOM)
    path = f"{tmp_path}/my_rows_for_test.py:Doubled"
    assert custom_rows(load(path), "mine", ["ab"], "train") == [
        RawRow("mine", 0, {"prompt": "abab"}),
        BadRow("mine", 1, "expected a dict, got str"),
    ]
    monkeypatch.syspath_prepend(tmp_path)
    assert load("my_rows_for_test:Doubled").__name__ == "Doubled"
    with pytest.raises(ValueError, match="has no 'Double'; did you mean 'Doubled'"):
        load(f"{tmp_path}/my_rows_for_test.py:Double")
    with pytest.raises(ValueError, match="there is no file .*did you mean .*my_rows_for_test.py"):
        load(f"{tmp_path}/my_row_for_test.py:Doubled")
    with pytest.raises(ValueError, match="there is no module 'no_such_module_here'"):
        load("no_such_module_here:Doubled")
    with pytest.raises(ValueError, match="does not name a function or class"):
        load("my_rows_for_test.Doubled")


def test_what_is_heavy_is_imported_where_it_is_used():
    code = (
        "import sys, jaxrl_llm.data.sources, jaxrl_llm.data.tasks, jaxrl_llm.data_files;"
        "assert not {'jax', 'pyarrow'} & set(sys.modules);"
        "import jaxrl_llm.checkpoint.layout, jaxrl_llm.data.dataset, jaxrl_llm.tokenizer;"
        "import jaxrl_llm.checkpoint.manager, jaxrl_llm.data.loader;"
        "assert not {'pyarrow', 'grain', 'orbax', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
