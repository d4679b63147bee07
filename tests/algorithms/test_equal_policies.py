"""Every loss, KL and weight where two policies are equal bit for bit, and exactly on each bound.

A run begins with policy = reference, and each first mini-batch has policy = old policy = sampler.
The expected values and gradients are worked out by hand. On a bound they are torch's.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.algorithms.covariance_losses import clip_cov, kl_cov
from jaxrl_llm.algorithms.fields import field_names
from jaxrl_llm.algorithms.imitation import reverse_kl, teacher_advantage
from jaxrl_llm.algorithms.importance import sequence_weights, token_weights
from jaxrl_llm.algorithms.kl import KL_ESTIMATORS, kl_in_reward, kl_k3, kl_penalty
from jaxrl_llm.algorithms.mismatch import mismatch_metrics
from jaxrl_llm.algorithms.policy_losses import (
    cispo,
    dppo_kl,
    dppo_tv,
    dro,
    policy_gradient,
    ppo_clip,
    sapo,
)
from jaxrl_llm.algorithms.preference_losses import (
    bradley_terry,
    cpo,
    cpo_normalised,
    dpo,
    dpo_normalised,
    kto,
    mismatched_kl,
    orpo,
    rating_error,
)
from jaxrl_llm.algorithms.rejection import reject
from jaxrl_llm.algorithms.sequence_losses import geo_mean, gspo
from jaxrl_llm.algorithms.value_losses import clipped_value_loss
from jaxrl_llm.config.thresholds import RULES, parse_rules
from jaxrl_llm.numerics import absolute, clip

LOGPROBS = np.float32([[-0.5, -1.25], [-2.0, -0.75], [-1.0, -3.0]])
ADVANTAGES = np.float32([[2.0, 2.0], [-1.0, -1.0], [0.0, 0.0]])
MASK = np.float32([[1, 1], [1, 1], [1, 0]])
BOUNDS = {"clip_low": 0.0, "clip_high": 0.0}
DIVERGENCE = {"divergence_low": 0.0, "divergence_high": 0.0}
FEW = {"clip_cov_lb": 100.0, "clip_cov_ub": 200.0}  # no token is eligible

# name -> (loss, its value at equality as a function of A and logprobs); the gradient is always -A
RATIO = lambda a, x: -a  # noqa: E731
REINFORCE = lambda a, x: -a * x  # noqa: E731
POLICY_LOSSES = {
    "ppo_clip": (ppo_clip, RATIO),
    "ppo_clip, bounds 0": (partial(ppo_clip, **BOUNDS), RATIO),
    "cispo": (cispo, REINFORCE),
    "cispo, bounds 0": (partial(cispo, **BOUNDS), REINFORCE),
    "sapo": (sapo, lambda a, x: -2.0 * a / np.where(a > 0, 1.0, 1.05)),
    "policy_gradient": (policy_gradient, REINFORCE),
    "dro": (partial(dro, beta=0.3), REINFORCE),
    "dppo_tv": (dppo_tv, REINFORCE),
    "dppo_tv, bounds 0": (partial(dppo_tv, **DIVERGENCE), REINFORCE),
    "dppo_kl": (dppo_kl, REINFORCE),
    "dppo_kl, bounds 0": (partial(dppo_kl, **DIVERGENCE), REINFORCE),
    "gspo": (gspo, RATIO),
    "gspo, bounds 0": (partial(gspo, **BOUNDS), RATIO),
    "geo_mean": (geo_mean, RATIO),
    "geo_mean, bounds 0": (partial(geo_mean, **BOUNDS), RATIO),
    "clip_cov": (partial(clip_cov, **FEW), RATIO),
    "clip_cov, bounds 0": (partial(clip_cov, **FEW, **BOUNDS), RATIO),
    "kl_cov": (partial(kl_cov, kl_cov_ratio=1.0, ppo_kl_coef=5.0), RATIO),
}


def results_and_gradient(fn, x, *others):
    """fn's results, and the gradient in x of the sum of the first, by one program."""

    def total(x, *others):
        out = fn(x, *others)
        first = out[0] if isinstance(out, tuple) else out
        return first.sum(), out

    gradient, out = jax.jit(jax.grad(total, has_aux=True))(x, *others)
    return out, np.asarray(gradient)


