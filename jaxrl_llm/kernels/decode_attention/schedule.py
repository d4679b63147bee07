"""The schedule of a decode step's attention: its tile jobs, longest first, for all layers.

Shape letters: B slots, S splits of a slot, U tile jobs, W prompt tiles, I slots of a prompt tile.
"""

import dataclasses
import math
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxrl_llm.kernels.decode_attention.pipeline import (
    TILE_ROWS,
    DecodeTuning,
    padded_rows,
)
from jaxrl_llm.kernels.hopper import SMS, num_blocks

MAX_SPLITS = 16
MAX_PROMPT_SPLITS = 4  # merging them takes time
CTAS = 2 * SMS  # CTAs that the jobs are split for; more run where each needs less shared memory
JOBS_PER_CTA = 24  # with full caches


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["table_U4", "num_jobs"],
    meta_fields=["num_splits", "blocks_per_split", "block"],
)
@dataclasses.dataclass(frozen=True)
class SlotJobs:
    """The splits of slots that hold an entry, and the first split of every slot, longest first.

    A table row has all numbers that the kernel needs before its first load. A chain of lookups
    would cost the latency of a read for each link.
    """

    # slot * num_splits + split, prompt row, prompt length, own length; U = B * num_splits
    table_U4: Int[Array, "U 4"]
    num_jobs: Int[Array, " 1"]  # jobs in use, which come first
    num_splits: int
    blocks_per_split: int
    block: int  # entries


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["num_tiles", "rows_W", "lengths_W", "num_slots_W", "slots_WI"],
    meta_fields=["num_splits"],
)
@dataclasses.dataclass(frozen=True)
class PromptTiles:
    """Prompt tiles: up to I slots with the same prompt, whose queries fill one tensor-core tile."""

    num_tiles: Int[Array, " 1"]  # tiles in use, which come first
    rows_W: Int[Array, " W"]  # prompt row
    lengths_W: Int[Array, " W"]  # prompt length
    num_slots_W: Int[Array, " W"]
    slots_WI: Int[Array, "W I"]  # past num_slots_W, any slot
    num_splits: int  # splits of a prompt


