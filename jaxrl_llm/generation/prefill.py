"""The prefill: computes many prompts at once, before slots need them.

Shape letters: B slots, A rows of a prefill, L tokens of such a row, C prompt rows of the cache.
"""

from typing import Any

import jax.numpy as jnp
from jax import lax

from jaxrl_llm.generation.kv_cache import (
    RESIDUAL_DTYPE,
    HeadAxes,
    prefill_attend,
    prefill_recur,
)
from jaxrl_llm.generation.packed_prompts import prefill_rows
from jaxrl_llm.generation.queue import Queue
from jaxrl_llm.generation.sizes import EngineSizes
from jaxrl_llm.generation.slots import State
from jaxrl_llm.kernels.flash_attention import Implementation
from jaxrl_llm.kernels.gated_delta import Runs, chunking_of
from jaxrl_llm.models.attention import Mixers
from jaxrl_llm.models.base import ModelSpec, bind
from jaxrl_llm.models.experts import Routing
from jaxrl_llm.models.media import media_of


def prefill(
    spec: ModelSpec,
    params: Any,
    queue: Queue,
    sizes: EngineSizes,
    state: State,
    *,
    attention: Implementation,
    heads: HeadAxes | None,
) -> State:
    """Compute the next prompts of the queue into rows of the cache that no live slot reads.

    A prefill needs no head and no sampling: the first decode step computes a prompt's last token
    again and so gives its logits. The prefill computes that token too. Without it, prompts of full
    width would not end at the attention kernel's blocks, and attention would take 1.4 times as
    many blocks.
    """
    num_groups, prompt_rows = queue.order_G.shape[0], sizes.prompt_rows
    rows = prefill_rows(queue.packed, sizes.prefill, state.prefills)
    slots = state.slots
    read_B = jnp.where(slots.live_B, slots.prompt_row_B, prompt_rows)
    used_C = jnp.zeros((prompt_rows,), bool).at[read_B].set(True, mode="drop")
    _, free_C = lax.top_k((~used_C).astype(jnp.int32), prompt_rows)

    # A pad id outside the vocabulary embeds as NaN, and no mask removes NaN from the cache.
    real_AL, groups_AL = rows.real_AL, queue.order_G[rows.prompt_AL]
    tokens_AL = queue.prompts_NP[queue.first_G[groups_AL], rows.position_AL]
    # Padding gets distinct rows out of range: the scatter drops them, and indices stay unique.
    dropped_AL = prompt_rows + jnp.arange(real_AL.size).reshape(real_AL.shape)
    cache_rows_AL = jnp.where(real_AL, free_C[rows.place_AL], dropped_AL)
    token_L = jnp.arange(real_AL.shape[1])
    start_AL = jnp.where(real_AL, token_L - rows.position_AL, real_AL.shape[1])
    place_AS = rows.place_AS
    dropped_AS = prompt_rows + jnp.arange(place_AS.size).reshape(place_AS.shape)
    state_rows_AS = jnp.where(place_AS >= 0, free_C[place_AS], dropped_AS)
    attend = prefill_attend(
        cache_rows_AL,
        rows.position_AL,
        jnp.where(real_AL, rows.prompt_AL + 1, 0) if sizes.prefill.prompts > 1 else None,
        attention,
        heads,
    )
    if spec.config.delta is not None:
        chunking = chunking_of(Runs(start_AL), spec.config.delta.conv_size)
        attend = Mixers(attend, prefill_recur(chunking, state_rows_AS, rows.last_AS, heads))
    media = None
    if queue.images is not None:  # once for all samples of a prompt
        at = (rows.position_AL, rows.position_AL)
        media = media_of(queue.images, queue.first_G[groups_AL], *at, real_AL)
    _, cache, routed = bind(spec, params).routed(
        jnp.where(real_AL, tokens_AL, 0),
        rows.position_AL if media is None else media.positions(rows.position_AL),
        attend=attend,
        cache=state.cache,
        residual_dtype=RESIDUAL_DTYPE,
        routing=None if spec.config.mixture is None else Routing(real_BT=real_AL),
        media=media,
    )
    place_C = jnp.arange(prompt_rows)
    prompts_C = jnp.minimum(state.prefilled + place_C, num_groups - 1)
    targets_C = jnp.where(
        place_C < rows.num_prompts, queue.order_G[prompts_C], num_groups + place_C
    )
    routes = state.routes
    if routes is not None and routed is not None:
        chosen_ALxK = jnp.moveaxis(routed.chosen_BTK, 0, 2).astype(routes.prompts_GP.dtype)
        dropped_AL = num_groups + jnp.arange(real_AL.size).reshape(real_AL.shape)
        at = (jnp.where(real_AL, groups_AL, dropped_AL), rows.position_AL)
        written = routes.prompts_GP.at[at].set(chosen_ALxK, mode="drop", unique_indices=True)
        routes = routes._replace(prompts_GP=written)
    return state._replace(
        routes=routes,
        cache=cache,
        prompt_row_G=state.prompt_row_G.at[targets_C].set(free_C, mode="drop", unique_indices=True),
        prefilled=state.prefilled + rows.num_prompts,
        prefills=state.prefills + 1,
    )