def value_and_gradient(fn, x, *others):
    """fn's first result, and the gradient of its sum in x."""
    out, gradient = results_and_gradient(fn, x, *others)
    return np.asarray(out[0] if isinstance(out, tuple) else out), gradient


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_policy_losses(name):
    loss, expected = POLICY_LOSSES[name]
    known = {"old_logprobs": LOGPROBS, "advantages": ADVANTAGES, "mask": MASK}
    rest = [known[field] for field in field_names(loss)[1:]]
    (value, metrics), gradient = results_and_gradient(loss, LOGPROBS, *rest)
    np.testing.assert_allclose(value, expected(ADVANTAGES, LOGPROBS) * MASK, rtol=1e-6)
    np.testing.assert_allclose(gradient, -ADVANTAGES * MASK, rtol=1e-6)
    for metric in metrics.values():  # nothing is clipped, no distance
        np.testing.assert_array_equal(metric, 0.0)


def test_a_token_that_clip_cov_draws_has_no_loss_and_no_gradient():
    loss = partial(clip_cov, clip_cov_ratio=1.0, clip_cov_lb=-100.0, clip_cov_ub=100.0)
    arrays = map(jnp.asarray, (LOGPROBS, ADVANTAGES, MASK))
    value, gradient = value_and_gradient(loss, LOGPROBS, *arrays)
    np.testing.assert_array_equal(value, 0.0)
    np.testing.assert_array_equal(gradient, 0.0)


@pytest.mark.parametrize("name", ["ppo_clip", "clip_cov"])
def test_clipped_ratio_exactly_on_its_bound(name):
    """Both sides of the maximum are equal and both have the whole gradient -A ratio."""
    loss = {"ppo_clip": ppo_clip, "clip_cov": partial(clip_cov, **FEW)}[name]
    log_ratio = np.float32([[0.25, -0.25]]).repeat(2, axis=0)
    ratio = np.asarray(jnp.exp(log_ratio))
    bounds = {"clip_low": 1.0 - float(ratio[0, 1]), "clip_high": float(ratio[0, 0]) - 1.0}
    old, advantages = np.full_like(ratio, -1.0), np.float32([[2.0, 2.0], [-1.0, -1.0]])
    others = map(jnp.asarray, (old, advantages, np.ones_like(ratio)))
    fn = partial(loss, **bounds)
    (value, metrics), gradient = results_and_gradient(fn, old + log_ratio, *others)
    np.testing.assert_allclose(value, -advantages * ratio, rtol=1e-6)
    np.testing.assert_allclose(gradient, -advantages * ratio, rtol=1e-6)
    np.testing.assert_array_equal(metrics["actor/pg_clipfrac"], 0.0)


def test_log_ratio_exactly_on_its_clamp():
    """exp(20) and exp(-20) are the last ratios that have a gradient."""
    old = np.float32([[-21.0, -1.0]])
    logprobs = np.float32([[-1.0, -21.0]])
    others = map(jnp.asarray, (old, np.float32([[-1.0, 1.0]]), np.ones_like(old)))
    _, gradient = value_and_gradient(partial(ppo_clip, clip_c=1e9), logprobs, *others)
    np.testing.assert_allclose(gradient, [[np.exp(20.0), -np.exp(-20.0)]], rtol=1e-6)


def test_dual_clip_exactly_on_its_bound():
    """The minimum of the surrogate and a constant: half the gradient, as torch.min has it."""
    ratio = np.asarray(jnp.exp(jnp.float32(1.5)))
    old = np.float32([[-2.0]])
    others = map(jnp.asarray, (old, np.float32([[-1.0]]), np.ones_like(old)))
    loss = partial(ppo_clip, clip_c=float(ratio))
    (value, metrics), gradient = results_and_gradient(loss, old + 1.5, *others)
    np.testing.assert_allclose([value, gradient], [[[ratio]], [[0.5 * ratio]]], rtol=1e-6)
    np.testing.assert_array_equal(metrics["actor/pg_clipfrac_lower"], 0.0)


