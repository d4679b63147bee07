"""KL estimators, the KL in the reward, and the controllers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.algorithms.kl import (
    AdaptiveKL,
    FixedKL,
    batch_kl,
    kl_abs,
    kl_in_reward,
    kl_k1,
    kl_k2,
    kl_k3,
    kl_k3_unclamped,
    make_kl_controller,
    straight_through,
)

LOGPROBS = np.array([[-1.0, -2.0, -0.5]])
REFERENCE = np.array([[-1.5, -1.0, -0.5]])  # differences 0.5, -1, 0
VALUES = {
    kl_k1: [[0.5, -1.0, 0.0]],
    kl_abs: [[0.5, 1.0, 0.0]],
    kl_k2: [[0.125, 0.5, 0.0]],
    kl_k3: [[np.exp(-0.5) + 0.5 - 1, np.exp(1.0) - 1 - 1, 0.0]],
    kl_k3_unclamped: [[np.exp(-0.5) + 0.5 - 1, np.exp(1.0) - 1 - 1, 0.0]],
}
GRADIENTS = {  # with respect to logprobs; abs has 0 at 0, as in torch
    kl_k1: [[1.0, 1.0, 1.0]],
    kl_abs: [[1.0, -1.0, 0.0]],
    kl_k2: [[0.5, -1.0, 0.0]],
    kl_k3: [[1 - np.exp(-0.5), 1 - np.exp(1.0), 0.0]],
    kl_k3_unclamped: [[1 - np.exp(-0.5), 1 - np.exp(1.0), 0.0]],
}


def arrays():
    return jnp.array(LOGPROBS, jnp.float32), jnp.array(REFERENCE, jnp.float32)


@pytest.mark.parametrize("estimator", list(VALUES))
def test_values_and_gradients_by_hand(estimator, checked):
    logprobs, reference = arrays()
    np.testing.assert_allclose(
        checked(estimator)(logprobs, reference), VALUES[estimator], atol=1e-6
    )
    gradient = jax.grad(lambda x: estimator(x, reference).sum())(logprobs)
    np.testing.assert_allclose(gradient, GRADIENTS[estimator], atol=1e-6)


@pytest.mark.parametrize("estimator", list(VALUES))
def test_straight_through_has_the_value_of_one_and_the_gradient_of_k2(estimator):
    logprobs, reference = arrays()
    combined = straight_through(estimator)
    np.testing.assert_array_equal(combined(logprobs, reference), estimator(logprobs, reference))
    gradient = jax.grad(lambda x: combined(x, reference).sum())(logprobs)
    np.testing.assert_allclose(gradient, GRADIENTS[kl_k2], atol=1e-6)


def test_k3_is_clamped_and_finite():
    logprobs, reference = jnp.array([[-900.0, 0.0]]), jnp.array([[0.0, -900.0]])
    np.testing.assert_array_equal(kl_k3(logprobs, reference), [[10.0, 10.0]])
    assert np.isfinite(jax.grad(lambda x: kl_k3(x, reference).sum())(logprobs)).all()


def test_unclamped_k3_holds_on_to_a_token_that_the_policy_has_dropped():
    logprobs, reference = jnp.array([[-4.0, -9.0]]), jnp.array([[-1.0, -0.5]])
    d = np.array([[3.0, 8.5]])
    np.testing.assert_allclose(kl_k3_unclamped(logprobs, reference), np.exp(d) - d - 1, rtol=1e-6)
    gradient = jax.grad(lambda x: kl_k3_unclamped(x, reference).sum())(logprobs)
    np.testing.assert_allclose(gradient, 1 - np.exp(d), rtol=1e-6)
    assert (jax.grad(lambda x: kl_k3(x, reference).sum())(logprobs) == 0).all()


def test_estimators_agree_in_expectation_with_the_exact_kl():
    p = np.array([0.5, 0.3, 0.2])
    q = np.array([0.4, 0.4, 0.2])
    exact = (p * np.log(p / q)).sum()
    log_p, log_q = jnp.log(jnp.array([p])), jnp.log(jnp.array([q]))
    for estimator in (kl_k1, kl_k3, kl_k3_unclamped):
        np.testing.assert_allclose((p * np.array(estimator(log_p, log_q))).sum(), exact, atol=1e-6)


def test_kl_in_reward_by_hand(checked):
    mask = jnp.array([[1.0, 1.0, 0.0], [1.0, 1.0, 1.0], [0.0, 0.0, 0.0]])
    old = jnp.array([[-1.0, -2.0, jnp.nan], [-1.0, -1.0, -1.0], [jnp.nan] * 3])
    reference = jnp.array([[-1.5, -1.0, -3.0], [-1.0, -2.0, -1.0], [-1.0] * 3])
    scores = jnp.array([1.0, 2.0, 3.0])
    rewards, kl = checked(kl_in_reward)(scores, mask, old, reference, coef=jnp.float32(0.1))
    np.testing.assert_allclose(kl, [[0.5, -1.0, 0.0], [0.0, 1.0, 0.0], [0.0] * 3])
    expected = [[-0.05, 1.1, 0.0], [0.0, -0.1, 2.0], [0.0] * 3]
    np.testing.assert_allclose(rewards, expected, atol=1e-6)
    # mean over the two sequences with tokens of -0.25 and 1/3
    np.testing.assert_allclose(checked(batch_kl)(kl, mask), (-0.25 + 1 / 3) / 2, atol=1e-6)


def test_fixed_controller_stays():
    controller = FixedKL(0.01)
    state = controller.init()
    assert state.dtype == jnp.float32
    assert controller.update(state, jnp.float32(5.0), 64) == state


def test_adaptive_controller_by_hand():
    controller = AdaptiveKL(0.5, horizon=100.0, target=0.1)
    state = controller.init()
    # far over: the error is clipped to 0.2, times 50 / 100
    np.testing.assert_allclose(controller.update(state, jnp.float32(9.0), 50), 0.55, rtol=1e-6)
    # far under: -0.2
    np.testing.assert_allclose(controller.update(state, jnp.float32(0.0), 50), 0.45, rtol=1e-6)
    # 10 % over
    np.testing.assert_allclose(controller.update(state, jnp.float32(0.11), 50), 0.525, rtol=1e-5)
    assert controller.update(state, jnp.float32(0.1), 50) == state
    # far over, and 30 of the 50 samples are masked: 0.2 times 20 / 100
    learned = jnp.float32(0.4)
    np.testing.assert_allclose(
        controller.update(state, jnp.float32(9.0), 50, learned), 0.52, rtol=1e-6
    )
    # 500 samples far under the target would make it 0.5 * (1 - 0.2 * 5) = 0.
    np.testing.assert_allclose(controller.update(state, jnp.float32(0.0), 499), 0.001, rtol=1e-3)
    with pytest.raises(ValueError, match="a horizon above 100"):
        controller.update(state, jnp.float32(0.0), 500)


def test_controllers_by_name():
    assert make_kl_controller("fixed", coef=0.1, horizon=1.0, target=1.0) == FixedKL(0.1)
    adaptive = make_kl_controller("adaptive", coef=0.1, horizon=5.0, target=2.0)
    assert adaptive == AdaptiveKL(0.1, horizon=5.0, target=2.0)
