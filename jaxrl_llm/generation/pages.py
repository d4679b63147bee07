"""Pages of the cache: which sample owns which page, and which sample gets the next ones.

If memory suffices for all slots at full length, each slot has fixed pages. Otherwise a slot takes a
page when its sample outgrows the pages it has. A page is free when its last owner has ended, so
pages are not returned explicitly. A slot that gets no page waits: it is computed in that step, but
writes nothing.

Older samples come first. A sample gets a page only while enough are left for what all older ones
are expected to need. So when pages run short, the youngest wait and the others run on, where equal
shares would make all of them wait for one. A sample is expected to grow by half of its length.

Guarantees: no deadlock. The oldest live sample is expected to reach the longest response. So it
ends and frees at least as many pages, and the next one becomes the oldest. The pages that a sample
gets do not change its result.

Shape letters: B slots, N samples, O pages, T pages a slot at most, X blocks of pages, I pages of a
block.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

BLOCK = 128  # pages that are counted together


@dataclass(frozen=True, kw_only=True)
class PageSizes:
    """Sizes of the pages of one device or replica."""

    entries: int  # tokens of a page
    num_pages: int
    per_slot: int  # T
    scarce: bool  # False: each slot has fixed pages

    @property
    def first(self) -> int:
        """The pages that a new sample is expected to need."""
        return max(1, self.per_slot // 8)


class PageTable(NamedTuple):
    """The owner of each page."""

    pages_BT: jax.Array  # each slot's pages, in order
    owner_O: jax.Array  # the sample that took a page last; N if none did


def page_sizes(
    *, num_slots: int, own_length: int, page_entries: int, cache_tokens: int
) -> PageSizes:
    """Pages for `cache_tokens` response tokens of all slots together; 0 is enough for all slots.

    Raises: ValueError when one response of `own_length` tokens would not fit.
    """
    per_slot = max(1, -(-own_length // page_entries))
    most = num_slots * per_slot
    wanted = -(-cache_tokens // page_entries) if cache_tokens else most
    if wanted < per_slot:
        raise ValueError(
            f"cache_tokens={cache_tokens} holds less than one response of {own_length} tokens in "
            f"pages of {page_entries}: give at least {per_slot * page_entries}, or 0"
        )
    return PageSizes(
        entries=page_entries,
        num_pages=min(wanted, most),
        per_slot=per_slot,
        scarce=wanted < most,
    )


def empty_table(sizes: PageSizes, num_slots: int, num_samples: int) -> PageTable:
    """A table in which no sample has taken a page."""
    pages_BT = jnp.zeros((num_slots, sizes.per_slot), jnp.int32)
    if not sizes.scarce:
        pages_BT = jnp.arange(sizes.num_pages, dtype=jnp.int32).reshape(pages_BT.shape)
    owner_O = jnp.full((sizes.num_pages,), num_samples, jnp.int32)
    return PageTable(pages_BT=pages_BT, owner_O=owner_O)


def num_admissible(
    sizes: PageSizes, *, sample_B: jax.Array, live_B: jax.Array, count_B: jax.Array
) -> jax.Array:
    """The number of samples that may start now; at least one when no slot is live.

    `take_pages` has the same arguments.
    """
    if not sizes.scarce:
        return jnp.int32(live_B.shape[0])
    has_B = jnp.where(live_B, _pages(sizes, count_B), 0)
    left = sizes.num_pages - jnp.sum(has_B + _needs(sizes, sample_B, live_B, count_B))
    alone = 1 + (sizes.num_pages - sizes.per_slot) // sizes.first  # the first one is the oldest
    return jnp.where(jnp.any(live_B), jnp.maximum(left, 0) // sizes.first, alone)


def take_pages(
    table: PageTable,
    sizes: PageSizes,
    *,
    sample_B: jax.Array,
    live_B: jax.Array,
    count_B: jax.Array,
    num_samples: int,
) -> tuple[PageTable, jax.Array]:
    """Give a page to each live slot whose next entry, number `count_B`, begins a new one.

    `sample_B` are the slots' samples from 0 to N - 1; a smaller number is older. Returns the new
    table and bool [B], the live slots that can store their next entry.
    """
    if not sizes.scarce:
        return table, live_B
    (B,), (num_pages,) = live_B.shape, table.owner_O.shape
    slots_B, pages_O = jnp.arange(B), jnp.arange(num_pages, dtype=jnp.int32)

    live_N = jnp.zeros((num_samples,), bool)
    live_N = live_N.at[jnp.where(live_B, sample_B, num_samples)].set(True, mode="drop")
    free_O = ~live_N.at[table.owner_O].get(mode="fill", fill_value=False)
    num_free = jnp.sum(free_O, dtype=jnp.int32)
    # The first B free pages, in order. Entries past the last free page are not used.
    place_O = jnp.where(free_O, _number_before(free_O), B)
    free_B = jnp.zeros((B,), jnp.int32).at[place_O].set(pages_O, mode="drop")

    # Sums over older samples by comparing every pair: XLA's running sum is slower on a GPU.
    older_BB = sample_B < sample_B[:, None]
    needs_B = _needs(sizes, sample_B, live_B, count_B)
    kept_B = jnp.sum(jnp.where(older_BB, needs_B, 0), axis=1)
    given_B = live_B & (count_B % sizes.entries == 0) & (kept_B < num_free)
    turn_B = jnp.sum(older_BB & given_B, axis=1, dtype=jnp.int32)
    page_B = free_B[turn_B]

    at = jnp.where(given_B, slots_B, B + slots_B), count_B // sizes.entries
    taken_B = jnp.where(given_B, page_B, num_pages + slots_B)
    table = PageTable(
        pages_BT=table.pages_BT.at[at].set(page_B, mode="drop", unique_indices=True),
        owner_O=table.owner_O.at[taken_B].set(sample_B, mode="drop", unique_indices=True),
    )
    return table, live_B & (given_B | (count_B % sizes.entries != 0))


def _number_before(flags_O: jax.Array) -> jax.Array:
    """The number of flags that are set before each.

    In blocks, of which every pair is compared: XLA's running sum is slower on a GPU.
    """
    (number,) = flags_O.shape
    blocks = -(-number // BLOCK)
    flags_XI = jnp.pad(flags_O, (0, blocks * BLOCK - number)).reshape(blocks, BLOCK)
    blocks_X, places_I = jnp.arange(blocks), jnp.arange(BLOCK)
    within_XI = jnp.sum(flags_XI[:, None] & (places_I < places_I[:, None]), axis=2, dtype=jnp.int32)
    sums_X = jnp.sum(flags_XI, axis=1, dtype=jnp.int32)
    before_X = jnp.sum(jnp.where(blocks_X < blocks_X[:, None], sums_X, 0), axis=1)
    return (before_X[:, None] + within_XI).reshape(-1)[:number]


def _pages(sizes: PageSizes, count_B: jax.Array) -> jax.Array:
    """The pages that hold `count_B` entries."""
    return -(-count_B // sizes.entries)


def _needs(
    sizes: PageSizes, sample_B: jax.Array, live_B: jax.Array, count_B: jax.Array
) -> jax.Array:
    """The further pages that live samples are expected to need; 0 for the others."""
    pages_B = _pages(sizes, count_B)
    expected_B = jnp.clip((3 * pages_B + 1) // 2, sizes.first, sizes.per_slot)
    rank_B = jnp.where(live_B, sample_B, jnp.iinfo(jnp.int32).max)
    expected_B = jnp.where(rank_B == jnp.min(rank_B), sizes.per_slot, expected_B)
    return jnp.where(live_B, expected_B - pages_B, 0)