def test_sequence_losses_exactly_on_their_bounds():
    old, ones = np.full((2, 2), -12.0, np.float32), np.ones((2, 2), np.float32)
    advantages = np.float32([[2.0, 2.0], [-1.0, -1.0]])
    others = [jnp.asarray(x) for x in (old, advantages, ones)]
    loss = partial(geo_mean, clip_low=0.5, clip_high=0.5)
    value, gradient = value_and_gradient(loss, old + np.float32([[0.5], [-0.5]]), *others)
    expected = -advantages * np.exp([[0.5], [-0.5]])
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    np.testing.assert_allclose(gradient, expected, rtol=1e-6)
    # The mean log-ratio of a response on its upper clamp.
    value, gradient = value_and_gradient(partial(gspo, clip_high=1e9), old + 10.0, *others)
    np.testing.assert_allclose(value, -advantages * np.exp(10.0), rtol=1e-6)
    np.testing.assert_allclose(gradient, -advantages * np.exp(10.0), rtol=1e-6)


# ------------------------------------------------------------------------- KL


@pytest.mark.parametrize("name", [*KL_ESTIMATORS, *(f"{name}+" for name in KL_ESTIMATORS)])
def test_kl_estimators(name):
    value, gradient = value_and_gradient(kl_penalty(name), LOGPROBS, jnp.asarray(LOGPROBS))
    np.testing.assert_array_equal(value, 0.0)
    np.testing.assert_array_equal(gradient, 1.0 if name in ("k1", "kl") else 0.0)


@pytest.mark.parametrize("name", KL_ESTIMATORS)
def test_reverse_kl_to_an_equal_teacher(name):
    others = jnp.asarray(LOGPROBS), jnp.asarray(MASK)
    loss = partial(reverse_kl, estimator=kl_penalty(name))
    value, gradient = value_and_gradient(loss, LOGPROBS, *others)
    np.testing.assert_array_equal(value, 0.0)
    np.testing.assert_array_equal(gradient, MASK if name in ("k1", "kl") else 0.0)
    advantages, _ = teacher_advantage(jnp.asarray(LOGPROBS), *others)
    np.testing.assert_array_equal(advantages, 0.0)


def test_k3_exactly_on_its_first_clamp():
    """d = -20 still has its gradient 1 - exp(-20); the second clamp cuts 19 + exp(-20) at 10."""
    _, gradient = value_and_gradient(kl_k3, np.float32([[0.0]]), jnp.float32([[20.0]]))
    np.testing.assert_array_equal(gradient, 0.0)
    _, gradient = value_and_gradient(kl_k3, np.float32([[0.0]]), jnp.float32([[-2.0]]))
    np.testing.assert_allclose(gradient, 1.0 - np.exp([[-2.0]]), rtol=1e-6)


def test_kl_in_reward_of_equal_policies_is_the_score():
    arrays = map(jnp.asarray, (np.float32([1, 2, 3]), MASK, LOGPROBS, LOGPROBS))
    rewards, kl = kl_in_reward(*arrays, coef=jnp.float32(0.5))
    np.testing.assert_array_equal(rewards, [[0, 1], [0, 2], [3, 0]])
    np.testing.assert_array_equal(kl, 0.0)


def test_clip_and_absolute_have_the_gradients_of_torch():
    x = jnp.float32([-2.0, -1.0, -0.5, 0.0, 0.5, 1.0, 2.0, jnp.nan])
    value, gradient = value_and_gradient(lambda x: clip(x, -1.0, 1.0), x)
    np.testing.assert_array_equal(value, np.clip(x, -1.0, 1.0))
    np.testing.assert_array_equal(gradient[:-1], [0, 1, 1, 1, 1, 1, 0])
    value, gradient = value_and_gradient(absolute, x)
    np.testing.assert_array_equal(value, np.abs(x))
    np.testing.assert_array_equal(gradient[:-1], [-1, -1, -1, 0, 1, 1, 1])


