"""The queue of prompts: everything that generation reads and never changes.

Shape letters: N samples, G groups (prompts), P prompt tokens.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.generation.packed_prompts import PackedPrompts, RowSizes, pack_prompts
from jaxrl_llm.generation.stop_strings import START, StopStrings


class Queue(NamedTuple):
    """The samples to generate; `order_G` lists the groups that hold a prompt."""

    prompts_NP: jax.Array
    lengths_N: jax.Array
    sample_ids_N: jax.Array
    limits_N: jax.Array
    begun_N: jax.Array | None  # tokens of the response that end the prompt; None is 0 for all
    stop_states_N: jax.Array | None  # of the stop strings before the first new token
    order_G: jax.Array
    num_groups: jax.Array
    packed: PackedPrompts  # the prompts in that order


def make_queue(
    prompts_NP: jax.Array,
    lengths_N: jax.Array,
    sample_ids_N: jax.Array,
    limits_N: jax.Array,
    begun_N: jax.Array | None = None,
    *,
    max_new_tokens: int,
    group: int,
    prefill: RowSizes,
    align: int = 1,
    strings: StopStrings | None = None,
) -> Queue:
    """Queue the groups whose prompt is not empty, in the order of their rows.

    In a prefill a prompt begins at a multiple of `align` tokens.
    """
    has_prompt_G = lengths_N[::group] > 0
    order_G = jnp.nonzero(has_prompt_G, size=has_prompt_G.size, fill_value=0)[0]
    num_groups = jnp.sum(has_prompt_G, dtype=jnp.int32)
    lengths_G = lengths_N[::group][order_G]
    lengths_G = jnp.where(jnp.arange(order_G.size) < num_groups, lengths_G, 0)
    return Queue(
        prompts_NP,
        lengths_N,
        sample_ids_N,
        jnp.minimum(limits_N, max_new_tokens),
        begun_N,
        None if strings is None else _begun_states(strings, prompts_NP, lengths_N, begun_N),
        order_G=order_G.astype(jnp.int32),
        num_groups=num_groups,
        packed=pack_prompts(lengths_G, num_groups, prefill, align),
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
