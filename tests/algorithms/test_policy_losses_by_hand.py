"""Every policy loss: cases by hand, gradients in float64, and common properties.

A gradient is compared with finite differences of a loss written in numpy, in which everything that
has no gradient (a clipped weight, a choice of tokens) is taken at a fixed point `at`.
"""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled import compiled
from finite_differences import numeric_gradient

from jaxrl_llm.algorithms.covariance_losses import clip_cov, kl_cov
from jaxrl_llm.algorithms.fields import field_names
from jaxrl_llm.algorithms.policy_losses import (
    cispo,
    dppo_kl,
    dppo_tv,
    dro,
    policy_gradient,
    ppo_clip,
    sapo,
)
from jaxrl_llm.algorithms.sequence_losses import geo_mean, gspo

LOSSES = {
    "ppo_clip": ppo_clip,
    "cispo": cispo,
    "sapo": sapo,
    "policy_gradient": policy_gradient,
    "dro": partial(dro, beta=0.3),
    "dppo_tv": dppo_tv,
    "dppo_kl": dppo_kl,
    "gspo": partial(gspo, clip_low=0.1, clip_high=0.2),
    "geo_mean": geo_mean,
    "clip_cov": partial(clip_cov, clip_cov_ratio=0.2, clip_cov_lb=0.1),
    "kl_cov": partial(kl_cov, kl_cov_ratio=0.3, ppo_kl_coef=1.0),
}


def case(seed=0, rows=6, length=5):
    """(logprobs, old, advantages, mask), with a row without a token."""
    rng = np.random.default_rng(seed)
    old = -rng.exponential(size=(rows, length))
    logprobs = np.minimum(old + 0.4 * rng.normal(size=(rows, length)), -0.01)
    advantages = rng.normal(size=(rows, 1)).repeat(length, axis=1)
    mask = (np.arange(length) < np.array([5, 3, 0, 1, 4, 5])[:, None]).astype(float)
    return tuple(np.asarray(x, np.float32) for x in (logprobs, old, advantages, mask))


@cache
def program(name):
    """The loss of that name by (logprobs, old, advantages, mask), one program of all tests.

    It gives (loss, metrics, gradient of the loss's sum, gradient of the metrics' sum).
    """
    fn = LOSSES[name]

    def call(*arrays):
        known = dict(zip(("logprobs", "old_logprobs", "advantages", "mask"), arrays, strict=True))
        return fn(*(known[name] for name in field_names(fn)))

    def total(logprobs, *others):
        loss, metrics = call(logprobs, *others)
        return loss.sum(), (loss, metrics)

    def of_metrics(logprobs, *others):
        found = call(logprobs, *others)[1]
        return sum(value.sum() for value in found.values()) + 0.0 * logprobs.sum()

    @jax.jit
    def run(*arrays):
        gradient, (loss, metrics) = jax.grad(total, has_aux=True)(*arrays)
        return loss, metrics, gradient, jax.grad(of_metrics)(*arrays)

    return run


def mean(x, mask):
    return (x * mask).sum(axis=1, keepdims=True) / np.maximum(mask.sum(axis=1, keepdims=True), 1)


def covariance(a, x, mask):
    return (a - a[mask > 0].mean()) * (x - x[mask > 0].mean())


def numpy_drawn(at, old, a, m):
    """(drawn, eligible) of clip_cov at log-probs `at`: the lowest keys of what is eligible.

    A token's key is a hash of its log-prob's 32 bits and its position, lowbias32 twice.
    """

    def mix(x):
        x = (x ^ (x >> 16)) * np.uint32(0x7FEB352D)
        x = (x ^ (x >> 15)) * np.uint32(0x846CA68B)
        return x ^ (x >> 16)

    position = np.arange(at.size, dtype=np.uint32).reshape(at.shape)
    key = mix(at.astype(np.float32).view(np.uint32) ^ mix(position)) >> 8
    ratio = np.exp(at - old)
    eligible = (m > 0) & (-a * np.clip(ratio, 0.8, 1.2) <= -a * ratio)
    product = covariance(a, at, m)
    eligible &= (product > 0.1) & (product < 5.0)
    drawn = np.zeros(at.shape, bool)
    drawn.flat[np.argsort(np.where(eligible, key, np.inf), axis=None)[: int(0.2 * m.sum())]] = True
    return drawn & eligible, eligible


