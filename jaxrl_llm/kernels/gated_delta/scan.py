"""The states of heads from chunk to chunk, and the gradient of that recurrence.

With left and right matrices L and R of a chunk's tokens by keys and states S of keys by values:

    values = own + sum_p enters_p * (L S_p),    S_p <- sum_q keeps_pq S_q + R^T (leaves_p * values)

The gradient is the same recurrence from the last chunk to the first one. L and R change places, as
do enters and leaves. keeps is transposed, and the gradients of the states are added at each chunk.

Shape letters: see inputs.py.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.kernels.gated_delta.inputs import einsum
from jaxrl_llm.kernels.gated_delta.scan_kernel import kernel_fits, scan_in_kernel


class Moves(NamedTuple):
    """Terms of each chunk that the recurrence reads, float32."""

    left_XBNCH: jax.Array
    right_XBNCH: jax.Array
    enters_XBNPC: jax.Array
    leaves_XBNPC: jax.Array
    keeps_XBNPQ: jax.Array
    own_XBNCV: jax.Array


States = tuple[jax.Array, jax.Array]  # before each chunk [X, B, N, H, P, V]; values [X, B, N, C, V]


@jax.custom_vjp
def scan_chunks(moves: Moves) -> States:
    """The states before each chunk, the first of which are zero, and the values of its tokens."""
    return _run(moves)


def _run(moves: Moves, added_XBNHPV: jax.Array | None = None) -> States:
    """`scan_chunks`. With `added` it goes from the last chunk on, and adds these to states."""
    if kernel_fits(moves.left_XBNCH, moves.own_XBNCV):
        return scan_in_kernel(*moves, added_XBNHPV)

    def step(states_BNHPV: jax.Array, chunk: tuple[Moves, jax.Array | None]) -> tuple[Any, States]:
        (left, right, enters, leaves, keeps, own), added = chunk
        enters_BNCP, leaves_BNCP = (x.swapaxes(-1, -2) for x in (enters, leaves))
        read_BNCPV = einsum("BNCH,BNHPV->BNCPV", left, states_BNHPV)
        values = own + (enters_BNCP[..., None] * read_BNCPV).sum(axis=-2)
        writes_BNCPV = leaves_BNCP[..., None] * values[..., None, :]
        new = einsum("BNCH,BNCPV->BNHPV", right, writes_BNCPV)
        for q in range(keeps.shape[-1]):
            new += keeps[..., None, :, q, None] * states_BNHPV[..., q, None, :]
        return new if added is None else new + added, (states_BNHPV, values)

    _, B, N, _, H = moves.left_XBNCH.shape
    P, V = moves.keeps_XBNPQ.shape[-1], moves.own_XBNCV.shape[-1]
    states = jnp.zeros((B, N, H, P, V), jnp.float32)
    chunks = (moves, added_XBNHPV)
    return jax.lax.scan(step, states, chunks, reverse=added_XBNHPV is not None)[1]


def _forward(moves: Moves) -> tuple[States, tuple[Moves, States]]:
    states = _run(moves)
    return states, (moves, states)


def _backward(residuals: tuple[Moves, States], gradients: States) -> tuple[Moves]:
    moves, (starts_XBNHPV, values_XBNCV) = residuals
    of_starts, of_values = gradients
    back = Moves(
        left_XBNCH=moves.right_XBNCH,
        right_XBNCH=moves.left_XBNCH,
        enters_XBNPC=moves.leaves_XBNPC,
        leaves_XBNPC=moves.enters_XBNPC,
        keeps_XBNPQ=moves.keeps_XBNPQ.swapaxes(-1, -2),
        own_XBNCV=of_values,
    )
    after_XBNHPV, of_values = _run(back, of_starts)
    enters_XBNCP, leaves_XBNCP = (
        x.swapaxes(-1, -2) for x in (moves.enters_XBNPC, moves.leaves_XBNPC)
    )
    entered_XBNCPV = enters_XBNCP[..., None] * of_values[..., None, :]
    left_XBNCPV = leaves_XBNCP[..., None] * values_XBNCV[..., None, :]
    read = einsum("XBNCH,XBNHPV->XBNCPV", moves.left_XBNCH, starts_XBNHPV)
    written = einsum("XBNCH,XBNHPV->XBNCPV", moves.right_XBNCH, after_XBNHPV)
    # Not a matmul: all states would be transposed for it.
    pairs_XBNHPQV = after_XBNHPV[..., None, :] * starts_XBNHPV[..., None, :, :]
    keeps_XBNPQ = pairs_XBNHPQV.sum(axis=(3, 6))
    return (
        Moves(
            left_XBNCH=einsum("XBNCPV,XBNHPV->XBNCH", entered_XBNCPV, starts_XBNHPV),
            right_XBNCH=einsum("XBNCPV,XBNHPV->XBNCH", left_XBNCPV, after_XBNHPV),
            enters_XBNPC=(read * of_values[..., None, :]).sum(axis=-1).swapaxes(-1, -2),
            leaves_XBNPC=(written * values_XBNCV[..., None, :]).sum(axis=-1).swapaxes(-1, -2),
            keeps_XBNPQ=keeps_XBNPQ,
            own_XBNCV=of_values,
        ),
    )


scan_chunks.defvjp(_forward, _backward)
