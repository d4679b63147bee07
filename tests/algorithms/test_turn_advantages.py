"""Credit of turns: by hand, against the estimators of whole responses, and on a bandit."""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled import compiled

from jaxrl_llm.algorithms import advantages, group_advantages, turn_advantages

# Two samples of a prompt. The first has two turns of two tokens with an observation between them,
# and rewards 1 and 2; the second has one turn of one token with reward 4. With gamma 0.5 the
# returns to go are 2 and 2, and 4. What stands outside of the mask is not read.
NAN = np.nan
MASK = np.float32([[1, 1, 0, 1, 1], [0, 1, 0, 0, 0]])
TURNS = np.int32([[0, 0, 9, 1, 1], [5, 0, -1, -1, -1]])
REWARDS = np.float32([[0, 1, NAN, 0, 2], [NAN, 4, NAN, 9, 9]])
VALUES = np.float32([[0.5, 9, NAN, 1, 9], [NAN, 2, NAN, 9, 9]])
KEYS = np.int32([[7, 3, 3, 8, 3], [3, 7, 3, 3, 3]])  # both first turns begin in state 7
GROUPS = np.int32([3, 3])


def on_tokens(first, second, other):
    return np.float32([[first, first, 0, second, second], [0, other, 0, 0, 0]])


def test_turn_baseline_by_hand(checked):
    """2 - 4, then 2 - 0 because the other sample has ended, and 4 - 2."""
    fn = partial(turn_advantages.turn_baseline, gamma=0.5)
    found, returns = compiled(checked(fn), REWARDS, MASK, GROUPS, TURNS)
    np.testing.assert_allclose(found, on_tokens(-2, 2, 2), atol=1e-6)
    np.testing.assert_allclose(returns, on_tokens(2, 2, 4), atol=1e-6)


def test_discounted_turns_by_hand(checked):
    """The mean of 2, 2 and 4 is 8 / 3, and their std sqrt(4 / 3)."""
    fn = partial(turn_advantages.discounted_turns, gamma=0.5)
    found, returns = compiled(checked(fn), REWARDS, MASK, GROUPS, TURNS)
    std = np.sqrt(4 / 3)
    np.testing.assert_allclose(found, on_tokens(*np.array([-2, -2, 4]) / 3 / std), rtol=1e-5)
    np.testing.assert_allclose(returns, on_tokens(2, 2, 4), atol=1e-6)
    plain = partial(fn, norm_adv_by_std=False)
    found, _ = compiled(plain, REWARDS, MASK, GROUPS, TURNS)
    np.testing.assert_allclose(found, on_tokens(-2 / 3, -2 / 3, 4 / 3), atol=1e-6)


def test_mt_grpo_by_hand(checked):
    """Turns 1 and 2, 3 and 0, 4: outcomes 2, 0, 4 have the mean 2, and 1 and 3 are first turns."""
    mask = np.float32([[1, 1, 0, 1], [1, 0, 1, 1], [1, 1, 0, 0]])
    turns = np.int32([[0, 0, 9, 1], [0, 9, 1, 1], [0, 0, 5, 5]])
    rewards = np.float32([[0, 1, NAN, 2], [3, NAN, 0, 0], [1, 3, 9, NAN]])
    arrays = rewards, mask, np.int32([3, 3, 3]), turns
    fn = partial(turn_advantages.mt_grpo, turn_weight=0.5, norm_adv_by_std=False)
    found, _ = compiled(checked(fn), *arrays)
    expected = np.float32([[-0.5, -0.5, 0, 0], [-2 + 0.5, 0, -2, -2], [2, 2, 0, 0]])
    np.testing.assert_allclose(found, expected, atol=1e-6)
    found, _ = compiled(turn_advantages.mt_grpo, *arrays)  # stds 2 and sqrt(2)
    half = np.sqrt(0.5)
    expected = np.float32([[-half, -half, 0, 0], [-1 + half, 0, -1, -1], [1, 1, 0, 0]])
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_gigpo_by_hand(checked):
    """Responses have 3 and 4, so -0.5 and 0.5. In state 7 G is 2 and 4, so -1 and 1; 8 is alone."""
    fn = partial(turn_advantages.gigpo, gamma=0.5, step_weight=0.5, norm_adv_by_std=False)
    found, _ = compiled(checked(fn), REWARDS, MASK, GROUPS, TURNS, KEYS)
    np.testing.assert_allclose(found, on_tokens(-1, -0.5, 1), atol=1e-6)
    by_std = partial(turn_advantages.gigpo, gamma=0.5)  # stds sqrt(0.5) and sqrt(2)
    found, _ = compiled(by_std, REWARDS, MASK, GROUPS, TURNS, KEYS)
    half = np.sqrt(0.5)
    np.testing.assert_allclose(found, on_tokens(-2 * half, -half, 2 * half), rtol=1e-5)


