"""Environments inside the generation program: their step is a JAX function of tokens.

A slot decodes until its turn ends. The same decode step then calls the environment, and the ids of
the observation are forced into the slot in the next steps, one a step. So slots do not wait for
each other, and no observation needs a kernel of its own. The host takes no part.

Shape letters: N samples, R response tokens, B slots, T tokens of a turn, O ids of an observation.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from jaxrl_llm.numerics import mix32

# Reasons for the end of a sample, by number. `StopReason` of agents/trajectory.py has these names.
STOP_REASONS = ("env_done", "max_turns", "max_tokens", "max_turn_tokens", "context_overflow")
DONE, MAX_TURNS, MAX_TOKENS, MAX_TURN_TOKENS, OVERFLOW = range(len(STOP_REASONS))


class TokenStep(NamedTuple):
    """The answer of an environment to the tokens of a turn."""

    state: Any  # shapes and dtypes of the state before
    observation: jax.Array  # int32 [O]
    length: Any  # number of the observation's ids that count
    reward: Any  # float32
    done: Any  # bool
    # Integer that stands for the state before the next turn; None: a hash of the observation.
    key: Any = None


class InGraph(Protocol):
    """An environment inside the generation program. A run has one, made with the tokenizer.

    `begin` runs on the host, once a sample. `init` and `step_tokens` are traced for one sample.
    """

    stop: tuple[str, ...]  # texts of one token that end a turn
    row_size: int  # length of the numbers that `begin` returns

    def begin(self, **row: Any) -> Any:
        """The ids of the opening, which go behind the prompt, and the row's numbers (int32)."""
        ...

    def init(self, numbers: jax.Array) -> Any:
        """The state before the first turn, a pytree of arrays."""
        ...

    def step_tokens(self, state: Any, ids: jax.Array, length: jax.Array) -> TokenStep:
        """Answer a turn: `ids` [T] with its stop token, -1 from `length` on."""
        ...


@dataclass(frozen=True, kw_only=True, eq=False)
class InGraphTurns:
    """The environment of a generation, and the limits of turns; 0 is no limit."""

    environment: InGraph
    max_turns: int = 0
    max_turn_tokens: int = 0


class TurnState(NamedTuple):
    """The turns of all samples: a part of the carry of the decode loop."""

    environment: Any  # states of the environments, [N, ...]
    observed_NO: jax.Array  # last observation
    length_N: jax.Array  # ids of it
    pending_N: jax.Array  # ids of it that are not in the sequence yet
    start_N: jax.Array  # place in the response where the turn begins
    number_N: jax.Array  # turns that have ended
    key_N: jax.Array  # stands for the state before the turn
    turn_ids_NR: jax.Array
    state_keys_NR: jax.Array
    rewards_NR: jax.Array
    stop_reasons_N: jax.Array


class TurnRecord(NamedTuple):
    """The turns of the responses of a generation."""

    turn_ids: jax.Array  # int32 [N, R]: number of the turn of a sampled token, -1 elsewhere
    state_keys: jax.Array  # int32 [N, R]: key of the state before the turn, on its tokens
    rewards: jax.Array  # float32 [N, R]: reward of a turn, on its last token
    stop_reasons: jax.Array  # int32 [N]: number in STOP_REASONS; -1 for padding


def begin_turns(settings: InGraphTurns, numbers_NK: jax.Array, response: int) -> TurnState:
    """The state before the first token. `response` is R."""
    environment = settings.environment
    states = jax.vmap(environment.init)(numbers_NK)
    answer = jax.eval_shape(
        jax.vmap(environment.step_tokens),
        states,
        jax.ShapeDtypeStruct(
            (numbers_NK.shape[0], settings.max_turn_tokens or response), jnp.int32
        ),
        jax.ShapeDtypeStruct(numbers_NK.shape[:1], jnp.int32),
    )
    for before, after in zip(jax.tree.leaves(states), jax.tree.leaves(answer.state), strict=True):
        if (before.shape, before.dtype) != (after.shape, after.dtype):
            raise ValueError(
                f"step_tokens of {type(environment).__name__} returned a state with an array "
                f"{after.dtype}{list(after.shape[1:])} in place of {before.dtype}"
                f"{list(before.shape[1:])}: keep shapes and dtypes, for example with "
                f"jnp.asarray(x, {before.dtype.name!r})"
            )
    num_samples = numbers_NK.shape[0]
    zeros_N = jnp.zeros((num_samples,), jnp.int32)
    zeros_NR = jnp.zeros((num_samples, response), jnp.int32)
    return TurnState(
        environment=states,
        observed_NO=jnp.zeros(answer.observation.shape, jnp.int32),
        length_N=zeros_N,
        pending_N=zeros_N,
        start_N=zeros_N,
        number_N=zeros_N,
        key_N=zeros_N,
        turn_ids_NR=zeros_NR - 1,
        state_keys_NR=zeros_NR,
        rewards_NR=jnp.zeros(zeros_NR.shape, jnp.float32),
        stop_reasons_N=zeros_N - 1,
    )


def given_tokens(turns: TurnState, row_B: jax.Array) -> jax.Array:
    """The next observed id of each slot; -1 where it samples."""
    pending_B = turns.pending_N[row_B]
    place_B = turns.length_N[row_B] - pending_B
    observed_BO = turns.observed_NO[row_B]
    most = observed_BO.shape[1] - 1
    place_B1 = jnp.clip(place_B, 0, most)[:, None]
    return jnp.where(pending_B > 0, jnp.take_along_axis(observed_BO, place_B1, axis=1)[:, 0], -1)


