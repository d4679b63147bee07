"""Masked statistics, log-probabilities and entropy: each written in one place.

A mask is 1 (or True) where a token counts and 0 elsewhere.

Guarantees: values outside of the mask, also infinity and NaN, change no result. An empty mask gives
0 instead of a division by zero.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

Mask = Float[Array, "..."] | Bool[Array, "..."] | Int[Array, "..."]

WHITEN_EPS = 1e-8  # added to the variance, as verl does


def clip(x: Float[Array, "*shape"], low: float, high: float) -> Float[Array, "*shape"]:
    """x within [low, high], with gradient 1 on both bounds and 0 outside.

    So has torch.clamp up to torch 2.13. On a bound, `jnp.clip` has 0.5, and later torch has 0.
    """
    return jnp.where(x < low, low, jnp.where(x > high, high, x))


def absolute(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """|x| with the gradient of torch.abs: sign(x), so 0 at 0. `jnp.abs` has gradient 1 there.

    It matters because the log-probs of two policies are equal in the first mini-batch of a run.
    """
    return x * jax.lax.stop_gradient(jnp.sign(x))


def safe_divide(total: Float[Array, "..."], count: Float[Array, "..."]) -> Float[Array, "..."]:
    """total / count, and 0 where count is 0. Its gradient is finite there too."""
    return jnp.where(count > 0, total / jnp.where(count > 0, count, 1.0), 0.0)


def masked_sum(x: Float[Array, "..."], mask: Mask, axis: int | None = None) -> Float[Array, "..."]:
    """Sum of x over the mask, in float32."""
    return jnp.sum(jnp.where(mask != 0, x.astype(jnp.float32), 0.0), axis=axis)


def masked_count(mask: Mask, axis: int | None = None) -> Float[Array, "..."]:
    """The number of entries that the mask selects, as float32."""
    return jnp.sum(mask != 0, axis=axis, dtype=jnp.float32)


def masked_mean(x: Float[Array, "..."], mask: Mask, axis: int | None = None) -> Float[Array, "..."]:
    """Mean of x over the mask; 0 where nothing is selected."""
    return safe_divide(masked_sum(x, mask, axis), masked_count(mask, axis))


def masked_var(x: Float[Array, "..."], mask: Mask, *, unbiased: bool = True) -> Float[Array, ""]:
    """Variance of x over the mask: with n - 1 as torch and verl have it, or with n.

    Fewer than two entries give 0. verl raises there; a run must survive a batch of one token.
    """
    squares = masked_sum(jnp.square(x - masked_mean(x, mask)), mask)
    count = masked_count(mask)
    return safe_divide(squares, count - 1.0 if unbiased else count)


def masked_quantiles(
    x: Float[Array, "..."], mask: Mask, percents: Sequence[int]
) -> Float[Array, " Q"]:
    """For each of `percents`: the least entry that so many percent of the entries do not exceed.

    These are entries of x, neither binned nor interpolated, in float32. They are found by bisection
    of their bits. Integers are counted, so devices and their number change no bit.
    """
    keep = mask != 0
    keys = _ordered_bits(jnp.where(keep, x.astype(jnp.float32), jnp.inf))
    keys, count = jnp.where(keep, keys, jnp.uint32(2**32 - 1)), keep.sum(dtype=jnp.int32)
    percent = jnp.array(percents, jnp.int32)
    # ceil(count percent / 100), without a product that overflows.
    ranks = count // 100 * percent + (count % 100 * percent + 99) // 100

    def narrow(step: Array, keys_of_ranks: Array) -> Array:
        trial = keys_of_ranks | (jnp.uint32(1) << (31 - step).astype(jnp.uint32))
        below = (keys[..., None] < trial).sum(tuple(range(keys.ndim)), dtype=jnp.int32)
        return jnp.where(below < jnp.maximum(ranks, 1), trial, keys_of_ranks)

    keys_of_ranks = jax.lax.fori_loop(0, 32, narrow, jnp.zeros(len(percents), jnp.uint32))
    return jnp.where(count > 0, _from_ordered_bits(keys_of_ranks), 0.0)


def _ordered_bits(x: Float[Array, "..."]) -> UInt32[Array, "..."]:
    """Integers that are ordered as the float32 numbers are."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))


