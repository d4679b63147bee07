"""Which keys each token of a row sees, as ranges, and the tile jobs that follow from them.

Token t sees the keys s with `prefix_start[t] <= s < prefix_end[t]` or `start[t] <= s <= t`. These
two ranges cover causal rows, packed rows, windows, and prompts that several responses share. Where
the queries are only a part of the row, `last[t]` takes the place of t.

Shape letters: B rows of the batch, T query tokens, S keys of a row (T == S where all tokens of the
row are queries), R rows of a schedule (B, or 1 if all rows have the same ranges), C arrays of
ranges (0 to 4), Q query blocks, K key blocks, I tile jobs.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

# NumPy where ranges are known at trace time: what is computed from them is then a constant.
HostOrDevice: TypeAlias = np.ndarray | Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Visibility:
    """Ranges of keys that each token sees, as positions in the row (int32).

    A padding token has `start` past itself and no prefix: it sees nothing, and its output and its
    gradients are 0.

    With `last` the tokens are queries of any order, and a token's first range ends with that key.

    Requires: no range of a real token contains a padding token; both prefix arrays or none.
    """

    start_BT: Int[Array, "B T"]
    prefix_start_BT: Int[Array, "B T"] | None = None
    prefix_end_BT: Int[Array, "B T"] | None = None
    last_BT: Int[Array, "B T"] | None = None

    def real(self) -> Array:
        """Which tokens see anything, that is, are not padding: bool [B, T]."""
        last = jnp.arange(self.start_BT.shape[1]) if self.last_BT is None else self.last_BT
        real_BT = self.start_BT <= last
        if self.prefix_start_BT is not None and self.prefix_end_BT is not None:
            real_BT |= self.prefix_start_BT < self.prefix_end_BT
        return real_BT

    def dense(self, num_keys: int | None = None) -> Array:
        """The visibility as a mask: bool [B, T, S]. None: as many keys as tokens."""
        T = self.start_BT.shape[1]
        t, s = (jnp.arange(T)[:, None], jnp.arange(num_keys or T))
        if self.last_BT is not None:
            t = self.last_BT[..., None]
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
    """Causal attention inside each segment of packed rows.

    A segment is a run of tokens with one id > 0; id 0 is padding. `prefix_ids` names for each
    token an earlier segment of the row that it sees whole (0: none). So n responses of a group
    share a prompt that is in the row once. With a `window` a token sees the last `window`
    positions of its own sequence, itself included. A response's sequence begins with its prefix.

    Requires: an id has one run per row.
    """
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
    # All pairs, which XLA fuses into one reduction. Ids need be neither sorted nor dense.
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


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["values_RCT"],
    meta_fields=["num_tokens", "num_keys"],
)
@dataclass(frozen=True)
class Ranges:
    """The ranges as the kernels take them, of `num_tokens` queries T: int32 [R, C, T].

    None: plain causal. C = 1: start. C = 3: start, prefix start, prefix end. One more: `last`.
    """

    num_tokens: int
    num_keys: int
    values_RCT: HostOrDevice | None = None

    def rows(self) -> tuple[HostOrDevice, HostOrDevice, HostOrDevice]:
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

    def last(self) -> HostOrDevice:
        """The last key of each query's first range: [R, T], or [T] if it is the query itself."""
        if self.values_RCT is None or self.values_RCT.shape[1] % 2:
            return np.arange(self.num_tokens, dtype=np.int32)
        return self.values_RCT[:, -1]

    @property
    def has_prefixes(self) -> bool:
        """True where some queries may have a second range."""
        return self.values_RCT is not None and self.values_RCT.shape[1] >= 3


