"""The queue of prompts: everything that generation reads and never changes.

Shape letters: N samples, G groups (prompts), P prompt tokens.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

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
    begun_N: jax.Array | None  # tokens of the response that end the prompt; None is 0 for all
    stop_states_N: jax.Array | None  # states of the stop strings before the first new token
    order_G: jax.Array
    num_groups: jax.Array
    first_G: jax.Array  # the first row of each group
    group_N: jax.Array  # the group of each row
    rows_N: jax.Array  # the samples in the queue's order: rows that hold a prompt
    ends_G1: jax.Array  # samples in the first 0, 1, ... groups of the order
    group: int | None  # samples of every group; None: groups differ
    packed: PackedPrompts  # the prompts in that order
    images: Images | None = None

    @property
    def rows(self) -> Rows:
        """What a decode step reads."""
        offsets_N = None
        if self.images is not None and self.images.offsets_NP3 is not None:
            offsets_N = self.images.offsets_NP3[:, -1, 0]  # a prompt ends in text
        own = (self.lengths_N, self.sample_ids_N, self.limits_N, self.begun_N)
        return Rows(*own, offsets_N=offsets_N)

    def ready(self, prefilled: jax.Array) -> jax.Array:
        """Samples of the first `prefilled` groups. Where groups are equal it costs no kernel."""
        return self.ends_G1[prefilled] if self.group is None else prefilled * self.group


def make_queue(
    prompts_NP: jax.Array,
    lengths_N: jax.Array,
    sample_ids_N: jax.Array,
    limits_N: jax.Array,
    begun_N: jax.Array | None = None,
    *,
    max_new_tokens: int,
    group: int,
    num_continued: int = 0,
    prefill: RowSizes,
    align: int = 1,
    strings: StopStrings | None = None,
    images: Images | None = None,
) -> Queue:
    """Queue the groups whose prompt is not empty, in the order of their rows.

    The first `num_continued` rows are groups of one, the others of `group`. In a prefill a prompt
    begins at a multiple of `align` tokens.
    """
    num_rows = lengths_N.shape[0]
    num_groups = (num_rows - num_continued) // group
    sizes_G = np.array([1] * num_continued + [group] * num_groups, np.int32)
    first_G = jnp.asarray(np.cumsum(sizes_G, dtype=np.int32) - sizes_G)
    has_prompt_G = lengths_N[first_G] > 0
    order_G = jnp.nonzero(has_prompt_G, size=has_prompt_G.size, fill_value=0)[0]
    num_groups = jnp.sum(has_prompt_G, dtype=jnp.int32)
    queued_G = jnp.arange(order_G.size) < num_groups
    lengths_G = jnp.where(queued_G, lengths_N[first_G[order_G]], 0)
    taken_G = jnp.where(queued_G, jnp.asarray(sizes_G)[order_G], 0)
    (rows_N,) = jnp.nonzero(lengths_N > 0, size=num_rows, fill_value=0)
    return Queue(
        prompts_NP,
        lengths_N,
        sample_ids_N,
        jnp.minimum(limits_N, max_new_tokens),
        begun_N,
        None if strings is None else _begun_states(strings, prompts_NP, lengths_N, begun_N),
        order_G=order_G.astype(jnp.int32),
        num_groups=num_groups,
        first_G=first_G,
        group_N=jnp.asarray(np.repeat(np.arange(len(sizes_G), dtype=np.int32), sizes_G)),
        rows_N=rows_N.astype(jnp.int32),
        group=None if num_continued else group,
        ends_G1=jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(taken_G, dtype=jnp.int32)]),
        packed=pack_prompts(lengths_G, num_groups, prefill, align),
        images=images,
    )


def _begun_states(
    strings: StopStrings, prompts_NP: jax.Array, lengths_N: jax.Array, begun_N: jax.Array | None
) -> jax.Array:
    """The states after the tokens of the response that end each prompt, int32 [N]."""
    if begun_N is None:
        return jnp.full(lengths_N.shape, START, jnp.int32)
    places_P = jnp.arange(prompts_NP.shape[1])
    ends_N1 = lengths_N[:, None]
    begun_NP = (places_P >= ends_N1 - begun_N[:, None]) & (places_P < ends_N1)
    return strings.read(prompts_NP, begun_NP)
