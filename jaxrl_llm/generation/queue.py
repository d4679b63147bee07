"""The queue of prompts: everything that generation reads and never changes.

Shape letters: N samples, G groups (prompts), P prompt tokens.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.generation.packed_prompts import PackedPrompts, RowSizes, pack_prompts
from jaxrl_llm.generation.sampler import RowSampling
from jaxrl_llm.generation.stop_strings import START, StopStrings
from jaxrl_llm.models.media import Images


class Rows(NamedTuple):
    """What a decode step reads of each sample."""

    lengths_N: jax.Array  # prompt tokens; all but the last are in the sample's prompt row
    sample_ids_N: jax.Array
    limits_N: jax.Array  # entries of the sample's pages after which it ends
    begun_N: jax.Array | None  # place in the response of the first token after the prompt; None: 0
    # Of a call that goes on: entries in the pages when it begins, and tokens to take instead of
    # sampled ones, from there on; -1 for none.
    first_N: jax.Array | None = None
    given_NR: jax.Array | None = None
    sampling: RowSampling | None = None  # settings of each sample; None: one for all
    # What the rope positions behind the prompt differ from a token's number; None: nothing.
    offsets_N: jax.Array | None = None

    def rope_positions(self, row_B: jax.Array, number_B: jax.Array) -> jax.Array:
        """The rope positions of these tokens of samples, behind their prompts' images."""
        return number_B if self.offsets_N is None else number_B + self.offsets_N[row_B]


class Queue(NamedTuple):
    """The samples to generate; `order_G` lists the groups that hold a prompt."""

    prompts_NP: jax.Array
    lengths_N: jax.Array
    sample_ids_N: jax.Array
    limits_N: jax.Array
    stop_states_N: jax.Array | None  # states of the stop strings before the first new token
    order_G: jax.Array
    num_groups: jax.Array
    first_G: jax.Array  # the first row of each group
    group_N: jax.Array  # the group of each row
    rows_N: jax.Array  # the samples in the queue's order: rows that hold a prompt
    group: int  # samples of every group
    packed: PackedPrompts  # the prompts in that order
    images: Images | None = None

    @property
    def rows(self) -> Rows:
        """What a decode step reads."""
        offsets_N = None
        if self.images is not None and self.images.offsets_NP3 is not None:
            offsets_N = self.images.offsets_NP3[:, -1, 0]  # a prompt ends in text
        own = (self.lengths_N, self.sample_ids_N, self.limits_N)
        return Rows(*own, begun_N=None, offsets_N=offsets_N)

    def ready(self, prefilled: jax.Array) -> jax.Array:
        """Samples of the first `prefilled` groups."""
        return prefilled * self.group


def make_queue(
    prompts_NP: jax.Array,
    lengths_N: jax.Array,
    sample_ids_N: jax.Array,
    limits_N: jax.Array,
    *,
    max_new_tokens: int,
    group: int,
    prefill: RowSizes,
    align: int = 1,
    strings: StopStrings | None = None,
    images: Images | None = None,
) -> Queue:
    """Queue the groups whose prompt is not empty, in the order of their rows.

    In a prefill a prompt begins at a multiple of `align` tokens.
    """
    num_rows = lengths_N.shape[0]
    first_G = jnp.arange(0, num_rows, group, dtype=jnp.int32)
    has_prompt_G = lengths_N[first_G] > 0
    order_G = jnp.nonzero(has_prompt_G, size=has_prompt_G.size, fill_value=0)[0]
    num_groups = jnp.sum(has_prompt_G, dtype=jnp.int32)
    queued_G = jnp.arange(order_G.size) < num_groups
    lengths_G = jnp.where(queued_G, lengths_N[first_G[order_G]], 0)
    (rows_N,) = jnp.nonzero(lengths_N > 0, size=num_rows, fill_value=0)
    return Queue(
        prompts_NP,
        lengths_N,
        sample_ids_N,
        jnp.minimum(limits_N, max_new_tokens),
        None if strings is None else jnp.full(lengths_N.shape, START, jnp.int32),
        order_G=order_G.astype(jnp.int32),
        num_groups=num_groups,
        first_G=first_G,
        group_N=jnp.arange(num_rows, dtype=jnp.int32) // group,
        rows_N=rows_N.astype(jnp.int32),
        group=group,
        packed=pack_prompts(lengths_G, num_groups, prefill, align),
        images=images,
    )
