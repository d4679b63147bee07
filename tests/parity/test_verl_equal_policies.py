"""Ours against verl 0.9.1 and torch where policies are equal bit for bit, and exactly on bounds.

Random log-probs are never equal; the first mini-batch of every iteration is.

On a bound, `torch.clamp` has gradient 1 up to torch 2.13 and 0 from torch 2.14 on. Ours is 1. So
gradients are compared with verl under the earlier rule, which is written out here, and also under
the rule of the torch that is installed.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_verl_losses import ALWAYS, CASES, LENGTH, ROWS, batch, config, ours_and_gradient
from verl_side import agrees, verl

from jaxrl_llm.algorithms.aggregation import aggregation, global_counts
from jaxrl_llm.algorithms.importance import sequence_weights, token_weights
from jaxrl_llm.algorithms.kl import KL_ESTIMATORS, kl_penalty
from jaxrl_llm.algorithms.mismatch import mismatch_metrics
from jaxrl_llm.algorithms.preference_losses import cpo, dpo
from jaxrl_llm.algorithms.rejection import reject
from jaxrl_llm.algorithms.value_losses import clipped_value_loss
from jaxrl_llm.config.thresholds import RULES, parse_rules, parse_threshold
from jaxrl_llm.numerics import clip

torch = pytest.importorskip("torch", reason="pip install -e '.[parity]'")
pytestmark = pytest.mark.torch

ZERO = {"clip_low": 0.0, "clip_high": 0.0}
THEIR_ZERO = {"clip_ratio_low": 0.0, "clip_ratio_high": 0.0}
DIVERGENCE = {"divergence_low": 0.0, "divergence_high": 0.0}
NO_ROOM = {  # bounds of width 0: at equality every token lies exactly on both
    "ppo": (ZERO, {}),
    "cispo": (ZERO, {}),
    "dppo_tv": (DIVERGENCE | {"clip_c": 1.3}, {"clip_ratio_c": 1.3}),
    "dppo_kl": (DIVERGENCE | {"clip_c": 1.3}, {"clip_ratio_c": 1.3}),
    "gspo": (ZERO, {}),
    "geo_mean": (ZERO, {}),
    "clip_cov": (CASES["clip_cov"][1] | ZERO, CASES["clip_cov"][3].policy_loss),
}


NEW_RULE = torch.__version__ >= "2.14"


def earlier_clamp(x, min=-np.inf, max=np.inf):
    """torch.clamp with its gradient up to torch 2.13: 1 on a bound."""
    return torch.where(x < min, min, torch.where(x > max, max, x))


def compare(name, arrays, settings, actor, tolerance=1e-5):
    """Value, gradient and metrics of a loss, ours and verl's."""
    fn, _, theirs, _ = CASES[name]
    aggregate = ALWAYS.get(name, "token-mean")
    value, gradient, metrics = ours_and_gradient(partial(fn, **settings), arrays, aggregate)
    for clamp in (earlier_clamp, torch.clamp):
        x = torch.tensor(arrays[0], requires_grad=True)
        old, advantages, mask = map(torch.tensor, arrays[1:])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "clamp", clamp)
            expected, found = theirs(old, x, advantages, mask, aggregate, actor)
            expected.backward()
        agrees(value, expected, tolerance)
        if clamp is earlier_clamp or not NEW_RULE:
            agrees(gradient, x.grad, tolerance)
        else:  # of a maximum of equal sides, the clipped one has no gradient, or both have none
            ours, theirs_now = np.asarray(gradient), x.grad.numpy()
            distances = [np.abs(theirs_now - share * ours) for share in (0.0, 0.5, 1.0)]
            assert (np.min(distances, axis=0) <= tolerance * (1 + np.abs(ours))).all()
        for key in metrics:
            np.testing.assert_allclose(metrics[key], found[key], rtol=1e-5, atol=1e-6, err_msg=key)


@pytest.mark.parametrize("bounds", [(-1.0, 1.0), (-1.0, np.inf), (-np.inf, 1.0)])
def test_the_gradient_of_a_clip(bounds):
    """Ours and both of torch's differ on the bounds alone."""
    values = np.float32([-2.0, -1.0, 0.5, 1.0, 3.0])
    ours = np.asarray(jax.grad(lambda x: clip(x, *bounds).sum())(jnp.array(values)))
    for clamp in (earlier_clamp, torch.clamp):
        x = torch.tensor(values, requires_grad=True)
        clamp(x, *bounds).sum().backward()
        expected = np.where(np.isin(values, bounds), 0.0, ours) if clamp is torch.clamp else ours
        np.testing.assert_array_equal(x.grad, expected if NEW_RULE else ours)


def equal(seed):
    """A batch whose policy is the old one; a row has advantage 0."""
    _, old, advantages, mask, _ = batch(seed)
    advantages[2] = 0.0
    return old.copy(), old, advantages, mask


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", CASES)
def test_policy_losses_at_equality(name, seed):
    _, settings, _, actor = CASES[name]
    compare(name, equal(seed), settings, actor)