# ------------------------------------------------------------------------- sampler and trainer


@pytest.mark.parametrize("bounds", [{"upper": 2.0}, {"upper": 1.0}, {"upper": 1.0, "lower": 1.0}])
@pytest.mark.parametrize("weights", [token_weights, sequence_weights])
def test_importance_weights_of_equal_policies_are_one(weights, bounds):
    arrays = map(jnp.asarray, (LOGPROBS, LOGPROBS, MASK))
    found, metrics = weights(*arrays, **bounds)
    np.testing.assert_array_equal(found, MASK)
    for name in ("mean", "eff_sample_size"):
        assert metrics[f"rollout_corr/rollout_is_{name}"] == 1.0
    for name in ("std", "ratio_fraction_high", "ratio_fraction_low"):
        assert metrics[f"rollout_corr/rollout_is_{name}"] == 0.0


@pytest.mark.parametrize("rule", RULES)
def test_nothing_is_rejected_of_equal_policies(rule):
    rules = parse_rules(rule, "1.0_1.0" if rule.endswith("k1") else 1e-9)
    kept, metrics = reject(*map(jnp.asarray, (LOGPROBS, LOGPROBS, MASK)), rules=rules)
    np.testing.assert_array_equal(kept, MASK)
    assert not any(float(value) for value in metrics.values())


def test_a_distance_exactly_on_its_threshold_is_kept():
    trainer = np.float32([[-1.0, -2.0]])
    arrays = [jnp.asarray(x) for x in (trainer, trainer - 1.0, np.ones_like(trainer))]
    kept, _ = reject(*arrays, rules=parse_rules("token_k2", 0.5))
    np.testing.assert_array_equal(kept, 1.0)
    kept, _ = reject(*arrays, rules=parse_rules("token_k2", 0.49))
    np.testing.assert_array_equal(kept, 0.0)


def test_mismatch_of_equal_policies():
    metrics = mismatch_metrics(*map(jnp.asarray, (LOGPROBS, LOGPROBS, MASK)))
    perplexities = ("_ppl", "log_ppl")
    for name, value in metrics.items():
        if name == "token_mult_prob_error" or name.endswith("ppl_ratio"):
            assert value == 1.0, name
        elif not name.endswith(perplexities):
            assert value == 0.0, name


# ------------------------------------------------------------------------- values


def test_value_loss_of_an_unchanged_critic_and_on_its_bound():
    values = np.float32([[1.0, 1.0, 1.0]])
    moved = values + np.float32([[0.0, 0.5, -0.5]])
    others = map(jnp.asarray, (values, np.float32([[2.0, 0.0, 2.0]]), np.ones_like(values)))
    loss = partial(clipped_value_loss, cliprange=0.5)
    (value, metrics), gradient = results_and_gradient(loss, moved, *others)
    np.testing.assert_array_equal(value, [[0.5, 1.125, 1.125]])
    np.testing.assert_array_equal(metrics["critic/vf_clipfrac"], 0.0)
    # On a bound verl and torch split the gradient of max(min(V, upper), lower) in halves.
    np.testing.assert_array_equal(gradient, [[-1.0, 0.75 * 1.5, -0.75 * 1.5]])


# ------------------------------------------------------------------------- fixed data

C, R = np.float32([-3.0, -5.0]), np.float32([-4.0, -2.0])
LENGTHS = np.float32([2.0, 4.0])
BETA, LOG2 = 0.5, np.log(2.0)
PAIR_LOSSES = {  # policy = reference: (loss, value, gradient in the chosen log-prob)
    "sigmoid": (partial(dpo, beta=BETA), LOG2, -BETA / 2),
    "smoothed": (partial(dpo, beta=BETA, label_smoothing=0.2), LOG2, -BETA * 0.3),
    "robust": (
        partial(dpo, beta=BETA, form="robust", label_smoothing=0.2),
        LOG2,
        -BETA / 2 / 0.6,
    ),
    "hinge": (partial(dpo, beta=BETA, form="hinge"), 1.0, -BETA),
    "sigmoid_norm": (partial(dpo_normalised, beta=BETA), LOG2, -BETA / 2 / LENGTHS),
    "ipo": (partial(dpo_normalised, beta=BETA, form="ipo"), 1.0, -2.0 / LENGTHS),
}


