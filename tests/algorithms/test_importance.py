"""Rollout correction, and the measures of the gap between sampler and trainer."""

import functools

import jax.numpy as jnp
import numpy as np

from jaxrl_llm.algorithms.fields import field_names
from jaxrl_llm.algorithms.importance import importance_weighted, token_weights
from jaxrl_llm.algorithms.mismatch import mismatch_metrics
from jaxrl_llm.algorithms.policy_losses import ppo_clip

OLD_PROBS = np.array([[0.5, 0.2, 0.9], [0.4, 1.0, 1.0], [1.0, 1.0, 1.0]])
ROLLOUT_PROBS = np.array([[0.4, 0.4, 0.1], [0.5, 1.0, 1.0], [1.0, 1.0, 1.0]])
MASK = np.array([[1.0, 1.0, 1.0], [1.0, 0.0, 0.0], [0.0, 0.0, 0.0]])


def arrays():
    probs = (np.log(OLD_PROBS), np.log(ROLLOUT_PROBS), MASK)
    return tuple(jnp.array(x, jnp.float32) for x in probs)


def test_weighted_loss_declares_the_field_and_multiplies():
    old, rollout, mask = arrays()
    weights, _ = token_weights(old, rollout, mask)
    advantages = jnp.array(np.random.default_rng(0).normal(size=(3, 3)), jnp.float32)
    plain = functools.partial(ppo_clip, clip_high=0.28)
    weighted = importance_weighted(plain)
    assert field_names(weighted) == (*field_names(plain), "importance_weights")
    loss, metrics = plain(rollout, old, advantages, mask)
    by_position = weighted(rollout, old, advantages, mask, weights)
    np.testing.assert_array_equal(by_position[0], loss * weights)
    fields = dict(zip(field_names(plain), (rollout, old, advantages, mask), strict=True))
    by_name = weighted(**fields, importance_weights=weights)
    np.testing.assert_array_equal(by_name[0], by_position[0])
    for name, value in metrics.items():
        np.testing.assert_array_equal(by_name[1][name], value)
    tight = weighted(rollout, old, advantages, mask, weights, clip_high=0.0)[0]
    expected = plain(rollout, old, advantages, mask, clip_high=0.0)[0] * weights
    np.testing.assert_array_equal(tight, expected)


def test_mismatch_by_hand(checked):
    metrics = checked(mismatch_metrics)(*arrays())
    old, rollout = (x[MASK > 0] for x in (OLD_PROBS, ROLLOUT_PROBS))
    gap = np.abs(old - rollout)  # 0.1, 0.2, 0.8, 0.1
    log_ratio = np.log(old / rollout)
    per_sequence = np.array([log_ratio[:3].mean(), log_ratio[3]])
    whole = np.array([log_ratio[:3].sum(), log_ratio[3]])
    trainer = np.array([-np.log(old[:3]).mean(), -np.log(old[3])])
    sampler = np.array([-np.log(rollout[:3]).mean(), -np.log(rollout[3])])
    expected = {
        "training/rollout_probs_diff_max": 0.8,
        "training/rollout_probs_diff_mean": gap.mean(),
        "training/rollout_probs_diff_std": gap.std(ddof=1),
        "rollout_corr/kl": -log_ratio.mean(),
        "rollout_corr/k3_kl": (old / rollout - log_ratio - 1).mean(),
        "rollout_corr/ppl_ratio": np.exp(-per_sequence).mean(),
        "rollout_corr/training_ppl": np.exp(trainer).mean(),
        "rollout_corr/training_log_ppl": trainer.mean(),
        "rollout_corr/rollout_ppl": np.exp(sampler).mean(),
        "rollout_corr/rollout_log_ppl": sampler.mean(),
        "rollout_corr/log_ppl_diff": -per_sequence.mean(),
        "rollout_corr/log_ppl_abs_diff": np.abs(per_sequence).mean(),
        "rollout_corr/log_ppl_diff_max": -per_sequence.min(),
        "rollout_corr/log_ppl_diff_min": -per_sequence.max(),
        "rollout_corr/chi2_token": ((old / rollout) ** 2).mean() - 1,
        "rollout_corr/chi2_seq": np.exp(2 * whole).mean() - 1,
        "token_mult_prob_error": np.exp(np.abs(log_ratio)).mean(),
    }
    assert metrics.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(metrics[name], value, rtol=1e-5, err_msg=name)


def test_padding_and_empty_batches():
    old, rollout, mask = arrays()
    dirty = [jnp.where(mask > 0, x, jnp.nan) for x in (old, rollout)]
    clean, padded = mismatch_metrics(old, rollout, mask), mismatch_metrics(*dirty, mask)
    for name in clean:
        np.testing.assert_array_equal(clean[name], padded[name])
    for name, value in mismatch_metrics(old, rollout, jnp.zeros_like(mask)).items():
        assert value == 0.0, name
