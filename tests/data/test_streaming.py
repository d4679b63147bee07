"""Streamed records equal those that are read at the start, and memory holds none of them."""

import json
import pickle
import threading
import time
from dataclasses import replace

import pyarrow as pa
import pytest
from pyarrow import parquet

from jaxrl_llm.config import ConfigError, load_config
from jaxrl_llm.data import dataset, streaming
from jaxrl_llm.data.dataset import (
    RowRules,
    Sources,
    load_examples,
    load_preferences,
    load_prompts,
    load_unpaired,
)
from jaxrl_llm.data.loader import PromptLoader
from jaxrl_llm.data.run_data import load_run_prompts, train_sources
from jaxrl_llm.data.shaping import Shape
from jaxrl_llm.data.sources import ParquetRows
from jaxrl_llm.data.streaming import Streamed
from jaxrl_llm.tokenizer import CharTokenizer

CHAR = CharTokenizer()
PAIRS = [{"prompt": f"{i}+1=", "chosen": str(i + 1), "rejected": "0"} for i in range(40)]
EXAMPLES = [{"prompt": f"{i}+1=", "completion": str(i + 1)} for i in range(40)]


def rules(**changes):
    return RowRules(**{"max_length": 9, "streaming": True, **changes})


def write(folder, rows):
    """The rows in every kind of file that can be read by place."""
    (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    table = pa.Table.from_pylist(rows)
    parquet.write_table(table, folder / "b.parquet", row_group_size=7)
    with pa.OSFile(str(folder / "c.arrow"), "wb") as out:
        with pa.ipc.new_stream(out, table.schema) as stream:
            stream.write_table(table, max_chunksize=9)
    names = ("a.jsonl", "b.parquet", "c.arrow")
    return Sources(files=tuple(str(folder / name) for name in names))


@pytest.mark.parametrize(
    ("load", "rows"), [(load_prompts, PAIRS), (load_preferences, PAIRS), (load_examples, EXAMPLES)]
)
def test_streamed_records_are_those_of_a_whole_read(load, rows, tmp_path):
    sources = write(tmp_path, rows)
    whole = load(sources, CHAR, rules(streaming=False)).items
    found = load(sources, CHAR, rules()).items
    assert isinstance(found, Streamed)
    assert len(found) == len(whole) == 120 and list(found) == whole
    assert list(pickle.loads(pickle.dumps(found))) == whole


def test_only_the_first_rows_are_read_before_a_batch(tmp_path, monkeypatch):
    monkeypatch.setattr(streaming, "CHECKED_ROWS", 5)
    converted = []
    original = dataset._Reader.records_of

    def counted(self, row):
        converted.append(row)
        return original(self, row)

    monkeypatch.setattr(dataset._Reader, "records_of", counted)
    found = load_prompts(write(tmp_path, PAIRS), CHAR, rules()).items
    assert len(converted) == 15
    assert found[30].text == found[30].text == "30+1="
    assert len(converted) == 17


@pytest.fixture
def with_bad_rows(tmp_path, monkeypatch):
    """Rows 7, 8 and 39 of 40 are bad, and row 20 is too long."""
    monkeypatch.setattr(streaming, "CHECKED_ROWS", 5)
    rows = [dict(row) for row in PAIRS]
    for place in (7, 8, 39):
        rows[place]["prompt"] = ""
    rows[20]["prompt"] = "1234567890+1="
    (tmp_path / "x.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Sources(files=(str(tmp_path / "x.jsonl"),))


def test_a_late_bad_row_is_replaced_by_the_next_good_one(with_bad_rows, tmp_path):
    file = tmp_path / "bad.jsonl"
    given = rules(max_bad_fraction=0.99, filter_overlong=True, bad_rows_file=file)
    found = load_prompts(with_bad_rows, CHAR, given).items
    texts = [found[i].text for i in (6, 7, 8, 9, 20, 39)]
    assert texts == ["6+1=", "9+1=", "9+1=", "9+1=", "21+1=", "0+1="]
    listed = [json.loads(line)["row"] for line in file.read_text().splitlines()]
    assert listed == [7, 8, 39]


def test_a_late_bad_row_ends_a_run_that_allows_none(with_bad_rows):
    found = load_prompts(with_bad_rows, CHAR, rules()).items
    with pytest.raises(ValueError, match="x.jsonl row 7: .*empty.*\n.*max_bad_fraction"):
        found[7]
    with pytest.raises(ValueError, match="row 20: .*13 tokens"):
        found[20]


def test_a_resume_goes_on_and_refuses_other_data(tmp_path):
    sources = write(tmp_path, PAIRS)

    def loader():
        return PromptLoader(load_prompts(sources, CHAR, rules()).items, batch_size=4, seed=3)

    first = loader()
    whole = [[prompt.text for prompt in next(first)] for _ in range(5)]
    again = loader()
    again.set_state({**first.get_state(), "next_batch": 2})
    assert [[prompt.text for prompt in next(again)] for _ in range(3)] == whole[2:]
    state = first.get_state()
    sources = write(tmp_path, [*PAIRS[:-1], PAIRS[-1] | {"prompt": "x"}])
    with pytest.raises(ValueError, match="items_digest"):
        loader().set_state(state)


def test_rows_of_several_records_are_refused(tmp_path):
    with pytest.raises(ValueError, match="several records.*streaming=false"):
        load_unpaired(write(tmp_path, PAIRS), CHAR, rules())


def test_a_file_of_large_row_groups_is_refused_where_rows_are_shuffled(tmp_path, monkeypatch):
    monkeypatch.setattr(streaming, "MOST_DECODED", 200)  # a group of 7 rows has more
    sources = write(tmp_path, PAIRS)
    with pytest.raises(ValueError, match="b.parquet has row groups.*row_group_size=100\\)"):
        load_prompts(sources, CHAR, rules())
    assert len(load_prompts(sources, CHAR, rules(shuffled=False)).items) == 120
    assert len(load_prompts(sources, CHAR, rules(streaming=False)).items) == 120


def test_batches_are_decoded_ahead_and_no_further(tmp_path, monkeypatch):
    """While the step works, the next `prefetch` batches are made; then the reader waits."""
    sources = write(tmp_path, PAIRS)
    places, threads = [], set()
    original = ParquetRows.one

    def counted(self, place):
        places.append(place)
        threads.add(threading.current_thread())
        return original(self, place)

    parquet_only = Sources(files=(sources.files[1],))
    items = load_prompts(parquet_only, CHAR, rules()).items
    monkeypatch.setattr(ParquetRows, "one", counted)
    loader = PromptLoader(items, batch_size=4, seed=3, prefetch=2)
    for step in range(1, 4):
        next(loader)
        # The batches taken, those in the buffer, and one that waits for room in it.
        deadline = time.monotonic() + 20
        while len(places) < 4 * (step + 2) and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.1)
        assert 4 * (step + 2) <= len(places) <= 4 * (step + 3)
    loader.close()
    assert threading.current_thread() not in threads


def test_examples_decode_only_the_columns_that_they_are_made_of(tmp_path, monkeypatch):
    rows = [row | {"notes": "x" * 500, "data_source": "sums"} for row in EXAMPLES]
    file = tmp_path / "wide.parquet"
    parquet.write_table(pa.Table.from_pylist(rows), file, row_group_size=7)
    sources, decoded = Sources(files=(str(file),)), []
    original = ParquetRows._decoded

    def noted(self, group):
        table = original(self, group)
        decoded.append(table.column_names)
        return table

    monkeypatch.setattr(ParquetRows, "_decoded", noted)
    monkeypatch.setattr(streaming, "MOST_DECODED", 1000)  # the notes of a group have 3,500
    found = load_examples(sources, CHAR, rules()).items
    assert list(found) == load_examples(sources, CHAR, rules(streaming=False)).items
    assert found[3].data_source == "sums"
    assert decoded and all(n == ["prompt", "completion", "data_source"] for n in decoded)
    with pytest.raises(ValueError, match="row groups"):  # a reward may read any column
        load_prompts(sources, CHAR, rules())
    shaped = replace(sources, shape=Shape(columns={"completion": "notes"}))
    monkeypatch.setattr(streaming, "MOST_DECODED", 9000)
    long = load_examples(shaped, CHAR, rules(max_length=600)).items
    assert len(long[0].token_ids) > 500


def test_the_key_is_for_training_rows(tmp_path):
    files = write(tmp_path, EXAMPLES).files
    keys = {"data.streaming": True, "data.train_files": files, "data.train_tasks": []}
    config = load_config("grpo", keys)
    assert isinstance(load_run_prompts(config, train_sources(config), CHAR, None), Streamed)
    with pytest.raises(ConfigError, match="reads the column of all rows"):
        load_config("grpo", {**keys, "data.curriculum": "level"})
