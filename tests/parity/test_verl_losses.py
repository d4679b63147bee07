"""Ours against verl 0.9.1: policy losses and rollout correction; values, gradients, metrics."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from verl_side import agrees, verl

from jaxrl_llm.algorithms.aggregation import aggregation, global_counts
from jaxrl_llm.algorithms.algorithm import compose
from jaxrl_llm.algorithms.covariance_losses import clip_cov, kl_cov
from jaxrl_llm.algorithms.fields import field_names
from jaxrl_llm.algorithms.group_advantages import grpo
from jaxrl_llm.algorithms.importance import sequence_weights, token_weights
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
from jaxrl_llm.algorithms.rejection import reject
from jaxrl_llm.algorithms.sequence_losses import geo_mean, gspo
from jaxrl_llm.config import Composed
from jaxrl_llm.config.thresholds import RULES, parse_rules, parse_threshold

torch = pytest.importorskip("torch", reason="pip install -e '.[parity]'")
pytestmark = pytest.mark.torch

ROWS, LENGTH = 8, 6


def config(policy_loss=None, **settings):
    """verl's actor config with what a loss reads."""
    return verl.ActorConfig(
        strategy="fsdp",
        rollout_n=2,
        ppo_micro_batch_size_per_gpu=4,
        policy_loss=verl.PolicyLossConfig(**(policy_loss or {})),
        **settings,
    )


def batch(seed=0):
    """(logprobs, old, advantages, mask, weights); some tokens moved far from the old policy."""
    rng = np.random.default_rng(seed)
    old = -rng.exponential(size=(ROWS, LENGTH))
    logprobs = np.minimum(old + 0.5 * rng.normal(size=(ROWS, LENGTH)), -1e-3)
    logprobs[0, 0] = old[0, 0] - 4.0
    advantages = rng.normal(size=(ROWS, 1)).repeat(LENGTH, axis=1)
    mask = np.arange(LENGTH) < rng.integers(1, LENGTH + 1, (ROWS, 1))
    weights = rng.uniform(0.5, 2.0, size=(ROWS, LENGTH)) * mask
    return [x.astype(np.float32) for x in (logprobs, old, advantages, mask, weights)]


WIDE = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.3}
CASES = {
    "ppo": (ppo_clip, {"clip_high": 0.3}, verl.compute_policy_loss_vanilla, config(**WIDE)),
    "cispo": (
        cispo,
        {"clip_low": 0.2, "clip_high": 0.3},
        verl.compute_policy_loss_cispo,
        config(**WIDE),
    ),
    "dppo_tv": (
        dppo_tv,
        {"divergence_low": 0.1, "divergence_high": 0.15, "clip_c": 1.3},
        verl.compute_policy_loss_dppo_tv,
        config(clip_ratio_low=0.1, clip_ratio_high=0.15, clip_ratio_c=1.3),
    ),
    "dppo_kl": (
        dppo_kl,
        {"divergence_low": 0.02, "divergence_high": 0.05, "clip_c": 1.3},
        verl.compute_policy_loss_dppo_kl,
        config(clip_ratio_low=0.02, clip_ratio_high=0.05, clip_ratio_c=1.3),
    ),
    "gspo": (
        gspo,
        {"clip_low": 0.05, "clip_high": 0.1},
        verl.compute_policy_loss_gspo,
        config(clip_ratio_low=0.05, clip_ratio_high=0.1),
    ),
    "sapo": (sapo, {"tau_neg": 1.3}, verl.compute_policy_loss_sapo, config(tau_neg=1.3)),
    "gpg": (policy_gradient, {}, verl.compute_policy_loss_gpg, config()),
    "dro": (dro, {"beta": 0.4}, verl.compute_policy_loss_dro, config({"dro_beta": 0.4})),
    "geo_mean": (
        geo_mean,
        {"clip_low": 0.3, "clip_high": 0.4},
        verl.compute_policy_loss_geo_mean,
        config(clip_ratio_low=0.3, clip_ratio_high=0.4),
    ),
    "kl_cov": (
        kl_cov,
        {"kl_cov_ratio": 0.2, "ppo_kl_coef": 0.5},
        verl.compute_policy_loss_kl_cov,
        config({"kl_cov_ratio": 0.2, "ppo_kl_coef": 0.5}),
    ),
    # With so large a share all tokens within the bounds are taken: nothing is left to chance.
    "clip_cov": (
        clip_cov,
        {"clip_cov_ratio": 1.0, "clip_cov_lb": 0.2, "clip_cov_ub": 1.5, "clip_high": 0.3},
        verl.compute_policy_loss_clip_cov,
        config({"clip_cov_ratio": 1.0, "clip_cov_lb": 0.2, "clip_cov_ub": 1.5}, **WIDE),
    ),
}
# verl averages these over sequences in every mode.
ALWAYS = {"sapo": "seq-mean-token-mean", "geo_mean": "seq-mean-token-mean"}


