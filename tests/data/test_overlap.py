"""Held-out rows that are training rows too are counted, and the first is named."""

import json
from pathlib import Path
from random import Random

from jaxrl_llm.data.collating import offline_records
from jaxrl_llm.data.dataset import RowRules, Sources, load_preferences, load_prompts
from jaxrl_llm.data.overlap import overlap, say_overlap
from jaxrl_llm.tokenizer import CharTokenizer

RULES, TOKENIZER = RowRules(max_length=64), CharTokenizer()


def test_it_equals_the_intersection_of_all_rows():
    rng = Random(0)

    def rows(count: int) -> list[tuple[int, ...]]:
        """Many have the same middle, and many are equal."""
        return [
            (rng.randrange(3), *[7] * rng.randrange(12), rng.randrange(3)) for _ in range(count)
        ]

    train, held_out = rows(200), [*rows(100), (), (1,)]
    expected = [place for place, row in enumerate(held_out) if row in set(train)]
    assert overlap(train, held_out) == expected and 20 < len(expected) < 100
    assert overlap([], held_out) == overlap(train, []) == []


def files(folder: Path, numbers: dict[str, range], **columns: str) -> list[Sources]:
    for name, found in numbers.items():
        rows = [{"prompt": f"{i}+1="} | columns for i in found]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [Sources(files=(str(folder / f"{name}.jsonl"),)) for name in numbers]


def test_prompts_are_named_by_their_row(tmp_path, caplog):
    sources = files(tmp_path, {"train": range(40), "val": range(37, 50)})
    train, val = (load_prompts(each, TOKENIZER, RULES).items for each in sources)
    say_overlap(train[:37], val)
    assert not caplog.records
    say_overlap(train, val[::-1])
    assert "3 of 13 held-out rows are training rows too, the first of them val row 2" in caplog.text


def test_pairs_are_compared_by_their_chosen_rows(tmp_path, caplog):
    columns = {"chosen": "5", "rejected": "6"}
    sources = files(tmp_path, {"train": range(9), "val": range(8, 12)}, **columns)
    train, val = (
        offline_records(load_preferences(each, TOKENIZER, RULES).items) for each in sources
    )
    say_overlap(train, val)
    assert "1 of 4 held-out rows are training rows too, the first of them val row 0" in caplog.text
