"""Best of n, its likelihood loss, and distillation: by hand, properties, gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled import compiled
from finite_differences import numeric_gradient

from jaxrl_llm import config as c
from jaxrl_llm.algorithms import imitation
from jaxrl_llm.algorithms.build import build_online
from jaxrl_llm.algorithms.fields import field_names
from jaxrl_llm.algorithms.kl import kl_penalty

# Two groups of three, interleaved: group 7 is rows 0, 2, 4. Sums of rewards: 1, 3, 3, 3, 2, 0; the
# last row has no token, so that its reward of 9 is padding.
REWARDS = np.float32([[0.0, 1.0], [3.0, 9.0], [1.0, 2.0], [0.0, 3.0], [0.0, 2.0], [9.0, 9.0]])
MASK = np.float32([[1.0, 1.0], [1.0, 0.0], [1.0, 1.0], [1.0, 1.0], [1.0, 1.0], [0.0, 0.0]])
GROUPS = np.int32([7, 4, 7, 4, 7, 4])
LOGPROBS = np.float32([[-0.5, -1.0], [-2.0, 99.0]])
TEACHER = np.float32([[-0.2, -3.0], [-1.5, np.nan]])
TWO = np.float32([[1.0, 1.0], [1.0, 0.0]])  # their mask


# ------------------------------------------------------------------------- best of n


def best_of_n(rewards, mask, groups, **settings):
    """The weights and returns, computed by one program."""
    return compiled(imitation.best_of_n, rewards, mask, groups, **settings)


def test_best_of_n_by_hand(checked):
    weights, returns = compiled(checked(imitation.best_of_n), REWARDS, MASK, GROUPS)
    # Rows 1 and 3 share the place in group 4: the first of them has it.
    np.testing.assert_array_equal(weights, [[0, 0], [1, 0], [1, 1], [0, 0], [0, 0], [0, 0]])
    np.testing.assert_array_equal(returns, weights)


@pytest.mark.parametrize(("threshold", "kept"), [(2.9, [1, 2]), (3.0, []), (-5.0, [1, 2])])
def test_what_does_not_pass_the_threshold_teaches_nothing(threshold, kept):
    weights, _ = best_of_n(REWARDS, MASK, GROUPS, threshold=threshold)
    assert np.flatnonzero(np.array(weights).max(axis=1)).tolist() == kept


def test_a_group_of_one_keeps_its_sample_and_an_empty_one_nothing():
    run = jax.jit(imitation.best_of_n)
    weights, _ = run(-REWARDS, MASK, np.arange(6, dtype=np.int32))
    np.testing.assert_array_equal(weights, MASK)
    nothing, _ = run(REWARDS, np.zeros_like(MASK), GROUPS)
    np.testing.assert_array_equal(nothing, np.zeros_like(MASK))


def test_kept_samples_and_their_share(checked):
    weights = np.array(best_of_n(REWARDS, MASK, GROUPS)[0])
    kept, metrics = compiled(checked(imitation.keep_chosen), weights, MASK)
    np.testing.assert_array_equal(kept, weights * MASK)
    assert float(metrics["rejection_sampling/kept_fraction"]) == pytest.approx(2 / 5)


def test_nll_is_minus_the_log_prob_where_there_is_a_token(checked):
    loss, _ = compiled(checked(imitation.nll), LOGPROBS, TWO)
    np.testing.assert_array_equal(loss, [[0.5, 1.0], [2.0, 0.0]])
    gradient = compiled(jax.grad(lambda x: imitation.nll(x, TWO)[0].sum()), LOGPROBS)
    np.testing.assert_array_equal(gradient, -TWO)


def test_rejection_sampling_needs_no_critic_no_reference_and_no_second_pass():
    algorithm = build_online(c.RejectionSampling(threshold=0.5))
    reads = {
        name
        for fn in (algorithm.advantage, algorithm.policy_loss, algorithm.rejection)
        for name in field_names(fn)
    }
    assert not reads & {"values", "reference_logprobs", "old_logprobs", "rollout_logprobs"}
    assert build_online(c.RejectionSampling(use_kl_loss=True)).kl_loss is not None


# ------------------------------------------------------------------------- distillation


def log_softmax(x):
    return x - np.log(np.exp(x).sum())


def test_teacher_advantage_by_hand(checked):
    advantages, _ = compiled(checked(imitation.teacher_advantage), LOGPROBS, TEACHER, TWO)
    np.testing.assert_allclose(advantages, [[0.3, -2.0], [0.5, 0.0]], atol=1e-6)


def test_the_policy_gradient_of_the_teachers_advantage_is_that_of_the_reverse_kl():
    """Over a whole vocabulary: sum of p (teacher - log p) grad log p = -grad KL(p || teacher)."""
    rng = np.random.default_rng(1)
    logits, teacher = rng.normal(size=5), log_softmax(rng.normal(size=5))

    def kl(logits):
        logp = logits - np.log(np.exp(logits).sum())
        return float((np.exp(logp) * (logp - teacher)).sum())

    def surrogate(logits):  # each token as often as the policy draws it
        logp = jax.nn.log_softmax(logits)
        sampled = jax.lax.stop_gradient(logp)[:, None]
        given = jnp.float32(teacher)[:, None]
        advantages, _ = imitation.teacher_advantage(sampled, given, jnp.ones_like(sampled))
        return (jnp.exp(sampled) * advantages * logp[:, None]).sum()

    gradient = compiled(jax.grad(surrogate), logits.astype(np.float32))
    np.testing.assert_allclose(gradient, -numeric_gradient(kl, logits), atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("k2", [[0.045, 2.0], [0.125, 0.0]]),
        ("k3", [[np.exp(0.3) - 1.3, np.exp(-2.0) + 1.0], [np.exp(0.5) - 1.5, 0.0]]),
    ],
)
def test_reverse_kl_by_hand(checked, kind, expected):
    reverse_kl = checked(imitation.reverse_kl)
    loss, metrics = compiled(reverse_kl, LOGPROBS, TEACHER, TWO, estimator=kl_penalty(kind))
    np.testing.assert_allclose(loss, expected, atol=1e-6)
    np.testing.assert_allclose(
        metrics["distillation/reverse_kl"], [[-0.3, 2.0], [-0.5, 0.0]], atol=1e-6
    )


def test_the_clipped_loss_of_the_default_reports_the_same_distance():
    """The loss is -(teacher - old) times a ratio of 1, with the gradient of the plain loss."""
    algorithm, plain = build_online(c.Distillation()), build_online(c.GRPO()).policy_loss
    advantages, _ = algorithm.advantage(LOGPROBS, TEACHER, TWO)
    fields = {"logprobs": LOGPROBS, "old_logprobs": LOGPROBS, "teacher_logprobs": TEACHER}
    fields |= {"advantages": advantages, "mask": TWO}

    def run(policy_loss):
        reads = field_names(policy_loss)

        def loss(x):
            per_token, metrics = policy_loss(*((fields | {"logprobs": x})[n] for n in reads))
            return per_token.sum(), metrics

        return compiled(jax.value_and_grad(loss, has_aux=True), LOGPROBS)

    (value, metrics), gradient = run(algorithm.policy_loss)
    np.testing.assert_allclose(value, -0.3 + 2.0 - 0.5, atol=1e-6)
    distance = metrics.pop("distillation/reverse_kl")
    np.testing.assert_allclose(distance, [[-0.3, 2.0], [-0.5, 0.0]], atol=1e-6)
    (plain_value, plain_metrics), plain_gradient = run(plain)
    assert metrics.keys() == plain_metrics.keys() and value == plain_value
    np.testing.assert_array_equal(gradient, plain_gradient)


def test_reverse_kl_gradient_by_finite_differences():
    teacher = np.array([[-0.2, -3.0], [-1.5, -0.7]])

    def k3(x):
        d = teacher - x
        return float(((np.exp(d) - d - 1.0) * np.asarray(TWO)).sum())

    def loss(x):
        estimator = kl_penalty("k3")
        return imitation.reverse_kl(x, jnp.array(teacher), TWO, estimator=estimator)[0].sum()

    x = np.array([[-0.5, -1.0], [-2.0, -3.0]])
    gradient = compiled(jax.grad(loss), x.astype(np.float32))
    np.testing.assert_allclose(gradient, numeric_gradient(k3, x), atol=1e-4)


def test_forward_kl_top_k_by_hand(checked):
    q = np.array([[[0.5, 0.25], [0.9, 0.1]], [[0.6, 0.2], [1.0, 1.0]]])
    p = np.array([[[0.25, 0.5], [0.9, 0.1]], [[0.3, 0.4], [0.2, 0.3]]])
    chosen, top = (np.log(x).astype(np.float32) for x in (p, q))
    top[1, 1] = np.nan  # padding
    loss, metrics = compiled(checked(imitation.forward_kl_top_k), chosen, top, TWO)
    log2 = np.log(2.0)
    np.testing.assert_allclose(loss, [[0.25 * log2, 0.0], [0.4 * log2, 0.0]], atol=1e-6)
    np.testing.assert_allclose(
        metrics["distillation/teacher_mass"], [[0.75, 1.0], [0.8, 0.0]], atol=1e-6
    )


def test_forward_kl_over_the_whole_vocabulary_is_the_kl_with_its_gradient():
    rng = np.random.default_rng(2)
    logits, teacher = rng.normal(size=6), rng.normal(size=6)

    def kl(logits):
        q = log_softmax(teacher)
        return float((np.exp(q) * (q - log_softmax(logits))).sum())

    def loss(logits):
        student = jax.nn.log_softmax(logits)[None, None]
        given = jnp.array(log_softmax(teacher), jnp.float32)[None, None]
        return imitation.forward_kl_top_k(student, given, jnp.ones((1, 1)))[0].sum()

    value, gradient = compiled(jax.value_and_grad(loss), logits.astype(np.float32))
    assert float(value) == pytest.approx(kl(logits), abs=1e-5)
    np.testing.assert_allclose(gradient, numeric_gradient(kl, logits), atol=1e-5)


def test_a_masked_token_has_no_gradient_however_wild():
    wild = np.float32([[-0.5, np.nan]])
    mask = np.float32([[1.0, 0.0]])
    teacher = np.float32([[-0.1, -np.inf]])
    estimator = kl_penalty("k2")
    losses = (
        lambda x: imitation.nll(x, mask),
        lambda x: imitation.reverse_kl(x, teacher, mask, estimator=estimator),
        lambda x: imitation.forward_kl_top_k(x[..., None], teacher[..., None], mask),
    )
    for loss in losses:
        gradient = compiled(jax.grad(lambda x, loss=loss: loss(x)[0].sum()), wild)
        assert np.isfinite(gradient).all() and gradient[0, 1] == 0 and gradient[0, 0] != 0


def test_which_estimators_distillation_takes():
    assert "old_logprobs" in field_names(build_online(c.Distillation()).policy_loss)
    assert "advantages" not in field_names(build_online(c.Distillation(kl_type="k3+")).policy_loss)
    assert field_names(build_online(c.DistillationTopK()).policy_loss)[:2] == (
        "top_logprobs",
        "teacher_top_logprobs",
    )
    with pytest.raises(ValueError, match="k3"):
        build_online(c.Distillation(kl_type="k4"))
