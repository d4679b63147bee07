"""DeepSeek-V3.2's stabilisers by hand: bad responses that the policy has left, an unbiased KL."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import config as c
from jaxrl_llm.algorithms.build import build_online
from jaxrl_llm.algorithms.fields import field_names
from jaxrl_llm.algorithms.importance import off_policy_masked
from jaxrl_llm.algorithms.kl import kl_k3, masked_kl, unbiased
from jaxrl_llm.algorithms.policy_losses import policy_gradient

MASK = jnp.array([[1.0, 1.0, 0.0], [1.0, 1.0, 1.0], [1.0, 0.0, 1.0], [0.0, 0.0, 0.0]])
ROLLOUT = jnp.full((4, 3), -1.0)
# Mean gaps of the sampled tokens: 0.4, 0.3, 0.5, and none.
LOGPROBS = jnp.array([[-1.8, -1.0, 9.0], [-1.3, -1.6, -1.0], [-2.0, 7.0, -1.0], [jnp.nan] * 3])
ADVANTAGES = jnp.array([[-1.0, -1.0, -1.0], [-1.0, -1.0, -1.0], [-1.0, -1.0, 2.0], [-1.0] * 3])


def test_bad_responses_that_the_policy_has_left_lose_their_loss():
    """Row 0 is left and bad, row 1 is near; in row 2 the good token keeps its loss."""
    fn = off_policy_masked(policy_gradient, most=0.35)
    known = {
        "logprobs": LOGPROBS,
        "rollout_logprobs": ROLLOUT,
        "advantages": ADVANTAGES,
        "mask": MASK,
    }

    def loss(logprobs):
        values, metrics = fn(*((known | {"logprobs": logprobs})[n] for n in field_names(fn)))
        return values.sum(), (values, metrics["actor/off_policy_masked"])

    gradient, (values, masked) = jax.grad(loss, has_aux=True)(LOGPROBS)
    np.testing.assert_allclose(
        values, [[0, 0, 0], [-1.3, -1.6, -1.0], [0, 0, 2.0], [0, 0, 0]], atol=1e-6
    )
    np.testing.assert_array_equal(masked, [[1, 1, 0], [0, 0, 0], [1, 0, 0], [0, 0, 0]])
    # d loss / d logprob = -A on tokens that keep their loss.
    np.testing.assert_allclose(gradient, [[0, 0, 0], [1, 1, 1], [0, 0, -2], [0, 0, 0]])


def test_the_weighted_kl_and_its_gradient_are_those_of_the_whole_distribution():
    """Over all tokens of a vocabulary, each with its probability under the old policy."""
    rng = np.random.default_rng(0)
    logits, old, reference = (jnp.asarray(x, jnp.float32) for x in rng.normal(size=(3, 1, 7)))

    def estimated(logits, estimator):
        names = ("logprobs", "old_logprobs", "reference_logprobs")
        policies = map(jax.nn.log_softmax, (logits, old, reference))
        fields = dict(zip(names, policies, strict=True))
        kl = masked_kl(estimator, fields, jnp.ones((1, 7)))
        return (jnp.exp(fields["old_logprobs"]) * kl).sum()

    def exact(logits):
        p, q = jax.nn.log_softmax(logits), jax.nn.log_softmax(reference)
        return (jnp.exp(p) * (p - q)).sum()

    value, gradient = jax.value_and_grad(estimated)(logits, unbiased(kl_k3))
    expected, expected_gradient = jax.value_and_grad(exact)(logits)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    np.testing.assert_allclose(gradient, expected_gradient, atol=1e-6)
    plain = jax.grad(estimated)(logits, kl_k3)
    assert np.abs(plain - expected_gradient).max() > 0.05  # so this test could fail


@pytest.mark.parametrize("bypass", [False, True])
def test_both_are_settings_of_an_algorithm(bypass):
    algorithm = build_online(c.GRPO(off_policy_mask=0.1, kl_loss_unbiased=True, bypass_mode=bypass))
    assert "rollout_logprobs" in field_names(algorithm.policy_loss)
    assert algorithm.kl_loss is not None
    old = "rollout_logprobs" if bypass else "old_logprobs"
    assert field_names(algorithm.kl_loss) == ("logprobs", "reference_logprobs", old)
    plain = build_online(c.GRPO())
    assert plain.kl_loss is kl_k3 and "rollout_logprobs" not in field_names(plain.policy_loss)
