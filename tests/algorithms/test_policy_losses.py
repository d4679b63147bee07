"""PPO's policy and value losses against cases worked out by hand and finite differences."""

import jax
import jax.numpy as jnp
import numpy as np
from finite_differences import numeric_gradient

from jaxrl_llm.algorithms.policy_losses import ppo_clip
from jaxrl_llm.algorithms.value_losses import clipped_value_loss


def case(seed=0, shape=(4, 6)):
    rng = np.random.default_rng(seed)
    old = -rng.exponential(size=shape)
    logprobs = old + rng.normal(size=shape)
    advantages = rng.normal(size=shape)
    mask = (np.arange(shape[1]) < rng.integers(0, shape[1] + 1, (shape[0], 1))).astype(float)
    return tuple(jnp.array(x, jnp.float32) for x in (logprobs, old, advantages, mask))


def test_ppo_clip_by_hand(checked):
    # clip_low 0.2, clip_high 0.28, clip_c 3; a column each:
    #   ratio       1     1.5   1.5   0.5   0.5   4     1.1
    #   advantage   2     2    -2     2    -2    -2     2
    #   unclipped  -2    -3     3    -1     1     8    -2.2
    #   clipped    -2    -2.56  2.56 -1.6   1.6   2.56 -2.2
    #   loss       -2    -2.56  3    -1     1.6   6    -2.2     (6: the dual clip, 2 * 3)
    ratio = np.array([[1.0, 1.5, 1.5, 0.5, 0.5, 4.0, 1.1]])
    advantages = jnp.array([[2.0, 2.0, -2.0, 2.0, -2.0, -2.0, 2.0]])
    loss, metrics = checked(ppo_clip)(
        jnp.array(np.log(ratio), jnp.float32),
        jnp.zeros((1, 7)),
        advantages,
        jnp.ones((1, 7)),
        clip_low=0.2,
        clip_high=0.28,
        clip_c=3.0,
    )
    np.testing.assert_allclose(loss, [[-2.0, -2.56, 3.0, -1.0, 1.6, 6.0, -2.2]], rtol=1e-6)
    np.testing.assert_array_equal(metrics["actor/pg_clipfrac"], [[0, 1, 0, 0, 1, 0, 0]])
    np.testing.assert_array_equal(metrics["actor/pg_clipfrac_lower"], [[0, 0, 0, 0, 0, 1, 0]])
    np.testing.assert_allclose(metrics["actor/ppo_kl"], -np.log(ratio), atol=1e-6)


def test_log_ratio_is_clamped_and_stays_finite():
    logprobs = jnp.array([[0.0, -500.0]])
    old = jnp.array([[-500.0, 0.0]])
    loss, metrics = ppo_clip(logprobs, old, jnp.array([[-1.0, 1.0]]), jnp.ones((1, 2)), clip_c=1e12)
    np.testing.assert_allclose(loss, [[np.exp(20.0), -np.exp(-20.0)]], rtol=1e-6)
    np.testing.assert_array_equal(metrics["actor/ppo_kl"], [[-20.0, 20.0]])


def test_value_loss_by_hand(checked):
    # old values 0, cliprange 0.5; a column each:
    #   new        0.2    2      2     -1
    #   return     1      1      3      0.2
    #   unclipped  0.64   1      1      1.44
    #   clipped    0.64   0.25   6.25   0.49
    new = jnp.array([[0.2, 2.0, 2.0, -1.0, 5.0]])
    returns = jnp.array([[1.0, 1.0, 3.0, 0.2, 7.0]])
    mask = jnp.array([[1.0, 1.0, 1.0, 1.0, 0.0]])
    loss, metrics = checked(clipped_value_loss)(
        new, jnp.zeros((1, 5)), returns, mask, cliprange=0.5
    )
    np.testing.assert_allclose(loss, [[0.32, 0.5, 3.125, 0.72, 0.0]], rtol=1e-6)
    np.testing.assert_array_equal(metrics["critic/vf_clipfrac"], [[0, 0, 1, 0, 0]])


def test_value_loss_gradient_against_finite_differences():
    new, values, returns, mask = case(seed=3)
    n, v, r, m = (np.array(x, np.float64) for x in (new, values, returns, mask))

    def numpy_loss(x):
        clipped = np.clip(x, v - 0.5, v + 0.5)
        return 0.5 * (m * np.maximum((x - r) ** 2, (clipped - r) ** 2)).sum()

    def loss(x):
        return clipped_value_loss(x, values, returns, mask)[0].sum()

    np.testing.assert_allclose(loss(new), numpy_loss(n), rtol=1e-5)
    np.testing.assert_allclose(jax.grad(loss)(new), numeric_gradient(numpy_loss, n), atol=1e-4)
