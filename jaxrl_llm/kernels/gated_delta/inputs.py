"""Inputs and states of a layer of the gated delta rule (arXiv:2412.06464).

A head has a state S of keys by values. Of a token with key k, value v, decay a = exp(g) and rate b:

    S <- a S,    S <- S + k (b (v - S^T k))^T,    its output is S^T q

All is float32. A convolution over the last tokens comes first.

Shape letters of this package: B rows or slots, T tokens, X chunks, C tokens of a chunk, G key
heads, N value heads, H dims of a key, V of a value, E channels, W tokens of the convolution, S
tokens whose states are asked for, P and Q states of a head that are followed at once.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

einsum = partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)


class Streams(NamedTuple):
    """Queries and keys [..., G, H] and values [..., N, V], or something for each of their dims."""

    q: jax.Array
    k: jax.Array
    v: jax.Array


class Inputs(NamedTuple):
    """Queries, keys, values and gates of a layer's tokens."""

    streams: Streams  # before the convolution, [B, T, ...]
    kernels: Streams  # kernels of the convolution, [..., W]
    log_decay_BTN: jax.Array  # float32, at most 0
    rate_BTN: jax.Array  # float32, from 0 to 1


class DeltaState(NamedTuple):
    """The state of a layer after the tokens that it has read."""

    memory: jax.Array  # float32 [..., N, V, H]
    window: jax.Array  # the last W - 1 tokens before the convolution, `channels` [..., W - 1, E]


def channels(streams: Streams) -> jax.Array:
    """All dims of all heads [B, T, E]: queries, keys, values."""
    return jnp.concatenate([x.reshape(*x.shape[:2], -1) for x in streams], axis=-1)


def kernel_of(inputs: Inputs) -> jax.Array:
    """The kernel of the convolution of all `channels`, float32 [E, W]."""
    kernels = [x.reshape(-1, x.shape[-1]) for x in inputs.kernels]
    return jnp.concatenate(kernels).astype(jnp.float32)


def of_channels(x: jax.Array, like: Streams) -> Streams:
    """The heads [..., heads, dims] of channels [..., E]."""
    parts, start = [], 0
    for heads, dims in (stream.shape[-2:] for stream in like):
        part = x[..., start : start + heads * dims]
        parts.append(part.reshape(*x.shape[:-1], heads, dims))
        start += heads * dims
    return Streams(*parts)


def activated(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Activated values, and queries and keys of unit length; queries are divided by sqrt(H)."""
    q, k, v = (jax.nn.silu(x) for x in (q, k, v))

    def unit(x: jax.Array) -> jax.Array:
        return x * jax.lax.rsqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True) + 1e-6)

    return unit(q) * q.shape[-1] ** -0.5, unit(k), v