def numpy_loss(name, x, at, old, a, m):
    """The loss summed over the mask, in float64; `at` is x where no gradient flows."""
    ratio, fixed = np.exp(x - old), np.exp(at - old)
    if name == "ppo_clip":
        surrogate = np.minimum(ratio * a, np.clip(ratio, 0.8, 1.2) * a)
        loss = -np.where(a < 0, np.maximum(surrogate, 3.0 * a), surrogate)
    elif name == "cispo":
        loss = -np.clip(fixed, 0.0, 1.2) * a * x
    elif name == "sapo":
        tau = np.where(a > 0, 1.0, 1.05)
        loss = -4 / tau / (1 + np.exp(-tau * (ratio - 1))) * a
    elif name == "policy_gradient":
        loss = -a * x
    elif name == "dro":
        loss = -(a * x - 0.15 * (x - old) ** 2)
    elif name in ("dppo_tv", "dppo_kl"):
        p, q = np.exp(at), np.exp(old)
        if name == "dppo_tv":
            within = np.where(a > 0, p - q <= 0.2, q - p <= 0.2)
        else:
            kl = q * (old - at) + (1 - q) * np.log((1 - q + 1e-8) / (1 - p + 1e-8))
            within = np.where(a > 0, (kl <= 0.05) | (p <= q), (kl <= 0.05) | (p >= q))
        loss = -a * np.minimum(fixed, 20.0) * x * within
    elif name == "gspo":
        s = np.exp(mean(at - old, m) + x - at)
        loss = np.maximum(-a * s, -a * np.clip(s, 0.9, 1.2))
    elif name == "geo_mean":
        d = np.where(a > 0, np.minimum(x - old, 0.4), np.maximum(x - old, -0.4))
        loss = (-mean(a, m) * np.exp(mean(d, m))) * np.ones_like(x)
    elif name == "kl_cov":
        chosen = np.zeros_like(x, bool)
        k = max(int(0.3 * m.sum()), 1)
        order = np.argsort(np.where(m > 0, -covariance(a, at, m), np.inf), axis=None)[:k]
        chosen.reshape(-1)[order] = True
        loss = -a * ratio + chosen * np.abs(x - old)
    elif name == "clip_cov":
        loss = np.maximum(-a * ratio, -a * np.clip(ratio, 0.8, 1.2))
        loss = np.where(numpy_drawn(at, old, a, m)[0], 0.0, loss)
    else:
        raise AssertionError(name)
    return (loss * m).sum()


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("seed", [0, 1])
def test_value_and_gradient_in_float64(name, seed):
    arrays = case(seed)
    wide = [np.asarray(x, np.float64) for x in arrays]

    def fn(x):
        return numpy_loss(name, x, wide[0], *wide[1:])

    loss, _, gradient, _ = program(name)(*arrays)
    np.testing.assert_allclose(np.array(loss).sum(), fn(wide[0]), rtol=1e-5)
    np.testing.assert_allclose(gradient, numeric_gradient(fn, wide[0]), atol=2e-4)


@pytest.mark.parametrize("name", LOSSES)
def test_padding_changes_nothing_and_is_zero(name):
    logprobs, old, advantages, mask = case()
    keep = mask > 0
    clean = program(name)(logprobs, old, advantages, mask)[:3]
    dirty = [np.where(keep, x, np.nan).astype(np.float32) for x in (logprobs, old, advantages)]
    found = program(name)(*dirty, mask)[:3]
    for a, b in zip(jax.tree.leaves(clean), jax.tree.leaves(found), strict=True):
        assert np.isfinite(b).all() and not np.array(b)[~keep].any()
        np.testing.assert_array_equal(a, b)
    empty = program(name)(logprobs, old, advantages, np.zeros_like(mask))[:2]
    for x in jax.tree.leaves(empty):
        np.testing.assert_array_equal(x, 0.0)


@pytest.mark.parametrize("name", LOSSES)
def test_metrics_have_no_gradient_and_old_logprobs_neither(name):
    np.testing.assert_array_equal(program(name)(*case())[3], 0.0)