def test_turn_gae_by_hand(checked):
    """delta: 1 + 0.5 x 1 - 0.5 = 1 and 2 - 1 = 1; A: 1 + 0.25 x 1 and 1. The other: 4 - 2."""
    fn = partial(turn_advantages.turn_gae, gamma=0.5, lam=0.5)
    found, returns = compiled(checked(fn), REWARDS, VALUES, MASK, TURNS)
    raw = on_tokens(1.25, 1, 2)
    chosen = raw[MASK > 0]
    whitened = np.where(MASK > 0, (raw - chosen.mean()) / chosen.std(ddof=1), 0)
    np.testing.assert_allclose(found, whitened, atol=1e-5)
    np.testing.assert_allclose(returns, on_tokens(1.75, 2, 4), atol=1e-6)


# ------------------------------------------------------------------------- one turn, one token

ROWS, LENGTH = 6, 7
RNG = np.random.default_rng(0)
FIELDS = {
    "rewards": RNG.normal(size=(ROWS, LENGTH)),
    "values": RNG.normal(size=(ROWS, LENGTH)),
    "mask": RNG.random((ROWS, LENGTH)) < 0.6,
}
FIELDS = {name: x.astype(np.float32) for name, x in FIELDS.items()}
SIX_GROUPS = np.int32([1, 4, 1, 4, 4, 1])


def test_a_turn_a_token_is_gae():
    turns = np.int32(np.cumsum(FIELDS["mask"], axis=1) - 1)
    how = {"gamma": 0.9, "lam": 0.8}
    arrays = FIELDS["rewards"], FIELDS["values"], FIELDS["mask"]
    expected = compiled(advantages.gae, *arrays, **how)
    for found, x in zip(
        compiled(turn_advantages.turn_gae, *arrays, turns, **how), expected, strict=True
    ):
        np.testing.assert_allclose(found, x, rtol=2e-5, atol=2e-6)


def test_one_turn_a_response_is_rloo_and_grpo():
    arrays = FIELDS["rewards"], FIELDS["mask"], SIX_GROUPS
    turns = np.zeros((ROWS, LENGTH), np.int32)
    rloo, grpo = (compiled(fn, *arrays)[0] for fn in (group_advantages.rloo, group_advantages.grpo))
    alone = np.arange(ROWS * LENGTH, dtype=np.int32).reshape(ROWS, LENGTH)
    found = {
        "rloo": compiled(turn_advantages.turn_baseline, *arrays, turns)[0],
        "grpo": compiled(turn_advantages.discounted_turns, *arrays, turns)[0],
        "states seen once": compiled(turn_advantages.gigpo, *arrays, turns, alone)[0],
        "the outcome alone": compiled(turn_advantages.mt_grpo, *arrays, turns)[0],
    }
    np.testing.assert_allclose(found["rloo"], rloo, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found["grpo"], grpo, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found["states seen once"], grpo, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found["the outcome alone"], grpo, rtol=1e-5, atol=1e-6)


