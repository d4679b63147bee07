"""The decode step: one token in every slot.

Shape letters: N samples, B slots, D hidden, R response tokens.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_llm.generation.in_graph import (
    InGraphTurns,
    TurnState,
    given_tokens,
    take_tokens,
)
from jaxrl_llm.generation.kv_cache import (
    RESIDUAL_DTYPE,
    HeadAxes,
    decode_attend,
    decode_attend_heads,
    decode_context,
    decode_recur,
    keys_and_values,
)
from jaxrl_llm.generation.pages import PageSizes, take_pages
from jaxrl_llm.generation.queue import Rows
from jaxrl_llm.generation.sampler import (
    RowSampling,
    Sampled,
    SamplingParams,
    sample,
    sample_rows,
    token_keys,
)
from jaxrl_llm.generation.slots import State
from jaxrl_llm.kernels.flash_attention import Implementation
from jaxrl_llm.kernels.kept_logprob import strict_kept_logprob
from jaxrl_llm.kernels.linear_logprob import strict_logits, strict_logprob, strict_sums
from jaxrl_llm.kernels.strict import by_rows, strict_in_scope
from jaxrl_llm.models.attention import Mixers
from jaxrl_llm.models.base import ModelSpec, bind
from jaxrl_llm.models.experts import Routing


def decode(
    spec: ModelSpec,
    params: Any,
    rows: Rows,
    group: int,
    pages: PageSizes,
    seed_key: jax.Array,
    sampling: SamplingParams,
    state: State,
    *,
    attention: Implementation,
    heads: HeadAxes | None,
    ready: Callable[[jax.Array], jax.Array] | None = None,
    in_tail: bool = False,
    filters: bool = True,
    in_graph: InGraphTurns | None = None,
) -> State:
    """Sample the next token of every live slot, and end the samples that are complete.

    In a tail no sample begins: `compact` gave each slot the states that it goes on from. `ready`
    counts the samples whose prompt is in the cache, of the first groups of a queue; None: no queue.
    `filters` False says that no row of `rows.sampling` has a filter. `in_graph` answers the turns
    of `state.turns`.

    Guarantees: a slot that is free, or waits for a page, reads nothing from the cache and writes
    nothing. It is computed all the same, because shapes are static.
    """
    model, slots = bind(spec, params), state.slots
    row_B, count_B = slots.row_B, slots.count_B
    num_samples, slots_B = rows.lengths_N.shape[0], jnp.arange(row_B.shape[0])
    table, live_B = take_pages(
        state.table,
        pages,
        sample_B=row_B,
        live_B=slots.live_B,
        count_B=count_B,
        num_samples=num_samples,
    )
    prompt_B = jnp.where(live_B, rows.lengths_N[row_B] - 1, 0)
    own_B = jnp.where(live_B, count_B, 0)
    context = decode_context(
        spec.config,
        keys_and_values(state.cache),
        slots.prompt_row_B,
        prompt_B,
        table.pages_BT,
        jnp.where(live_B, count_B + 1, 0),
        slots_per_prompt=group,
        heads=heads,
    )
    hidden_B1D, cache, routed = model.routed(
        jnp.where(live_B, slots.token_B, 0)[:, None],
        rows.rope_positions(row_B, prompt_B + own_B)[:, None],
        attend=Mixers(
            decode_attend(context, attention, heads),
            decode_recur(None if in_tail else own_B == 0, live_B, slots.prompt_row_B, heads),
            decode_attend_heads(context, keys_and_values(state.cache).own.dtype, attention, heads),
        ),
        cache=state.cache,
        residual_dtype=RESIDUAL_DTYPE,
        routing=None if spec.config.mixture is None else Routing(real_BT=live_B[:, None]),
    )
    index_B = count_B if rows.begun_N is None else rows.begun_N[row_B] + count_B
    keys_B2 = token_keys(
        seed_key if seed_key.ndim == 0 else seed_key[row_B], rows.sample_ids_N[row_B], index_B
    )
    tokens_B, logprobs_B, kept_BK = _sample(
        model, hidden_B1D[:, 0], keys_B2, sampling, rows.sampling, filters
    )

    stalled = jnp.sum(slots.live_B & ~live_B, dtype=jnp.int32)
    if ready is not None:
        # Slots were refilled before this step, so a sample that is still ready found no page.
        num_free = jnp.sum(~slots.live_B, dtype=jnp.int32)
        stalled += jnp.minimum(num_free, ready(state.prefilled) - state.head)
    column_B = own_B if rows.first_N is None else jnp.where(live_B, own_B - rows.first_N, 0)
    at = (jnp.where(live_B, row_B, num_samples + slots_B), column_B)
    given_B = _given(rows, state, column_B)
    if given_B is not None:
        tokens_B = jnp.where(given_B >= 0, given_B, tokens_B)
        logprobs_B = jnp.where(given_B >= 0, 0.0, logprobs_B)
    tokens_NR = state.tokens_NR.at[at].set(tokens_B, mode="drop", unique_indices=True)
    ended_B, turns = _ends(rows, sampling, in_graph, state, tokens_NR, at, tokens_B, given_B)
    stop_states_N = state.stop_states_N
    if sampling.stop_strings is not None and stop_states_N is not None:
        stop_states_B = sampling.stop_strings.step(stop_states_N[row_B], tokens_B)
        ended_B |= stop_states_B == sampling.stop_strings.complete
        stop_states_N = stop_states_N.at[at[0]].set(stop_states_B, mode="drop", unique_indices=True)
    routes = state.routes
    if routes is not None and routed is not None:
        chosen_BLK = routed.chosen_BTK[:, :, 0].swapaxes(0, 1).astype(routes.read_NR.dtype)
        read_NR = routes.read_NR.at[at].set(chosen_BLK, mode="drop", unique_indices=True)
        routes = routes._replace(read_NR=read_NR)
    kept_NRK = state.kept_NRK
    if kept_NRK is not None:
        assert kept_BK is not None
        if turns is not None and given_B is not None:
            kept_BK = jnp.where(given_B[:, None] >= 0, -1, kept_BK)
        kept_NRK = kept_NRK.at[at].set(kept_BK, mode="drop", unique_indices=True)
    return state._replace(
        routes=routes,
        kept_NRK=kept_NRK,
        cache=cache,
        table=table,
        slots=slots._replace(
            token_B=jnp.where(live_B, tokens_B, slots.token_B),
            count_B=count_B + live_B,
            live_B=slots.live_B & ~(live_B & ended_B),
        ),
        tokens_NR=tokens_NR,
        logprobs_NR=state.logprobs_NR.at[at].set(logprobs_B, mode="drop", unique_indices=True),
        stop_states_N=stop_states_N,
        turns=turns,
        steps=state.steps + 1,
        slot_steps=state.slot_steps + live_B.shape[0],
        live_slot_steps=state.live_slot_steps + jnp.sum(live_B, dtype=jnp.int32),
        stalled_slot_steps=state.stalled_slot_steps + stalled,
    )


def _given(rows: Rows, state: State, column_B: jax.Array) -> jax.Array | None:
    """The token that each slot takes in place of a sampled one; -1: it samples. None: all do."""
    if state.turns is not None:
        return given_tokens(state.turns, state.slots.row_B)
    if rows.given_NR is None:
        return None
    return jnp.take_along_axis(rows.given_NR, column_B[:, None], axis=1)[:, 0]


def _ends(
    rows: Rows,
    sampling: SamplingParams,
    in_graph: InGraphTurns | None,
    state: State,
    tokens_NR: jax.Array,
    at: tuple[jax.Array, jax.Array],
    tokens_B: jax.Array,
    given_B: jax.Array | None,
) -> tuple[jax.Array, TurnState | None]:
    """Which samples ended with these tokens, bool [B], and the turns after them.

    Given tokens, which are at least 0, end no turn.
    """
    row_B, count_B = state.slots.row_B, state.slots.count_B
    is_stop_B, limit_B = sampling.is_stop(tokens_B), rows.limits_N[row_B]
    if given_B is not None:
        is_stop_B &= given_B < 0
    if in_graph is None or state.turns is None:
        return is_stop_B | (count_B + 1 >= limit_B), None
    assert given_B is not None
    turns, ended_B = take_tokens(
        in_graph,
        state.turns,
        tokens_NR,
        at,
        row_B=row_B,
        is_given_B=given_B >= 0,
        is_stop_B=is_stop_B,
        limit_B=limit_B,
    )
    return ended_B, turns


def _sample(
    model: Any,
    hidden_BD: jax.Array,
    keys_B2: jax.Array,
    sampling: SamplingParams,
    rows: RowSampling | None,
    filters: bool,
) -> Sampled:
    """A token of every slot. In a `strict_scope` log-probs have the bits of the trainer.

    `rows` are settings of each slot, in place of `sampling`; see `sample_rows`.
    """
    if rows is not None:
        return sample_rows(model.logits(hidden_BD), keys_B2, rows, filters=filters)
    if (strict := strict_in_scope()) is None:
        return sample(model.logits(hidden_BD), keys_B2, sampling)
    temperature = sampling.temperature or 1.0

    def run(weight_VD: jax.Array, hidden_CD: jax.Array, keys_C2: jax.Array) -> Any:
        logits_CV = strict_logits(hidden_CD, weight_VD)
        sums_CM = strict_sums(logits_CV, temperature)
        tokens_C, _, kept_CK = sample(logits_CV, keys_C2, sampling, sums_CM)
        if kept_CK is None:
            logprobs_C, _ = strict_logprob(logits_CV, sums_CM, tokens_C, temperature)
        else:
            logprobs_C, _ = strict_kept_logprob(logits_CV, kept_CK, tokens_C, temperature)
        return Sampled(tokens_C, logprobs_C, kept_CK)

    return by_rows(strict, run, model.unembedding(), hidden_BD, keys_B2, lead=1)
