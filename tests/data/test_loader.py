"""The endless stream of batches: nothing lost, and the same bits after a resume anywhere."""

import json
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from jaxrl_llm.config import ConfigError, SupervisedConfig, check
from jaxrl_llm.configs import ppo
from jaxrl_llm.data.collating import (
    OfflineRecord,
    collate_prompts,
    collate_records,
    collate_tokens,
    offline_records,
    pad_rows,
)
from jaxrl_llm.data.formats import LabelledExample, PreferencePair, TokenExample
from jaxrl_llm.data.loader import Loader, PromptLoader
from jaxrl_llm.data.run_data import train_batches
from jaxrl_llm.types import Prompt


def prompts(count=10, offset=0):
    return [Prompt(token_ids=(i + offset, 7), text=str(i), row=i) for i in range(count)]


def example(*ids, given=1):
    return TokenExample(token_ids=ids, loss_mask=(0,) * given + (1,) * (len(ids) - given))


def take(loader, count):
    return [[prompt.row for prompt in next(loader)] for _ in range(count)]


def test_every_epoch_holds_every_row_once_in_another_order():
    rows = sum(take(PromptLoader(prompts(), batch_size=4, seed=0), 10), [])
    epochs = [rows[i : i + 10] for i in range(0, 40, 10)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4
    assert list(range(10)) not in epochs


def test_order_depends_on_the_seed_alone():
    def rows(**options):
        return take(PromptLoader(prompts(), **{"batch_size": 4, "seed": 3, **options}), 6)

    assert rows() == rows() == rows(prefetch=0) == rows(prefetch=5)
    assert rows(seed=4) != rows()
    assert sum(rows(batch_size=2), []) == sum(rows(), [])[:12]
    assert rows(seed=-1) == rows(seed=2**32 - 1)


def test_adjacent_seeds_are_unrelated():
    """The second epoch of one seed must not be the first of the next."""
    first = [take(PromptLoader(prompts(), batch_size=10, seed=seed), 2) for seed in range(4)]
    assert len({tuple(epoch) for epochs in first for epoch in epochs}) == 8


def test_without_shuffle_rows_keep_their_order_across_the_boundary():
    loader = PromptLoader(prompts(5), batch_size=3, seed=0, shuffle=False)
    assert take(loader, 4) == [[0, 1, 2], [3, 4, 0], [1, 2, 3], [4, 0, 1]]


def test_a_batch_larger_than_the_data_repeats_rows():
    loader = PromptLoader(prompts(2), batch_size=5, seed=0, shuffle=False)
    assert take(loader, 2) == [[0, 1, 0, 1, 0], [1, 0, 1, 0, 1]]
    assert loader.epoch == 5


def test_epoch_counts_whole_passes():
    loader = PromptLoader(prompts(10), batch_size=4, seed=0)
    epochs = []
    for _ in range(6):
        epochs.append(loader.epoch)
        next(loader)
    assert epochs == [0, 0, 0, 1, 1, 2]  # rows 0, 4, 8, 12, 16, 20


@pytest.mark.parametrize("stop", [0, 1, 2, 3, 5, 9, 10, 11])
def test_a_fresh_loader_continues_at_any_batch(stop):
    """Batches of 4 of 10 rows: 2 ends inside an epoch, 5 and 10 at a boundary."""
    whole = take(PromptLoader(prompts(), batch_size=4, seed=5), 14)
    first = PromptLoader(prompts(), batch_size=4, seed=5)
    assert take(first, stop) == whole[:stop]
    state = json.loads(json.dumps(first.get_state()))
    second = PromptLoader(prompts(), batch_size=4, seed=5, prefetch=0)
    next(second)  # a used loader can be set back, too
    second.set_state(state)
    assert second.get_state() == state
    assert second.epoch == stop * 4 // 10
    assert take(second, 14 - stop) == whole[stop:]
    assert take(first, 14 - stop) == whole[stop:]


@pytest.mark.parametrize(
    "other, message",
    [
        ({"seed": 6}, "its seed is 5, here it is 6"),
        ({"batch_size": 5}, "its batch_size is 4, here it is 5"),
        ({"shuffle": False}, "its shuffle is True"),
        ({"prompts": prompts(9)}, "its num_items is 10, here it is 9"),
        ({"prompts": prompts(offset=1)}, "its items_digest is"),
        ({"prompts": [replace(p, ground_truth={1: "x"}) for p in prompts()]}, "its answers_digest"),
    ],
)
def test_a_position_in_other_data_is_refused(other, message):
    state = PromptLoader(prompts(), batch_size=4, seed=5).get_state()
    options = {"prompts": prompts(), "batch_size": 4, "seed": 5, **other}
    with pytest.raises(ValueError, match=message):
        PromptLoader(**options).set_state(state)
    with pytest.raises(ValueError, match="lacks 'next_batch'"):
        PromptLoader(prompts(), batch_size=4, seed=5).set_state({})


@pytest.mark.parametrize("changed", ["labels", "masks"])
def test_a_position_in_data_with_other_labels_is_refused(changed):
    def loader(label: float, mask: tuple[int, ...]) -> Loader:
        row = TokenExample(token_ids=(1, 2, 3), loss_mask=mask)
        records = [OfflineRecord(i, {"completion": row}, {"labels": label}) for i in range(3)]
        return Loader(records, list, batch_size=2, seed=0)

    state = json.loads(json.dumps(loader(1.0, (0, 1, 1)).get_state()))
    other = (0.0, (0, 1, 1)) if changed == "labels" else (1.0, (0, 0, 1))
    with pytest.raises(ValueError, match="its answers_digest is .* Resume with the same data"):
        loader(*other).set_state(state)
    loader(1.0, (0, 1, 1)).set_state(state)


def test_worker_processes_give_the_same_batches_and_resume():
    items = [example(1, i, 2) for i in range(10)]
    collate = partial(collate_tokens, length=4, pad_id=0)
    options = {"batch_size": 4, "seed": 5}
    plain = Loader(items, collate, **options)
    whole = [next(plain) for _ in range(6)]
    plain.set_state({**plain.get_state(), "next_batch": 2})
    workers = Loader(items, collate, num_workers=2, **options)
    workers.set_state(plain.get_state())
    for expected in whole[2:]:
        batch = next(workers)
        for name in ("tokens", "lengths", "loss_mask"):
            np.testing.assert_array_equal(getattr(batch, name), getattr(expected, name))
    assert workers.get_state() == {**plain.get_state(), "next_batch": 6}
    workers.close()


def test_worker_processes_are_refused_where_they_would_do_nothing():
    """Prompts of an online run are in memory; the warm-up's padded batches are worth a process."""
    config = ppo.get_config()
    items = prompts(200)
    config = replace(config, warmup=None, data=replace(config.data, num_workers=2))
    with pytest.raises(ConfigError, match="prompts are tokenised before the first step"):
        check(config)
    check(replace(config, warmup=SupervisedConfig()))
    assert (
        len(next(train_batches(replace(config, warmup=SupervisedConfig()), items)))
        == config.data.train_batch_size
    )


def test_rows_are_padded_on_the_right():
    padded = pad_rows([[1, 2, 3], [], [4]], 3, 9)
    assert padded.dtype == np.int32
    assert padded.tolist() == [[1, 2, 3], [9, 9, 9], [4, 9, 9]]
    tokens, lengths = collate_prompts(prompts(2), length=3, pad_id=5)
    assert tokens.tolist() == [[0, 7, 5], [1, 7, 5]]
    assert (lengths.tolist(), lengths.dtype) == ([2, 2], np.int32)


def test_examples_become_a_token_batch():
    batch = collate_tokens([example(1, 2, 3, given=2), example(4, 5, given=0)], length=4, pad_id=9)
    assert batch.tokens.tolist() == [[1, 2, 3, 9], [4, 5, 9, 9]]
    assert batch.lengths.tolist() == [3, 2]
    assert batch.loss_mask.tolist() == [[0, 0, 1, 0], [0, 1, 0, 0]]
    assert (batch.tokens.dtype, batch.loss_mask.dtype) == (np.int32, np.float32)


def test_pairs_become_an_offline_batch():
    pairs = [
        PreferencePair(chosen=example(1, 2), rejected=example(1, 3, 4), margin=0.5),
        PreferencePair(chosen=example(5, 6), rejected=example(5, 7)),
    ]
    loader = Loader(
        offline_records(pairs),
        partial(collate_records, length=3, pad_id=0),
        batch_size=2,
        seed=0,
        shuffle=False,
    )
    batch = next(loader)
    assert batch.chosen.tokens.tolist() == [[1, 2, 0], [5, 6, 0]]
    assert batch.rejected.tokens.tolist() == [[1, 3, 4], [5, 7, 0]]
    assert batch.rejected.loss_mask.tolist() == [[0, 1, 1], [0, 1, 0]]
    assert batch.margins.tolist() == [0.5, 0.0]
    assert (batch.index.tolist(), batch.weights.tolist()) == ([0, 1], [1, 1])
    assert batch.completion is None and batch.labels is None


def test_a_batch_is_filled_up_with_records_that_do_not_count():
    records = offline_records([example(1, 2), example(3, 4)])
    batch = collate_records(records, length=2, pad_id=0, size=4)
    assert batch.completion.tokens.tolist() == [[1, 2], [3, 4], [1, 2], [1, 2]]
    assert batch.weights.tolist() == [1, 1, 0, 0]


def test_mismatched_rows_take_the_completion_of_the_record_before():
    labelled = [
        LabelledExample(completion=example(1, 2, 9, 8, given=2), label=1.0),
        LabelledExample(completion=example(3, 7, given=1), label=0.0),
        LabelledExample(completion=example(4, 5, 6, 6, given=3), label=1.0),
    ]
    batch = collate_records(offline_records(labelled), length=4, pad_id=0, mismatched=True, size=4)
    assert batch.labels.tolist() == [1, 0, 1, 1]
    # The third prompt leaves no room for more than one token of the second completion, which fits.
    assert batch.mismatched.tokens.tolist()[:3] == [[1, 2, 6, 0], [3, 9, 8, 0], [4, 5, 6, 7]]
    assert batch.mismatched.loss_mask.tolist()[:3] == [[0, 0, 1, 0], [0, 1, 1, 0], [0, 0, 0, 1]]
    assert batch.mismatched.lengths.tolist()[:3] == [3, 3, 4]
    assert batch.weights.tolist() == [1, 1, 1, 0]


def test_a_record_alone_takes_the_completion_of_the_one_before_its_batch():
    first, second = offline_records(
        [
            LabelledExample(completion=example(1, 2, 6, given=2), label=1.0),
            LabelledExample(completion=example(3, 9, 8, given=1), label=0.0),
        ]
    )
    collate = partial(collate_records, length=4, pad_id=0, mismatched=True, size=2)
    batch = collate([second], before=first)
    assert batch.mismatched.tokens.tolist()[0] == [3, 6, 0, 0]
