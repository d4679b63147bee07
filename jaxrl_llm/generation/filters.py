"""The tokens that top-k, top-p and min-p keep, as ids and without a sort.

Filters keep at most MOST_KEPT tokens, because their ids travel with each sampled token: the trainer
computes its log-probs over the same set. Two steps find the k likeliest tokens. The k blocks with
the largest maxima hold them. So the vocabulary is read once, and thresholds are searched among the
tokens of these blocks. Bisection on the bits of the floats finds a threshold.

Shape letters: B rows, V vocabulary, G blocks of W tokens, L numbers, K tokens kept at most.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

MOST_KEPT = 512  # tokens that filters keep at most; config.rollout.top_k has this bound
BLOCK = 128  # tokens of a block, about
BITS = 4  # bits of a threshold that one pass over the numbers finds


class Kept(NamedTuple):
    """The tokens that filters keep. A row with fewer than K ends somewhere with other entries."""

    ids_BK: jax.Array  # int32; -1 for no token
    z_BK: jax.Array  # logits over the temperature; -inf for no token


def num_kept(vocab_size: int, *, top_k: int, top_p: float, min_p: float) -> int:
    """K, the most tokens that these filters keep; 0 where all are off."""
    chosen = top_k if 0 < top_k < vocab_size else 0
    if not chosen and top_p == 1 and min_p == 0:
        return 0
    return min(chosen or vocab_size, MOST_KEPT, vocab_size)


def kept_tokens(z_BV: jax.Array, *, top_k: int, top_p: float, min_p: float) -> Kept:
    """What the filters keep of `z_BV`, logits over the temperature; top-k, then top-p, then min-p.

    Of equal tokens at the end of top-k some are kept, so that there are k. Top-p is a share of the
    probability of the tokens that top-k kept, as in transformers, and keeps equal ones.

    Requires: some filter is on.
    """
    V = z_BV.shape[-1]
    K = num_kept(V, top_k=top_k, top_p=top_p, min_p=min_p)
    ids_BK = likeliest(z_BV, K)
    z_BK = jnp.take_along_axis(z_BV, ids_BK, axis=-1, mode="clip")
    peak_B1 = jnp.max(z_BK, axis=-1, keepdims=True)
    kept_BK = jnp.ones(z_BK.shape, bool)
    if top_p < 1:
        mass_BK = jnp.exp(z_BK - peak_B1)
        every = z_BK if 0 < top_k < V else z_BV
        need_B = top_p * jnp.sum(jnp.exp(every - peak_B1), axis=-1)
        ordered_BK = _ordered_bits(z_BK)
        kept_BK = ordered_BK >= _largest_threshold(ordered_BK, mass_BK, need_B)[:, None]
    if min_p > 0:
        kept_BK &= z_BK >= peak_B1 + jnp.log(min_p)
    return Kept(jnp.where(kept_BK, ids_BK, -1), jnp.where(kept_BK, z_BK, -jnp.inf))


def kept_of_rows(z_BV: jax.Array, *, top_k: jax.Array, top_p: jax.Array, min_p: jax.Array) -> Kept:
    """What filters of each row keep, as `kept_tokens` with numbers [B]; 0, 1 and 0 are off.

    At most MOST_KEPT tokens are kept, the likeliest ones.
    """
    V = z_BV.shape[-1]
    ids_BK = likeliest(z_BV, min(MOST_KEPT, V))
    K = ids_BK.shape[1]
    z_BK, order_BK = lax.top_k(jnp.take_along_axis(z_BV, ids_BK, axis=-1, mode="clip"), K)
    ids_BK = jnp.take_along_axis(ids_BK, order_BK, axis=-1)
    peak_B1 = z_BK[:, :1]
    has_k_B1 = ((top_k > 0) & (top_k < V))[:, None]
    kept_BK = ~has_k_B1 | (jnp.arange(K) < top_k[:, None])
    mass_BK = jnp.where(kept_BK, jnp.exp(z_BK - peak_B1), 0.0)
    every_B1 = jnp.sum(jnp.exp(z_BV - peak_B1), axis=-1, keepdims=True)
    total_B1 = jnp.where(has_k_B1, jnp.sum(mass_BK, axis=-1, keepdims=True), every_B1)
    before_BK = jnp.cumsum(mass_BK, axis=-1) - mass_BK
    # The last token that is needed may have equals: they are kept too.
    last_B1 = jnp.sum(before_BK < top_p[:, None] * total_B1, axis=-1, keepdims=True) - 1
    threshold_B1 = jnp.take_along_axis(z_BK, jnp.maximum(last_B1, 0), axis=-1)
    kept_BK &= (top_p[:, None] >= 1) | (z_BK >= threshold_B1)
    kept_BK &= (min_p[:, None] <= 0) | (z_BK >= peak_B1 + jnp.log(min_p[:, None]))
    return Kept(jnp.where(kept_BK, ids_BK, -1), jnp.where(kept_BK, z_BK, -jnp.inf))


def likeliest(z_BV: jax.Array, k: int) -> jax.Array:
    """The ids of the k largest numbers of each row in no order, int32 [B, K]."""
    B, V = z_BV.shape
    if k == V:
        return jnp.broadcast_to(jnp.arange(V, dtype=jnp.int32), (B, V))
    z_BGW = _blocks(z_BV, BLOCK)
    blocks, width = z_BGW.shape[1:]
    if k >= blocks:
        return _largest(z_BV, k)
    # Each of these blocks has a number at least as large as all numbers of the other blocks.
    chosen_BK = _largest(jnp.max(z_BGW, axis=-1), k)
    z_BKW = jnp.take_along_axis(z_BGW, chosen_BK[..., None], axis=1, mode="clip")
    places_BK = _largest(z_BKW.reshape(B, -1), k)
    block_BK = jnp.take_along_axis(chosen_BK, places_BK // width, axis=-1, mode="clip")
    return jnp.minimum(block_BK * width + places_BK % width, V - 1)


def _blocks(x_BL: jax.Array, width: int) -> jax.Array:
    """The numbers in blocks [B, G, W] of about `width`: of a divisor of L, where one is near."""
    B, L = x_BL.shape
    near = [w for w in range(max(1, width // 2), 2 * width + 1) if L % w == 0]
    width = min(near, key=lambda w: abs(w - width), default=width)
    padding = ((0, 0), (0, -L % width))
    return jnp.pad(x_BL, padding, constant_values=-jnp.inf).reshape(B, -1, width)


def _largest(x_BL: jax.Array, k: int) -> jax.Array:
    """The places of the k largest numbers of each row in no order, int32 [B, K].

    Numbers above a threshold come first, then as many of those equal to it as are needed. Counts of
    blocks say in which block each of them is. So the vocabulary may be split over devices: only
    these counts move, and the blocks that are read.
    """
    ordered_BGW = _ordered_bits(_blocks(x_BL, math.isqrt(x_BL.shape[1])))
    B, G, W = ordered_BGW.shape
    ordered_BL = ordered_BGW.reshape(B, -1)
    ones_BL = jnp.ones_like(ordered_BL, jnp.int32)
    threshold_B = _largest_threshold(ordered_BL, ones_BL, jnp.full((B,), k, jnp.int32))
    threshold_B11 = threshold_B[:, None, None]
    above_BG, equal_BG = (
        jnp.sum(hits_BGW, axis=-1, dtype=jnp.int32)
        for hits_BGW in (ordered_BGW > threshold_B11, ordered_BGW == threshold_B11)
    )
    rank_BK = jnp.broadcast_to(jnp.arange(k, dtype=jnp.int32), (B, k))
    num_above_B1 = jnp.sum(above_BG, axis=-1, keepdims=True, dtype=jnp.int32)
    is_above_BK1 = (rank_BK < num_above_B1)[..., None]
    rank_BK = jnp.where(is_above_BK1[..., 0], rank_BK, rank_BK - num_above_B1)
    counts_BKG = jnp.where(is_above_BK1, above_BG[:, None], equal_BG[:, None])
    ends_BKG = jnp.where(
        is_above_BK1, jnp.cumsum(above_BG, axis=-1)[:, None], jnp.cumsum(equal_BG, axis=-1)[:, None]
    )
    block_BK = jnp.sum(ends_BKG <= rank_BK[..., None], axis=-1, dtype=jnp.int32)
    before_BKG = jnp.where(jnp.arange(G) < block_BK[..., None], counts_BKG, 0)
    rank_BK = rank_BK - jnp.sum(before_BKG, axis=-1, dtype=jnp.int32)
    read_BKW = jnp.take_along_axis(ordered_BGW, block_BK[..., None], axis=1, mode="clip")
    hits_BKW = jnp.where(is_above_BK1, read_BKW > threshold_B11, read_BKW == threshold_B11)
    counts_BKW = jnp.cumsum(hits_BKW, axis=-1, dtype=jnp.int32)
    place_BK = jnp.sum(counts_BKW <= rank_BK[..., None], axis=-1, dtype=jnp.int32)
    return jnp.minimum(block_BK * W + place_BK, x_BL.shape[1] - 1)


def _ordered_bits(x: jax.Array) -> jax.Array:
    """uint32 numbers in the order of the float32 values; -0 equals 0."""
    bits = lax.bitcast_convert_type(jnp.where(x == 0, jnp.float32(0), x), jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))


def _largest_threshold(ordered_BL: jax.Array, weight_BL: jax.Array, need_B: jax.Array) -> jax.Array:
    """The largest uint32 t [B] such that the numbers >= t weigh at least `need_B`; 0 without any.

    A pass weighs what lies above each of 2^BITS - 1 candidates.
    """
    digits_J = jnp.arange(1, 1 << BITS, dtype=jnp.uint32)

    def step(i: jax.Array, t_B: jax.Array) -> jax.Array:
        shift = jnp.uint32(32 - BITS) - jnp.uint32(BITS) * i.astype(jnp.uint32)
        candidates_BJ = t_B[:, None] | (digits_J << shift)
        above_BJL = ordered_BL[:, None] >= candidates_BJ[..., None]
        weight_BJ = jnp.sum(jnp.where(above_BJL, weight_BL[:, None], 0), axis=-1)
        digit_B = jnp.sum(weight_BJ >= need_B[:, None], axis=-1, dtype=jnp.uint32)
        return t_B | (digit_B << shift)

    return lax.fori_loop(0, 32 // BITS, step, jnp.zeros(ordered_BL.shape[:1], jnp.uint32))
