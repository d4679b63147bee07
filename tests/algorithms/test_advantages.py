"""Estimators against arrays written by hand and against the same in float64, one step at a time."""

import jax.numpy as jnp
import numpy as np
import pytest
from compiled import compiled

from jaxrl_llm.algorithms.advantages import gae, score_to_rewards
from jaxrl_llm.algorithms.group_advantages import grpo


def loop_gae(rewards, values, mask, gamma, lam):
    """The recursion as verl writes it, in float64: (advantages before whitening, returns)."""
    advantages = np.zeros_like(values, dtype=np.float64)
    for b in range(values.shape[0]):
        next_value = last = 0.0
        for t in reversed(range(values.shape[1])):
            if mask[b, t]:
                delta = rewards[b, t] + gamma * next_value - values[b, t]
                last = delta + gamma * lam * last
                next_value = values[b, t]
                advantages[b, t] = last
    return advantages, np.where(mask > 0, advantages + values, 0.0)


def whiten(x, mask):
    selected = x[mask > 0]
    scaled = (x - selected.mean()) / np.sqrt(selected.var(ddof=1) + 1e-8)
    return np.where(mask > 0, scaled, 0.0)


def random_case(seed=0, rows=5, length=9):
    rng = np.random.default_rng(seed)
    rewards, values = rng.normal(size=(2, rows, length)).astype(np.float32)
    lengths = rng.integers(0, length + 1, rows)
    mask = (np.arange(length) < lengths[:, None]).astype(np.float32)
    return rewards, values, mask


def test_score_goes_to_the_last_token_of_the_mask(checked):
    mask = np.array([[1, 1, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0], [1, 0, 1, 0], [1, 1, 1, 1]])
    scores = np.array([2.0, -1.0, 5.0, 0.5, 3.0], np.float32)
    rewards = compiled(checked(score_to_rewards), scores, mask.astype(np.float32))
    expected = [[0, 0, 2, 0], [-1, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0.5, 0], [0, 0, 0, 3]]
    np.testing.assert_array_equal(rewards, np.array(expected, np.float32))


def test_gae_by_hand(checked):
    # gamma 0.5, lam 0.5, so the trace decays by 0.25.
    # row 0: delta_1 = 1 - 0.8 = 0.2;  delta_0 = 0.5 * 0.8 - 0.6 = -0.2
    #        A_1 = 0.2;  A_0 = -0.2 + 0.25 * 0.2 = -0.15;  returns 0.45, 1.0
    # row 1, one token: A_0 = 0 - 0.4 = -0.4;  return 0
    rewards = jnp.array([[0.0, 1.0, 9.0], [0.0, 9.0, 9.0]])
    values = jnp.array([[0.6, 0.8, 9.0], [0.4, 9.0, 9.0]])
    mask = jnp.array([[1.0, 1.0, 0.0], [1.0, 0.0, 0.0]])
    advantages, returns = compiled(checked(gae), rewards, values, mask, gamma=0.5, lam=0.5)
    np.testing.assert_allclose(returns, [[0.45, 1.0, 0.0], [0.0, 0.0, 0.0]], atol=1e-6)
    raw = np.array([[-0.15, 0.2, 0.0], [-0.4, 0.0, 0.0]])
    np.testing.assert_allclose(advantages, whiten(raw, np.array(mask)), atol=1e-5)


