"""Estimators over groups and variants of REINFORCE against arrays by hand, and properties."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled import compiled

from jaxrl_llm.algorithms import advantages, group_advantages
from jaxrl_llm.algorithms.fields import field_names
from jaxrl_llm.algorithms.group_advantages import GROUP_STD_EPS
from jaxrl_llm.algorithms.sample_masks import without_left_out

# Two groups, 4 with three samples and 9 with two; the third sample of group 4 is two tokens long.
REWARDS = np.array([[0, 1.0], [0, 0], [0.5, 0], [0, 0.2], [0, 0.8]], np.float32)
MASK = np.array([[1, 1], [1, 1], [1, 0], [1, 1], [1, 1]], np.float32)
GROUPS = np.array([4, 4, 4, 9, 9], np.int32)


def on_tokens(x, mask=MASK):
    return np.array(x)[:, None] * mask


def whiten(x, mask=MASK):
    chosen = x[mask > 0]
    return np.where(mask > 0, (x - chosen.mean()) / np.sqrt(chosen.var(ddof=1) + 1e-8), 0.0)


def test_rloo_by_hand(checked):
    # the others of group 4 have means 0.25, 0.75, 0.5; of group 9 0.8 and 0.2
    found, returns = compiled(checked(group_advantages.rloo), REWARDS, MASK, GROUPS)
    np.testing.assert_allclose(found, on_tokens([0.75, -0.75, 0, -0.6, 0.6]), atol=1e-6)
    np.testing.assert_array_equal(found, returns)


def test_pass_at_k_by_hand(checked):
    arrays = REWARDS, MASK, GROUPS
    plain, _ = compiled(checked(group_advantages.grpo_passk), *arrays, norm_adv_by_std=False)
    np.testing.assert_allclose(plain, on_tokens([0.5, 0, 0, 0, 0.6]), atol=1e-6)
    by_std, _ = compiled(group_advantages.grpo_passk, *arrays)
    # The deviation of 1, 0, 0.5 is 0.5; of 0.2, 0.8 it is 0.424.
    np.testing.assert_allclose(by_std, on_tokens([1, 0, 0, 0, 0.6 / 0.424264]), rtol=1e-4)
    tie = np.float32([[1.0], [1.0], [0.0]])
    one_group = np.ones_like(tie), np.zeros(3, np.int32)
    found, _ = compiled(group_advantages.grpo_passk, tie, *one_group)
    np.testing.assert_array_equal(found, 0.0)


def test_reinforce_plus_plus_baseline_by_hand(checked):
    fn = checked(group_advantages.reinforce_plus_plus_baseline)
    found, _ = compiled(fn, REWARDS, MASK, GROUPS)
    np.testing.assert_allclose(found, whiten(on_tokens([0.5, -0.5, 0, -0.3, 0.3])), atol=1e-5)


# The rewards with 2 more in group 9: deviations are 0.5, -0.5, 0, -0.3, 0.3 as before. The std of
# all rewards is sqrt(5.48 / 4), of all deviations sqrt(0.68 / 4). Without the first sample the
# deviations are -0.25, 0.25, -0.3, 0.3, and the stds sqrt(5.3675 / 3) and sqrt(0.305 / 3).
@pytest.mark.parametrize(
    ("std_of", "std", "left"), [("batch", 1.17047, 1.337598), ("advantages", 0.412311, 0.318852)]
)
def test_grpo_by_the_std_of_the_batch_by_hand(checked, std_of, std, left):
    fn = partial(group_advantages.grpo, std_of=std_of)
    rewards = REWARDS + np.float32([[0, 0], [0, 0], [0, 0], [2, 0], [0, 2]])
    advantages, _ = compiled(checked(fn), rewards, MASK, GROUPS)
    deviations = np.array([0.5, -0.5, 0, -0.3, 0.3])
    np.testing.assert_allclose(advantages, on_tokens(deviations / std), rtol=2e-5, atol=1e-6)
    fields = {"mask": jnp.array(MASK), "group_ids": jnp.array(GROUPS)}
    kept = without_left_out(fields, jnp.float32([0, 1, 1, 1, 1]), compares=True)
    failed = rewards + np.float32([[1e6, 0], [0, 0], [0, 0], [0, 0], [0, 0]])
    advantages, _ = compiled(fn, failed, kept["mask"], kept["group_ids"])
    deviations = np.array([0, -0.25, 0.25, -0.3, 0.3])
    np.testing.assert_allclose(advantages, on_tokens(deviations / left), rtol=2e-5, atol=1e-6)


def test_opo_by_hand(checked):
    # group 4: lengths 2, 2, 1: (2 * 1 + 0 + 1 * 0.5) / 5 = 0.5; group 9: equal lengths, 0.5
    found, _ = compiled(checked(group_advantages.opo), REWARDS, MASK, GROUPS)
    np.testing.assert_allclose(found, on_tokens([0.5, -0.5, 0, -0.3, 0.3]), atol=1e-6)
    # group 4 with lengths 2, 2, 1 and rewards 1, 1, 0: (2 + 2) / 5 = 0.8
    rewards = np.float32([[0, 1.0], [0, 1.0], [0, 9.0]])
    found, _ = compiled(group_advantages.opo, rewards, MASK[:3], np.zeros(3, np.int32))
    np.testing.assert_allclose(found, on_tokens([0.2, 0.2, -0.8], MASK[:3]), atol=1e-6)


def test_gpg_by_hand(checked):
    # 4 of 5 samples got something: alpha = 5 / 4
    found, _ = compiled(checked(group_advantages.gpg), REWARDS, MASK, GROUPS, f_norm=2.0)
    expected = 1.25 * np.array([0.5, -0.5, 0, -0.3, 0.3]) / 2
    np.testing.assert_allclose(found, on_tokens(expected), atol=1e-6)


def test_gdpo_by_hand(checked):
    # The second part says nothing of the last sample of group 4, and is a hundred times as large.
    parts = np.array([[1, 100], [0, 300], [0.5, np.nan], [0, 0], [1, 0]], np.float32)
    arrays = parts, MASK, GROUPS
    fn = partial(group_advantages.gdpo, reward_weights=(1.0, 0.5))
    found, _ = compiled(checked(fn), *arrays)
    first = np.array([1, -1, 0, -0.7071068, 0.7071068])
    second = np.array([-0.7071068, 0.7071068, 0, 0, 0])  # equal rewards give 0
    np.testing.assert_allclose(found, whiten(on_tokens(first + 0.5 * second)), atol=1e-4)
    with pytest.raises(ValueError, match="1 reward_weights for 2 reward functions"):
        group_advantages.gdpo(*arrays, reward_weights=(1.0,))


def test_reinforce_plus_plus_by_hand(checked):
    # gamma 0.5; the masked middle token of row 1 is stepped over without discount
    rewards = np.float32([[0.0, 1.0, 2.0], [0.0, 9.0, 1.0]])
    mask = np.array([[1, 1, 1], [1, 0, 1]], np.float32)
    fn = partial(advantages.reinforce_plus_plus, gamma=0.5)
    found, returns = compiled(checked(fn), rewards, mask)
    expected = np.array([[1.0, 2.0, 2.0], [0.5, 0.0, 1.0]])
    np.testing.assert_allclose(returns, expected, atol=1e-6)
    np.testing.assert_allclose(found, whiten(expected, mask), atol=1e-5)


def test_remax_by_hand(checked):
    rewards = np.float32([[-0.1, 1.0], [0.0, 9.0]])
    mask = np.float32([[1.0, 1.0], [1.0, 0.0]])
    remax = checked(advantages.remax)
    found, returns = compiled(remax, rewards, np.float32([0.25, 0.5]), mask)
    np.testing.assert_allclose(returns, [[0.9, 1.0], [0.0, 0.0]], atol=1e-6)
    np.testing.assert_allclose(found, [[0.65, 0.75], [-0.5, 0.0]], atol=1e-6)


def test_optimal_token_baseline_by_hand(checked):
    # w = 1 - 2 p + s:   row 0: 1 - 1 + 0.5 = 0.5, 1 - 0.5 + 0.5 = 1     W = 0.5, 1.5
    #                    row 1: 1 - 0.4 + 0.4 = 1, (masked)               W = 1
    # G: row 0: 1, 1; row 1: 0. Baseline at token 0: 0.5 / 1.5; at token 1 row 0 is alone: 0.
    rewards = np.float32([[0.0, 1.0], [0.0, 9.0]])
    mask = np.float32([[1.0, 1.0], [1.0, 0.0]])
    old = np.log(np.float32([[0.5, 0.25], [0.2, 1.0]]))
    squares = np.float32([[0.5, 0.5], [0.4, 7.0]])
    arrays = (rewards, mask, np.array([3, 3], np.int32), old, squares)
    baseline = group_advantages.optimal_token_baseline
    found, returns = compiled(checked(baseline), *arrays)
    np.testing.assert_allclose(returns, [[1, 1], [0, 0]], atol=1e-6)
    np.testing.assert_allclose(found, [[2 / 3, 1], [-1 / 3, 0]], atol=1e-5)
    tail, _ = compiled(baseline, *arrays, handle_zero_tail=False)
    np.testing.assert_allclose(tail, [[2 / 3, 0], [-1 / 3, 0]], atol=1e-5)
    # Importance weights 1, 2 | 3: w is 0.5, 4 | 9; the baseline at token 0 is 0.5 / 9.5.
    weights = np.float32([[1.0, 2.0], [3.0, 5.0]])
    fn = checked(group_advantages.corrected_optimal_token_baseline)
    found, _ = compiled(fn, *arrays, weights)
    np.testing.assert_allclose(found, [[1 - 1 / 19, 1], [-1 / 19, 0]], atol=1e-5)


GROUPED = [
    group_advantages.grpo,
    partial(group_advantages.grpo, norm_adv_by_std=False),
    group_advantages.grpo_passk,
    group_advantages.gdpo,
    group_advantages.rloo,
    group_advantages.reinforce_plus_plus_baseline,
    group_advantages.opo,
    group_advantages.gpg,
    group_advantages.optimal_token_baseline,
    group_advantages.corrected_optimal_token_baseline,
]


def name_of(fn):
    return fn.func.__name__ + "_plain" if isinstance(fn, partial) else fn.__name__


def random_fields(rows=7, length=5, seed=0):
    """A row without a token, a group of one, and groups whose samples do not stand together."""
    rng = np.random.default_rng(seed)
    lengths = np.array([5, 3, 0, 1, 4, 5, 2])
    fields = {
        "mask": (np.arange(length) < lengths[:, None]).astype(np.float32),
        "rewards": rng.normal(size=(rows, length)),
        "reward_parts": rng.normal(size=(rows, 2)),
        "old_logprobs": -rng.exponential(size=(rows, length)),
        "sum_pi_squared": rng.uniform(size=(rows, length)),
        "importance_weights": rng.uniform(0.5, 2.0, size=(rows, length)),
        "greedy_scores": rng.normal(size=rows),
        "group_ids": np.array([7, 2, 7, 5, 2, 7, 2]),
    }
    kinds = {"group_ids": np.int32}
    return {name: np.asarray(x, kinds.get(name, np.float32)) for name, x in fields.items()}


one_program = cache(jax.jit)


def call(fn, fields):
    return one_program(fn)(*(fields[name] for name in field_names(fn)))


# The token baselines are left out: theirs is a mean, whose rounding no std magnifies.
@pytest.mark.parametrize("fn", GROUPED[:-2], ids=name_of)
def test_equal_rewards_teach_nothing_at_all(fn):
    """0.7 three times has not the mean 0.7 in float32; divided by its std that would count."""
    mask = np.ones((6, 2), np.float32)
    rewards = np.zeros((6, 2), np.float32)
    rewards[:, 1] = 0.7
    fields = {
        "rewards": rewards,
        "reward_parts": rewards,
        "mask": mask,
        "group_ids": np.array([0, 0, 0, 1, 1, 1], np.int32),
    }
    np.testing.assert_array_equal(call(fn, fields)[0], 0.0)


def test_a_sample_without_others_is_compared_with_nothing():
    fields = random_fields()
    alone = 3  # group 5
    total = (fields["rewards"] * fields["mask"])[alone].sum()
    expected = {
        "grpo": total,
        "grpo_plain": total,
        "grpo_passk": 0.0,
        "rloo": total,
        "opo": total,
        "gpg": total * 7 / 6,  # one of seven samples got nothing
        "optimal_token_baseline": total,
        "corrected_optimal_token_baseline": total,
    }
    for fn in GROUPED:
        if name_of(fn) in expected:
            np.testing.assert_allclose(
                call(fn, fields)[0][alone, 0], expected[name_of(fn)], rtol=1e-5, err_msg=name_of(fn)
            )
    assert GROUP_STD_EPS == 1e-6  # verl's