def ranges_of(
    length: int,
    padded: int,
    *,
    causal: bool,
    window: int | None,
    lengths: Array | None,
    visibility: Visibility | None,
    num_keys: int | None = None,
) -> Ranges:
    """The ranges of rows of `length` tokens that are padded to `padded` tokens.

    `num_keys` is the padded number of keys of a visibility with `last`.
    """
    t = np.arange(padded, dtype=np.int32)
    if visibility is not None:
        num_keys = num_keys or padded
        arrays, fill = [visibility.start_BT], [num_keys]
        if visibility.prefix_start_BT is not None:
            arrays += [visibility.prefix_start_BT, visibility.prefix_end_BT]
            fill += [0, 0]
        if visibility.last_BT is not None:
            arrays.append(visibility.last_BT)
            fill.append(-1)
        return Ranges(
            padded,
            num_keys,
            jnp.stack(
                [
                    jnp.pad(x.astype(jnp.int32), ((0, 0), (0, padded - length)), constant_values=c)
                    for x, c in zip(arrays, fill, strict=True)
                ],
                axis=1,
            ),
        )
    if causal and window is None and lengths is None and padded == length:
        # None and no empty array: in a shard_map that would become an unused argument, on which
        # Shardy of jax 0.11.2 crashes.
        return Ranges(padded, padded)
    xp: Any = np if lengths is None else jnp
    stop_R1 = np.full((1, 1), length, np.int32) if lengths is None else lengths[:, None]
    real_RT = t[None] < stop_R1
    if causal:
        start_RT = t - window + 1 if window is not None else np.zeros_like(t)
        start_RT = xp.where(real_RT, xp.maximum(start_RT, 0), padded)
        return Ranges(padded, padded, start_RT[:, None].astype(np.int32))
    start_RT = xp.full(real_RT.shape, padded, np.int32)
    end_RT = xp.where(real_RT, stop_R1, 0).astype(np.int32)
    return Ranges(padded, padded, xp.stack([start_RT, xp.zeros_like(start_RT), end_RT], axis=1))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Schedule:
    """The tile jobs of a kernel: one per tile of a row, or per part of a tile, longest first.

    The columns of `jobs` are row, tile, and four numbers that differ by kind of tile.

    - Tile of queries: first key block of the first range, number of its blocks, first key block of
      the second range, number of blocks in all.
    - Tile of keys: first query block, first step, end of the steps, number of query blocks. Step i
      is query block i % blocks of head i // blocks.
    """

    jobs: HostOrDevice  # [I, 8]
    full_RQK: HostOrDevice  # 1 where every query of a block sees every key: no mask is needed
    # [tiles, 2] where tiles of keys are split: each tile's first job and number of jobs, by row.
    jobs_of_tile: HostOrDevice | None = None