def test_gigpo_against_a_loop():
    """Many turns, few states, two prompts: sums over a dict of lists, in float64."""
    rng = np.random.default_rng(3)
    rows, length = 8, 12
    mask = (rng.random((rows, length)) < 0.8).astype(np.float32)
    mask[5] = 0  # a response without a token has no turn
    turns = np.int32(np.maximum(np.cumsum(mask, axis=1) - 1, 0) // 2)
    keys = rng.integers(0, 3, (rows, length)).astype(np.int32)
    rewards = rng.integers(0, 3, (rows, length)).astype(np.float32)
    groups = np.int32([0, 1, 0, 1, 0, 1, 0, 1])
    states: dict[tuple[int, int], list[float]] = {}
    entries = []
    for i in range(rows):
        later, of_row = 0.0, []
        for t in range(int(turns[i][mask[i] > 0].max(initial=-1)), -1, -1):
            at = np.flatnonzero((turns[i] == t) & (mask[i] > 0))
            later = float(rewards[i, at].sum()) + 0.9 * later
            of_row.append((at, (int(groups[i]), int(keys[i, at[0]])), later))
        entries.append(of_row)
        for _, state, value in of_row:
            states.setdefault(state, []).append(value)
    expected = np.zeros((rows, length))
    for i, of_row in enumerate(entries):
        for at, state, value in of_row:
            among = np.array(states[state])
            if among.size > 1:
                expected[i, at] = (value - among.mean()) / (among.std(ddof=1) + 1e-6)
    fn = partial(turn_advantages.gigpo, gamma=0.9, step_weight=2.0)
    arrays = rewards, mask, groups, turns, keys
    outcome, _ = compiled(group_advantages.grpo, *arrays[:3])
    found, _ = compiled(fn, *arrays)
    np.testing.assert_allclose(found - outcome, 2 * expected, rtol=1e-4, atol=1e-5)


def test_equal_returns_give_exactly_nothing():
    rewards, turns = np.float32([[0.7], [0.7], [0.7]]), np.zeros((3, 1), np.int32)
    arrays = rewards, np.ones_like(rewards), np.zeros(3, np.int32), turns
    for fn in (turn_advantages.turn_baseline, turn_advantages.discounted_turns):
        np.testing.assert_array_equal(compiled(fn, *arrays)[0], 0.0)
    np.testing.assert_array_equal(compiled(turn_advantages.gigpo, *arrays, turns)[0], 0.0)


# ------------------------------------------------------------------------- a bandit

GO = 1 / (1 + np.exp(-0.3))  # probability of another round, at most two; each pays 1
PLAYS = {(0,): 1 - GO, (1, 0): GO * (1 - GO), (1, 1): GO * GO}
GROUP = 4


def gradient(advantages_of):
    """Mean and variance of a group's policy gradient, over all 81 groups of four plays."""
    groups = list(itertools.product(PLAYS, repeat=GROUP))
    chances = np.array([np.prod([PLAYS[play] for play in group]) for group in groups])
    taken = np.array([[[*play, -1][:2] for play in group] for group in groups])
    mask, rewards = taken >= 0, (taken == 1).astype(np.float32)
    credit = advantages_of(rewards, mask.astype(np.float32))
    scores = np.where(taken == 1, 1 - GO, -GO) * mask
    estimates = (credit * scores).sum(axis=2).mean(axis=1)
    mean = (chances * estimates).sum()
    return mean, (chances * np.square(estimates - mean)).sum()


def by_ours(estimator, *turns):
    def of_groups(rewards, mask):
        one = lambda r, m: estimator(r, m, jnp.zeros(GROUP, jnp.int32), *turns)[0]  # noqa: E731
        return np.asarray(jax.jit(jax.vmap(one))(jnp.asarray(rewards), jnp.asarray(mask)))

    return of_groups


def test_the_baseline_of_turns_is_unbiased_where_the_policy_decides_when_to_stop():
    exact = GO * (1 - GO) * (1 + 2 * GO)
    assert exact == pytest.approx(0.525, abs=5e-4)
    turns = jnp.tile(jnp.arange(2, dtype=jnp.int32), (GROUP, 1))
    mean, variance = gradient(by_ours(turn_advantages.turn_baseline, turns))
    assert mean == pytest.approx(exact, rel=1e-5) and variance == pytest.approx(0.045, abs=5e-4)
    mean, variance = gradient(by_ours(group_advantages.rloo))
    assert mean == pytest.approx(exact, rel=1e-5) and variance == pytest.approx(0.078, abs=5e-4)


def test_the_mean_of_those_who_took_the_turn_takes_the_gradient_away():
    """Each of them got 1, so none is better than the others: this is not what we do."""

    def naive(rewards, mask):
        took = rewards.sum(axis=1, keepdims=True)
        return (rewards - rewards.sum(axis=1, keepdims=True) / np.maximum(took, 1)) * rewards

    assert gradient(naive)[0] == pytest.approx(0, abs=1e-6)
