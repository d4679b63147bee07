"""Draft tokens: free slots of a tail check tokens that live samples may draw next.

A decode step of a tail computes all its slots, also the free ones. So each of them can read a draft
token of a live sample. The matmuls have the same rows. Attention reads the sample's entries once
more for each draft, and layers of experts compute the draft's experts. A draft comes from the
sample's own text and from the responses of its group: what followed there on the tokens that the
sample ends in (prompt lookup decoding; DAS, arXiv:2511.13841). No second model is needed.

No GPU has timed drafts yet. The constants below were chosen without a measurement of time.

The noise of a token is keyed by its place. So the token after a draft is drawn as in a step of its
own, and a draft is accepted where it equals the token that was drawn before it. Decoding one token
a step gives the same tokens and log-probs.

Shape letters: B rows of a step, S slots, N samples, R response tokens, W rows of a slot at most,
D = W - 1 drafts of a slot, T pages a slot at most, X tokens of the texts that are searched,
L tokens that are compared.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxrl_llm.generation.pages import PageSizes, PageTable
from jaxrl_llm.generation.queue import Queue, Rows
from jaxrl_llm.generation.sampler import SamplingParams
from jaxrl_llm.generation.slots import DraftRecord, Slots, State

# A draft follows at least SHORTEST equal tokens, and a sample gets as many drafts as tokens are
# equal. More than LONGEST equal tokens count as LONGEST.
SHORTEST, LONGEST = 1, 8
# A step with drafts launches a dozen kernels more, and one a layer. We assume that it saves time if
# one accepted draft comes on ENOUGH live slots. PATIENCE steps in a row may have fewer before
# pauses begin: 1, 3, 7, then 15 steps.
ENOUGH, PATIENCE, MOST = 8, 2, 6
LENGTH_BITS, OWN_BIT = 27, 26  # bits of a candidate's number: equal tokens, own text, then place


class Drafting(NamedTuple):
    """What drafts are made from."""

    most: int  # D
    prompts_NP: jax.Array
    lengths_N: jax.Array  # prompt tokens
    group: int  # consecutive samples of one prompt

    @classmethod
    def of(cls, most: int, queue: Queue) -> "Drafting":
        """At most `most` drafts of a sample in a step."""
        return cls(most, queue.prompts_NP, queue.lengths_N, queue.group)


class StepRows(NamedTuple):
    """The rows of a decode step. A row reads one token, and samples the next."""

    live_B: jax.Array  # False: the row reads and writes nothing
    row_B: jax.Array  # row of the queue
    prompt_row_B: jax.Array  # row of the cache that holds the prompt
    token_B: jax.Array  # the token that is read
    count_B: jax.Array  # response tokens before the one that is sampled
    pages_BT: jax.Array

    @classmethod
    def of_slots(cls, slots: Slots, table: PageTable, live_S: jax.Array) -> "StepRows":
        """One row for each slot."""
        own = (slots.row_B, slots.prompt_row_B, slots.token_B, slots.count_B)
        return cls(live_S, *own, table.pages_BT)


class Drafted(NamedTuple):
    """The places of slots and their drafts in the rows of a step."""

    live_B: jax.Array
    slot_B: jax.Array  # slot of each row
    offset_B: jax.Array  # place of the row's token behind the slot's last token; 0: that one
    row_SW: jax.Array  # row of each token of a slot
    has_row_SW: jax.Array
    read_SW: jax.Array  # token that each of these rows reads


class Taken(NamedTuple):
    """The tokens that samples take of a step."""

    taken_B: jax.Array  # rows whose token is taken
    num_S: jax.Array  # tokens of each slot; at least 1 where it is live
    token_S: jax.Array  # the last of them
    place_S: jax.Array  # its place in the response
    stop_states_S: jax.Array | None  # states of the stop strings before that token


def draft_rows(
    drafting: Drafting,
    rows: Rows,
    pages: PageSizes,
    state: State,
    table: PageTable,
    live_S: jax.Array,
) -> tuple[StepRows, Drafted]:
    """A row for each live slot, then rows for drafts while some are free.

    First drafts of all slots come before second ones. The drafts of a step stay in the page of the
    slot's last token where pages are scarce: a step takes one page for a slot at most.
    """
    slots = state.slots
    offset_D = jnp.arange(1, drafting.most + 1)
    drafts_SD = find_drafts(drafting, slots, state.tokens_NR)
    count_SD = slots.count_B[:, None] + offset_D
    may_SD = (drafts_SD >= 0) & live_S[:, None] & (count_SD < rows.limits_N[slots.row_B][:, None])
    if pages.scarce:
        may_SD &= count_SD // pages.entries == (slots.count_B // pages.entries)[:, None]
    # No draft behind one that is missing.
    may_SD = jnp.all(may_SD[:, None, :] | (offset_D > offset_D[:, None]), axis=2)

    wants_SW = jnp.concatenate([live_S[:, None], may_SD], axis=1)
    num_slots, W = wants_SW.shape
    place_S, place_W = jnp.arange(num_slots), jnp.arange(W)
    # Counted by comparing every pair, as in `fill_slots`.
    wanted_W = jnp.sum(wants_SW, axis=0, dtype=jnp.int32)
    before_W = jnp.sum(jnp.where(place_W < place_W[:, None], wanted_W, 0), axis=1)
    earlier_SS = place_S < place_S[:, None]
    before_SW = jnp.sum(wants_SW & earlier_SS[:, :, None], axis=1, dtype=jnp.int32) + before_W
    has_row_SW = wants_SW & (before_SW < num_slots)
    row_SW = jnp.where(has_row_SW, before_SW, num_slots)

    # The inverse as a masked sum; a row that nobody has gets the first pair.
    is_mine = row_SW.reshape(-1) == place_S[:, None]
    pair_B = jnp.sum(jnp.where(is_mine, jnp.arange(num_slots * W), 0), axis=1, dtype=jnp.int32)
    slot_B, offset_B = pair_B // W, pair_B % W
    read_SW = jnp.concatenate([slots.token_B[:, None], drafts_SD], axis=1)
    live_B = place_S < jnp.sum(has_row_SW, dtype=jnp.int32)
    step = StepRows(
        live_B=live_B,
        row_B=slots.row_B[slot_B],
        prompt_row_B=slots.prompt_row_B[slot_B],
        token_B=read_SW.reshape(-1)[pair_B],
        count_B=slots.count_B[slot_B] + offset_B,
        pages_BT=table.pages_BT[slot_B],
    )
    return step, Drafted(live_B, slot_B, offset_B, row_SW, has_row_SW, read_SW)


def take_drafted(
    drafted: Drafted,
    sampling: SamplingParams,
    live_S: jax.Array,
    count_S: jax.Array,
    stop_states_S: jax.Array | None,
    tokens_B: jax.Array,
) -> Taken:
    """Take each slot's tokens up to the first that differs from the draft behind it, or is an end.

    `count_S` are the response tokens before the step, `stop_states_S` the states of the stop
    strings after them.
    """
    num_rows, strings = tokens_B.shape[0], sampling.stop_strings
    tokens_SW = tokens_B[jnp.minimum(drafted.row_SW, num_rows - 1)]
    goes_on_S, token_S = live_S, tokens_SW[:, 0]
    num_S = live_S.astype(jnp.int32)
    for offset in range(1, tokens_SW.shape[1]):
        goes_on_S &= drafted.has_row_SW[:, offset] & (token_S == drafted.read_SW[:, offset])
        goes_on_S &= ~sampling.is_stop(token_S)
        if strings is not None and stop_states_S is not None:
            after_S = strings.step(stop_states_S, token_S)
            goes_on_S &= after_S != strings.complete
            stop_states_S = jnp.where(goes_on_S, after_S, stop_states_S)
        token_S = jnp.where(goes_on_S, tokens_SW[:, offset], token_S)
        num_S += goes_on_S
    taken_B = drafted.live_B & (drafted.offset_B < num_S[drafted.slot_B])
    return Taken(taken_B, num_S, token_S, count_S + num_S - 1, stop_states_S)


def recorded(
    record: DraftRecord, step: jax.Array, live_S: jax.Array, live_B: jax.Array, taken_B: jax.Array
) -> DraftRecord:
    """The record after step number `step` with drafts: its live slots and rows, and taken tokens.

    After some steps with too few accepted drafts the next ones have none. So where texts repeat
    nothing, one of 16 steps has drafts.
    """
    slots, rows, taken = (jnp.sum(x, dtype=jnp.int32) for x in (live_S, live_B, taken_B))
    accepted = taken - slots
    failures = jnp.where(ENOUGH * accepted >= slots, 0, jnp.minimum(record.failures + 1, MOST))
    pause = (1 << jnp.maximum(failures - PATIENCE, 0)) - 1
    return DraftRecord(
        record.offered + rows - slots, record.accepted + accepted, failures, step + 1 + pause
    )


def draft_loop(
    go_on: Callable[[State, jax.Array], jax.Array],
    with_drafts: Callable[[State], State],
    without: Callable[[State], State],
    state: State,
) -> State:
    """Decode steps with drafts, and without them during a pause.

    `go_on` also takes whether enough drafts were accepted of late. A step without drafts is the
    step of a tail that never has any: it neither searches nor writes entries twice.
    """

    def record(state: State) -> DraftRecord:
        assert state.drafts is not None
        return state.drafts

    def goes_on(state: State) -> jax.Array:
        return go_on(state, record(state).failures <= PATIENCE)

    def one_then_without(state: State) -> State:
        return lax.while_loop(
            lambda state: goes_on(state) & (state.steps < record(state).resume),
            without,
            with_drafts(state),
        )

    return lax.while_loop(goes_on, one_then_without, state)


def find_drafts(drafting: Drafting, slots: Slots, tokens_NR: jax.Array) -> jax.Array:
    """The tokens that may follow on each slot's last one, int32 [S, D]; -1 where none is known.

    They followed on the longest run of equal tokens in the prompt and the responses of the group.
    Of equally long runs the sample's own come first, then the last one in the texts.
    """
    row_S, count_S = slots.row_B, slots.count_B
    group, (R,) = drafting.group, tokens_NR.shape[1:]
    prompts_SP, length_S = drafting.prompts_NP[row_S], drafting.lengths_N[row_S]
    P = prompts_SP.shape[1]
    prompts_SP = jnp.where(jnp.arange(P) < length_S[:, None], prompts_SP, -1)
    members_S = (row_S // group * group)[:, None] + jnp.arange(group)
    responses_SX = tokens_NR[members_S].reshape(row_S.shape[0], group * R)
    texts_SX = jnp.concatenate([prompts_SP, responses_SX], axis=1)
    place_X = jnp.arange(texts_SX.shape[1], dtype=jnp.int32)
    assert place_X.size < 1 << OWN_BIT

    own_S1 = (P + row_S % group * R)[:, None]  # where the sample's own response begins
    last_SL = count_S[:, None] - 1 - jnp.arange(LONGEST)
    prompt_SL = length_S[:, None] + last_SL
    in_text_SL = jnp.where(last_SL >= 0, own_S1 + last_SL, jnp.maximum(prompt_SL, 0))
    ends_SL = jnp.take_along_axis(texts_SX, in_text_SL, axis=1)
    ends_SL = jnp.where((last_SL >= 0) | (prompt_SL >= 0), ends_SL, -2)  # equals no token

    equal_SX, run_SX = True, 0
    for back in range(LONGEST):
        equal_SX &= _moved(texts_SX, back) == ends_SL[:, back, None]
        run_SX += equal_SX.astype(jnp.int32)
    is_own_SX = (place_X >= own_S1) & (place_X < own_S1 + R)
    number_SX = (run_SX << LENGTH_BITS) + (is_own_SX.astype(jnp.int32) << OWN_BIT) + place_X
    is_known_SX = (_moved(texts_SX, -1) >= 0) & (run_SX >= SHORTEST)
    best_S1 = jnp.max(jnp.where(is_known_SX, number_SX, 0), axis=1, keepdims=True)

    at_S1, is_own_S1 = best_S1 & ((1 << OWN_BIT) - 1), (best_S1 >> OWN_BIT) & 1 == 1
    offset_D = jnp.arange(drafting.most)
    # A text that repeats itself goes on so behind its end.
    period_S1 = jnp.where(is_own_S1, own_S1 + count_S[:, None] - 1 - at_S1, drafting.most)
    after_SD = at_S1 + 1 + offset_D % jnp.maximum(period_S1, 1)
    drafts_SD = texts_SX.at[jnp.arange(row_S.shape[0])[:, None], after_SD].get(
        mode="fill", fill_value=-1
    )
    return jnp.where(offset_D < best_S1 >> LENGTH_BITS, drafts_SD, -1)


def _moved(texts_SX: jax.Array, by: int) -> jax.Array:
    """The texts moved to the right by some places, with -1 where nothing comes from."""
    X = texts_SX.shape[1]
    padded = jnp.pad(texts_SX, ((0, 0), (max(by, 0), max(-by, 0))), constant_values=-1)
    return padded[:, max(-by, 0) :][:, :X]