@pytest.mark.parametrize("name", NO_ROOM)
def test_policy_losses_at_equality_on_both_bounds(name):
    settings, theirs = NO_ROOM[name]
    if name == "clip_cov":
        actor = config(
            {"clip_cov_ratio": 1.0, "clip_cov_lb": 0.2, "clip_cov_ub": 1.5}, **THEIR_ZERO
        )
    else:
        actor = config(**(THEIR_ZERO | theirs))
    compare(name, equal(0), settings, actor)


def exact_log_ratio(near):
    """A log-ratio near `near` whose exp is the same float32 in jax and in torch."""
    for step in range(1000):
        x = np.float32(near + step / 1024)
        if float(jnp.exp(x)) == float(torch.exp(torch.tensor(x))):
            return x, float(jnp.exp(x))
    raise AssertionError(near)


def on_bounds(*log_ratios):
    """One column a log-ratio, rows of advantage 1, -1 and 0."""
    rows = len(log_ratios)
    old = np.full((3, rows), -30.0, np.float32)
    advantages = np.float32([[1.0], [-1.0], [0.0]]).repeat(rows, axis=1)
    return old + np.float32(log_ratios), old, advantages, np.ones_like(old)


@pytest.mark.parametrize("name", ["ppo", "cispo", "clip_cov"])
def test_ratios_exactly_on_their_bounds(name):
    high, upper = exact_log_ratio(0.25)
    low, lower = exact_log_ratio(-0.25)
    dual, bound = exact_log_ratio(1.0)
    ours = {"clip_low": 1.0 - lower, "clip_high": upper - 1.0}
    theirs = {"clip_ratio_low": 1.0 - lower, "clip_ratio_high": upper - 1.0}
    none_drawn = {"clip_cov_lb": 1e3, "clip_cov_ub": 2e3}
    if name == "clip_cov":
        settings, actor = ours | none_drawn, config(none_drawn, **theirs)
    elif name == "ppo":
        settings, actor = ours | {"clip_c": bound}, config(clip_ratio_c=bound, **theirs)
    else:
        settings, actor = ours, config(**theirs)
    compare(name, on_bounds(high, low, dual, 0.0), settings, actor)


CLAMPED = [(name, x) for name in ("ppo", "cispo", "sapo", "clip_cov", "dppo_tv") for x in (-20, 20)]


# kl_cov at 20: its penalty is less than the rounding of a loss of exp(20).
@pytest.mark.parametrize(("name", "log_ratio"), [*CLAMPED, ("kl_cov", -20)])
def test_log_ratio_exactly_on_its_clamp(name, log_ratio):
    _, settings, _, actor = CASES[name]
    if name == "clip_cov":
        none_drawn = {"clip_cov_lb": 1e3, "clip_cov_ub": 2e3}
        settings, actor = none_drawn, config(none_drawn, clip_ratio_low=0.2, clip_ratio_high=0.2)
    if name == "kl_cov":  # all tokens have one covariance: choose them all
        settings, actor = {"kl_cov_ratio": 1.0}, config({"kl_cov_ratio": 1.0})
    compare(name, on_bounds(float(log_ratio), float(log_ratio)), settings, actor)


def test_geo_mean_exactly_on_its_bounds():
    actor = config(clip_ratio_low=0.25, clip_ratio_high=0.5)
    settings = {"clip_low": 0.25, "clip_high": 0.5}
    compare("geo_mean", on_bounds(0.5, -0.25, 0.0), settings, actor)


def test_gspo_exactly_on_its_upper_clamp():
    actor = config(clip_ratio_low=0.05, clip_ratio_high=1e6)
    compare("gspo", on_bounds(10.0, 10.0), {"clip_low": 0.05, "clip_high": 1e6}, actor)


# ------------------------------------------------------------------------- KL


VERLS = sorted(KL_ESTIMATORS.keys() - {"k3_unclamped"})


@pytest.mark.parametrize("name", [*VERLS, *(f"{name}+" for name in VERLS)])
def test_kl_at_equality_and_on_the_clamps(name):
    reference = np.float32([[-1.0, -0.3, -21.0, -1.0, -2.0]])
    logprobs = np.float32([[-1.0, -0.3, -1.0, -21.0, -1.5]])
    x = torch.tensor(logprobs, requires_grad=True)
    expected = verl.kl_penalty(x, torch.tensor(reference), name)
    expected.sum().backward()
    value, pull_back = jax.vjp(lambda x: kl_penalty(name)(x, jnp.array(reference)), logprobs)
    agrees(value, expected)
    agrees(pull_back(jnp.ones_like(value))[0], x.grad)


