"""Importance weights, rejection rules, and what an algorithm makes of their settings."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import config as c
from jaxrl_llm.algorithms.algorithm import corrected_for_staleness
from jaxrl_llm.algorithms.build import build_online
from jaxrl_llm.algorithms.fields import field_names
from jaxrl_llm.algorithms.importance import (
    sequence_weights,
    token_weights,
    weights_of_stale_samples,
)
from jaxrl_llm.algorithms.policy_losses import ppo_clip
from jaxrl_llm.algorithms.rejection import reject
from jaxrl_llm.config.thresholds import RULES, parse_rules, parse_threshold

# Ratios of trainer to sampler, a row each; the third row has no token.
RATIO = np.array([[1.25, 0.5, 9.0], [0.8, 7.0, 7.0], [3.0, 3.0, 3.0]])
MASK = np.array([[1.0, 1.0, 1.0], [1.0, 0.0, 0.0], [0.0, 0.0, 0.0]])


def arrays():
    rollout = np.full_like(RATIO, np.log(0.1))
    return tuple(jnp.array(x, jnp.float32) for x in (np.log(RATIO) + rollout, rollout, MASK))


def test_token_weights_are_cut_or_banded_by_hand(checked):
    cut, metrics = checked(token_weights)(*arrays(), upper=2.0)
    expected = np.array([[1.25, 0.5, 2.0], [0.8, 0, 0], [0, 0, 0]])
    np.testing.assert_allclose(cut, expected, rtol=1e-5)
    used = np.array([1.25, 0.5, 2.0, 0.8])
    of_rows = np.array([1.25, 0.8])  # means of the rows with a token
    found = {
        "mean": used.mean(),
        "max": 2.0,
        "min": 0.5,
        "std": used.std(),
        "eff_sample_size": used.mean() ** 2 / (used**2).mean(),
        "ratio_fraction_high": 0.25,
        "ratio_fraction_low": 0.0,  # below 1 / 2
        "seq_mean": of_rows.mean(),
        "seq_std": of_rows.std(ddof=1),
        "seq_max": 1.25,
        "seq_min": 0.8,
    }
    assert metrics.keys() == {f"rollout_corr/rollout_is_{name}" for name in found}
    for name, value in found.items():
        np.testing.assert_allclose(metrics[f"rollout_corr/rollout_is_{name}"], value, rtol=1e-5)
    band, metrics = token_weights(*arrays(), upper=2.0, lower=0.6)
    np.testing.assert_allclose(band, [[1.25, 0, 0], [0.8, 0, 0], [0, 0, 0]], rtol=1e-5)
    assert metrics["rollout_corr/rollout_is_oob_ratio"] == 0.5


def test_sequence_weights_by_hand(checked):
    # products 1.25 * 0.5 * 9 = 5.625 and 0.8
    cut, metrics = checked(sequence_weights)(*arrays(), upper=5.0)
    np.testing.assert_allclose(cut, [[5, 5, 5], [0.8, 0, 0], [0, 0, 0]], rtol=1e-5)
    assert metrics["rollout_corr/rollout_is_ratio_fraction_high"] == 0.75  # of tokens
    band, _ = sequence_weights(*arrays(), upper=5.0, lower=0.5)
    np.testing.assert_allclose(band, [[0, 0, 0], [0.8, 0, 0], [0, 0, 0]], rtol=1e-5)


def test_normalised_weights_have_mean_one():
    weights, metrics = token_weights(*arrays(), normalize=True)
    np.testing.assert_allclose(weights.sum() / MASK.sum(), 1.0, rtol=1e-5)
    factor = metrics["rollout_corr/rollout_is_batch_norm_factor"]
    np.testing.assert_allclose(factor, metrics["rollout_corr/rollout_is_mean"], rtol=1e-6)
    weights, metrics = sequence_weights(*arrays(), upper=5.0, normalize=True)
    np.testing.assert_allclose(weights[:2, 0], np.array([5, 0.8]) / 2.9, rtol=1e-5)


@pytest.mark.parametrize(
    ("given", "expected"),
    [(2, (None, 2.0)), ("2.5", (None, 2.5)), ("0.5_2.0", (0.5, 2.0)), ("1e-2_1", (0.01, 1.0))],
)
def test_thresholds_are_read(given, expected):
    assert parse_threshold(given) == expected


@pytest.mark.parametrize("given", [0, -1.0, "", "2_1", "0_2", "a_2", "two"])
def test_bad_thresholds_are_refused(given):
    with pytest.raises(ValueError, match="an importance threshold of"):
        parse_threshold(given)


def numpy_kept(name, lower, upper):
    """The rules in float64, a row at a time; None for the tokens that are rejected."""
    d = np.log(RATIO)
    kind = {"k1": -d, "k2": d**2 / 2, "k3": np.exp(d) - d - 1}[name[-2:]]
    kept = np.zeros_like(MASK)
    for row in range(2):
        tokens = np.flatnonzero(MASK[row])
        values = kind[row, tokens]
        if name.startswith("seq"):
            reduce = {"sum": np.sum, "mean": np.mean, "max": np.max}[name.split("_")[1]]
            values = np.full(len(tokens), reduce(values))
        kept[row, tokens] = (values >= lower) & (values <= upper)
    return kept


@pytest.mark.parametrize("name", RULES)
def test_each_rule_equals_a_loop(name, checked):
    ratio = name.endswith("k1")
    seen = set()
    for bound in (0.05, 0.3, 1.3, 2.0, 7.0):
        if ratio:
            text, limits = f"{1 / (1 + bound)}_{1 + bound}", (-np.log1p(bound), np.log1p(bound))
        else:
            text, limits = str(bound), (-np.inf, bound)
        kept, metrics = checked(partial(reject, rules=parse_rules(name, text)))(*arrays())
        np.testing.assert_array_equal(kept, numpy_kept(name, *limits), err_msg=f"{bound}")
        share = 1 - kept.sum() / 4
        np.testing.assert_allclose(metrics["rollout_corr/rollout_rs_masked_fraction"], share)
        np.testing.assert_allclose(
            metrics[f"rollout_corr/rollout_rs_{name}_masked_fraction"], share
        )
        rows = (np.array(kept).sum(axis=1) < MASK.sum(axis=1))[:2]
        found = metrics["rollout_corr/rollout_rs_seq_masked_fraction"]
        np.testing.assert_allclose(found, rows.mean())
        seen.add(float(kept.sum()))
    assert len(seen) > 1  # the bounds above do tell something


def test_several_rules_must_all_be_kept_and_no_gap_rejects_nothing():
    rules = parse_rules("token_k1, seq_sum_k2", "0.6_1.9, 4.0")
    assert [rule.name for rule in rules] == ["token_k1", "seq_sum_k2"]
    # k1 is the sampler over the trainer: 1 / 0.5 is over 1.9, 1 / 9 under 0.6
    kept, _ = reject(*arrays(), rules=rules)
    np.testing.assert_array_equal(kept, [[1, 0, 0], [1, 0, 0], [0, 0, 0]])
    old, _, mask = arrays()
    dirty = jnp.where(mask > 0, old, jnp.nan)
    everything = parse_rules(",".join(RULES), 1.0000001)
    np.testing.assert_array_equal(reject(dirty, dirty, mask, rules=everything)[0], mask)


@pytest.mark.parametrize(
    ("names", "thresholds", "message"),
    [
        ("token_k4", 1.0, "did you mean 'token_k"),
        ("seq_max_k1", 1.0, "no rejection rule 'seq_max_k1'"),
        ("token_k1,token_k2", "1,2,3", "one threshold for all or one each"),
        ("token_k1", None, "one threshold for all or one each"),
        (None, 2.0, "one threshold for all or one each"),
        ("token_k1", "2_1", "a band of the ratio"),
        ("token_k2", "0.5_2", "a number over 0"),
        ("seq_sum_k3", 0.0, "a number over 0"),
    ],
)
def test_bad_rules_are_refused(names, thresholds, message):
    with pytest.raises(ValueError, match=message):
        build_online(c.GRPO(rollout_rs=names, rollout_rs_threshold=thresholds))


# ------------------------------------------------------------------------- in an algorithm


def test_three_policies_weigh_by_a_field_and_reject_by_a_mask():
    algorithm = build_online(
        c.PPO(
            rollout_is="sequence",
            rollout_is_threshold="0.5_2.0",
            rollout_rs="token_k1",
            rollout_rs_threshold=2.0,
        )
    )
    assert "importance_weights" in field_names(algorithm.policy_loss)
    assert "old_logprobs" in field_names(algorithm.policy_loss)
    fields = ("old_logprobs", "rollout_logprobs", "mask")
    assert field_names(algorithm.importance) == field_names(algorithm.rejection) == fields


def test_two_policies_never_ask_for_the_old_one():
    algorithm = build_online(c.GRPO(bypass_mode=True, use_kl_in_reward=True, use_kl_loss=False))
    for fn in (algorithm.policy_loss, algorithm.kl_reward, algorithm.advantage):
        assert "old_logprobs" not in field_names(fn)
    assert "rollout_logprobs" in field_names(algorithm.policy_loss)
    old, rollout, mask = arrays()
    advantages = jnp.ones_like(mask)
    known = {"logprobs": old, "rollout_logprobs": rollout, "advantages": advantages, "mask": mask}
    found, _ = algorithm.policy_loss(**known)
    np.testing.assert_array_equal(found, ppo_clip(old, rollout, advantages, mask)[0])
    with pytest.raises(ValueError, match="weighs twice"):
        build_online(c.GRPO(bypass_mode=True, rollout_is="token"))


def test_two_policies_weigh_and_reject_in_the_update():
    algorithm = build_online(
        c.GPG(bypass_mode=True, rollout_is="token", rollout_rs="token_k2", rollout_rs_threshold=0.5)
    )
    assert algorithm.importance is None and algorithm.rejection is None
    names = field_names(algorithm.policy_loss)
    assert names == ("logprobs", "advantages", "mask", "rollout_logprobs")
    old, rollout, mask = arrays()
    advantages = jnp.array([[2.0] * 3, [-1.0] * 3, [9.0] * 3])

    def loss(x):
        return algorithm.policy_loss(x, advantages, mask, rollout)

    # token_k2 rejects the ratio 9: log(9)^2 / 2 = 2.4; the ratios 0.5 and 1.25 stay
    kept = np.array([[1, 1, 0], [1, 0, 0], [0, 0, 0]])
    found, metrics = loss(old)
    np.testing.assert_allclose(found, -old * advantages * RATIO * kept, rtol=1e-5)
    np.testing.assert_array_equal(metrics["rollout_corr/rollout_rs_masked_fraction"], MASK - kept)
    gradient = jax.grad(lambda x: loss(x)[0].sum())(old)  # none through the weight
    np.testing.assert_allclose(gradient, -advantages * RATIO * kept, rtol=1e-5)
    # A pair is judged by the loss that it takes, whatever the estimator's own one is.
    weights = {"bypass_mode": True, "rollout_is": "token"}
    paired = build_online(c.Pair(adv_estimator="rloo", loss_mode="gpg", **weights))
    found, _ = paired.policy_loss(old, advantages, mask, rollout)
    cut = np.minimum(RATIO, 2)
    np.testing.assert_allclose(found, -old * advantages * cut * MASK, rtol=1e-5)
    with pytest.raises(ValueError, match="weighs twice"):
        build_online(c.Pair(adv_estimator="rloo", loss_mode="vanilla", **weights))
    rejecting = build_online(
        c.GRPO(bypass_mode=True, rollout_rs="token_k2", rollout_rs_threshold=0.5)
    )
    assert "importance_weights" not in field_names(rejecting.policy_loss)


def test_an_algorithm_without_weights_gets_those_of_tokens_when_samples_are_old():
    def loss(logprobs, advantages):
        return -logprobs * advantages, {}

    plain = replace(build_online(c.GPG()), policy_loss=loss)
    ours = corrected_for_staleness(plain, "token", 3.0)
    assert field_names(ours.policy_loss) == ("logprobs", "advantages", "importance_weights")
    ones = jnp.ones((1, 2))
    weights, _ = ours.importance(jnp.log(jnp.array([[0.5, 0.9]])), jnp.log(0.25 * ones), ones)
    np.testing.assert_allclose(weights, [[2.0, 3.0]], rtol=1e-6)
    found, _ = ours.policy_loss(ones, ones, weights)
    np.testing.assert_allclose(found, [[-2.0, -3.0]], rtol=1e-6)

    def own(logprobs, rollout_logprobs, advantages):
        return -jnp.exp(logprobs - rollout_logprobs) * advantages, {}

    knows = replace(plain, policy_loss=own)
    assert corrected_for_staleness(knows, "token", 3.0) is knows
    assert corrected_for_staleness(ours, "token", 3.0) is ours


@pytest.mark.parametrize(
    ("staleness", "longest", "expected"),
    [(1, 4, ("token", 2.0)), (4, 16, ("sequence", 10.0)), (2, 17, ("token", 10.0))],
)
def test_old_samples_get_larger_weights_and_short_ones_those_of_whole_responses(
    staleness, longest, expected
):
    assert weights_of_stale_samples(staleness, longest) == expected
