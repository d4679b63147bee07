"""Chunks of tokens by matmuls: all that does not depend on the states before a chunk.

Shape letters: see inputs.py.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.kernels.gated_delta.inputs import einsum

SMALLEST = 8  # rows of a block that is inverted, and of a matmul


class Chunks(NamedTuple):
    """Terms that do not depend on the states before a chunk."""

    k_XBNCH: jax.Array
    q_XBNCH: jax.Array  # with the decay since the chunk began
    values_XBNCV: jax.Array  # values that the tokens write, with empty states before the chunk
    reads_XBNCH: jax.Array  # keys that read the state before the chunk
    scores_XBNCC: jax.Array  # products of queries and keys, decayed
    decay_XBNCC: jax.Array  # from one token to another that follows it; 0 where none does
    since_XBNC: jax.Array  # the decay since the chunk began


def chunks_of(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array,
    rate: jax.Array,
    visible_XBCC: jax.Array,
) -> Chunks:
    """The chunks of streams [X, B, N, C, ...]."""
    follows = (visible_XBCC & ~jnp.eye(visible_XBCC.shape[-1], dtype=bool))[:, :, None]
    visible = visible_XBCC.astype(jnp.float32)
    total = einsum("XBCD,XBND->XBNC", visible, log_decay)
    # Summed for each pair: a difference of totals would lose digits where decays are strong.
    between = einsum("XBCE,XBNED->XBNCD", visible, log_decay[..., None] * follows)
    decay = jnp.where(visible_XBCC[:, :, None], jnp.exp(between), 0)
    since = jnp.exp(total)
    written = jnp.tril(einsum("XBNCH,XBNDH->XBNCD", k, k) * decay, -1) * rate[..., None]
    solved = unit_lower_inverse(written)
    return Chunks(
        k_XBNCH=k,
        q_XBNCH=q * since[..., None],
        values_XBNCV=einsum("XBNCD,XBNDV->XBNCV", solved, rate[..., None] * v),
        reads_XBNCH=einsum("XBNCD,XBNDH->XBNCH", solved, (rate * since)[..., None] * k),
        scores_XBNCC=einsum("XBNCH,XBNDH->XBNCD", q, k) * decay,
        decay_XBNCC=decay,
        since_XBNC=since,
    )


@jax.custom_vjp
def unit_lower_inverse(below: jax.Array) -> jax.Array:
    """The inverse of 1 + `below`, which is zero on and over the diagonal; [..., C, C].

    Inverses of small blocks on the diagonal are joined to inverses of blocks of twice the size.
    Requires: C is a power of 2.
    """
    return _inverse(below)


def _inverse(whole: jax.Array) -> jax.Array:
    size = whole.shape[-1]
    # Programs of jax 0.10 for a CPU crash on products of small blocks with more dims before them.
    below = whole.reshape(-1, size, size)
    block = min(size, SMALLEST)
    # (1 + B)^-1 = (1 - B) (1 + B^2) (1 + B^4): no sum of powers, and B^8 is 0.
    power = -_corners(below, block, 0, 0)
    inverse = jnp.eye(block) + power
    for _ in range(block.bit_length() - 2):
        power = _product(power, power)
        inverse += _product(inverse, power)
    while block < size:
        upper, lower = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
        corner = _product(_product(lower, -_corners(below, 2 * block, block, 0)), upper)
        above = jnp.concatenate([upper, jnp.zeros_like(upper)], axis=-1)
        under = jnp.concatenate([corner, lower], axis=-1)
        inverse = jnp.concatenate([above, under], axis=-2)
        block *= 2
    return inverse.reshape(whole.shape)


def _corners(x: jax.Array, block: int, row: int, column: int) -> jax.Array:
    """Of each block on the diagonal, the half or whole that begins at this row and column."""
    number, size = x.shape[-1] // block, block - max(row, column)
    each = [
        x[..., i + row : i + row + size, i + column : i + column + size]
        for i in range(0, number * block, block)
    ]
    return jnp.stack(each, axis=-3)


def _product(x: jax.Array, y: jax.Array) -> jax.Array:
    """x y; small matrices without a matmul, which would take a kernel for each."""
    if x.shape[-1] <= SMALLEST:
        return (x[..., None] * y[..., None, :, :]).sum(axis=-2)
    return einsum("...CD,...DE->...CE", x, y)


def _inverse_backward(inverse: jax.Array, gradient: jax.Array) -> tuple[jax.Array]:
    return (-einsum("...DC,...DE,...FE->...CF", inverse, gradient, inverse),)


def _inverse_forward(below: jax.Array) -> tuple[jax.Array, jax.Array]:
    inverse = _inverse(below)
    return inverse, inverse


unit_lower_inverse.defvjp(_inverse_forward, _inverse_backward)