@pytest.mark.parametrize("name", PAIR_LOSSES)
def test_pairs_of_a_policy_that_is_its_own_reference(name):
    loss, expected, slope = PAIR_LOSSES[name]
    rest = (R, C, R, *((LENGTHS, LENGTHS) if loss.func is dpo_normalised else ()))
    (value, metrics), gradient = results_and_gradient(loss, C, *rest)
    np.testing.assert_allclose(value, [expected] * 2, rtol=1e-6)
    np.testing.assert_allclose(gradient, np.broadcast_to(slope, 2), rtol=1e-6)
    for part in ("chosen", "rejected", "margins", "accuracies"):
        np.testing.assert_array_equal(metrics[f"rewards/{part}"], 0.0)


@pytest.mark.parametrize("loss", [dpo, cpo])
def test_hinge_exactly_on_its_margin_has_no_gradient(loss):
    """relu(0), as in torch."""
    zeros = [jnp.zeros(1)] * (3 if loss is dpo else 1)
    hinge = partial(loss, beta=BETA, form="hinge")
    value, gradient = value_and_gradient(hinge, np.float32([1 / BETA]), *zeros)
    np.testing.assert_array_equal([value, gradient], 0.0)


def test_kto_of_a_policy_that_is_its_own_reference():
    baseline = mismatched_kl(*map(jnp.asarray, (C, C, np.ones_like(C))))
    np.testing.assert_array_equal(baseline, 0.0)
    labels = jnp.float32([1.0, 0.0])
    loss = partial(kto, beta=BETA, desirable_weight=2.0, undesirable_weight=3.0)
    value, gradient = value_and_gradient(loss, C, jnp.asarray(C), labels, baseline)
    np.testing.assert_allclose(value, [1.0, 1.5], rtol=1e-6)
    np.testing.assert_allclose(gradient, [-2.0 * BETA / 4, 3.0 * BETA / 4], rtol=1e-6)


def test_pairs_without_a_reference_that_are_equal():
    same = jnp.asarray(C), jnp.asarray(LENGTHS), jnp.asarray(LENGTHS)
    value, gradient = value_and_gradient(partial(orpo, beta=BETA), C, *same)
    p = np.exp(C / LENGTHS)
    np.testing.assert_allclose(value, [BETA * LOG2] * 2, rtol=1e-6)
    np.testing.assert_allclose(gradient, -BETA / 2 / (1 - p) / LENGTHS, rtol=1e-5)
    value, gradient = value_and_gradient(partial(cpo, beta=BETA), C, same[0])
    np.testing.assert_allclose([value, gradient], [[LOG2] * 2, [-BETA / 2] * 2], rtol=1e-6)
    value, gradient = value_and_gradient(partial(cpo_normalised, beta=BETA, gamma=0.0), C, *same)
    np.testing.assert_allclose(value, [LOG2] * 2, rtol=1e-6)
    np.testing.assert_allclose(gradient, -BETA / 2 / LENGTHS, rtol=1e-6)
    loss = partial(cpo_normalised, beta=BETA, form="ipo")
    value, gradient = value_and_gradient(loss, C, *same)
    np.testing.assert_allclose(value, [1.0] * 2, rtol=1e-6)
    np.testing.assert_allclose(gradient, -2.0 / LENGTHS, rtol=1e-6)


def test_reward_models_of_equal_scores():
    zeros = jnp.zeros(2)
    value, gradient = value_and_gradient(bradley_terry, C, jnp.asarray(C), zeros)
    np.testing.assert_allclose([value, gradient], [[LOG2] * 2, [-0.5] * 2], rtol=1e-6)
    value, gradient = value_and_gradient(rating_error, C, jnp.asarray(C))
    np.testing.assert_array_equal([value, gradient], 0.0)