def test_observation_tokens_are_stepped_over():
    # The masked middle token carries neither discount, value nor reward: the row with it removed
    # gives the same numbers.
    with_gap = compiled(
        gae,
        jnp.array([[0.1, 7.0, 1.0]]),
        jnp.array([[0.5, 7.0, 0.25]]),
        jnp.array([[1.0, 0.0, 1.0]]),
        gamma=0.9,
        lam=0.8,
    )
    without = compiled(
        gae, jnp.array([[0.1, 1.0]]), jnp.array([[0.5, 0.25]]), jnp.ones((1, 2)), gamma=0.9, lam=0.8
    )
    for gap, plain in zip(with_gap, without, strict=True):
        np.testing.assert_allclose(gap[:, [0, 2]], plain, rtol=1e-6)
        assert gap[0, 1] == 0.0


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.99, 0.95), (1.0, 0.0), (0.0, 1.0)])
@pytest.mark.parametrize("holes", [False, True])
def test_gae_equals_the_recursion(gamma, lam, holes):
    rewards, values, mask = random_case()
    if holes:
        mask = mask * (np.random.default_rng(1).random(mask.shape) < 0.7)
    advantages, returns = compiled(
        gae,
        jnp.array(rewards),
        jnp.array(values),
        jnp.array(mask, jnp.float32),
        gamma=gamma,
        lam=lam,
    )
    raw, expected = loop_gae(rewards, values, mask, gamma, lam)
    np.testing.assert_allclose(returns, expected, atol=1e-5)
    np.testing.assert_allclose(advantages, whiten(raw, mask), atol=2e-5)


def test_defaults_give_the_monte_carlo_return():
    rewards, values, mask = random_case()
    _, returns = compiled(gae, jnp.array(rewards), jnp.array(values), jnp.array(mask))
    to_go = np.cumsum((rewards * mask)[:, ::-1], axis=1)[:, ::-1]
    np.testing.assert_allclose(returns, to_go * mask, atol=1e-5)


def test_grpo_by_hand(checked):
    # group 0: rewards 1, 0, 0.5 (two tokens of 0.25): mean 0.5, unbiased std 0.5 -> 1, -1, 0
    # group 1, alone: mean 0 and std 1 -> its own reward
    # group 2: equal rewards -> 0
    rewards = jnp.array([[0.0, 1.0], [0.0, 9.0], [0.25, 0.25], [0.7, 9.0], [3.0, 0.0], [3.0, 0.0]])
    mask = jnp.array([[1.0, 1.0], [1.0, 0.0], [1.0, 1.0], [1.0, 0.0], [1.0, 1.0], [1.0, 1.0]])
    groups = jnp.array([0, 0, 0, 1, 2, 2], jnp.int32)
    expected = np.array([[1, 1], [-1, 0], [0, 0], [0.7, 0], [0, 0], [0, 0]])
    advantages, returns = compiled(checked(grpo), rewards, mask, groups)
    np.testing.assert_allclose(advantages, expected, atol=1e-5)
    np.testing.assert_array_equal(advantages, returns)
    plain, _ = compiled(grpo, rewards, mask, groups, norm_adv_by_std=False)
    np.testing.assert_allclose(plain, expected * [[0.5], [0.5], [1], [1], [1], [1]], atol=1e-6)


@pytest.mark.parametrize("norm_adv_by_std", [True, False])
def test_grpo_equals_a_loop_over_groups_in_any_order(norm_adv_by_std):
    """Samples of a group need not stand together, and what is outside the mask is not read."""
    rng = np.random.default_rng(0)
    rewards, _, mask = random_case(rows=12)
    groups = rng.integers(0, 4, 12).astype(np.int32) * 100
    rewards = np.where(mask > 0, rewards, np.nan).astype(np.float32)
    totals = np.where(mask > 0, rewards, 0).astype(np.float64).sum(axis=1)
    expected = np.zeros((12, 9))
    for group in np.unique(groups):
        members = np.flatnonzero(groups == group)
        mean, std = 0.0, 1.0
        if len(members) > 1:
            mean, std = totals[members].mean(), totals[members].std(ddof=1) + 1e-6
        for i in members:
            expected[i] = (totals[i] - mean) / (std if norm_adv_by_std else 1.0) * mask[i]
    found, _ = compiled(grpo, rewards, mask, groups, norm_adv_by_std=norm_adv_by_std)
    np.testing.assert_allclose(found, expected, atol=1e-5)