def ours_and_gradient(fn, arrays, name, weights=None):
    logprobs, old, advantages, mask = map(jnp.array, arrays)
    tokens, sequences = global_counts(mask)
    known = {"old_logprobs": old, "advantages": advantages, "mask": mask}

    def total(x):
        per_token, metrics = fn(*((known | {"logprobs": x})[n] for n in field_names(fn)))
        if weights is not None:
            per_token = per_token * jnp.array(weights)
        sums = aggregation(name)(per_token, mask, global_tokens=tokens, global_sequences=sequences)
        return sums, {k: (v * mask).sum() / tokens for k, v in metrics.items()}

    (value, metrics), gradient = jax.value_and_grad(total, has_aux=True)(logprobs)
    return value, gradient, metrics


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("aggregate", ["token-mean", "seq-mean-token-mean"])
@pytest.mark.parametrize("name", CASES)
def test_policy_losses(name, aggregate, seed):
    fn, settings, theirs, actor = CASES[name]
    aggregate = ALWAYS.get(name, aggregate)
    *arrays, _ = batch(seed)
    value, gradient, metrics = ours_and_gradient(partial(fn, **settings), arrays, aggregate)
    x = torch.tensor(arrays[0], requires_grad=True)
    old, advantages, mask = map(torch.tensor, arrays[1:])
    expected, found = theirs(old, x, advantages, mask, aggregate, actor)
    expected.backward()
    agrees(value, expected)
    agrees(gradient, x.grad)
    for key in metrics:
        np.testing.assert_allclose(metrics[key], found[key], rtol=1e-5, atol=1e-5, err_msg=key)


def earlier_clamp(x, min=-np.inf, max=np.inf):
    """torch.clamp with its gradient up to torch 2.13: 1 on a bound. From torch 2.14 on it is 0."""
    return torch.where(x < min, min, torch.where(x > max, max, x))


@pytest.mark.parametrize("name", ["ppo", "cispo", "gspo", "geo_mean"])
def test_bounds_of_width_0_have_the_gradient_of_torch_before_2_14(name, monkeypatch):
    """At equality every token lies exactly on both. Newer torch has our gradient, half or none."""
    fn, _, theirs, _ = CASES[name]
    _, old, advantages, mask, _ = batch()
    aggregate = ALWAYS.get(name, "token-mean")
    ours = partial(fn, clip_low=0.0, clip_high=0.0)
    value, gradient, _ = ours_and_gradient(ours, [old, old, advantages, mask], aggregate)
    actor = config(clip_ratio_low=0.0, clip_ratio_high=0.0)
    for clamp in (torch.clamp, earlier_clamp):
        monkeypatch.setattr(torch, "clamp", clamp)
        x = torch.tensor(old, requires_grad=True)
        rest = map(torch.tensor, (advantages, mask))
        expected, _ = theirs(torch.tensor(old), x, *rest, aggregate, actor)
        expected.backward()
        agrees(value, expected)
        shares = (1.0,) if clamp is earlier_clamp or torch.__version__ < "2.14" else (0.0, 0.5, 1.0)
        distances = [np.abs(x.grad.numpy() - share * np.asarray(gradient)) for share in shares]
        np.testing.assert_allclose(np.min(distances, axis=0), 0.0, atol=1e-6)
    assert np.abs(gradient).max() > 1e-3


@pytest.mark.parametrize("name", sorted(CASES.keys() - {"geo_mean"}))
def test_importance_weights_on_a_loss(name):
    """On purpose not geo_mean: verl takes the geometric mean of a response's weights, ours the mean
    of its weighted tokens; the same for weights of sequences, below."""
    fn, settings, theirs, actor = CASES[name]
    *arrays, weights = batch(1)
    aggregate = ALWAYS.get(name, "token-mean")
    value, _, _ = ours_and_gradient(partial(fn, **settings), arrays, aggregate, weights)
    x, old, advantages, mask, w = map(torch.tensor, (*arrays, weights))
    agrees(value, theirs(old, x, advantages, mask, aggregate, actor, w)[0])


def test_importance_weights_of_sequences_on_geo_mean():
    fn, settings, theirs, actor = CASES["geo_mean"]
    *arrays, weights = batch(1)
    weights = weights[:, :1] * arrays[3]
    value, _, _ = ours_and_gradient(partial(fn, **settings), arrays, "seq-mean-token-mean", weights)
    x, old, advantages, mask, w = map(torch.tensor, (*arrays, weights))
    agrees(value, theirs(old, x, advantages, mask, "", actor, w)[0])