def query_schedule(
    ranges: Ranges, num_rows: int, *, block_q: int, block_k: int, tile_q: int
) -> Schedule:
    """The tile jobs of a kernel whose CTAs own `tile_q` queries and loop over key blocks."""
    start_RT, prefix_start_RT, prefix_end_RT = ranges.rows()
    xp = _module(start_RT)
    T, S = ranges.num_tokens, ranges.num_keys

    def hull(low_RT: HostOrDevice, high_RT: HostOrDevice) -> tuple[HostOrDevice, HostOrDevice]:
        """First block and end of the blocks that the non-empty ranges of a tile touch."""
        some = low_RT < high_RT
        low = xp.where(some, low_RT, S).reshape(-1, T // tile_q, tile_q).min(axis=2)
        high = xp.where(some, high_RT, 0).reshape(-1, T // tile_q, tile_q).max(axis=2)
        return low // block_k, -(-high // block_k)

    own_low, own_high = hull(start_RT, xp.broadcast_to(ranges.last() + 1, start_RT.shape))
    prefix_low, prefix_high = hull(prefix_start_RT, prefix_end_RT)
    own = xp.maximum(own_high - own_low, 0)
    prefix = xp.maximum(prefix_high - prefix_low, 0)
    # Two ranges that share a block become one: otherwise its keys would count twice.
    overlap = (own > 0) & (prefix > 0) & (own_low < prefix_high) & (prefix_low < own_high)
    both_low = xp.minimum(own_low, prefix_low)
    both = xp.maximum(own_high, prefix_high) - both_low
    first = xp.where(overlap, both_low, prefix_low)
    num_first = xp.where(overlap, both, prefix)
    num = xp.where(overlap, both, prefix + own)
    jobs = _whole_tiles(num_rows, [first, num_first, own_low, num])
    return Schedule(jobs, _full(ranges, block_q, block_k))


def key_schedule(
    ranges: Ranges,
    num_rows: int,
    *,
    block_q: int,
    block_k: int,
    tile_k: int,
    num_groups: int = 1,
    extra_jobs: int = 0,
) -> Schedule:
    """The tile jobs of a kernel whose CTAs own `tile_k` keys and loop over every head's queries.

    With `extra_jobs`, tiles with many steps are split. A job has at most 1 / `extra_jobs` of all
    steps, so that tiles and extra jobs together bound the number of jobs. Unused jobs have no step.
    """
    start_RT, prefix_start_RT, prefix_end_RT = ranges.rows()
    xp = _module(start_RT)
    T, S = ranges.num_tokens, ranges.num_keys
    t, last = np.arange(T, dtype=np.int32)[:, None], ranges.last()[..., None]
    low, high = (np.arange(S // tile_k, dtype=np.int32) + i for i in (0, 1))
    low, high = low * tile_k, high * tile_k
    start, prefix_start, prefix_end = (
        x[..., None] for x in (start_RT, prefix_start_RT, prefix_end_RT)
    )
    sees_RTK = (start < high) & (start <= last) & (last >= low)
    sees_RTK |= (prefix_start < prefix_end) & (prefix_start < high) & (prefix_end > low)
    block = t // block_q
    first = xp.where(sees_RTK, block, T).min(axis=1)
    stop = xp.where(sees_RTK, block + 1, 0).max(axis=1)
    num = xp.maximum(stop - first, 0)
    first = xp.where(num > 0, first, 0)
    columns = [first, xp.zeros_like(num), num * num_groups, num]
    full = _full(ranges, block_q, block_k)
    if not extra_jobs:
        return Schedule(_whole_tiles(num_rows, columns), full)
    jobs, jobs_of_tile = _split_tiles(_tiles(num_rows, columns), extra_jobs)
    return Schedule(jobs, full, jobs_of_tile)


def _split_tiles(tiles: HostOrDevice, extra_jobs: int) -> tuple[HostOrDevice, HostOrDevice]:
    """Jobs [I, 8] that are parts of tiles, longest parts first, and `Schedule.jobs_of_tile`.

    The parts of a tile follow each other. They have one length, except the last.
    """
    xp = _module(tiles)
    steps = tiles[:, 4]
    most = xp.maximum(-(-steps.sum() // extra_jobs), 1)
    parts = -(-steps // most)
    length = -(-steps // xp.maximum(parts, 1))
    parts = -(-steps // xp.maximum(length, 1))  # rounding up may leave the last part empty
    # Compares all pairs, for which XLA makes fewer kernels than for a sort and a search.
    tile = np.arange(len(tiles))
    earlier = (length > length[:, None]) | ((length == length[:, None]) & (tile < tile[:, None]))
    first = (earlier * parts).sum(axis=1)
    job = np.arange(len(tiles) + extra_jobs)[:, None]
    is_of = (first <= job) & (job < first + parts)
    of = is_of.argmax(axis=1)
    begin = (job[:, 0] - first[of]) * length[of]
    end = xp.minimum(begin + length[of], steps[of])
    begin, end = (xp.where(is_of.any(axis=1), x, 0)[:, None] for x in (begin, end))
    jobs = xp.concatenate([tiles[of, :3], begin, end, tiles[of, 5:]], axis=1)
    return jobs.astype(np.int32), xp.stack([first, parts], axis=1).astype(np.int32)


def _full(ranges: Ranges, block_q: int, block_k: int) -> HostOrDevice:
    start_RT, prefix_start_RT, prefix_end_RT = (x[..., None] for x in ranges.rows())
    T, S = ranges.num_tokens, ranges.num_keys
    low = np.arange(S // block_k, dtype=np.int32) * block_k
    full_RTK = (start_RT <= low) & (low + block_k - 1 <= ranges.last()[..., None])
    full_RTK |= (prefix_start_RT <= low) & (prefix_end_RT >= low + block_k)
    by_block = full_RTK.reshape(full_RTK.shape[0], T // block_q, block_q, -1)
    return _module(full_RTK).all(by_block, axis=2).astype(np.int32)


def _whole_tiles(num_rows: int, columns: list[HostOrDevice]) -> HostOrDevice:
    """Jobs [I, 8] that are whole tiles, longest first: short ones fill the gaps at the end."""
    tiles = _tiles(num_rows, columns)
    by_length = -tiles[:, 5]
    if _module(tiles) is np:
        return tiles[np.argsort(by_length, kind="stable")]
    return tiles[jnp.argsort(by_length)]


def _tiles(num_rows: int, columns: list[HostOrDevice]) -> HostOrDevice:
    """Row, tile and four columns of every tile, in order: [I, 8]."""
    xp = _module(*columns)
    num_tiles = columns[0].shape[1]
    row, tile = (x.reshape(-1) for x in np.indices((num_rows, num_tiles), np.int32))
    flat = [xp.broadcast_to(x, (num_rows, num_tiles)).reshape(-1).astype(np.int32) for x in columns]
    empty = np.zeros_like(row)
    return xp.stack([row, tile, *flat, empty, empty], axis=1)


def _module(*arrays: HostOrDevice) -> Any:
    """NumPy if all arrays are NumPy's, else jax.numpy."""
    return np if all(isinstance(x, np.ndarray) for x in arrays) else jnp
