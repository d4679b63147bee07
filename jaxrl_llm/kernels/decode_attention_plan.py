"""What a decode step's attention reads, and in which order: planned once for all layers.

Shape letters: B slots, S parts of a slot, U units, W items, I slots of an item.
"""

import dataclasses
import math
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxrl_llm.kernels.decode_attention_program import (
    MOST_GROUP_ROWS,
    TILE_ROWS,
    DecodeTuning,
    num_blocks,
    rows_a_slot,
)
from jaxrl_llm.kernels.hopper import SMS

MAX_SPLITS = 16
MAX_PROMPT_SPLITS = 4  # merging them takes time
PROGRAMS = 2 * SMS  # that work is split for; where each needs less memory, more run
UNITS_A_PROGRAM = 24  # split until full caches would give every program as many


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["table_U4", "num_units"],
    meta_fields=["num_splits", "blocks_of_part", "block"],
)
@dataclasses.dataclass(frozen=True)
class Units:
    """The parts of slots that hold an entry, and the first part of every slot: longest first.

    A row of the table has all that the kernel must know of a unit before it can load anything:
    each number that leads to the next would cost it the time of a read.
    """

    # slot * num_splits + part, prompt row, prompt length, own length; U = B * num_splits
    table_U4: Int[Array, "U 4"]
    num_units: Int[Array, " 1"]
    num_splits: int
    blocks_of_part: int  # of a slot's part
    block: int  # entries


@partial(
    jax.tree_util.register_dataclass,
    data_fields=[
        "num_items",
        "item_rows_W",
        "item_lengths_W",
        "item_counts_W",
        "item_slots_WI",
    ],
    meta_fields=["num_splits"],
)
@dataclasses.dataclass(frozen=True)
class SharedPrompts:
    """Which slots read a prompt together."""

    num_items: Int[Array, " 1"]  # the items in use, which come first
    item_rows_W: Int[Array, " W"]
    item_lengths_W: Int[Array, " W"]
    item_counts_W: Int[Array, " W"]  # slots
    item_slots_WI: Int[Array, "W I"]  # past the count, any slot
    num_splits: int  # parts of a prompt