# ------------------------------------------------------------------------- rollout correction


def policies(seed=0):
    """(trainer, sampler, mask)."""
    rng = np.random.default_rng(seed)
    sampler = -rng.exponential(size=(ROWS, LENGTH))
    trainer = sampler + 0.4 * rng.normal(size=(ROWS, LENGTH))
    mask = np.arange(LENGTH) < rng.integers(1, LENGTH + 1, (ROWS, 1))
    return [x.astype(np.float32) for x in (trainer, sampler, mask)]


# On purpose: of sequences verl reports the raw ratio before it is cut, and counts rows, where ours
# reports the weights as they are used and counts tokens; so it is for tokens in both.
OF_ROWS = ("max", "min", "ratio_fraction_high", "ratio_fraction_low")


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("threshold", [1.5, "0.7_1.4"])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_importance_weights_and_their_metrics(level, threshold, normalize):
    arrays = policies()
    trainer, sampler, mask = map(torch.tensor, arrays)
    expected, metrics = verl.compute_rollout_correction_weights(
        trainer - sampler, mask, level, threshold, normalize
    )
    lower, upper = parse_threshold(threshold)
    fn = {"token": token_weights, "sequence": sequence_weights}[level]
    found, ours = fn(*map(jnp.array, arrays), upper=upper, lower=lower, normalize=normalize)
    agrees(found, expected)
    names = {name.removeprefix("rollout_corr/rollout_is_") for name in ours}
    assert {"mean", "std", "eff_sample_size", "seq_mean"} <= names
    for name in names - set(OF_ROWS if level == "sequence" else ()):
        agrees(ours[f"rollout_corr/rollout_is_{name}"], metrics[f"rollout_is_{name}"])


@pytest.mark.parametrize("rule", [*RULES, "token_k1,seq_mean_k3", "seq_sum_k1,token_k2"])
@pytest.mark.parametrize("bound", [0.1, 0.4, 2.0])
def test_rejection(rule, bound):
    arrays = policies(1)
    trainer, sampler, mask = map(torch.tensor, arrays)
    names = rule.split(",")
    spec = ",".join(f"{1 / (1 + bound)}_{1 + bound}" if n[-1] == "1" else str(bound) for n in names)
    expected, metrics = verl.compute_rollout_rejection_mask(trainer - sampler, mask, rule, spec)
    found, ours = reject(*map(jnp.array, arrays), rules=parse_rules(rule, spec))
    np.testing.assert_array_equal(found, expected)
    for name, value in ours.items():
        agrees(value, metrics[name.removeprefix("rollout_corr/")])


def test_mismatch_metrics():
    arrays = policies(2)
    ours = mismatch_metrics(*map(jnp.array, arrays))
    expected = verl.compute_offpolicy_metrics(*map(torch.tensor, arrays))
    for name, value in expected.items():
        agrees(ours[f"rollout_corr/{name}"], value)


@pytest.mark.parametrize("kind", ["ppo_clip", "reinforce"])
def test_two_policies(kind):
    """verl's bypass mode: the ratio of the current policy to the sampler, in the loss."""
    logprobs, sampler, advantages, mask, _ = batch(3)
    settings = {"rollout_rs": "token_k2", "rollout_rs_threshold": 0.5}
    weights = {"rollout_is": "token", "rollout_is_threshold": 1.5} if kind == "reinforce" else {}
    loss = ppo_clip if kind == "ppo_clip" else policy_gradient
    algorithm = compose(Composed(bypass_mode=True, **settings, **weights), grpo, loss)
    known = {"logprobs": logprobs, "rollout_logprobs": sampler, "mask": mask}
    known = {name: jnp.array(x) for name, x in (known | {"advantages": advantages}).items()}
    names = field_names(algorithm.policy_loss)
    tokens = mask.sum()

    def total(x):
        per_token, _ = algorithm.policy_loss(*((known | {"logprobs": x})[n] for n in names))
        return (per_token * known["mask"]).sum() / tokens

    value, gradient = jax.value_and_grad(total)(known["logprobs"])
    actor = config(
        {"rollout_correction": {"loss_type": kind, "rollout_is": None} | settings | weights}
    )
    actor.global_batch_info.update(batch_num_tokens=tokens)  # as verl's trainer gives it
    x = torch.tensor(logprobs, requires_grad=True)
    expected, _ = verl.compute_policy_loss_bypass_mode(
        torch.tensor(sampler), x, torch.tensor(advantages), torch.tensor(mask), "token-mean", actor
    )
    expected.backward()
    agrees(value, expected)
    agrees(gradient, x.grad)
