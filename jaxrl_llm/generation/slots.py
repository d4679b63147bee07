"""The slots, each of which decodes one sample, and the state that the loops carry.

Shape letters: N samples, G groups (prompts), R response tokens, B slots.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.generation.in_graph import TurnState
from jaxrl_llm.generation.kv_cache import Cache, init_cache
from jaxrl_llm.generation.pages import PageSizes, PageTable, empty_table, num_admissible
from jaxrl_llm.generation.queue import Queue
from jaxrl_llm.models.base import ModelConfig


class Slots(NamedTuple):
    """One entry a slot. A slot's pages are in `State.table`."""

    row_B: jax.Array  # row of the queue that the slot answers
    prompt_row_B: jax.Array  # row of the cache that holds its prompt
    token_B: jax.Array  # last token of the sequence, not yet in the cache
    count_B: jax.Array  # response tokens so far, which is the slot's own entries in the cache
    live_B: jax.Array  # False: the slot is free

    @property
    def num_live(self) -> jax.Array:
        """The number of slots that hold a sample that has not ended."""
        return jnp.sum(self.live_B, dtype=jnp.int32)


class Routes(NamedTuple):
    """The experts of every computed token, [..., L, K] of small integers; -1 where none is."""

    prompts_GP: jax.Array
    # The experts of the token that a decode step reads: the prompt's last one, then the response.
    read_NR: jax.Array

    def of_samples(self, lengths_N: jax.Array, group_N: jax.Array) -> jax.Array:
        """The experts of each sample's prompt tokens, then of its response's: [N, P + R, L, K].

        `group_N` are the samples' groups. Nothing reads the last token of a response, so it has
        none.
        """
        prompts_NP = self.prompts_GP[group_N]
        rows_N = jnp.arange(lengths_N.shape[0])
        last_N = jnp.where(lengths_N > 0, lengths_N - 1, prompts_NP.shape[1])
        prompts_NP = prompts_NP.at[rows_N, last_N].set(self.read_NR[:, 0], mode="drop")
        none_N1 = jnp.full_like(self.read_NR[:, :1], -1)
        return jnp.concatenate([prompts_NP, self.read_NR[:, 1:], none_N1], axis=1)


def empty_routes(
    config: ModelConfig, num_groups: int, num_samples: int, prompt: int, response: int
) -> Routes:
    """No token was computed."""
    return Routes(
        prompts_GP=no_routes(config, num_groups, prompt),
        read_NR=no_routes(config, num_samples, response),
    )


def no_routes(config: ModelConfig, rows: int, tokens: int) -> jax.Array:
    """The experts of tokens that were not computed, [rows, tokens, L, K]."""
    mixture = config.mixture
    assert mixture is not None
    each = (config.num_expert_layers, mixture.experts_per_token)
    dtype = jnp.int8 if mixture.num_experts <= 128 else jnp.int16
    return jnp.full((rows, tokens, *each), -1, dtype)


def no_kept(rows: int, tokens: int, most: int) -> jax.Array:
    """The ids of kept tokens where nothing was sampled, int32 [rows, tokens, most]."""
    return jnp.full((rows, tokens, most), -1, jnp.int32)


class DraftRecord(NamedTuple):
    """Draft tokens of all steps, and when the next ones are due."""

    offered: jax.Array
    accepted: jax.Array
    failures: jax.Array  # steps with drafts since one in which enough were accepted
    resume: jax.Array  # number of the next step with drafts


class State(NamedTuple):
    """The carry of all loops."""

    cache: Cache
    table: PageTable
    slots: Slots
    prompt_row_G: jax.Array  # row of the cache that holds a group's prompt
    prefilled: jax.Array  # groups of the queue's order whose prompt is in the cache
    head: jax.Array  # samples of the queue's order that a slot has taken
    tokens_NR: jax.Array  # -1 where nothing was written
    logprobs_NR: jax.Array
    stop_states_N: jax.Array | None  # states of the stop strings after each text; None: no string
    steps: jax.Array
    prefills: jax.Array
    slot_steps: jax.Array
    live_slot_steps: jax.Array
    stalled_slot_steps: jax.Array
    routes: Routes | None = None
    kept_NRK: jax.Array | None = None  # ids of the tokens that filters kept; None: not recorded
    turns: TurnState | None = None  # turns with an environment in the program; None: without
    drafts: DraftRecord | None = None  # None: no tail has drafts


