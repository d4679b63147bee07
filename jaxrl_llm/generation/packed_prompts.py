"""Packing of prompts into rows of equal length, so that a prefill computes little padding.

A row takes the next prompts of the queue while they fit. The packing is computed once, before the
first prefill and without a loop over prompts.

Shape letters: G prompts in the queue's order, A rows of a prefill, L tokens of a row, S prompts of
a row at most.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.kernels.flash_attention import Implementation

# Default tokens of a prefill: enough to keep a GPU's tensor cores busy. Prompts are prefilled ahead
# of need, so a large prefill leaves no slot idle.
PREFILL_TOKENS = 8192
# Least tokens of a packed row where attention skips hidden blocks: long rows waste little at their
# ends.
ROW_TOKENS = 2048
# Most prompts in the space of one prompt of full width. Each prompt of a prefill needs a row of the
# cache of full width, so more short prompts would cost memory.
SHORT_PROMPTS = 4


@dataclass(frozen=True, kw_only=True)
class RowSizes:
    """The shape of one prefill."""

    rows: int  # A
    tokens: int  # L, at least the longest prompt
    prompts: int  # S


class PackedPrompts(NamedTuple):
    """Where the prompts lie, in the queue's order."""

    first_G1: jax.Array  # each row's first prompt; after the last row, the number of prompts
    start_G: jax.Array  # where a prompt begins in its row
    lengths_G: jax.Array  # tokens that a prefill computes


class PrefillRows(NamedTuple):
    """The tokens of one prefill."""

    prompt_AL: jax.Array  # the prompt of each token
    position_AL: jax.Array  # the token's position in its prompt
    real_AL: jax.Array  # False for padding
    place_AL: jax.Array  # number of its prompt within this prefill
    num_prompts: jax.Array
    # Of each prompt that a row has room for, in turn.
    place_AS: jax.Array  # number of the prompt within this prefill; -1: none
    last_AS: jax.Array  # the token of the row that is the last but one of the prompt; -1: none


def row_sizes(
    width: int,
    num_prompts: int,
    *,
    most: int,
    attention: Implementation,
) -> RowSizes:
    """The shape of a prefill that holds `num_prompts` prompts of `width` tokens.

    It has about PREFILL_TOKENS tokens at most, and room for `most` prompts if they are shorter.
    With "pallas", which skips hidden blocks, rows are long. With "xla" a row has `width` tokens.
    With "cudnn", which takes no packed rows, a row also holds only one prompt.
    """
    width = max(width, 1)
    # Prompts of full width in one row.
    full = max(1, min(ROW_TOKENS // width, num_prompts)) if attention == "pallas" else 1
    rows = max(1, min(PREFILL_TOKENS // (full * width), -(-num_prompts // full)))
    full = min(full, -(-num_prompts // rows))  # no row is much emptier than the others
    prompts = max(min(SHORT_PROMPTS * full, -(-most // rows)), full)
    return RowSizes(rows=rows, tokens=full * width, prompts=1 if attention == "cudnn" else prompts)


def pack_prompts(
    lengths_G: jax.Array, num_prompts: jax.Array, sizes: RowSizes, align: int = 1
) -> PackedPrompts:
    """Pack the first `num_prompts` prompts, each from a multiple of `align` tokens on.

    Requires: `lengths_G`, the tokens to compute, are from 0 to L, and 0 after `num_prompts`. L is a
    multiple of `align`.
    """
    G = lengths_G.shape[0]
    prompts_G = jnp.arange(G, dtype=jnp.int32)
    room_G = -(-lengths_G // align) * align
    ends_G = jnp.cumsum(room_G, dtype=jnp.int32)
    before_G = ends_G - room_G
    # The first prompt of the next row, if a row began with this one.
    next_G = jnp.searchsorted(ends_G, before_G + sizes.tokens, side="right").astype(jnp.int32)
    next_G = jnp.minimum(jnp.minimum(next_G, prompts_G + sizes.prompts), num_prompts)
    # Mark the prompts that begin a row, starting from the first one: jumps of 1, 2, 4, ... rows.
    jump_G1 = jnp.append(next_G, G)
    begins_G1 = jnp.zeros((G + 1,), bool).at[0].set(True)
    for _ in range(G.bit_length()):
        begins_G1 = begins_G1.at[jump_G1].max(begins_G1)
        jump_G1 = jump_G1[jump_G1]
    begins_G = begins_G1[:G] & (prompts_G < num_prompts)
    (first_G1,) = jnp.nonzero(begins_G, size=G + 1, fill_value=num_prompts)
    row_G = jnp.maximum(jnp.cumsum(begins_G, dtype=jnp.int32) - 1, 0)
    start_G = before_G - before_G[first_G1[row_G]]
    return PackedPrompts(first_G1.astype(jnp.int32), start_G, lengths_G)


def prefill_rows(packed: PackedPrompts, sizes: RowSizes, prefills: jax.Array) -> PrefillRows:
    """The rows of the prefill that follows the first `prefills` ones."""
    G = packed.start_G.shape[0]
    rows_A = prefills * sizes.rows + jnp.arange(sizes.rows)
    first_A = packed.first_G1[jnp.minimum(rows_A, G)]
    end_A = packed.first_G1[jnp.minimum(rows_A + 1, G)]
    prompts_AS = first_A[:, None] + jnp.arange(sizes.prompts)
    wanted_AS = prompts_AS < end_A[:, None]
    prompts_AS = jnp.minimum(prompts_AS, G - 1)
    start_AS = jnp.where(wanted_AS, packed.start_G[prompts_AS], sizes.tokens)

    before_AS = jnp.where(wanted_AS, packed.lengths_G[prompts_AS] - 1, 0)

    tokens_L = jnp.arange(sizes.tokens, dtype=jnp.int32)
    begun_AL = jnp.sum(start_AS[:, None] <= tokens_L[:, None], axis=2, dtype=jnp.int32)
    prompt_AL = jnp.minimum(first_A[:, None] + jnp.maximum(begun_AL - 1, 0), G - 1)
    position_AL = tokens_L - packed.start_G[prompt_AL]
    real_AL = (begun_AL > 0) & (position_AL < packed.lengths_G[prompt_AL])
    return PrefillRows(
        prompt_AL=prompt_AL,
        position_AL=jnp.where(real_AL, position_AL, 0),
        real_AL=real_AL,
        place_AL=prompt_AL - first_A[0],
        num_prompts=end_A[-1] - first_A[0],
        place_AS=jnp.where(wanted_AS, prompts_AS - first_A[0], -1),
        last_AS=jnp.where(before_AS > 0, start_AS + before_AS - 1, -1),
    )