@partial(jax.tree_util.register_dataclass, data_fields=["units", "prompts"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class DecodePlan:
    """The order of the work, and who shares prompts; None where every slot reads its own."""

    units: Units
    prompts: SharedPrompts | None


def decode_plan(
    prefix_rows_B: Int[Array, " B"],
    prefix_lengths_B: Int[Array, " B"],
    lengths_B: Int[Array, " B"],
    *,
    group_rows: int,
    num_kv_heads: int,
    prefix_entries: int,
    own_entries: int,
    slots_per_prompt: int,
    tuning: DecodeTuning,
    num_splits: int | None = None,
    prompt_splits: int | None = None,
) -> DecodePlan:
    """The plan of a decode step, made once and given to every layer's `prefix_decode_attention`.

    The first three are that function's. `group_rows` is N / K, the query heads of a KV head;
    `prefix_entries` and `own_entries` are what a prompt row and a slot's list of pages have room
    for; `tuning` is the kernel's. `slots_per_prompt` is how many slots share a prompt as a rule:
    it only sizes the work; with 1 every slot reads its prompt itself. `num_splits` and
    `prompt_splits` are the parts of a slot and of a prompt that are read in parallel (None: chosen
    from the shapes; give them where batches of different sizes must agree to the bit). Slots share
    a prompt where both row and length are equal, in any order; those of length 0 read none. Raises
    ValueError for numbers out of range.
    """
    if not 1 <= group_rows <= MOST_GROUP_ROWS or slots_per_prompt < 1:
        raise ValueError(
            f"group_rows is {group_rows}, slots_per_prompt {slots_per_prompt}: "
            f"use 1 to {MOST_GROUP_ROWS}, and at least 1"
        )
    if prompt_splits is not None and not 1 <= prompt_splits <= MAX_PROMPT_SPLITS:
        raise ValueError(f"prompt_splits is {prompt_splits}: use 1 to {MAX_PROMPT_SPLITS}, or None")
    B, block = prefix_rows_B.shape[0], tuning.block
    prompts = None
    if slots_per_prompt > 1:
        slots_of_item = TILE_ROWS // rows_a_slot(group_rows)
        if prompt_splits is None:
            items = math.ceil(B / min(slots_per_prompt, slots_of_item))
            prompt_splits = choose_prompt_splits(items * num_kv_heads, prefix_entries, block)
        prompts = _shared_prompts(prefix_rows_B, prefix_lengths_B, slots_of_item, prompt_splits)
    entries = own_entries + (prefix_entries if prompts is None else 0)
    if num_splits is None:
        shared = prompts is not None
        num_splits = choose_num_splits(B, num_kv_heads, entries, tuning, shared=shared)
    blocks_B = num_blocks(lengths_B, block)
    if prompts is None:
        blocks_B += num_blocks(prefix_lengths_B, block)
    numbers_B3 = jnp.stack([prefix_rows_B, prefix_lengths_B, lengths_B], axis=1)
    return DecodePlan(_units(blocks_B, numbers_B3, num_splits, entries, block), prompts)


def choose_num_splits(
    num_slots: int,
    num_kv_heads: int,
    num_entries: int,
    tuning: DecodeTuning,
    *,
    shared: bool = False,
) -> int:
    """Parts into which each slot's tokens are split, a power of two, from shapes only.

    Enough for UNITS_A_PROGRAM when all slots fill their `num_entries`, for most
    do not, and then the longest must not be what all wait for. A slot of one part needs no merging,
    so parts have at least 16 blocks; where prompts are `shared` results are merged anyway, and 8
    are enough. Where slots are too few for the SMs, 4 are.
    """
    shortest = 8 if shared else 16
    units, entries = num_slots * num_kv_heads, num_entries / tuning.block
    wanted = min(UNITS_A_PROGRAM * PROGRAMS / units, entries / shortest)
    to_fill = min(SMS / units, entries / 4)
    most = int(math.log2(MAX_SPLITS))
    return 2 ** max(0, min(most, math.floor(math.log2(max(wanted, to_fill)))))


def choose_prompt_splits(num_units: int, num_entries: int, block: int) -> int:
    """Parts into which each prompt is split, a power of two, from the expected units of one part.

    So many that as many units as programs are to be expected, but no part shorter than a block
    when the prompt fills its `num_entries`.
    """
    wanted = min(PROGRAMS / num_units, num_entries / block)
    return 2 ** max(0, min(int(math.log2(MAX_PROMPT_SPLITS)), math.floor(math.log2(wanted))))


def entries_seen(num_entries: int, window: int | None, block: int) -> int:
    """Entries that a slot reads at most: a window's, and a block more at either end."""
    return num_entries if window is None else min(num_entries, window + 2 * block)


def part_blocks(num_entries: int, num_splits: int, block: int) -> int:
    """Blocks of each of `num_splits` parts of a slot that fills its `num_entries`.

    Parts do not depend on how many entries a slot has, so shorter slots have fewer of them.
    """
    return -(-num_entries // (num_splits * block))


def _units(
    blocks_B: Array, numbers_B3: Array, num_splits: int, num_entries: int, block: int
) -> Units:
    """Ranked by comparing every pair, which takes fewer and shorter kernels than sorting would."""
    B, S = blocks_B.shape[0], num_splits
    blocks_of_part = part_blocks(num_entries, S, block)
    part_S = jnp.arange(S, dtype=jnp.int32)
    left_BS = blocks_B[:, None].astype(jnp.int32) - part_S * blocks_of_part
    size_U = jnp.minimum(left_BS, blocks_of_part).reshape(-1)
    exists_U = (size_U > 0) | (jnp.tile(part_S, B) == 0)
    size_U = jnp.where(exists_U, jnp.maximum(size_U, 0), -1)
    index_U = jnp.arange(B * S, dtype=jnp.int32)
    before_UU = size_U > size_U[:, None]
    before_UU |= (size_U == size_U[:, None]) & (index_U < index_U[:, None])
    rank_U = before_UU.sum(axis=1, dtype=jnp.int32)
    # The inverse of the ranks, by a sum of one each: a kernel, where a scatter takes two.
    parts_U = jnp.where(rank_U == index_U[:, None], index_U, 0).sum(axis=1, dtype=jnp.int32)
    numbers_U3 = numbers_B3.astype(jnp.int32)[parts_U // S]
    return Units(
        table_U4=jnp.concatenate([parts_U[:, None], numbers_U3], axis=1),
        num_units=exists_U.sum(dtype=jnp.int32)[None],
        num_splits=S,
        blocks_of_part=blocks_of_part,
        block=block,
    )


def _shared_prompts(
    prefix_rows_B: Array, prefix_lengths_B: Array, slots_of_item: int, num_splits: int
) -> SharedPrompts:
    B = prefix_rows_B.shape[0]
    slots_B = jnp.arange(B, dtype=jnp.int32)

    def count(which_BB: Array) -> Array:
        return which_BB.sum(axis=1, dtype=jnp.int32)

    earlier_BB = slots_B < slots_B[:, None]  # of slots b and c
    reads_B = prefix_lengths_B > 0
    shares_BB = reads_B[:, None] & (prefix_rows_B == prefix_rows_B[:, None])
    shares_BB &= prefix_lengths_B == prefix_lengths_B[:, None]
    position_B = count(shares_BB & earlier_BB)
    place_B = position_B % slots_of_item
    leads_B = reads_B & (place_B == 0)
    # A slot's item is that of the slot of its prompt that leads it, numbered in order of leaders.
    number_B = count(leads_B & earlier_BB)
    leader_BB = shares_BB & (position_B == (position_B - place_B)[:, None])
    item_B = jnp.where(leader_BB, number_B, 0).sum(axis=1, dtype=jnp.int32)
    zeros_WI = jnp.zeros((B, slots_of_item), jnp.int32)  # one item a slot at most
    slots_WI = zeros_WI.at[jnp.where(reads_B, item_B, B), place_B].set(slots_B, mode="drop")
    return SharedPrompts(
        num_items=leads_B.sum(dtype=jnp.int32)[None],
        item_rows_W=prefix_rows_B[slots_WI[:, 0]].astype(jnp.int32),
        item_lengths_W=prefix_lengths_B[slots_WI[:, 0]].astype(jnp.int32),
        item_counts_W=count(reads_B & (item_B == slots_B[:, None])),
        item_slots_WI=slots_WI,
        num_splits=num_splits,
    )
