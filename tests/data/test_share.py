"""Three processes read what one does, each checks its stripe, and each reads any record."""

import json
import pickle

import jax
import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from jaxrl_llm.config import ChainSum
from jaxrl_llm.data import dataset, share
from jaxrl_llm.data.collating import collate_records, offline_records
from jaxrl_llm.data.dataset import RowRules, Sources, load_prompts, load_unpaired
from jaxrl_llm.data.loader import Loader, PromptLoader
from jaxrl_llm.data.share import digest, sampled_digest
from jaxrl_llm.tokenizer import CharTokenizer

CHAR, PROCESSES = CharTokenizer(), 3
RULES = RowRules(max_length=9, filter_overlong=True, max_bad_fraction=0.5)
# Bad rows, rows that are too long, and rows that give two records.
PAIRS = [{"prompt": f"{i}+1=", "chosen": str(i), "rejected": "9" * (1 + i % 4)} for i in range(40)]
PAIRS[3] = PAIRS[3] | {"prompt": ""}
PAIRS[20] = PAIRS[20] | {"chosen": "1234567"}


@pytest.fixture
def sources(tmp_path):
    """Every kind of file, and a task."""
    lines = [json.dumps(row) for row in PAIRS]
    lines.insert(7, "")
    lines[30] = "{"
    (tmp_path / "a.jsonl").write_text("\n".join(lines) + "\n")
    table = pa.Table.from_pylist(PAIRS)
    parquet.write_table(table, tmp_path / "b.parquet", row_group_size=7)
    with (
        pa.OSFile(str(tmp_path / "c.arrow"), "wb") as out,
        pa.ipc.new_stream(out, table.schema) as w,
    ):
        w.write_table(table, max_chunksize=9)
    (tmp_path / "d.json").write_text(json.dumps(PAIRS[:2]))
    files = tuple(str(tmp_path / name) for name in ("a.jsonl", "b.parquet", "c.arrow", "d.json"))
    return Sources(files=files, tasks=(ChainSum(num_terms=2, size=5),))


def on_processes(monkeypatch, load):
    """What `load()` returns on each of three processes; their summaries are exchanged by hand."""

    class Given(Exception):
        pass

    summaries = []

    def give(value, name):
        summaries.append(json.loads(json.dumps(value)))
        raise Given

    found = []
    with monkeypatch.context() as patch:
        patch.setattr(jax, "process_count", lambda: PROCESSES)
        for exchange in (give, lambda value, name: summaries):
            patch.setattr(dataset, "gather_objects", exchange)
            for process in range(PROCESSES):
                patch.setattr(jax, "process_index", lambda process=process: process)
                try:
                    found.append(load())
                except Given:
                    pass
    return found


@pytest.mark.parametrize("load", [load_prompts, load_unpaired])
def test_three_processes_load_what_one_does(load, sources, monkeypatch):
    alone = load(sources, CHAR, RULES)
    several = on_processes(monkeypatch, lambda: load(sources, CHAR, RULES))
    assert len(several) == PROCESSES and alone.bad_rows
    assert alone.num_overlong > 0 or load is load_prompts
    for loaded in several:
        assert list(loaded.items) == alone.items
        assert list(pickle.loads(pickle.dumps(loaded.items))[::-1]) == alone.items[::-1]
        assert sorted(map(str, loaded.bad_rows)) == sorted(map(str, alone.bad_rows))
        assert (loaded.num_rows, loaded.num_overlong) == (alone.num_rows, alone.num_overlong)
        assert loaded.formats == alone.formats
    kept = [list(loaded.items.own) for loaded in several]
    assert sorted(sum(kept, [])) == list(range(len(alone.items)))
    assert max(map(len, kept)) < 0.5 * len(alone.items)


def test_processes_that_read_other_rows_are_refused(tmp_path, monkeypatch):
    """A copy of a file on the disk of a node may be an older one."""
    file = tmp_path / "a.jsonl"
    copies = [PAIRS, PAIRS, [PAIRS[0] | {"prompt": "8+8="}, *PAIRS[1:]]]

    def load():
        file.write_text("".join(json.dumps(row) + "\n" for row in copies[jax.process_index()]))
        return load_prompts(Sources(files=(str(file),)), CHAR, RULES)

    with pytest.raises(ValueError, match=r"a.jsonl has other rows in process 2 than in process 0"):
        on_processes(monkeypatch, load)
    copies[2] = PAIRS
    assert len(on_processes(monkeypatch, load)) == PROCESSES


def test_the_digest_adds_up_and_tells_the_order(sources, monkeypatch):
    items = load_prompts(sources, CHAR, RULES).items
    several = on_processes(monkeypatch, lambda: load_prompts(sources, CHAR, RULES).items)
    parts = []
    monkeypatch.setattr(share, "sum_over_processes", lambda value, name: parts.append(value) or 0)
    for own in several:
        digest(own)
    assert sum(parts) % 2**32 == digest(items)
    assert digest(items) != digest([items[1], items[0], *items[2:]])


def test_an_overlong_row_on_one_process_is_the_error_of_all(sources, monkeypatch):
    rules = RowRules(max_length=9, max_bad_fraction=0.5)
    errors = []

    def load():
        try:
            load_unpaired(sources, CHAR, rules)
        except ValueError as error:
            errors.append(str(error))

    with pytest.raises(ValueError) as alone:
        load_unpaired(sources, CHAR, rules)
    on_processes(monkeypatch, load)
    assert errors == [str(alone.value)] * PROCESSES


def test_a_process_makes_its_rows_of_the_batch_of_one(sources):
    records = offline_records(load_unpaired(sources, CHAR, RULES).items)
    settings = {"length": 12, "pad_id": 0, "mismatched": True}
    whole = collate_records(records[:5], size=8, **settings)
    for rows in ([0, 1], [2, 5], [6, 7], [0, 4]):
        own = collate_records(records[:5], size=8, rows=rows, **settings)
        for found, expected in zip(jax.tree.leaves(own), jax.tree.leaves(whole), strict=True):
            np.testing.assert_array_equal(found, expected[rows])


def test_loaders_of_parts_give_the_batches_of_the_whole(sources):
    prompts = load_prompts(sources, CHAR, RULES).items
    options = {"batch_size": 6, "seed": 3}
    whole = Loader(prompts, list, **options)
    parts = [PromptLoader(prompts, groups=np.array(g), **options) for g in ([0, 1, 5], [2, 3, 4])]
    for _ in range(30):  # more than an epoch
        batch, (first, second) = next(whole), map(next, parts)
        assert [*first[:2], *second, first[2]] == batch


def test_a_sampled_digest_is_of_values_their_places_and_their_number():
    rows = [{"level": i, "when": None} for i in range(30_001)]
    found = sampled_digest(rows)
    assert sampled_digest([dict(row) for row in rows]) == found
    assert sampled_digest(rows[::-1]) != found and sampled_digest(rows[:-1]) != found
    changed = [row | {"level": -1} if i % 3 == 0 else row for i, row in enumerate(rows)]
    assert sampled_digest(changed) != found
    assert sampled_digest([{"a": "b"}]) != sampled_digest([{"a": "c"}]) != sampled_digest([])
