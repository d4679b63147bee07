"""The reward model's loss by hand and against finite differences."""

import jax
import jax.numpy as jnp
import numpy as np
from finite_differences import numeric_gradient

from jaxrl_llm.algorithms.preference_losses import bradley_terry

CHOSEN = np.array([2.0, 0.5, -1.0, 0.3])
REJECTED = np.array([1.0, 1.0, -1.0, 0.1])
MARGIN = np.array([0.0, 0.0, 0.0, 0.5])


def arrays():
    return tuple(jnp.array(x, jnp.float32) for x in (CHOSEN, REJECTED, MARGIN))


def test_by_hand(checked):
    loss, metrics = checked(bradley_terry)(*arrays(), center=0.1)
    gaps = np.array([1.0, -0.5, 0.0, -0.3])  # chosen - rejected - margin
    expected = np.log1p(np.exp(-gaps)) + 0.1 * np.array([9.0, 2.25, 4.0, 0.16])
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    np.testing.assert_array_equal(metrics["accuracy"], [1, 0, 0, 1])
    np.testing.assert_allclose(metrics["margin"], [1, -0.5, 0, 0.2], atol=1e-6)
    np.testing.assert_allclose(metrics["mean_reward"], [1.5, 0.75, -1, 0.2], atol=1e-6)


def test_equal_scores_cost_log_two_and_large_gaps_stay_finite():
    zero = jnp.zeros(1)
    np.testing.assert_allclose(bradley_terry(zero, zero, zero)[0], np.log(2), rtol=1e-6)
    far = jnp.array([1e4])
    assert bradley_terry(far, zero, zero)[0] == 0.0
    np.testing.assert_allclose(bradley_terry(zero, far, zero)[0], 1e4)


def test_gradient_against_finite_differences():
    def numpy_loss(scores):
        chosen, rejected = scores
        gap = chosen - rejected - MARGIN
        return (np.log1p(np.exp(-gap)) + 0.1 * (chosen + rejected) ** 2).sum()

    chosen, rejected, margin = arrays()

    def loss(scores):
        return bradley_terry(scores[0], scores[1], margin, center=0.1)[0].sum()

    gradient = jax.grad(loss)(jnp.stack([chosen, rejected]))
    expected = numeric_gradient(numpy_loss, np.stack([CHOSEN, REJECTED]))
    np.testing.assert_allclose(gradient, expected, atol=1e-4)
