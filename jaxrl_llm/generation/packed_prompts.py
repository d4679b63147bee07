"""Prompts one after the other in rows of equal length, so that a prefill computes no padding.

A row takes the next prompts of the queue's order as long as they fit. All of it is known before the
first prefill and computed there at once, without a loop over prompts.

Shape letters: G prompts in the queue's order, A rows of a prefill, L tokens of a row, S prompts of
a row at most.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.kernels.flash_attention import Implementation

# Tokens that a prefill computes at once unless told otherwise: enough to keep a GPU's matrix units
# busy. Prompts are prefilled ahead, so a large prefill starves no slot.
PREFILL_TOKENS = 8192
# Of a packed row at least, where attention skips blocks: little stays empty at the ends of rows.
ROW_TOKENS = 2048
# So many prompts take the room of one of the longest at most. More would have to be shorter still,
# and every prompt of a prefill needs a row of the cache, which is as long as the longest.
SHORT_PROMPTS = 4


@dataclass(frozen=True, kw_only=True)
class RowSizes:
    """Rows that a prefill computes at once."""

    rows: int  # A
    tokens: int  # L, no less than the longest prompt
    prompts: int  # S


class PackedPrompts(NamedTuple):
    """Where the prompts lie; the queue's order numbers them."""

    first_G1: jax.Array  # each row's first prompt; past the last row, the number of prompts
    start_G: jax.Array  # where in its row a prompt begins
    lengths_G: jax.Array  # tokens that a prefill computes of it


class PrefillRows(NamedTuple):
    """The tokens of one prefill."""

    prompt_AL: jax.Array  # the prompt of each token
    position_AL: jax.Array  # in its prompt
    real_AL: jax.Array  # False: padding
    place_AL: jax.Array  # of its prompt among those of the prefill
    num_prompts: jax.Array


def row_sizes(
    width: int,
    num_prompts: int,
    *,
    most: int,
    attention: Implementation,
) -> RowSizes:
    """Rows for prompts of `width` tokens at most, `num_prompts` of which are wanted at once.

    As many prompts of the longest as are wanted, and about PREFILL_TOKENS tokens, in long rows
    where `attention` skips what no token of a block sees (pallas), in rows of the longest prompt
    where it does not, with one prompt in each where it takes no packed ones (cudnn). There is room
    for `most` shorter prompts, or more.
    """
    width = max(width, 1)
    # Prompts of a row where all are of the longest.
    full = max(1, min(ROW_TOKENS // width, num_prompts)) if attention == "pallas" else 1
    rows = max(1, min(PREFILL_TOKENS // (full * width), -(-num_prompts // full)))
    full = min(full, -(-num_prompts // rows))  # no row less full than the others
    prompts = max(min(SHORT_PROMPTS * full, -(-most // rows)), full)
    return RowSizes(rows=rows, tokens=full * width, prompts=1 if attention == "cudnn" else prompts)


def pack_prompts(lengths_G: jax.Array, num_prompts: jax.Array, sizes: RowSizes) -> PackedPrompts:
    """`lengths_G` are the tokens to compute, 0 to L, of the first `num_prompts`; the rest is 0."""
    G = lengths_G.shape[0]
    prompts_G = jnp.arange(G, dtype=jnp.int32)
    ends_G = jnp.cumsum(lengths_G, dtype=jnp.int32)
    before_G = ends_G - lengths_G
    # The first prompt of the next row, if a row began with this one.
    next_G = jnp.searchsorted(ends_G, before_G + sizes.tokens, side="right").astype(jnp.int32)
    next_G = jnp.minimum(jnp.minimum(next_G, prompts_G + sizes.prompts), num_prompts)
    # Which of them are met from the first one on: by steps of 1, 2, 4, ... rows.
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
    """The rows of the prefill after the first `prefills`."""
    G = packed.start_G.shape[0]
    rows_A = prefills * sizes.rows + jnp.arange(sizes.rows)
    first_A = packed.first_G1[jnp.minimum(rows_A, G)]
    end_A = packed.first_G1[jnp.minimum(rows_A + 1, G)]
    prompts_AS = first_A[:, None] + jnp.arange(sizes.prompts)
    wanted_AS = prompts_AS < end_A[:, None]
    prompts_AS = jnp.minimum(prompts_AS, G - 1)
    start_AS = jnp.where(wanted_AS, packed.start_G[prompts_AS], sizes.tokens)

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
    )
