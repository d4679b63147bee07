"""Schedules of decode attention: every split and every prompt has its place; sizes from shapes."""

import numpy as np
import pytest
from compiled import compiled, on_device

from jaxrl_llm.kernels.decode_attention import cache_length, decode_schedule
from jaxrl_llm.kernels.decode_attention.pipeline import DecodeTuning, default_tuning
from jaxrl_llm.kernels.decode_attention.schedule import choose_num_splits, choose_prompt_splits

SIZES = dict(
    num_kv_heads=2, prefix_capacity=1024, own_capacity=1024, tuning=DecodeTuning(), num_splits=4
)


@pytest.mark.parametrize("slots_per_prompt", [1, 4])
def test_schedule_lists_every_split_that_holds_an_entry_longest_first(slots_per_prompt: int):
    rng = np.random.default_rng(0)
    rows, prefix_lengths, lengths = (rng.integers(0, top, 40) for top in (3, 500, 1025))
    lengths[:2], prefix_lengths[:2] = (0, 0), (0, 1)
    arguments = [on_device(x, np.int32) for x in (rows, prefix_lengths, lengths)]
    sizes = SIZES | dict(group_size=6, slots_per_prompt=slots_per_prompt)
    schedule = compiled(decode_schedule, *arguments, **sizes)
    listed = np.asarray(schedule.jobs.table_U4)[: int(schedule.jobs.num_jobs[0])]
    listed, *numbers = listed.T
    for number, of_slot in zip(numbers, (rows, prefix_lengths, lengths), strict=True):
        np.testing.assert_array_equal(number, of_slot[listed // 4])
    blocks = -(-lengths // 64) + (-(-prefix_lengths // 64) if slots_per_prompt == 1 else 0)
    a_part = 4 if slots_per_prompt > 1 else 8  # a quarter of what there is room for
    sizes = {
        4 * slot + part: min(a_part, int(blocks[slot]) - a_part * part)
        for slot in range(40)
        for part in range(4)
        if not part or blocks[slot] > a_part * part
    }
    assert sorted(listed) == sorted(sizes)
    assert np.all(np.diff([sizes[part] for part in listed]) <= 0)


@pytest.mark.parametrize("seed", range(4))
def test_every_slot_with_a_prompt_is_in_one_prompt_tile(seed: int):
    rng = np.random.default_rng(seed)
    B, group_size = 40, 13  # four slots a prompt tile
    rows, lengths = rng.integers(0, 6, B), rng.integers(1, 999, B)
    prefix_lengths = np.where(rng.random(B) < 0.2, 0, 5 + rows + (rng.random(B) < 0.2))
    arguments = [on_device(x, np.int32) for x in (rows, prefix_lengths, lengths)]
    sizes = SIZES | dict(group_size=group_size, slots_per_prompt=4)
    tiles = compiled(decode_schedule, *arguments, **sizes).prompts
    (num_tiles,) = tiles.num_tiles
    found = set()
    for tile in range(int(num_tiles)):
        count = int(tiles.num_slots_W[tile])
        assert 1 <= count <= 4
        for slot in np.asarray(tiles.slots_WI[tile, :count]):
            assert int(slot) not in found
            found.add(int(slot))
            assert rows[slot] == tiles.rows_W[tile]
            assert prefix_lengths[slot] == tiles.lengths_W[tile]
    assert found == set(np.flatnonzero(prefix_lengths))
    prompts = np.stack([rows, prefix_lengths])[:, prefix_lengths > 0]
    _, sizes = np.unique(prompts, axis=1, return_counts=True)
    assert num_tiles == np.ceil(sizes / 4).sum()
    assert ((0 <= tiles.slots_WI) & (tiles.slots_WI < B)).all()


def test_prompt_splits_come_from_shapes_and_fill_the_card():
    assert choose_prompt_splits(1024 * 8 // 8, 512, 64) == 1
    assert choose_prompt_splits(256 * 2 // 8, 512, 64) == 4
    assert choose_prompt_splits(2, 128, 64) == 2  # no part under a block


def test_splits_come_from_shapes_and_fill_the_card():
    tuning = default_tuning(128)
    assert choose_num_splits(1024, 8, 4096, tuning) == 1
    assert choose_num_splits(1, 2, 4096, tuning) == 16
    assert choose_num_splits(1, 2, 512, tuning) == 2  # no part under four blocks
    assert choose_num_splits(64, 2, 1024, tuning) == 1  # nor under sixteen, once SMs are busy,
    assert choose_num_splits(64, 2, 1024, tuning, shared=True) == 2  # or eight of a slot's own
    assert choose_num_splits(256, 2, 8192, tuning) == 8


@pytest.mark.parametrize(
    ("tokens", "head_dim", "entries"),
    [(0, 128, 64), (1, 128, 64), (64, 128, 64), (65, 128, 128), (65, 64, 128), (129, 64, 256)],
)
def test_cache_length_rounds_up_to_the_block(tokens: int, head_dim: int, entries: int):
    assert cache_length(tokens, head_dim) == entries
