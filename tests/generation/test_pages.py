"""Pages of the cache by themselves: never two samples' page, and never a standstill."""

import functools

import jax
import numpy as np
import pytest

from jaxrl_llm.generation.pages import (
    PageSizes,
    _number_before,
    empty_table,
    num_admissible,
    page_sizes,
    take_pages,
)


def sizes_of(**changes) -> PageSizes:
    settings = dict(num_slots=6, own_length=20, page_entries=4, cache_tokens=0)
    return page_sizes(**{**settings, **changes})


def test_room_for_everything_holds_nothing_back():
    sizes = sizes_of()
    assert (sizes.num_pages, sizes.per_slot, sizes.scarce) == (30, 5, False)
    assert sizes_of(cache_tokens=10_000) == sizes


def test_scarce_pages_are_fewer_than_all_slots_could_take():
    sizes = sizes_of(num_slots=100, cache_tokens=1_001)
    assert (sizes.num_pages, sizes.scarce, sizes.first) == (251, True, 1)


def test_refuses_less_than_one_response():
    with pytest.raises(ValueError, match="give at least 20, or 0"):
        sizes_of(cache_tokens=16)


@functools.partial(jax.jit, static_argnames=("sizes", "num_samples"))
def take(table, sizes, samples, live, counts, num_samples):
    return take_pages(
        table, sizes, sample_B=samples, live_B=live, count_B=counts, num_samples=num_samples
    )


@functools.partial(jax.jit, static_argnames="sizes")
def admissible(sizes, samples, live, counts):
    return num_admissible(sizes, sample_B=samples, live_B=live, count_B=counts)


@pytest.mark.parametrize("cache_tokens", [0, 20, 24, 60])
def test_every_sample_ends_and_no_page_has_two_samples(cache_tokens: int):
    """A queue of 40 samples through 6 slots, with pages for all, for one, and between."""
    rng = np.random.default_rng(cache_tokens)
    B, N, sizes = 6, 40, sizes_of(cache_tokens=cache_tokens)
    lengths = rng.integers(1, 21, N)
    lengths[::7] = 20
    table = empty_table(sizes, B, N)
    samples, counts = np.zeros(B, np.int32), np.zeros(B, np.int32)
    live, head, waited, steps = np.zeros(B, bool), 0, 0, 0
    while head < N or live.any():
        admitted = int(admissible(sizes, samples, live, counts))
        for slot in np.flatnonzero(~live)[:admitted]:
            if head < N:
                samples[slot], counts[slot], live[slot], head = head, 0, True, head + 1
        table, active = take(table, sizes, samples, live, counts, N)
        active = np.asarray(active)
        assert not (active & ~live).any()
        assert active[live].any()  # never a standstill
        held = [
            page
            for slot in np.flatnonzero(live)
            for page in np.asarray(table.pages_BT)[slot, : -(-(counts + active)[slot] // 4)]
        ]
        assert len(set(held)) == len(held)
        assert all(0 <= page < sizes.num_pages for page in held)
        waited += int((live & ~active).sum())
        counts[active] += 1
        live &= counts < lengths[samples]
        steps += 1
        assert steps < 1_000
    assert (waited > 0) == (cache_tokens in (24, 60))  # with 20, one sample runs at a time


def steps_of(lengths: np.ndarray, slots: int, cache_tokens: int, own_length: int) -> int:
    """Decode steps until all samples have ended, in pages of 4 tokens."""
    sizes = page_sizes(
        num_slots=slots, own_length=own_length, page_entries=4, cache_tokens=cache_tokens
    )
    N = len(lengths)
    table = empty_table(sizes, slots, N)
    samples, counts = np.zeros(slots, np.int32), np.zeros(slots, np.int32)
    live, head, steps = np.zeros(slots, bool), 0, 0
    while head < N or live.any():
        admitted = int(admissible(sizes, samples, live, counts))
        for slot in np.flatnonzero(~live)[:admitted]:
            if head < N:
                samples[slot], counts[slot], live[slot], head = head, 0, True, head + 1
        table, active = take(table, sizes, samples, live, counts, N)
        counts[np.asarray(active)] += 1
        live &= counts < lengths[samples]
        steps += 1
    return steps


def test_responses_that_are_all_long_do_not_wait_for_each_other():
    """Twice as many slots as the cache has room for long responses."""
    R, fit = 128, 16
    lengths = np.full(4 * fit, R)
    least = R * len(lengths) // fit  # steps where `fit` responses run all the time
    assert steps_of(lengths, fit, fit * R, R) == least
    assert steps_of(lengths, 2 * fit, fit * R, R) < 1.7 * least


def test_short_responses_do_not_wait():
    """As many slots as samples, of which each has room for a third of the longest."""
    R, N = 128, 64
    lengths = np.random.default_rng(0).integers(1, R // 2, N)
    assert steps_of(lengths, N, N * R // 3, R) == lengths.max()


@pytest.mark.parametrize("number", [1, 127, 128, 129, 1000])
def test_flags_are_counted_over_blocks(number: int):
    flags = np.random.default_rng(number).random(number) < 0.5
    np.testing.assert_array_equal(_number_before(flags), np.cumsum(flags) - flags)