@partial(jax.tree_util.register_dataclass, data_fields=["jobs", "prompts"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class DecodeSchedule:
    """The tile jobs of a decode step. `prompts` is None where every slot reads its own prompt."""

    jobs: SlotJobs
    prompts: PromptTiles | None


def decode_schedule(
    prefix_rows_B: Int[Array, " B"],
    prefix_lengths_B: Int[Array, " B"],
    own_lengths_B: Int[Array, " B"],
    *,
    group_size: int,
    num_kv_heads: int,
    prefix_capacity: int,
    own_capacity: int,
    slots_per_prompt: int,
    tuning: DecodeTuning,
    num_splits: int | None = None,
    prompt_splits: int | None = None,
) -> DecodeSchedule:
    """The schedule of one decode step, made once and passed to `prefix_decode_attention` per layer.

    `DecodeInputs` explains the arrays and sizes; `group_size` is G. Slots share a prompt where
    row and length are equal, in any order. `slots_per_prompt` is the expected number of slots per
    prompt. It only sizes the jobs, but with 1 every slot reads its prompt alone. `num_splits` and
    `prompt_splits` are the splits of a slot and of a prompt; None chooses them from the shapes. Set
    them where batches of different sizes must give the same bits, at most MAX_SPLITS and
    MAX_PROMPT_SPLITS.
    """
    B, block = prefix_rows_B.shape[0], tuning.block
    prompts = None
    if slots_per_prompt > 1:
        slots_per_tile = TILE_ROWS // padded_rows(group_size)
        if prompt_splits is None:
            tiles = math.ceil(B / min(slots_per_prompt, slots_per_tile))
            prompt_splits = choose_prompt_splits(tiles * num_kv_heads, prefix_capacity, block)
        prompts = _prompt_tiles(prefix_rows_B, prefix_lengths_B, slots_per_tile, prompt_splits)
    entries = own_capacity + (prefix_capacity if prompts is None else 0)
    if num_splits is None:
        shared = prompts is not None
        num_splits = choose_num_splits(B, num_kv_heads, entries, tuning, shared=shared)
    blocks_B = num_blocks(own_lengths_B, block)
    if prompts is None:
        blocks_B += num_blocks(prefix_lengths_B, block)
    numbers_B3 = jnp.stack([prefix_rows_B, prefix_lengths_B, own_lengths_B], axis=1)
    return DecodeSchedule(_slot_jobs(blocks_B, numbers_B3, num_splits, entries, block), prompts)


def choose_num_splits(
    num_slots: int,
    num_kv_heads: int,
    num_entries: int,
    tuning: DecodeTuning,
    *,
    shared: bool = False,
) -> int:
    """The number of splits of a slot, a power of two, from shapes alone.

    Full caches give every CTA JOBS_PER_CTA jobs: most slots are shorter, and the longest must not
    be what all wait for. A slot of one split needs no merge, so a split has at least 16 blocks.
    With `shared` prompts results are merged anyway, and 8 blocks are enough. With fewer slots than
    SMs, 4 are.
    """
    min_blocks = 8 if shared else 16
    jobs, blocks = num_slots * num_kv_heads, num_entries / tuning.block
    wanted = min(JOBS_PER_CTA * CTAS / jobs, blocks / min_blocks)
    to_fill = min(SMS / jobs, blocks / 4)
    limit = int(math.log2(MAX_SPLITS))
    return 2 ** max(0, min(limit, math.floor(math.log2(max(wanted, to_fill)))))


def choose_prompt_splits(num_jobs: int, num_entries: int, block: int) -> int:
    """The number of splits of a prompt, a power of two, if one split each gives `num_jobs`.

    As many jobs as CTAs, but no split under a block when the prompt fills its `num_entries`.
    """
    wanted = min(CTAS / num_jobs, num_entries / block)
    return 2 ** max(0, min(int(math.log2(MAX_PROMPT_SPLITS)), math.floor(math.log2(wanted))))


def max_entries_read(capacity: int, window: int | None, block: int) -> int:
    """Entries that a slot reads at most. A window may start and end within a block."""
    return capacity if window is None else min(capacity, window + 2 * block)


def split_blocks(capacity: int, num_splits: int, block: int) -> int:
    """Blocks of one of the `num_splits` splits of a full slot.

    They do not depend on a slot's length: a shorter slot has fewer splits.
    """
    return -(-capacity // (num_splits * block))


def _slot_jobs(
    blocks_B: Array, numbers_B3: Array, num_splits: int, capacity: int, block: int
) -> SlotJobs:
    """Ranked by comparing every pair, which takes fewer and shorter kernels than sorting."""
    B, S = blocks_B.shape[0], num_splits
    blocks_per_split = split_blocks(capacity, S, block)
    split_S = jnp.arange(S, dtype=jnp.int32)
    left_BS = blocks_B[:, None].astype(jnp.int32) - split_S * blocks_per_split
    size_U = jnp.minimum(left_BS, blocks_per_split).reshape(-1)
    exists_U = (size_U > 0) | (jnp.tile(split_S, B) == 0)
    size_U = jnp.where(exists_U, jnp.maximum(size_U, 0), -1)
    index_U = jnp.arange(B * S, dtype=jnp.int32)
    before_UU = size_U > size_U[:, None]
    before_UU |= (size_U == size_U[:, None]) & (index_U < index_U[:, None])
    rank_U = before_UU.sum(axis=1, dtype=jnp.int32)
    # The inverse permutation as a masked sum: one kernel, where a scatter takes two.
    job_U = jnp.where(rank_U == index_U[:, None], index_U, 0).sum(axis=1, dtype=jnp.int32)
    numbers_U3 = numbers_B3.astype(jnp.int32)[job_U // S]
    return SlotJobs(
        table_U4=jnp.concatenate([job_U[:, None], numbers_U3], axis=1),
        num_jobs=exists_U.sum(dtype=jnp.int32)[None],
        num_splits=S,
        blocks_per_split=blocks_per_split,
        block=block,
    )


def _prompt_tiles(
    prefix_rows_B: Array, prefix_lengths_B: Array, slots_per_tile: int, num_splits: int
) -> PromptTiles:
    B = prefix_rows_B.shape[0]
    slots_B = jnp.arange(B, dtype=jnp.int32)

    def count(which_BB: Array) -> Array:
        return which_BB.sum(axis=1, dtype=jnp.int32)

    earlier_BB = slots_B < slots_B[:, None]  # [b, c]: slot c is before slot b
    reads_B = prefix_lengths_B > 0
    shares_BB = reads_B[:, None] & (prefix_rows_B == prefix_rows_B[:, None])
    shares_BB &= prefix_lengths_B == prefix_lengths_B[:, None]
    position_B = count(shares_BB & earlier_BB)
    index_in_tile_B = position_B % slots_per_tile
    leads_B = reads_B & (index_in_tile_B == 0)
    # The first slot of a tile is its leader. Tiles are numbered in the order of their leaders.
    number_B = count(leads_B & earlier_BB)
    leader_BB = shares_BB & (position_B == (position_B - index_in_tile_B)[:, None])
    tile_B = jnp.where(leader_BB, number_B, 0).sum(axis=1, dtype=jnp.int32)
    zeros_WI = jnp.zeros((B, slots_per_tile), jnp.int32)  # W = B: one tile per slot at most
    slots_WI = zeros_WI.at[jnp.where(reads_B, tile_B, B), index_in_tile_B].set(slots_B, mode="drop")
    return PromptTiles(
        num_tiles=leads_B.sum(dtype=jnp.int32)[None],
        rows_W=prefix_rows_B[slots_WI[:, 0]].astype(jnp.int32),
        lengths_W=prefix_lengths_B[slots_WI[:, 0]].astype(jnp.int32),
        num_slots_W=count(reads_B & (tile_B == slots_B[:, None])),
        slots_WI=slots_WI,
        num_splits=num_splits,
    )
