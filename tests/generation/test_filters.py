"""The tokens that filters keep, against sorting, and draws from them against the exact softmax."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.generation.filters import MOST_KEPT, likeliest
from jaxrl_llm.generation.sampler import SamplingParams, sample, token_keys

SEED = jax.random.key(0)


def params(**settings):
    return SamplingParams(max_new_tokens=4, **settings)


def drawn(logits, **settings):
    """Tokens, log-probs and kept ids of some rows."""
    count = len(logits)
    keys = token_keys(SEED, jnp.arange(count, dtype=jnp.uint32), jnp.zeros(count, jnp.int32))
    run = jax.jit(sample, static_argnums=2)
    return tuple(map(np.asarray, run(jnp.asarray(logits), keys, params(**settings))))


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def reference_keep(logits, top_k=0, top_p=1.0, min_p=0.0):
    """The kept set by sorting, one row, distinct logits; transformers' order of filters."""
    order = np.argsort(-logits, kind="stable")
    keep = np.ones(len(logits), bool)
    if 0 < top_k < len(logits):
        keep[order[top_k:]] = False
    if top_p < 1:
        mass = softmax(np.where(keep, logits, -np.inf).astype(np.float64))
        before = np.cumsum(mass[order]) - mass[order]
        keep[order[before >= top_p]] = False
    if min_p > 0:
        keep &= softmax(logits) >= min_p * softmax(logits).max()
    keep[order[MOST_KEPT:]] = False
    return keep


@pytest.mark.parametrize(
    ("size", "settings"),
    [
        (300, {"top_k": 1}),
        (300, {"top_k": 7}),
        (300, {"top_p": 0.01}),
        (300, {"top_p": 0.5, "temperature": 1.5}),
        (300, {"top_p": 0.95}),
        (300, {"min_p": 0.05}),
        (300, {"min_p": 1.0}),
        (300, {"top_k": 20, "top_p": 0.8, "min_p": 0.1}),
        (4096, {"top_k": 9, "top_p": 0.9}),  # found in 9 of 32 blocks
        (4099, {"top_k": 30}),  # no divisor: the last block is filled
        (700, {"top_p": 0.9999}),  # more than are kept at most
    ],
)
def test_log_probs_are_over_the_sorted_reference_set(size, settings):
    scale = 0.5 if size == 700 else 3
    logits = np.random.default_rng(1).normal(size=(16, size), scale=scale).astype(np.float32)
    tokens, logprobs, kept = drawn(logits, **settings)
    z = logits.astype(np.float64) / settings.pop("temperature", 1.0)
    for row in range(len(z)):
        keep = reference_keep(z[row].astype(np.float32), **settings)
        ids = kept[row][kept[row] >= 0]
        np.testing.assert_array_equal(np.sort(ids), np.flatnonzero(keep))
        exact = softmax(np.where(keep, z[row], -np.inf))
        assert exact[tokens[row]] > 0
        np.testing.assert_allclose(logprobs[row], np.log(exact[tokens[row]]), atol=1e-5)


@pytest.mark.parametrize(("size", "k"), [(60, 7), (2560, 6)])
def test_equal_tokens_fill_top_k_and_no_more(size, k):
    """Rounded logits: many are equal to the last one kept."""
    rng = np.random.default_rng(5)
    logits = (np.round(2 * rng.normal(size=(8, size))) / 2).astype(np.float32)
    found = np.asarray(jax.jit(likeliest, static_argnums=1)(jnp.asarray(logits), k))
    for row, ids in zip(logits, found, strict=True):
        assert len(set(ids.tolist())) == k
        np.testing.assert_array_equal(np.sort(row[ids]), np.sort(row)[-k:])


def test_draws_follow_the_softmax_over_the_kept_tokens():
    logits = np.random.default_rng(2).normal(size=30).astype(np.float32)
    settings = {"top_k": 12, "top_p": 0.9}
    tokens, _, _ = drawn(np.broadcast_to(logits, (50_000, 30)), **settings)
    keep = reference_keep(logits, **settings)
    counts = np.bincount(tokens, minlength=30)
    assert counts[~keep].sum() == 0
    expected = counts.sum() * softmax(logits[keep])
    statistic, freedom = np.sum((counts[keep] - expected) ** 2 / expected), keep.sum() - 1
    assert statistic < freedom + 5 * np.sqrt(2 * freedom)


def test_how_many_tokens_are_kept_at_most():
    assert params().num_kept(100) == params(top_k=100).num_kept(100) == 0
    assert params(top_k=7, top_p=0.5).num_kept(100) == 7
    assert params(top_p=0.5).num_kept(100) == 100
    assert params(min_p=0.1).num_kept(10**5) == params(top_k=600).num_kept(10**5) == MOST_KEPT
    assert params(top_k=7, temperature=0.0).num_kept(100) == 0
