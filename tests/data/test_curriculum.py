"""A curriculum: prompts by a column, then shuffled epochs, and exact after a resume."""

import json

import numpy as np
import pytest

from jaxrl_llm.config import ConfigError, load_config
from jaxrl_llm.data import curriculum
from jaxrl_llm.data.curriculum import ascending_batches, column_values
from jaxrl_llm.data.run_data import train_batches
from jaxrl_llm.data.share import Picked
from jaxrl_llm.types import Prompt

LEVELS = [5, 1, 4, 1, 3, 2, 2, 6, 9, 7]


def prompts(levels=LEVELS):
    return [
        Prompt(token_ids=(i,), text=str(i), row=i, columns={"level": level, "more": {"x": level}})
        for i, level in enumerate(levels)
    ]


def loader(levels=LEVELS, **keys):
    given = {
        "data.train_batch_size": 4,
        "actor.ppo_mini_batch_size": 4,
        "data.curriculum": "level",
        "rollout.n": 2,
    }
    return train_batches(load_config("grpo", given | keys), prompts(levels))


def levels_of(batches):
    return [[prompt.columns["level"] for prompt in batch] for batch in batches]


def test_the_first_pass_goes_up_and_shuffled_epochs_follow():
    source = loader()
    batches = levels_of(next(source) for _ in range(8))
    # Windows of 4 of the sorted [1, 1, 2, 2, 3, 4, 5, 6, 7, 9]: they begin at 0, 3 and 6.
    expected = [[1, 1, 2, 2], [2, 3, 4, 5], [5, 6, 7, 9]]
    assert [sorted(batch) for batch in batches[:3]] == expected
    assert sorted(sum(batches[3:8], [])) == sorted(LEVELS * 2)
    assert batches[3:] != [sorted(batch) for batch in batches[3:]]


def test_equal_values_come_in_another_order_by_seed_and_in_file_order_without_shuffle():
    def rows(seed, shuffle):
        found = ascending_batches(np.zeros(6), batch_size=3, steps=0, seed=seed, shuffle=shuffle)
        return found.tolist()

    assert rows(0, False) == rows(1, False) == [0, 1, 2, 3, 4, 5]
    assert rows(0, True) != rows(1, True)
    assert sorted(rows(0, True)) == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("steps", [1, 2, 5, 9])
@pytest.mark.parametrize("shuffle", [True, False])
def test_fewer_or_more_steps_still_go_from_the_lowest_to_the_highest(steps, shuffle):
    values = np.arange(20.0)[::-1]
    found = values[ascending_batches(values, batch_size=4, steps=steps, seed=0, shuffle=shuffle)]
    batches = found.reshape(steps, 4)
    assert all(len(set(batch)) == 4 for batch in batches)  # no prompt twice
    width = max(4, -(-20 // steps))
    for step, batch in enumerate(batches):
        start = step * (20 - width) / max(steps - 1, 1)
        assert start - 1 <= batch.min() and batch.max() <= start + width
    assert np.all(np.diff(batches.max(axis=1)) >= 0 if steps > 1 and not shuffle else True)


def test_a_batch_larger_than_the_data_repeats_prompts():
    source = loader([3, 1])
    assert sorted(levels_of([next(source)])[0]) == [1, 1, 3, 3]


@pytest.mark.parametrize("stop", [0, 2, 3, 5])
def test_a_fresh_loader_continues_at_any_batch(stop):
    source = loader()
    whole = levels_of(next(source) for _ in range(8))
    first = loader()
    for _ in range(stop):
        next(first)
    again = loader()
    again.set_state(json.loads(json.dumps(first.get_state())))
    assert levels_of(next(again) for _ in range(8 - stop)) == whole[stop:]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"data.curriculum_steps": 5}, "its curriculum is"),
        ({"data.curriculum": ""}, "has a curriculum and this one none"),
    ],
)
def test_a_position_in_another_order_is_refused(keys, message):
    with pytest.raises(ValueError, match=message):
        loader(**keys).set_state(loader().get_state())
    with pytest.raises(ValueError, match="lacks 'curriculum'"):
        loader().set_state(loader(**{"data.curriculum": ""}).get_state())


def test_a_nested_column_and_numbers_as_text():
    np.testing.assert_array_equal(column_values(prompts(), "more.x"), LEVELS)
    np.testing.assert_array_equal(column_values(prompts(["2", "1.5"]), "level"), [2, 1.5])


@pytest.mark.parametrize("value", [None, "Level 3", float("nan"), [1]])
def test_what_is_no_number_is_refused(value):
    with pytest.raises(ValueError, match="level: row 1 of default has .* ordered by a number"):
        column_values(prompts([1, value]), "level")
    with pytest.raises(
        ValueError, match="no such column; it has level, more; did you mean 'level'"
    ):
        column_values(prompts(), "levle")


def test_processes_read_their_own_prompts_and_know_all_values(monkeypatch):
    items = prompts()
    found = []
    for keep in ((0, 5), (5, 10)):
        share = Picked(items, range(10))
        monkeypatch.setattr(curriculum, "own_indices", lambda _, keep=keep: range(*keep))
        monkeypatch.setattr(curriculum, "gather_objects", lambda own, _: found.append(own) or [own])
        column_values(share, "level")
    everyone = json.loads(json.dumps(found))
    monkeypatch.setattr(curriculum, "gather_objects", lambda own, _: everyone)
    np.testing.assert_array_equal(column_values(Picked(items, range(10)), "level"), LEVELS)


@pytest.mark.parametrize(
    ("name", "keys", "message"),
    [
        (
            "grpo",
            {"data.curriculum_steps": 3},
            "without config.data.curriculum: they are batches",
        ),
        ("dpo", {"data.curriculum": "level"}, "is for online runs"),
        ("grpo", {"data.curriculum": "x", "data.priority": "learnability"}, "each give the order"),
    ],
)
def test_settings_that_contradict_are_refused(name, keys, message):
    with pytest.raises(ConfigError, match=message):
        load_config(name, keys)
