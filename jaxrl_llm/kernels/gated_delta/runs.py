"""Which tokens follow which in packed rows, and how rows are cut into chunks.

Shape letters: those of inputs.py.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

CHUNK = 64  # tokens


class Runs(NamedTuple):
    """Which tokens of its row a token follows, int32 [B, T]."""

    start_BT: jax.Array  # first token of its run; after the token itself for padding
    # The prompt before the run, which is empty where both are equal. None: no run has one.
    # Runs that answer a prompt lie between it and the next prompt.
    prefix_start_BT: jax.Array | None = None
    prefix_end_BT: jax.Array | None = None


def chunk_size(length: int) -> int:
    return min(CHUNK, max(8, 1 << (length - 1).bit_length()))


def by_chunk(x_BT: jax.Array, size: int, fill: int = 0) -> jax.Array:
    """The tokens by chunk, [X, B, C, ...]; `fill` pads the last one."""
    padding = ((0, 0), (0, -x_BT.shape[1] % size), *[(0, 0)] * (x_BT.ndim - 2))
    x_BT = jnp.pad(x_BT, padding, constant_values=fill)
    return jnp.moveaxis(x_BT.reshape(x_BT.shape[0], -1, size, *x_BT.shape[2:]), 1, 0)


class Prompts(NamedTuple):
    """The prompts before runs, by chunk. A chunk follows one of those that ended before it."""

    end_XBC: jax.Array
    length_XBC: jax.Array  # 0: none is before the token's run
    first_XBC: jax.Array  # whether a token is the first of a run with a prompt
    earlier_XBC: jax.Array  # whether the run begins in the chunk, and the prompt ended before it
    chunk_XBY: jax.Array  # whether it ended in chunk Y
    last_YB: jax.Array  # place in Y of its last token; -1: no later chunk follows a prompt there


def prompts_of(runs: Runs, size: int) -> Prompts:
    assert runs.prefix_start_BT is not None and runs.prefix_end_BT is not None
    start_XBC = by_chunk(runs.start_BT, size, fill=-1)
    begin_XBC = by_chunk(runs.prefix_start_BT, size)
    end_XBC = by_chunk(runs.prefix_end_BT, size)
    first_X11 = size * jnp.arange(len(start_XBC))[:, None, None]
    token_X1C = first_X11 + jnp.arange(size)
    has_XBC = (begin_XBC < end_XBC) & (start_XBC <= token_X1C)
    earlier_XBC = has_XBC & (start_XBC >= first_X11) & (end_XBC <= first_X11)
    last_XB1 = jnp.where(earlier_XBC, end_XBC - 1, -1).max(axis=-1, keepdims=True)
    chunk_XBY = last_XB1 // size == jnp.arange(len(start_XBC))
    return Prompts(
        end_XBC=end_XBC,
        length_XBC=jnp.where(has_XBC, end_XBC - begin_XBC, 0),
        first_XBC=has_XBC & (start_XBC == token_X1C),
        earlier_XBC=earlier_XBC,
        chunk_XBY=chunk_XBY,
        last_YB=jnp.where(chunk_XBY, last_XB1 % size, -1).max(axis=0).T,
    )


class Entering(NamedTuple):
    """Which state from before the chunk its tokens follow: float32 [X, B, C] of 0 and 1."""

    last: jax.Array  # the state of the last token
    prompt: jax.Array  # that of the prompt that ended last
    ending: jax.Array  # 1 at the last token of a prompt that later chunks follow


def following(runs: Runs, size: int) -> tuple[jax.Array, Entering]:
    """Which tokens of its chunk each token follows, itself included, and which states before it."""
    start_XBC = by_chunk(runs.start_BT, size, fill=runs.start_BT.shape[1] + size)
    first_X11 = size * jnp.arange(len(start_XBC))[:, None, None]
    token_X1C = first_X11 + jnp.arange(size)
    own_XBCC = token_X1C[..., None, :] >= start_XBC[..., None]
    causal_CC = jnp.tril(jnp.ones((size, size), bool))
    none = jnp.zeros(start_XBC.shape, jnp.float32)
    if runs.prefix_start_BT is None or runs.prefix_end_BT is None:
        last_XBC = start_XBC < first_X11
        return own_XBCC & causal_CC, Entering(last_XBC.astype(jnp.float32), none, none)
    prompts = prompts_of(runs, size)
    end_XBC, has_XBC = prompts.end_XBC, prompts.length_XBC > 0
    begin_XBC = end_XBC - prompts.length_XBC
    of_prefix_XBCC = token_X1C[..., None, :] >= begin_XBC[..., None]
    of_prefix_XBCC &= token_X1C[..., None, :] < end_XBC[..., None]
    begins_XBC = has_XBC & (start_XBC >= first_X11) & (begin_XBC < first_X11)
    last_XBC = (start_XBC < first_X11) | (begins_XBC & (end_XBC > first_X11))
    ending_XBC = jax.nn.one_hot(prompts.last_YB, size)
    prompt_XBC = prompts.earlier_XBC.astype(jnp.float32)
    entering = Entering(last_XBC.astype(jnp.float32), prompt_XBC, ending_XBC)
    return (own_XBCC | (of_prefix_XBCC & has_XBC[..., None])) & causal_CC, entering