def test_what_clip_cov_draws_is_held_fixed_in_its_gradient():
    """The finite differences above hold the draw of the point; a step of 1e-6 would change it.

    Here that there is a draw to hold: some eligible tokens are drawn and some are not, the first
    have no gradient at all and the others PPO's; a batch moved by less than they step by
    draws other tokens.
    """
    arrays = case()
    wide = [np.asarray(x, np.float64) for x in arrays]
    drawn, eligible = numpy_drawn(*wide)
    assert 0 < drawn.sum() < eligible.sum()
    _, metrics, gradient, _ = program("clip_cov")(*arrays)
    np.testing.assert_array_equal(metrics["actor/pg_clipfrac"], drawn)
    plain = program("ppo_clip")(*arrays)[2]
    np.testing.assert_array_equal(gradient, np.where(drawn, 0.0, plain))
    assert np.abs(np.asarray(plain)[drawn]).min() > 0.1
    nearest = np.nextafter(arrays[0], np.float32(-9)).astype(np.float64)
    assert (numpy_drawn(nearest, *wide[1:])[0] != drawn).any()


# ------------------------------------------------------------------------- by hand


def one_row(ratio, advantages, old=-1.0):
    old = np.full((1, len(ratio)), old, np.float32)
    logprobs = old + np.log(np.array([ratio], np.float32))
    return logprobs, old, np.array([advantages], np.float32), np.ones_like(old)


def test_cispo_by_hand(checked):
    arrays = tuple(map(jnp.array, one_row([1.0, 2.0, 0.5], [1.0, 1.0, -2.0])))
    loss, metrics = compiled(checked(cispo), *arrays, clip_low=0.3, clip_high=0.4)
    logprobs = np.array(arrays[0])
    np.testing.assert_allclose(loss, [-logprobs[0] * [1.0, 1.4, 0.7 * -2.0]], rtol=1e-5)
    np.testing.assert_array_equal(metrics["actor/pg_clipfrac"], [[0, 1, 1]])


def test_sapo_by_hand(checked):
    loss, _ = compiled(checked(sapo), *one_row([1.0, 2.0], [1.0, -1.0]), tau_neg=2.0)
    gate = 1 / (1 + np.exp(-2.0))
    np.testing.assert_allclose(loss, [[-2.0, 2.0 * gate]], rtol=1e-5)  # 4 / tau sigmoid


def test_policy_gradient_and_dro_by_hand(checked):
    logprobs, old, advantages, mask = map(jnp.array, one_row([np.e, 1.0], [2.0, -1.0]))
    loss, metrics = compiled(checked(policy_gradient), logprobs, advantages, mask)
    np.testing.assert_allclose(loss, [[0.0, -1.0]], atol=1e-6)  # log-probs 0 and -1
    assert metrics == {}
    loss, _ = compiled(checked(dro), logprobs, old, advantages, mask, beta=0.5)
    np.testing.assert_allclose(loss, [[0.25, -1.0]], atol=1e-6)


def test_dppo_by_hand(checked):
    # old p 0.4 everywhere; p 0.5, 0.7, 0.7, 0.1, 0.1 with advantages 1, 1, -1, 1, -1
    p = np.array([[0.5, 0.7, 0.7, 0.1, 0.1]], np.float32)
    old = np.full_like(p, np.log(0.4))
    a = np.array([[1.0, 1.0, -1.0, 1.0, -1.0]], np.float32)
    arrays = tuple(map(jnp.array, (np.log(p), old, a, np.ones_like(p))))
    kept = np.array([[1, 0, 1, 1, 0]])  # moved too far, and further: the second and the last
    for fn in (dppo_tv, dppo_kl):
        loss, metrics = compiled(checked(fn), *arrays)
        np.testing.assert_allclose(loss, -a * p / 0.4 * np.log(p) * kept, rtol=1e-5)
        np.testing.assert_array_equal(metrics["actor/pg_clipfrac"], 1 - kept)
    loss, metrics = compiled(dppo_tv, *arrays, clip_c=1.1)
    np.testing.assert_allclose(loss[0, 2], 1.1 * np.log(0.7), rtol=1e-5)
    np.testing.assert_array_equal(metrics["actor/pg_clipfrac_lower"], [[1, 0, 1, 0, 0]])