@pytest.mark.parametrize("name", ["abs", "k2", "k3"])
def test_the_kl_term_of_a_first_mini_batch_has_no_gradient(name):
    """As a loss with its mask and mean, where policy = reference: torch's answer is 0."""
    logprobs, _, _, mask = equal(0)
    tokens, sequences = global_counts(jnp.array(mask))

    def total(x):
        kl = kl_penalty(name)(x, jnp.array(logprobs))
        counts = {"global_tokens": tokens, "global_sequences": sequences}
        return aggregation("token-mean")(kl, jnp.array(mask), **counts)

    x = torch.tensor(logprobs, requires_grad=True)
    kl = verl.kl_penalty(x, torch.tensor(logprobs), name)
    verl.agg_loss(kl, torch.tensor(mask), "token-mean").backward()
    np.testing.assert_array_equal(x.grad, 0.0)
    np.testing.assert_array_equal(jax.grad(total)(jnp.array(logprobs)), 0.0)


# ------------------------------------------------------------------------- values


def test_value_loss_at_equality_and_on_its_bounds():
    values = np.float32([[1.0, -1.0, 0.5, 2.0, 0.0, 1.0]])
    moved = values + np.float32([[0.0, 0.0, 0.5, 0.5, -0.5, -0.5]])
    returns = np.float32([[2.0, -1.0, 2.0, 0.0, 2.0, -2.0]])
    mask = np.ones_like(values)
    x = torch.tensor(moved, requires_grad=True)
    others = [torch.tensor(a) for a in (returns, values, mask)]
    expected, clipped = verl.compute_value_loss(x, *others, 0.5, "token-mean")
    expected.backward()

    def total(x):
        loss, metrics = clipped_value_loss(x, *map(jnp.array, (values, returns, mask)))
        return loss.mean(), metrics["critic/vf_clipfrac"].mean()

    (value, fraction), gradient = jax.value_and_grad(total, has_aux=True)(jnp.array(moved))
    agrees(value, expected)
    agrees(gradient, x.grad)
    agrees(fraction, clipped)


# ------------------------------------------------------------------------- rollout correction


@pytest.mark.parametrize("threshold", [2.0, 1.0, "0.5_2.0", "1.0_1.0"])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_importance_weights_at_equality(level, threshold):
    logprobs, _, _, mask = equal(0)
    log_ratio = torch.zeros(ROWS, LENGTH)
    arguments = (log_ratio, torch.tensor(mask), level, threshold)
    expected, metrics = verl.compute_rollout_correction_weights(*arguments)
    lower, upper = parse_threshold(threshold)
    fn = {"token": token_weights, "sequence": sequence_weights}[level]
    found, ours = fn(*map(jnp.array, (logprobs, logprobs, mask)), upper=upper, lower=lower)
    agrees(found, expected)
    for name in ("mean", "std", "eff_sample_size", "ratio_fraction_high", "ratio_fraction_low"):
        agrees(ours[f"rollout_corr/rollout_is_{name}"], metrics[f"rollout_is_{name}"])


@pytest.mark.parametrize("distance", [0.0, 1.0])
@pytest.mark.parametrize("rule", RULES)
def test_rejection_at_equality_and_on_the_threshold(rule, distance):
    logprobs, _, _, mask = equal(0)
    logprobs = np.round(logprobs * 8) / 8  # so that a difference of 1 is exact
    sampler = (logprobs - distance).astype(np.float32)
    # A response of three tokens has a sum of 3 k: on the threshold only where it has one token.
    threshold = "1.0_1.0" if rule.endswith("k1") else "0.5"
    log_ratio = torch.tensor(logprobs - sampler)
    expected, _ = verl.compute_rollout_rejection_mask(
        log_ratio, torch.tensor(mask), rule, threshold
    )
    arrays = map(jnp.array, (logprobs, sampler, mask))
    found, _ = reject(*arrays, rules=parse_rules(rule, threshold))
    np.testing.assert_array_equal(found, expected)


def test_mismatch_at_equality():
    logprobs, _, _, mask = equal(0)
    ours = mismatch_metrics(*map(jnp.array, (logprobs, logprobs, mask)))
    expected = verl.compute_offpolicy_metrics(*map(torch.tensor, (logprobs, logprobs, mask)))
    for name, value in expected.items():
        agrees(ours[f"rollout_corr/{name}"], value)


# ------------------------------------------------------------------------- preferences


@pytest.mark.parametrize("margin", [0.0, 2.0])
@pytest.mark.parametrize("loss", [dpo, cpo])
def test_hinge_at_equality_and_exactly_on_its_margin(loss, margin):
    x = torch.tensor([margin], requires_grad=True)
    expected = torch.relu(1.0 - 0.5 * x)
    expected.backward()
    zeros = [jnp.zeros(1)] * (3 if loss is dpo else 1)
    value, pull_back = jax.vjp(
        lambda x: loss(x, *zeros, beta=0.5, form="hinge")[0], jnp.float32([margin])
    )
    agrees(value, expected)
    agrees(pull_back(jnp.ones(1))[0], x.grad)
