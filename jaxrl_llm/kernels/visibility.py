"""Which keys each token of a row sees, as ranges, and the block schedules attention takes from it.

Token t sees the keys s with `prefix_start[t] <= s < prefix_end[t]` or `start[t] <= s <= t`: ranges
cover causal rows, packed rows, windows and prompts shared by several responses at once.

Shape letters: B batch, T tokens of a row, S keys of a row (T == S), R rows of a schedule (B, or 1
where every row has the same ranges), C ranges' arrays (0, 1 or 3), Q query blocks, K key blocks,
I work items (a block of a row).
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Visibility:
    """Ranges of keys (int32 [B, T], positions in the row) that each token sees.

    A token of padding has `start` past itself and no prefix: it sees nothing, its output and its
    gradients are 0, and no real token's range may hold it. The two prefix arrays come together.
    """

    start_BT: Int[Array, "B T"]
    prefix_start_BT: Int[Array, "B T"] | None = None
    prefix_end_BT: Int[Array, "B T"] | None = None

    def real(self) -> Array:
        """Which tokens see anything, so are not padding: bool [B, T]."""
        real_BT = self.start_BT <= jnp.arange(self.start_BT.shape[1])
        if self.prefix_start_BT is not None and self.prefix_end_BT is not None:
            real_BT |= self.prefix_start_BT < self.prefix_end_BT
        return real_BT

    def dense(self) -> Array:
        """The same as a mask: bool [B, T, S]."""
        t, s = (jnp.arange(self.start_BT.shape[1])[:, None], jnp.arange(self.start_BT.shape[1]))
        visible_BTS = (self.start_BT[..., None] <= s) & (s <= t)
        if self.prefix_start_BT is not None and self.prefix_end_BT is not None:
            visible_BTS |= (self.prefix_start_BT[..., None] <= s) & (
                s < self.prefix_end_BT[..., None]
            )
        return visible_BTS


def packed_visibility(
    segment_ids_BT: Int[Array, "B T"],
    prefix_ids_BT: Int[Array, "B T"] | None = None,
    *,
    window: int | None = None,
) -> Visibility:
    """Causal attention inside each segment of a packed row.

    A segment is a run of tokens of one id > 0, and an id has one run a row; 0 is padding.
    `prefix_ids` names for each token the segment, earlier in the row, that it sees whole too (0:
    none): n responses of one group share the prompt that is in the row once. `window` lets a
    token see the last `window` positions of its own sequence, itself included; a response's
    sequence begins with its prefix. ValueError if the window is under 1.
    """
    if window is not None and window < 1:
        raise ValueError(f"window {window}: use None for no window, or 1 and more")
    T = segment_ids_BT.shape[1]
    t = jnp.arange(T, dtype=jnp.int32)
    first_BT = jnp.pad(
        segment_ids_BT[:, 1:] != segment_ids_BT[:, :-1], ((0, 0), (1, 0)), constant_values=True
    )
    segment_start_BT = jax.lax.cummax(jnp.where(first_BT, t, 0), axis=1)
    start_BT = segment_start_BT
    if window is not None:
        start_BT = jnp.maximum(start_BT, t - window + 1)
    real_BT = segment_ids_BT > 0
    start_BT = jnp.where(real_BT, start_BT, T)
    if prefix_ids_BT is None:
        return Visibility(start_BT=start_BT)

    has_prefix_BT = real_BT & (prefix_ids_BT > 0)
    # Compared pair by pair, fused into one reduction; ids need be neither sorted nor dense.
    is_prefix_BTS = prefix_ids_BT[:, :, None] == segment_ids_BT[:, None, :]
    prefix_start_BT = jnp.min(jnp.where(is_prefix_BTS, t, T), axis=2)
    prefix_end_BT = jnp.max(jnp.where(is_prefix_BTS, t + 1, 0), axis=2)
    if window is not None:
        position_BT = prefix_end_BT - prefix_start_BT + t - segment_start_BT
        prefix_start_BT = jnp.maximum(prefix_start_BT, prefix_start_BT + position_BT - window + 1)
        prefix_start_BT = jnp.minimum(prefix_start_BT, prefix_end_BT)
    return Visibility(
        start_BT=start_BT,
        prefix_start_BT=jnp.where(has_prefix_BT, prefix_start_BT, 0),
        prefix_end_BT=jnp.where(has_prefix_BT, prefix_end_BT, 0),
    )


@partial(jax.tree_util.register_dataclass, data_fields=["values_RCT"], meta_fields=["num_tokens"])
@dataclass(frozen=True)
class Ranges:
    """The ranges of whole rows of `num_tokens` T for the kernels: [R, C, T] of int32.

    None: plain causal, so that what follows is a constant of the program; C = 1: start; C = 3:
    start, prefix start, prefix end. NumPy where they are known at trace time.
    """

    num_tokens: int
    values_RCT: Any = None

    def rows(self) -> tuple[Any, Any, Any]:
        """start, prefix start, prefix end, each [R, T]; 0 where absent."""
        if self.values_RCT is None:
            start = np.zeros((1, self.num_tokens), np.int32)
            return start, start, start
        R, C, T = self.values_RCT.shape
        xp = _module(self.values_RCT)
        none = xp.zeros((R, T), np.int32)
        start = self.values_RCT[:, 0]
        if C < 3:
            return start, none, none
        return start, self.values_RCT[:, 1], self.values_RCT[:, 2]


def ranges_of(
    length: int,
    padded: int,
    *,
    causal: bool,
    window: int | None,
    lengths: Array | None,
    visibility: Visibility | None,
) -> Ranges:
    """Ranges of rows of `length` tokens that are padded to `padded`."""
    t = np.arange(padded, dtype=np.int32)
    if visibility is not None:
        arrays = [visibility.start_BT]
        if visibility.prefix_start_BT is not None:
            arrays += [visibility.prefix_start_BT, visibility.prefix_end_BT]
        fill = [padded, 0, 0]
        return Ranges(
            padded,
            jnp.stack(
                [
                    jnp.pad(x.astype(jnp.int32), ((0, 0), (0, padded - length)), constant_values=c)
                    for x, c in zip(arrays, fill, strict=False)
                ],
                axis=1,
            ),
        )
    if causal and window is None and lengths is None and padded == length:
        # Not an array of none: in a shard_map it becomes an argument that nothing uses, at which
        # Shardy of jax 0.11.2 crashes.
        return Ranges(padded)
    xp: Any = np if lengths is None else jnp
    stop_R1 = np.full((1, 1), length, np.int32) if lengths is None else lengths[:, None]
    real_RT = t[None] < stop_R1
    if causal:
        start_RT = t - window + 1 if window is not None else np.zeros_like(t)
        start_RT = xp.where(real_RT, xp.maximum(start_RT, 0), padded)
        return Ranges(padded, start_RT[:, None].astype(np.int32))
    start_RT = xp.full(real_RT.shape, padded, np.int32)
    end_RT = xp.where(real_RT, stop_R1, 0).astype(np.int32)
    return Ranges(padded, xp.stack([start_RT, xp.zeros_like(start_RT), end_RT], axis=1))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Schedule:
    """What a kernel's programs do: one item a tile of one row or a part of it, the longest first.

    `items` [I, 8] is row, tile, and for a tile of queries: first key block of the first range,
    its number of blocks, first key block of the second range, number of blocks in all. For a tile
    of keys: first query block, first step and one past the last, number of query blocks; step i
    is query block i % blocks of head i // blocks. `parts` [tiles, 2], where tiles of keys are
    divided: the first item of each tile (row after row) and the number of its items. `whole_RQK`
    is 1 where every query of a block sees every key of a block, so that no mask is needed.
    """

    items: Any
    whole_RQK: Any
    parts: Any = None


def query_schedule(
    ranges: Ranges, num_rows: int, *, block_q: int, block_k: int, tile_q: int
) -> Schedule:
    """For programs of `tile_q` queries that loop over blocks of `block_k` keys."""
    start_RT, prefix_start_RT, prefix_end_RT = ranges.rows()
    xp = _module(start_RT)
    T = ranges.num_tokens
    t = np.arange(T, dtype=np.int32)

    def hull(low_RT: Any, high_RT: Any) -> tuple[Any, Any]:
        """First block and one past the last block that a tile's non-empty ranges touch."""
        some = low_RT < high_RT
        low = xp.where(some, low_RT, T).reshape(-1, T // tile_q, tile_q).min(axis=2)
        high = xp.where(some, high_RT, 0).reshape(-1, T // tile_q, tile_q).max(axis=2)
        return low // block_k, -(-high // block_k)

    own_low, own_high = hull(start_RT, xp.broadcast_to(t + 1, start_RT.shape))
    prefix_low, prefix_high = hull(prefix_start_RT, prefix_end_RT)
    own = xp.maximum(own_high - own_low, 0)
    prefix = xp.maximum(prefix_high - prefix_low, 0)
    # Two ranges that share a block become one, so that no key is counted twice.
    overlap = (own > 0) & (prefix > 0) & (own_low < prefix_high) & (prefix_low < own_high)
    both_low = xp.minimum(own_low, prefix_low)
    both = xp.maximum(own_high, prefix_high) - both_low
    first = xp.where(overlap, both_low, prefix_low)
    num_first = xp.where(overlap, both, prefix)
    num = xp.where(overlap, both, prefix + own)
    items = _items(num_rows, [first, num_first, own_low, num])
    return Schedule(items, _whole(ranges, block_q, block_k))


def key_schedule(
    ranges: Ranges,
    num_rows: int,
    *,
    block_q: int,
    block_k: int,
    tile_k: int,
    num_groups: int = 1,
    extra_items: int = 0,
) -> Schedule:
    """For programs of `tile_k` keys that loop over blocks of `block_q` queries of each head.

    With `extra_items`, tiles of many steps are divided among programs: a part takes at most
    1 / `extra_items` of all steps, so that there are never more of them than tiles and extra items
    together. Items that are left over have no tile of their own and no step.
    """
    start_RT, prefix_start_RT, prefix_end_RT = ranges.rows()
    xp = _module(start_RT)
    T = ranges.num_tokens
    t = np.arange(T, dtype=np.int32)[:, None]
    low, high = (np.arange(T // tile_k, dtype=np.int32) + i for i in (0, 1))
    low, high = low * tile_k, high * tile_k
    start, prefix_start, prefix_end = (
        x[..., None] for x in (start_RT, prefix_start_RT, prefix_end_RT)
    )
    sees_RTK = (start < high) & (start <= t) & (t >= low)
    sees_RTK |= (prefix_start < prefix_end) & (prefix_start < high) & (prefix_end > low)
    block = t // block_q
    first = xp.where(sees_RTK, block, T).min(axis=1)
    stop = xp.where(sees_RTK, block + 1, 0).max(axis=1)
    num = xp.maximum(stop - first, 0)
    first = xp.where(num > 0, first, 0)
    columns = [first, xp.zeros_like(num), num * num_groups, num]
    whole = _whole(ranges, block_q, block_k)
    if not extra_items:
        return Schedule(_items(num_rows, columns), whole)
    items, parts = _divided(_tiles(num_rows, columns), extra_items)
    return Schedule(items, whole, parts)


def _divided(tiles: Any, extra_items: int) -> tuple[Any, Any]:
    """Items [I, 8] of parts, those of the longest parts first, and their place [tiles, 2].

    A tile's parts come one after the other and have one length, but for the last.
    """
    xp = _module(tiles)
    steps = tiles[:, 4]
    most = xp.maximum(-(-steps.sum() // extra_items), 1)
    parts = -(-steps // most)
    length = -(-steps // xp.maximum(parts, 1))
    parts = -(-steps // xp.maximum(length, 1))  # rounded up, fewer may do: none is empty
    # By comparing all with all, which XLA makes of fewer kernels than a sort and a search.
    tile = np.arange(len(tiles))
    earlier = (length > length[:, None]) | ((length == length[:, None]) & (tile < tile[:, None]))
    first = (earlier * parts).sum(axis=1)
    item = np.arange(len(tiles) + extra_items)[:, None]
    is_of = (first <= item) & (item < first + parts)
    of = is_of.argmax(axis=1)
    begin = (item[:, 0] - first[of]) * length[of]
    end = xp.minimum(begin + length[of], steps[of])
    begin, end = (xp.where(is_of.any(axis=1), x, 0)[:, None] for x in (begin, end))
    items = xp.concatenate([tiles[of, :3], begin, end, tiles[of, 5:]], axis=1)
    return items.astype(np.int32), xp.stack([first, parts], axis=1).astype(np.int32)


def _whole(ranges: Ranges, block_q: int, block_k: int) -> Any:
    start_RT, prefix_start_RT, prefix_end_RT = (x[..., None] for x in ranges.rows())
    T = ranges.num_tokens
    t = np.arange(T, dtype=np.int32)[:, None]
    low = np.arange(T // block_k, dtype=np.int32) * block_k
    whole_RTK = (start_RT <= low) & (low + block_k - 1 <= t)
    whole_RTK |= (prefix_start_RT <= low) & (prefix_end_RT >= low + block_k)
    R = whole_RTK.shape[0]
    return whole_RTK.reshape(R, T // block_q, block_q, -1).all(axis=2).astype(np.int32)


def _items(num_rows: int, columns: list[Any]) -> Any:
    """Work items [I, 8] of whole tiles, the longest first: short ones fill the gaps at the end."""
    tiles = _tiles(num_rows, columns)
    by_length = -tiles[:, 5]
    if _module(tiles) is np:
        return tiles[np.argsort(by_length, kind="stable")]
    return tiles[jnp.argsort(by_length)]


def _tiles(num_rows: int, columns: list[Any]) -> Any:
    """Rows, tiles and four columns, in order: [I, 8]."""
    xp = _module(*columns)
    num_tiles = columns[0].shape[1]
    row, tile = (x.reshape(-1) for x in np.indices((num_rows, num_tiles), np.int32))
    flat = [xp.broadcast_to(x, (num_rows, num_tiles)).reshape(-1).astype(np.int32) for x in columns]
    empty = np.zeros_like(row)
    return xp.stack([row, tile, *flat, empty, empty], axis=1)


def _module(*arrays: Any) -> Any:
    return np if all(isinstance(x, np.ndarray) for x in arrays) else jnp
