"""Records of offline training: labelled, rated and stepwise rows, pairs taken apart, tasks."""

import json
from pathlib import Path

import pytest
from chat_tokenizer import write_chat_tokenizer

from jaxrl_llm import config as c
from jaxrl_llm.config import Config, DataConfig
from jaxrl_llm.data.dataset import (
    RowRules,
    Sources,
    load_preferences,
    load_ratings,
    load_unpaired,
)
from jaxrl_llm.data.run_data import load_held_out
from jaxrl_llm.tokenizer import CharTokenizer, load_tokenizer

CHAR = CharTokenizer()
RULES = RowRules(max_length=99)
USER = [{"role": "user", "content": "2+2?"}]


def load(loader, tmp_path, rows, tokenizer=CHAR):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return loader(Sources(files=(str(path),)), tokenizer, RULES).items


def text(example, tokenizer=CHAR):
    """(what is given, what is learned)."""
    parts = {0: [], 1: []}
    for token, mask in zip(example.token_ids, example.loss_mask, strict=True):
        parts[mask].append(token)
    return tuple(tokenizer.decode(parts[i], skip_special=False) for i in (0, 1))


def described(items, tokenizer=CHAR):
    return [(*text(item.completion, tokenizer), item.label) for item in items]


def test_labelled_completions(tmp_path):
    rows = [
        {"prompt": "2+2=", "completion": "4", "label": True},
        {"prompt": "2+2=", "completion": "", "label": False},
    ]
    found = described(load(load_unpaired, tmp_path, rows))
    assert found == [("2+2=", "4<|eos|>", 1.0), ("2+2=", "<|eos|>", 0.0)]


def test_pairs_are_taken_apart_also_with_an_implicit_prompt(tmp_path):
    rows = [{"prompt": "2+2=", "chosen": "4", "rejected": "5"}]
    expected = [("2+2=", "4<|eos|>", 1.0), ("2+2=", "5<|eos|>", 0.0)]
    assert described(load(load_unpaired, tmp_path, rows)) == expected
    implicit = [{"chosen": "2+2=4", "rejected": "2+2=5"}]
    assert described(load(load_unpaired, tmp_path, implicit)) == expected


def test_conversations_are_labelled_too(tmp_path):
    chat = load_tokenizer(write_chat_tokenizer(tmp_path / "chat"))
    answer = [{"role": "assistant", "content": "4"}]
    rows = [{"prompt": USER, "completion": answer, "label": True}]
    found = described(load(load_unpaired, tmp_path, rows, chat), chat)
    assert [(given[-10:], *rest) for given, *rest in found] == [("assistant\n", "4<|im_end|>", 1.0)]


def test_ratings(tmp_path):
    rows = [
        {"prompt": "2+2=", "completion": "4", "rating": 1.5},
        {"prompt": "2+2=", "completion": "5", "rating": -2},
    ]
    found = described(load(load_ratings, tmp_path, rows))
    assert found == [("2+2=", "4<|eos|>", 1.5), ("2+2=", "5<|eos|>", -2.0)]


@pytest.mark.parametrize("loader", [load_ratings, load_unpaired])
def test_each_step_is_judged_after_those_before_it(loader, tmp_path):
    rows = [{"prompt": "9-4-4=", "completions": ["5-4=", "2"], "labels": [True, False]}]
    found = described(load(loader, tmp_path, rows))
    assert found == [("9-4-4=", "5-4=\n", 1.0), ("9-4-4=5-4=\n", "2\n", 0.0)]


def test_held_out_rows_that_are_pairs_are_known_as_such(tmp_path):
    """Also among several files, of which one other is enough to say no."""
    pair = {"prompt": "2+2=", "chosen": "4", "rejected": "5"}
    implicit = {"chosen": "2+2=4", "rejected": "2+2=5"}
    single = {"prompt": "2+2=", "completion": "4", "label": True}
    files = []
    for name, row in (("pair", pair), ("implicit", implicit), ("single", single)):
        files.append(str(tmp_path / f"{name}.jsonl"))
        Path(files[-1]).write_text(json.dumps(row) + "\n")

    def found(*files, tasks=()):
        data = DataConfig(val_files=files, val_tasks=tasks, max_prompt_length=9)
        records, are_pairs = load_held_out(Config(data=data), "unpaired", CHAR, None)
        return len(records), are_pairs

    assert found(*files[:2]) == (4, True)
    assert found(*files) == (5, False)
    assert found() == (0, False)
    task = c.ChainSum(num_terms=2, size=3)
    num, are_pairs = found(files[0], tasks=(task,))
    assert num > 2 and are_pairs


@pytest.mark.parametrize(
    ("loader", "good", "bad", "message"),
    [
        (
            load_unpaired,
            {"prompt": "a", "completion": "b", "label": True},
            {"prompt": "a", "completion": "b", "label": "yes"},
            "holds 'yes', not true or false",
        ),
        (
            load_ratings,
            {"prompt": "a", "completion": "b", "rating": 1},
            {"prompt": "a", "completion": "b", "rating": True},
            "holds True, not a finite number",
        ),
        (
            load_ratings,
            {"prompt": "a", "completions": ["b"], "labels": [True]},
            {"prompt": "a", "completions": ["b"], "labels": [True, False]},
            "not two lists of one length",
        ),
    ],
)
def test_bad_rows_are_set_aside_with_the_reason(loader, good, bad, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        load(loader, tmp_path, [good, good, bad])


def test_tasks_give_as_many_right_answers_as_wrong_ones():
    tasks = (c.ChainSum(num_terms=2, size=10),)
    sources = Sources(tasks=tasks, split="train")
    pairs = load_preferences(sources, CHAR, RULES).items
    for loader in (load_unpaired, load_ratings):
        items = loader(sources, CHAR, RULES).items
        assert [item.label for item in items] == [1.0, 0.0] * len(pairs)
        assert items[0].completion.token_ids == pairs[0].chosen.token_ids
        assert items[1].completion.token_ids == pairs[0].rejected.token_ids