def empty_state(
    config: ModelConfig,
    queue: Queue,
    pages: PageSizes,
    *,
    num_slots: int,
    prompt_rows: int,
    cache_dtype: Any,
    state_dtype: Any,
    max_new_tokens: int,
    record_routes: bool = False,
    record_kept: int = 0,
    turns: TurnState | None = None,
    drafts: bool = False,
) -> State:
    """All slots free, nothing in the cache, nothing written."""
    num_samples, width = queue.prompts_NP.shape
    routes, kept_NRK = None, None
    if record_kept:
        kept_NRK = no_kept(num_samples, max_new_tokens, record_kept)
    if record_routes:
        num_groups = queue.order_G.shape[0]
        routes = empty_routes(config, num_groups, num_samples, width, max_new_tokens)
    zeros_B, zero = jnp.zeros((num_slots,), jnp.int32), jnp.int32(0)
    cache = init_cache(
        config,
        num_prompts=prompt_rows,
        prompt_length=width,
        num_pages=pages.num_pages,
        page_entries=pages.entries,
        num_slots=num_slots,
        dtype=cache_dtype,
        state_dtype=state_dtype,
    )
    return State(
        cache=cache,
        table=empty_table(pages, num_slots, num_samples),
        slots=Slots(
            row_B=zeros_B,
            prompt_row_B=zeros_B,
            token_B=zeros_B,
            count_B=zeros_B,
            live_B=jnp.zeros((num_slots,), bool),
        ),
        prompt_row_G=jnp.zeros(queue.order_G.shape, jnp.int32),
        prefilled=zero,
        head=zero,
        tokens_NR=jnp.full((num_samples, max_new_tokens), -1, jnp.int32),
        logprobs_NR=jnp.zeros((num_samples, max_new_tokens), jnp.float32),
        stop_states_N=queue.stop_states_N,
        steps=zero,
        prefills=zero,
        slot_steps=zero,
        live_slot_steps=zero,
        stalled_slot_steps=zero,
        routes=routes,
        kept_NRK=kept_NRK,
        turns=turns,
        drafts=DraftRecord(zero, zero, zero, zero) if drafts else None,
    )


def fill_slots(queue: Queue, pages: PageSizes, state: State) -> State:
    """Free slots take the next samples whose prompt is in the cache, while pages are free."""
    slots, num_samples = state.slots, queue.prompts_NP.shape[0]
    free_B = ~slots.live_B
    ready = queue.ready(state.prefilled)
    admitted = state.head + num_admissible(
        pages, sample_B=slots.row_B, live_B=slots.live_B, count_B=slots.count_B
    )
    slots_B = jnp.arange(len(free_B))
    # Counted by comparing every pair: XLA's running sum of 512 slots takes 44 us on a GPU.
    before_BB = free_B & (slots_B < slots_B[:, None])
    index_B = state.head + jnp.sum(before_BB, axis=1, dtype=jnp.int32)
    take_B = free_B & (index_B < jnp.minimum(ready, admitted))
    index_B = jnp.clip(index_B, 0, num_samples - 1)
    row_B = queue.rows_N[index_B]
    group_B = queue.group_N[row_B]
    token_B = queue.prompts_NP[row_B, jnp.maximum(queue.lengths_N[row_B] - 1, 0)]
    return state._replace(
        slots=Slots(
            row_B=jnp.where(take_B, row_B, slots.row_B),
            prompt_row_B=jnp.where(take_B, state.prompt_row_G[group_B], slots.prompt_row_B),
            token_B=jnp.where(take_B, token_B, slots.token_B),
            count_B=jnp.where(take_B, 0, slots.count_B),
            live_B=slots.live_B | take_B,
        ),
        head=state.head + jnp.sum(take_B, dtype=jnp.int32),
    )
