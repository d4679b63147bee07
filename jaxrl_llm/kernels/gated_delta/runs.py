"""Which tokens follow which in packed rows, and how rows are cut into chunks.

Shape letters: see inputs.py.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

CHUNK = 64  # tokens
ALIGN = 8  # rows and columns of a bfloat16 matrix that XLA need not pad by a copy


class Runs(NamedTuple):
    """Which tokens of its row a token follows, int32 [B, T]."""

    start_BT: jax.Array  # first token of its run; after the token itself for padding
    # The prompt before the run, from the first token of another run on. It is empty where both are
    # equal. None: no run has one.
    # Runs that answer a prompt lie between it and the next prompt.
    prefix_start_BT: jax.Array | None = None
    prefix_end_BT: jax.Array | None = None


class Chunking(NamedTuple):
    """Rows cut into chunks, and what their tokens follow: the same in all layers of a pass."""

    runs: Runs
    visible_XBCC: jax.Array  # which tokens of its chunk a token follows, itself included
    # P: the state of the last token, and where runs have prompts also of the last prompt.
    enters_XBPC: jax.Array  # float32, 1 where a token follows the state from before the chunk
    ends_XBPC: jax.Array  # float32, 1 at the token whose state it is after the chunk
    taps: "PromptTaps | None"  # None: no run has a prompt before it


class PromptTaps(NamedTuple):
    """What the convolution takes from the prompts before runs, and where its gradient goes.

    Y are chunks, too. Z are the tokens of a chunk with the last ones of the chunk before, F those
    with the first ones of the chunk after. R are Z for each distance between two tokens. Then comes
    what goes to prompts that ended in chunks before: a row for each distance and each number of
    tokens behind in the prompt. The last rows are padding and take nothing.
    """

    from_BTW: jax.Array  # token of the prompt that is so many tokens back, from 1 on
    inside_BTW: jax.Array  # whether there is one
    takes_XBRF: jax.Array  # bool: whether a row takes a token's gradient
    chunk_XBY: jax.Array  # float32, 1 where the prompt before a chunk's runs ended in chunk Y
    behind_YBC: jax.Array  # tokens behind a token in that prompt; others are negative
    behind_next_YBC: jax.Array  # the same for the prompt that ended in the next chunk


def chunking_of(runs: Runs, conv_size: int) -> Chunking:
    """The chunks of rows for layers with a convolution over `conv_size` tokens."""
    size = chunk_size(runs.start_BT.shape[1])
    visible_XBCC, entering = _following(runs, size)
    final_C = (jnp.arange(size) == size - 1).astype(jnp.float32)
    enters, ends = [entering.last], [jnp.broadcast_to(final_C, entering.last.shape)]
    if runs.prefix_start_BT is None:
        taps = None
    else:
        enters, ends = [*enters, entering.prompt], [*ends, entering.ending]
        taps = _prompt_taps(runs, conv_size)
    enters_XBPC, ends_XBPC = jnp.stack(enters, axis=2), jnp.stack(ends, axis=2)
    return Chunking(runs, visible_XBCC, enters_XBPC, ends_XBPC, taps)


def chunk_size(length: int) -> int:
    """Tokens of a chunk of rows of this length: a power of 2, at least 8."""
    return min(CHUNK, max(8, 1 << (length - 1).bit_length()))


def by_chunk(x_BT: jax.Array, size: int, fill: int = 0) -> jax.Array:
    """The tokens by chunk, [X, B, C, ...]; `fill` pads the last one."""
    padding = ((0, 0), (0, -x_BT.shape[1] % size), *[(0, 0)] * (x_BT.ndim - 2))
    x_BT = jnp.pad(x_BT, padding, constant_values=fill)
    return jnp.moveaxis(x_BT.reshape(x_BT.shape[0], -1, size, *x_BT.shape[2:]), 1, 0)


def tap_chunk(length: int, width: int) -> int:
    """Tokens of a chunk of `PromptTaps`."""
    return max(chunk_size(length), width)


def tokens_after(size: int, width: int) -> int:
    """Count the tokens of the next chunk that `PromptTaps` have: at least `width` - 2."""
    return min(size, -(-(width - 2) // ALIGN) * ALIGN)


def next_chunk(x_XB: jax.Array, fill: int = 0) -> jax.Array:
    """For each chunk the entries of the chunk after it, and `fill` for the last one."""
    padding = ((0, 1), *[(0, 0)] * (x_XB.ndim - 1))
    return jnp.pad(x_XB[1:], padding, constant_values=fill)


def and_after(x_XBC: jax.Array, number: int) -> jax.Array:
    """The tokens of each chunk with so many of the chunk after it."""
    return jnp.concatenate([x_XBC, next_chunk(x_XBC[:, :, :number])], axis=2)


class _Prompts(NamedTuple):
    """The prompts before runs, by chunk. A chunk follows one of those that ended before it."""

    end_XBC: jax.Array
    length_XBC: jax.Array  # 0: none is before the token's run
    earlier_XBC: jax.Array  # whether the run begins in the chunk, and the prompt ended before it
    chunk_XBY: jax.Array  # whether it ended in chunk Y
    last_YB: jax.Array  # place in Y of its last token; -1: no later chunk follows a prompt there


def _prompts_of(runs: Runs, size: int) -> _Prompts:
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
    return _Prompts(
        end_XBC=end_XBC,
        length_XBC=jnp.where(has_XBC, end_XBC - begin_XBC, 0),
        earlier_XBC=earlier_XBC,
        chunk_XBY=chunk_XBY,
        last_YB=jnp.where(chunk_XBY, last_XB1 % size, -1).max(axis=0).T,
    )


class _Entering(NamedTuple):
    """Which state from before the chunk its tokens follow: float32 [X, B, C] of 0 and 1."""

    last: jax.Array  # the state of the last token
    prompt: jax.Array  # state of the prompt that ended last
    ending: jax.Array  # 1 at the last token of a prompt that later chunks follow


def _following(runs: Runs, size: int) -> tuple[jax.Array, _Entering]:
    """Which tokens of its chunk each token follows, itself included, and which states before it."""
    start_XBC = by_chunk(runs.start_BT, size, fill=runs.start_BT.shape[1] + size)
    first_X11 = size * jnp.arange(len(start_XBC))[:, None, None]
    token_X1C = first_X11 + jnp.arange(size)
    own_XBCC = token_X1C[..., None, :] >= start_XBC[..., None]
    causal_CC = jnp.tril(jnp.ones((size, size), bool))
    none = jnp.zeros(start_XBC.shape, jnp.float32)
    if runs.prefix_start_BT is None or runs.prefix_end_BT is None:
        last_XBC = start_XBC < first_X11
        return own_XBCC & causal_CC, _Entering(last_XBC.astype(jnp.float32), none, none)
    prompts = _prompts_of(runs, size)
    end_XBC, has_XBC = prompts.end_XBC, prompts.length_XBC > 0
    begin_XBC = end_XBC - prompts.length_XBC
    of_prefix_XBCC = token_X1C[..., None, :] >= begin_XBC[..., None]
    of_prefix_XBCC &= token_X1C[..., None, :] < end_XBC[..., None]
    begins_XBC = has_XBC & (start_XBC >= first_X11) & (begin_XBC < first_X11)
    last_XBC = (start_XBC < first_X11) | (begins_XBC & (end_XBC > first_X11))
    ending_XBC = jax.nn.one_hot(prompts.last_YB, size)
    prompt_XBC = prompts.earlier_XBC.astype(jnp.float32)
    entering = _Entering(last_XBC.astype(jnp.float32), prompt_XBC, ending_XBC)
    return (own_XBCC | of_prefix_XBCC) & causal_CC, entering


def _prompt_taps(runs: Runs, width: int) -> PromptTaps:
    assert runs.prefix_start_BT is not None and runs.prefix_end_BT is not None
    token_T1 = jnp.arange(runs.start_BT.shape[1])[:, None]
    start_BT1, begin_BT1, end_BT1 = (
        x[..., None] for x in (runs.start_BT, runs.prefix_start_BT, runs.prefix_end_BT)
    )
    at_TW = token_T1 - jnp.arange(1, width)
    from_BTW = end_BT1 - (start_BT1 - at_TW)
    inside_BTW = (at_TW < start_BT1) & (from_BTW >= begin_BT1) & (start_BT1 <= token_T1)

    size, lead = tap_chunk(len(token_T1), width), width - 2
    prompts = _prompts_of(runs, size)
    first_X11 = size * jnp.arange(len(prompts.end_XBC))[:, None, None]
    after = tokens_after(size, width)
    start_XBF = and_after(by_chunk(runs.start_BT, size, fill=-1), after) - first_X11
    in_run_XBF = jnp.arange(size + after) - start_XBF
    starts_XBF = (start_XBF >= 0) & (start_XBF < size) & (in_run_XBF >= 0)  # in this chunk
    last_XBF = and_after(prompts.end_XBC, after) - 1 - first_X11  # last token of the prompt
    length_XBF = and_after(prompts.length_XBC, after)
    place_Z1 = jnp.arange(-lead, size)[:, None]
    near, far = [], []
    for distance in range(1, width):
        behind_XBF = distance - 1 - in_run_XBF  # tokens after it in the prompt
        takes_XBF = starts_XBF & (behind_XBF >= 0) & (behind_XBF < length_XBF)
        near_XB1F = (takes_XBF & (last_XBF >= 0))[:, :, None]
        near.append(((last_XBF - behind_XBF)[:, :, None] == place_Z1) & near_XB1F)
        far_XBF = takes_XBF & (last_XBF < 0)
        far += [(far_XBF & (behind_XBF == b))[:, :, None] for b in range(distance)]

    def behind(last_YB: jax.Array, first: int) -> jax.Array:
        last_YB1, place_C = last_YB[..., None], jnp.arange(first, first + size)
        return jnp.where(last_YB1 >= 0, last_YB1 - place_C, -1)

    takes_XBRF = jnp.concatenate([*near, *far], axis=2)
    return PromptTaps(
        from_BTW=jnp.where(inside_BTW, from_BTW, 0),
        inside_BTW=inside_BTW,
        takes_XBRF=jnp.pad(takes_XBRF, ((0, 0), (0, 0), (0, -takes_XBRF.shape[2] % ALIGN), (0, 0))),
        chunk_XBY=prompts.chunk_XBY.astype(jnp.float32),
        behind_YBC=behind(prompts.last_YB, 0),
        behind_next_YBC=behind(next_chunk(prompts.last_YB, fill=-1), -size),
    )