def test_gspo_by_hand(checked):
    # row 0: log-ratios 0.2, 0.4, mean 0.3; row 1: -0.6 alone
    old = np.float32([[-1.0, -1.0], [-1.0, 5.0]])
    logprobs = old + np.float32([[0.2, 0.4], [-0.6, 3.0]])
    mask = np.float32([[1.0, 1.0], [1.0, 0.0]])
    arrays = logprobs, old, np.float32([[1.0, 1.0], [-1.0, 9.0]]), mask
    loss, metrics = compiled(checked(gspo), *arrays, clip_low=0.2, clip_high=0.2)
    np.testing.assert_allclose(loss, [[-1.2, -1.2], [0.8, 0.0]], rtol=1e-5)
    np.testing.assert_array_equal(metrics["actor/pg_clipfrac"], [[1, 1], [1, 0]])
    loss, _ = compiled(gspo, *arrays, clip_low=1.0, clip_high=1.0)
    np.testing.assert_allclose(loss, [[-np.exp(0.3), -np.exp(0.3)], [np.exp(-0.6), 0.0]], rtol=1e-5)


def test_geo_mean_by_hand(checked):
    # row 0, A = 2: 0.1 and 0.9 held at 0.4, mean 0.25; row 1, A = -1: -0.9 held at -0.4, and 0.5
    old, ones = np.full((2, 2), -1.0, np.float32), np.ones((2, 2), np.float32)
    logprobs = old + np.float32([[0.1, 0.9], [-0.9, 0.5]])
    advantages = np.float32([[2.0, 2.0], [-1.0, -1.0]])
    loss, metrics = compiled(checked(geo_mean), logprobs, old, advantages, ones)
    expected = [-2 * np.exp(0.25), np.exp(0.05)]
    np.testing.assert_allclose(loss, np.array(expected)[:, None] * [1, 1], rtol=1e-5)
    np.testing.assert_array_equal(metrics["actor/pg_clipfrac"], [[0, 1], [0, 0]])
    np.testing.assert_array_equal(metrics["actor/pg_clipfrac_lower"], [[0, 0], [1, 1]])


def test_kl_cov_by_hand(checked):
    # mean advantage 0, mean log-prob -1: covariances -1, 1, 0, 0; one of four is chosen
    logprobs = np.float32([[-2.0, 0.0, -1.0, -1.0]])
    advantages = np.float32([[1.0, 1.0, -1.0, -1.0]])
    arrays = logprobs, logprobs - np.float32(0.5), advantages, np.ones_like(logprobs)
    loss, metrics = compiled(checked(kl_cov), *arrays, kl_cov_ratio=0.25, ppo_kl_coef=2.0)
    ratio = np.exp(0.5)
    np.testing.assert_allclose(loss, [[-ratio, -ratio + 1.0, ratio, ratio]], rtol=1e-5)
    np.testing.assert_allclose(metrics["actor/ppo_kl"], 0.5)


def test_clip_cov_draws_its_share_of_the_eligible(checked):
    rng = np.random.default_rng(0)
    logprobs, old, advantages, mask = case(rows=6, length=5)
    advantages = rng.normal(size=mask.shape).astype(np.float32)
    settings = {"clip_cov_lb": 0.1, "clip_cov_ub": 3.0}
    arrays = tuple(map(jnp.array, (logprobs, old, advantages, mask)))
    plain, _ = compiled(ppo_clip, *arrays, clip_c=1e9)
    product = covariance(advantages.astype(np.float64), logprobs.astype(np.float64), mask)
    ratio = np.exp(logprobs - old)
    clipped = -advantages * np.clip(ratio, 0.8, 1.2) > -advantages * ratio
    eligible = (product > 0.1) & (product < 3.0) & ~clipped & (mask > 0)
    assert eligible.sum() > 2
    for ratio, count in ((1e-4, 1), (0.12, 2), (1.0, eligible.sum())):
        draw = jax.jit(partial(checked(clip_cov), clip_cov_ratio=ratio, **settings))
        loss, metrics = draw(*arrays)
        drawn = np.array(metrics["actor/pg_clipfrac"]) > 0
        assert drawn.sum() == count and eligible[drawn].all()
        np.testing.assert_allclose(loss, np.where(drawn, 0.0, plain), rtol=1e-6)
        np.testing.assert_array_equal(loss, draw(*arrays)[0])
    # Another batch draws other positions: the draw is not a fixed pattern.
    seen, draw = set(), jax.jit(partial(clip_cov, clip_cov_ratio=1e-4, **settings))
    for shift in range(12):
        less = np.float32(0.001 * shift)
        found = draw(logprobs - less, old - less, *arrays[2:])[1]["actor/pg_clipfrac"]
        seen.add(int(np.argmax(found)))
    assert len(seen) > 1