def take_tokens(
    settings: InGraphTurns,
    turns: TurnState,
    tokens_NR: jax.Array,
    at: tuple[jax.Array, jax.Array],
    *,
    row_B: jax.Array,
    is_given_B: jax.Array,
    is_stop_B: jax.Array,
    limit_B: jax.Array,
) -> tuple[TurnState, jax.Array]:
    """Take over the tokens of a decode step, which stand in `tokens_NR` at the places `at`.

    A slot that does not decode has a place outside.
    Returns the new state, and which samples have ended. The environment answers the turns whose
    stop token was sampled. An observation that would be the last of its sample is left out.
    """
    to_B, column_B = at
    sampled_B, count_B = (to_B < tokens_NR.shape[0]) & ~is_given_B, column_B + 1
    number_B, start_B = turns.number_N[row_B], turns.start_N[row_B]
    length_B = count_B - start_B
    acts_B = sampled_B & is_stop_B
    most = settings.max_turn_tokens or tokens_NR.shape[1]
    is_full_B, is_long_B = count_B >= limit_B, length_B >= most
    is_cut_B = sampled_B & ~is_stop_B & (is_full_B | is_long_B)

    def put(x: jax.Array, values_B: Any) -> jax.Array:
        return x.at[to_B].set(values_B, mode="drop", unique_indices=True)

    def put_token(x_NR: jax.Array, values_B: Any) -> jax.Array:
        return x_NR.at[at].set(values_B, mode="drop", unique_indices=True)

    turns = turns._replace(
        pending_N=put(turns.pending_N, turns.pending_N[row_B] - is_given_B),
        turn_ids_NR=put_token(turns.turn_ids_NR, jnp.where(sampled_B, number_B, -1)),
        state_keys_NR=put_token(turns.state_keys_NR, jnp.where(sampled_B, turns.key_N[row_B], 0)),
        stop_reasons_N=put(
            turns.stop_reasons_N,
            jnp.where(is_cut_B, jnp.where(is_full_B, MAX_TOKENS, MAX_TURN_TOKENS), -1),
        ),
    )

    def answer(turns: TurnState) -> tuple[TurnState, jax.Array]:
        place_T = jnp.arange(most)
        at_BT = jnp.minimum(start_B[:, None] + place_T, tokens_NR.shape[1] - 1)
        ids_BT = jnp.where(place_T < length_B[:, None], tokens_NR[row_B[:, None], at_BT], -1)
        states = jax.tree.map(lambda x: x[row_B], turns.environment)
        step = jax.vmap(settings.environment.step_tokens)(states, ids_BT, length_B)
        is_done_B, observed_B = step.done.astype(bool), step.length.astype(jnp.int32)
        is_last_B = number_B + 1 >= settings.max_turns if settings.max_turns else is_done_B
        lacks_room_B = count_B + observed_B >= limit_B
        reasons_B = jnp.where(
            is_done_B, DONE, jnp.where(is_last_B, MAX_TURNS, jnp.where(lacks_room_B, OVERFLOW, -1))
        )
        key_B = _hashed(step.observation, observed_B) if step.key is None else _key(step.key)
        acting = jnp.where(acts_B, to_B, tokens_NR.shape[0] + to_B)

        def put(x: jax.Array, values: Any) -> jax.Array:
            return x.at[acting].set(values.astype(x.dtype), mode="drop", unique_indices=True)

        return turns._replace(
            environment=jax.tree.map(put, turns.environment, step.state),
            observed_NO=put(turns.observed_NO, step.observation),
            length_N=put(turns.length_N, observed_B),
            pending_N=put(turns.pending_N, observed_B),
            start_N=put(turns.start_N, count_B + observed_B),
            number_N=put(turns.number_N, number_B + 1),
            key_N=put(turns.key_N, key_B),
            rewards_NR=turns.rewards_NR.at[acting, column_B].set(
                step.reward.astype(jnp.float32), mode="drop", unique_indices=True
            ),
            stop_reasons_N=put(turns.stop_reasons_N, reasons_B),
        ), reasons_B >= 0

    turns, ends_B = lax.cond(
        jnp.any(acts_B), answer, lambda turns: (turns, jnp.zeros_like(acts_B)), turns
    )
    return turns, is_cut_B | (acts_B & ends_B)


def record_of(turns: TurnState) -> TurnRecord:
    """The record of all samples."""
    return TurnRecord(
        turns.turn_ids_NR, turns.state_keys_NR, turns.rewards_NR, turns.stop_reasons_N
    )


def _key(key_B: jax.Array) -> jax.Array:
    """A hash of an environment's keys; 0 stands for the state before the first turn."""
    return (mix32(key_B.astype(jnp.uint32) + jnp.uint32(1)) >> 1).astype(jnp.int32)


def _hashed(observed_BO: jax.Array, length_B: jax.Array) -> jax.Array:
    """A hash of observations."""
    place_O = jnp.arange(observed_BO.shape[1], dtype=jnp.uint32)
    each_BO = mix32(observed_BO.astype(jnp.uint32) ^ mix32(place_O + jnp.uint32(1)))
    counts_BO = place_O < length_B.astype(jnp.uint32)[:, None]
    return _key(jnp.sum(jnp.where(counts_BO, each_BO, jnp.uint32(0)), axis=1, dtype=jnp.uint32))
