"""Pages of the cache: which sample owns which page, and which sample gets the next ones.

If memory suffices for all slots at full length, each slot has fixed pages. Otherwise a slot takes a
page when its sample outgrows the pages it has. A page is free when its last owner has ended, so
pages are not returned explicitly. A slot that gets no page waits: it is computed in that step, but
writes nothing.

Guarantees: no deadlock. Enough pages for one whole response are held back for the oldest live
sample. So that sample ends and frees at least as many pages, and the next one becomes the oldest.
The pages that a sample gets do not change its result.

Shape letters: B slots, N samples, O pages, T pages a slot at most.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp


@dataclass(frozen=True, kw_only=True)
class PageSizes:
    """Sizes of the pages of one device or replica."""

    entries: int  # tokens of a page
    num_pages: int
    per_slot: int  # T
    held_back: int  # pages for the oldest sample; 0 when each slot has fixed pages
    watermark: int  # no new sample starts when fewer pages are free


class PageTable(NamedTuple):
    """The owner of each page."""

    pages_BT: jax.Array  # each slot's pages, in order
    owner_O: jax.Array  # the sample that took a page last; N if none did
    num_free: jax.Array  # pages without a live owner; all of them when slots have fixed pages


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
    scarce = wanted < most
    return PageSizes(
        entries=page_entries,
        num_pages=min(wanted, most),
        per_slot=per_slot,
        held_back=per_slot if scarce else 0,
        watermark=wanted // 32 if scarce else 0,
    )


def empty_table(sizes: PageSizes, num_slots: int, num_samples: int) -> PageTable:
    """A table in which no sample has taken a page."""
    pages_BT = jnp.zeros((num_slots, sizes.per_slot), jnp.int32)
    if not sizes.held_back:
        pages_BT = jnp.arange(sizes.num_pages, dtype=jnp.int32).reshape(pages_BT.shape)
    return PageTable(
        pages_BT=pages_BT,
        owner_O=jnp.full((sizes.num_pages,), num_samples, jnp.int32),
        num_free=jnp.int32(sizes.num_pages),
    )


def num_admissible(table: PageTable, sizes: PageSizes, live_B: jax.Array) -> jax.Array:
    """The number of samples that may start now; at least one when no slot is live."""
    if not sizes.held_back:
        return jnp.int32(live_B.shape[0])
    left = table.num_free - sizes.held_back - sizes.watermark
    return jnp.maximum(left, jnp.where(jnp.any(live_B), 0, 1))


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
    if not sizes.held_back:
        return table, live_B
    (B,), (num_pages,) = live_B.shape, table.owner_O.shape
    slots_B, pages_O = jnp.arange(B), jnp.arange(num_pages, dtype=jnp.int32)

    live_N = jnp.zeros((num_samples,), bool)
    live_N = live_N.at[jnp.where(live_B, sample_B, num_samples)].set(True, mode="drop")
    free_O = ~live_N.at[table.owner_O].get(mode="fill", fill_value=False)
    num_free = jnp.sum(free_O, dtype=jnp.int32)
    # The first B free pages, in order. Entries past the last free page are not used.
    turn_O = jnp.cumsum(free_O, dtype=jnp.int32) - 1
    place_O = jnp.where(free_O, turn_O, B)
    free_B = jnp.zeros((B,), jnp.int32).at[place_O].set(pages_O, mode="drop")

    wants_B = live_B & (count_B % sizes.entries == 0)
    oldest = jnp.min(jnp.where(live_B, sample_B, num_samples))
    oldest_B = live_B & (sample_B == oldest)
    # The oldest sample takes the last free page, which no other sample can get; see `held_back`.
    turn_B = jnp.cumsum(wants_B & ~oldest_B, dtype=jnp.int32) - 1
    last = jnp.max(jnp.where(free_O, pages_O, 0))
    page_B = jnp.where(oldest_B, last, free_B[jnp.clip(turn_B, 0, B - 1)])
    given_B = wants_B & jnp.where(oldest_B, num_free > 0, turn_B < num_free - sizes.held_back)

    at = jnp.where(given_B, slots_B, B + slots_B), count_B // sizes.entries
    taken_B = jnp.where(given_B, page_B, num_pages + slots_B)
    table = PageTable(
        pages_BT=table.pages_BT.at[at].set(page_B, mode="drop", unique_indices=True),
        owner_O=table.owner_O.at[taken_B].set(sample_B, mode="drop", unique_indices=True),
        num_free=num_free - jnp.sum(given_B, dtype=jnp.int32),
    )
    return table, live_B & (given_B | ~wants_B)
