"""The decode step: one token in every slot, and with drafts several.

Shape letters: N samples, S slots, B rows of the step (the slots; with drafts see drafts.py),
D hidden, R response tokens.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_llm.generation.drafts import (
    Drafting,
    StepRows,
    Taken,
    draft_rows,
    recorded,
    take_drafted,
)
from jaxrl_llm.generation.in_graph import (
    InGraphTurns,
    TurnState,
    given_tokens,
    take_tokens,
)
from jaxrl_llm.generation.kv_cache import (
    RESIDUAL_DTYPE,
    Cache,
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
from jaxrl_llm.generation.slots import Routes, State
from jaxrl_llm.kernels.flash_attention import Implementation
from jaxrl_llm.kernels.kept_logprob import strict_kept_logprob
from jaxrl_llm.kernels.linear_logprob import strict_logits, strict_logprob, strict_sums
from jaxrl_llm.kernels.strict import by_rows, strict_in_scope
from jaxrl_llm.models.attention import Mixers
from jaxrl_llm.models.base import ModelConfig, ModelSpec, bind
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
    drafting: Drafting | None = None,
) -> State:
    """Sample the next token of every live slot, and end the samples that are complete.

    In a tail no sample begins: `compact` gave each slot the states that it goes on from. `ready`
    counts the samples whose prompt is in the cache, of the first groups of a queue; None: no queue.
    `filters` False says that no row of `rows.sampling` has a filter. `in_graph` answers the turns
    of `state.turns`. With `drafting`, rows of free slots check draft tokens of live ones.

    Requires: `drafting` is None with a recurrent state, and with tokens that are given.
    Guarantees: a slot that is free, or waits for a page, reads nothing from the cache and writes
    nothing. It is computed all the same, because shapes are static.
    """
    model, slots = bind(spec, params), state.slots
    num_samples, slots_S = rows.lengths_N.shape[0], jnp.arange(slots.row_B.shape[0])
    table, live_S = take_pages(
        state.table,
        pages,
        sample_B=slots.row_B,
        live_B=slots.live_B,
        count_B=slots.count_B,
        num_samples=num_samples,
    )
    step, drafted, slots_per_prompt = StepRows.of_slots(slots, table, live_S), None, group
    if drafting is not None:
        step, drafted = draft_rows(drafting, rows, pages, state, table, live_S)
        slots_per_prompt *= 1 + drafting.most
    live_B, row_B, count_B = step.live_B, step.row_B, step.count_B
    prompt_B = jnp.where(live_B, rows.lengths_N[row_B] - 1, 0)
    own_B = jnp.where(live_B, count_B, 0)
    hidden_B1D, cache, routed = _forward(
        model,
        spec.config,
        rows,
        step,
        prompt_B,
        own_B,
        state.cache,
        attention,
        heads,
        slots_per_prompt=slots_per_prompt,
        shared_pages=drafted is not None,
        in_tail=in_tail,
    )
    index_B = count_B if rows.begun_N is None else rows.begun_N[row_B] + count_B
    keys_B2 = token_keys(
        seed_key if seed_key.ndim == 0 else seed_key[row_B], rows.sample_ids_N[row_B], index_B
    )
    tokens_B, logprobs_B, kept_BK = _sample(
        model, hidden_B1D[:, 0], keys_B2, sampling, rows.sampling, filters
    )

    stalled = _stalled(state, live_S, ready)
    column_B = own_B if rows.first_N is None else jnp.where(live_B, own_B - rows.first_N, 0)
    strings, stop_states_N, routes = sampling.stop_strings, state.stop_states_N, state.routes
    stop_states_S = None if stop_states_N is None else stop_states_N[slots.row_B]
    given_B = None
    if drafted is not None:
        taken = take_drafted(drafted, sampling, live_S, slots.count_B, stop_states_S, tokens_B)
    else:
        given_B = _given(rows, state, column_B)
        if given_B is not None:
            tokens_B = jnp.where(given_B >= 0, given_B, tokens_B)
            logprobs_B = jnp.where(given_B >= 0, 0.0, logprobs_B)
        taken = Taken(live_B, live_S, tokens_B, count_B, stop_states_S)
    at = (jnp.where(taken.taken_B, row_B, num_samples + slots_S), column_B)
    tokens_NR = state.tokens_NR.at[at].set(tokens_B, mode="drop", unique_indices=True)
    ended_S, turns = _ends(rows, sampling, in_graph, state, tokens_NR, at, taken, given_B)
    if strings is not None and stop_states_N is not None:
        assert taken.stop_states_S is not None
        stop_states_S = strings.step(taken.stop_states_S, taken.token_S)
        ended_S |= stop_states_S == strings.complete
        to_S = jnp.where(live_S, slots.row_B, num_samples + slots_S)
        stop_states_N = stop_states_N.at[to_S].set(stop_states_S, mode="drop", unique_indices=True)
    if routes is not None and routed is not None:
        routes = _put_routes(routes, at, routed.chosen_BTK[:, :, 0])
    kept_NRK, drafts = state.kept_NRK, state.drafts
    if kept_NRK is not None:
        assert kept_BK is not None
        if turns is not None and given_B is not None:
            kept_BK = jnp.where(given_B[:, None] >= 0, -1, kept_BK)
        kept_NRK = kept_NRK.at[at].set(kept_BK, mode="drop", unique_indices=True)
    if drafted is not None and drafts is not None:
        drafts = recorded(drafts, state.steps, live_S, live_B, taken.taken_B)
    return state._replace(
        routes=routes,
        kept_NRK=kept_NRK,
        cache=cache,
        table=table,
        slots=slots._replace(
            token_B=jnp.where(live_S, taken.token_S, slots.token_B),
            count_B=slots.count_B + taken.num_S,
            live_B=slots.live_B & ~(live_S & ended_S),
        ),
        tokens_NR=tokens_NR,
        logprobs_NR=state.logprobs_NR.at[at].set(logprobs_B, mode="drop", unique_indices=True),
        stop_states_N=stop_states_N,
        turns=turns,
        steps=state.steps + 1,
        slot_steps=state.slot_steps + live_S.shape[0],
        live_slot_steps=state.live_slot_steps + jnp.sum(live_S, dtype=jnp.int32),
        stalled_slot_steps=state.stalled_slot_steps + stalled,
        drafts=drafts,
    )


def _forward(
    model: Any,
    config: ModelConfig,
    rows: Rows,
    step: StepRows,
    prompt_B: jax.Array,
    own_B: jax.Array,
    cache: Cache,
    attention: Implementation,
    heads: HeadAxes | None,
    *,
    slots_per_prompt: int,
    shared_pages: bool,
    in_tail: bool,
) -> tuple[jax.Array, Any, Any]:
    """The last hidden states, the cache with the new entries, and the experts of the tokens read.

    `prompt_B` and `own_B` are the entries before them. `shared_pages`: rows may be of one slot.
    """
    live_B = step.live_B
    context = decode_context(
        config,
        keys_and_values(cache),
        step.prompt_row_B,
        prompt_B,
        step.pages_BT,
        jnp.where(live_B, step.count_B + 1, 0),
        slots_per_prompt=slots_per_prompt,
        heads=heads,
    )
    how = {"heads": heads, "shared_pages": shared_pages}
    return model.routed(
        jnp.where(live_B, step.token_B, 0)[:, None],
        rows.rope_positions(step.row_B, prompt_B + own_B)[:, None],
        attend=Mixers(
            decode_attend(context, attention, **how),
            decode_recur(None if in_tail else own_B == 0, live_B, step.prompt_row_B, heads),
            decode_attend_heads(context, keys_and_values(cache).own.dtype, attention, **how),
        ),
        cache=cache,
        residual_dtype=RESIDUAL_DTYPE,
        routing=None if config.mixture is None else Routing(real_BT=live_B[:, None]),
    )


def _stalled(
    state: State, live_S: jax.Array, ready: Callable[[jax.Array], jax.Array] | None
) -> jax.Array:
    """The number of slots in which a sample waits for a page."""
    stalled = jnp.sum(state.slots.live_B & ~live_S, dtype=jnp.int32)
    if ready is not None:
        # Slots were refilled before this step, so a sample that is still ready found no page.
        num_free = jnp.sum(~state.slots.live_B, dtype=jnp.int32)
        stalled += jnp.minimum(num_free, ready(state.prefilled) - state.head)
    return stalled


def _put_routes(routes: Routes, at: tuple[jax.Array, jax.Array], chosen_LBK: jax.Array) -> Routes:
    """The routes with the experts of the tokens that a step read."""
    chosen_BLK = chosen_LBK.swapaxes(0, 1).astype(routes.read_NR.dtype)
    read_NR = routes.read_NR.at[at].set(chosen_BLK, mode="drop", unique_indices=True)
    return routes._replace(read_NR=read_NR)


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
    taken: Taken,
    given_B: jax.Array | None,
) -> tuple[jax.Array, TurnState | None]:
    """Which samples ended with their last token, bool [S], and the turns after it.

    Given tokens, which are at least 0, end no turn.
    """
    row_S = state.slots.row_B
    is_stop_S, limit_S = sampling.is_stop(taken.token_S), rows.limits_N[row_S]
    if given_B is not None:
        is_stop_S &= given_B < 0
    if in_graph is None or state.turns is None:
        return is_stop_S | (taken.place_S + 1 >= limit_S), None
    assert given_B is not None
    turns, ended_S = take_tokens(
        in_graph,
        state.turns,
        tokens_NR,
        at,
        row_B=row_S,
        is_given_B=given_B >= 0,
        is_stop_B=is_stop_S,
        limit_B=limit_S,
    )
    return ended_S, turns


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