def _from_ordered_bits(keys: UInt32[Array, "..."]) -> Float[Array, "..."]:
    bits = jnp.where(keys >> 31 == 1, keys & jnp.uint32(2**31 - 1), ~keys)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def masked_whiten(
    x: Float[Array, "*shape"], mask: Mask, *, shift_mean: bool = True
) -> Float[Array, "*shape"]:
    """x scaled to unit variance over the mask and shifted to mean 0 (or left at its mean).

    (x - mean) / sqrt(var + 1e-8) with the unbiased variance; 0 outside the mask. Mean and variance
    are taken over the whole array, so they are global on a sharded batch.
    """
    mean = masked_mean(x, mask)
    whitened = (x - mean) * jax.lax.rsqrt(masked_var(x, mask) + WHITEN_EPS)
    if not shift_mean:
        whitened += mean
    return jnp.where(mask != 0, whitened, 0.0)


def chosen_logprobs(
    logits: Float[Array, "*batch vocab"], ids: Int[Array, "*batch"]
) -> Float[Array, "*batch"]:
    """Log-probability of each id under the softmax of its logits, in float32.

    Use it where whole logits exist, as in a decode step. A training batch uses
    `kernels.linear_logprob`, which never holds whole logits.
    """
    logits = logits.astype(jnp.float32)
    chosen = jnp.take_along_axis(logits, ids[..., None], axis=-1)[..., 0]
    return chosen - jax.nn.logsumexp(logits, axis=-1)


def rms_norm(
    x: Float[Array, "..."],
    weight: Float[Array, " D"],
    eps: float,
    total: Callable[[Array], Array] | None = None,
) -> Float[Array, "..."]:
    """x / rms(x) * weight over the last dim, statistics in float32 (arXiv:1910.07467).

    x is rounded to the weight's dtype before the multiplication, as in transformers, so that bf16
    results agree. `total` adds up the last dim in an order of its own.
    """
    x32 = x.astype(jnp.float32)
    if total is None:
        variance = jnp.mean(jnp.square(x32), axis=-1, keepdims=True)
    else:
        variance = total(jnp.square(x32))[..., None] / x.shape[-1]
    normed = (x32 * jax.lax.rsqrt(variance + eps)).astype(weight.dtype)
    return normed * to_every_token(weight, x.shape)


def to_every_token(weight: Float[Array, " D"], shape: tuple[int, ...]) -> Float[Array, "..."]:
    """The weight broadcast to `shape` [..., D]. Its gradient is summed over tokens in float32.

    A bf16 sum of 4,096 equal terms is wrong by up to 20 % on a CPU.
    """
    return _to_every_token(weight, shape)


def _to_every_token_backward(shape: tuple[int, ...], _: None, gradient: Array) -> tuple[Array]:
    total = gradient.astype(jnp.float32).sum(axis=range(len(shape) - 1))
    return (total.astype(gradient.dtype),)


_to_every_token: Any = jax.custom_vjp(jnp.broadcast_to, nondiff_argnums=(1,))
_to_every_token.defvjp(
    lambda x, shape: (jnp.broadcast_to(x, shape), None), _to_every_token_backward
)


def mix32(x: UInt32[Array, "..."]) -> UInt32[Array, "..."]:
    """The bijection lowbias32 of uint32 (C. Wellons, "Prospecting for Hash Functions", 2018)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)


def round_by_chance(
    x: Float[Array, "..."], step: Int[Array, ""], stream: int | UInt32[Array, ""]
) -> Float[Array, "..."]:
    """float32 to bfloat16 by stochastic rounding: the expected result equals x.

    A small change that is added to a bfloat16 value in each step is therefore kept on average.
    The random bits are a hash of (step, stream, position), equal in every run and layout.
    """
    bits = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
    position = jnp.zeros(x.shape, jnp.uint32)
    for axis, size in enumerate(x.shape):
        axis_index = jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis)
        position = position * jnp.uint32(size) + axis_index
    seed = mix32(step.astype(jnp.uint32) + mix32(jnp.asarray(stream, jnp.uint32)))
    # The 16 dropped bits plus noise carry into the kept bits with probability dropped / 2**16.
    noise = mix32(position ^ seed) >> 16
    rounded = jax.lax.bitcast_convert_type((bits + noise) & jnp.uint32(0xFFFF0000), jnp.float32)
    return jnp.where(jnp.isfinite(x), rounded, x).astype(jnp.bfloat16)
