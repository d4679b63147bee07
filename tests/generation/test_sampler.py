"""The sampler against the exact distribution; test_filters.py has its filters."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.generation.sampler import (
    SamplingParams,
    sample,
    token_keys,
)
from jaxrl_llm.kernels.vocabulary_sums import num_rows, sums_of_columns

SEED = jax.random.key(0)


def params(**settings):
    return SamplingParams(max_new_tokens=4, **settings)


def keys(count, token=0):
    return token_keys(SEED, jnp.arange(count, dtype=jnp.uint32), jnp.full((count,), token))


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def chi_square_fits(counts, probabilities):
    """Within five standard deviations of the chi-square statistic; the seeds are fixed."""
    expected = counts.sum() * probabilities
    statistic = np.sum((counts - expected) ** 2 / expected)
    freedom = len(counts) - 1
    return statistic < freedom + 5 * np.sqrt(2 * freedom)


@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
def test_draws_follow_the_softmax(temperature):
    logits = np.random.default_rng(0).normal(size=50).astype(np.float32)
    draws = 100_000
    tokens, *_ = jax.jit(sample, static_argnums=2)(
        jnp.broadcast_to(logits, (draws, 50)), keys(draws), params(temperature=temperature)
    )
    counts = np.bincount(np.asarray(tokens), minlength=50)
    assert chi_square_fits(counts, softmax(logits / temperature))
    assert not chi_square_fits(counts, softmax(logits / temperature * 1.1))


def test_a_large_vocabulary_is_drawn_in_two_steps_from_the_same_softmax():
    """2,560 tokens are 8 rows of 320 columns; counts by row, by column and of the likeliest."""
    size, rows, draws = 2560, 8, 40_000
    assert num_rows(size) == rows
    logits = np.random.default_rng(3).normal(size=size, scale=2).astype(np.float32)
    run = jax.jit(lambda k: sample(jnp.broadcast_to(logits, (2000, size)), k, params())[:2])
    found = [run(part) for part in np.split(np.asarray(keys(draws)), draws // 2000)]
    tokens, logprobs = (np.concatenate(parts) for parts in zip(*found, strict=True))
    np.testing.assert_allclose(logprobs, np.log(softmax(logits))[tokens], atol=1e-5)
    exact = softmax(logits.astype(np.float64))
    top = np.argsort(-exact)[:200]
    which = np.full(size, 200)
    which[top] = np.arange(200)
    for label in (np.arange(size) // 320, np.arange(size) % 320 // 8, which):
        probabilities = np.bincount(label, weights=exact)
        assert chi_square_fits(
            np.bincount(label[tokens], minlength=len(probabilities)), probabilities
        )


@pytest.mark.parametrize("rows", [2, 16, 128])
def test_sums_of_columns_are_those_of_float64(rows):
    z = 20 * jax.random.normal(SEED, (3, rows, 257))
    assert num_rows(rows * 257) == rows
    z = z.at[0, :, 3].set(-jnp.inf).at[1, 0, 4].set(-jnp.inf).at[2, 1, 5].set(3e38)
    found, exact = sums_of_columns(z.reshape(3, -1)), np.asarray(z, np.float64)
    peak = np.maximum(exact.max(axis=1), -1e300)
    with np.errstate(divide="ignore"):
        expected = peak + np.log(np.exp(exact - peak[:, None]).sum(axis=1))
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=2e-5)
    assert np.isneginf(found[0, 3])
    assert np.isnan(sums_of_columns(z.at[1, 1, 7].set(jnp.nan).reshape(3, -1))[1, 7])


def test_draws_of_consecutive_tokens_and_samples_are_independent():
    """Joint counts of (token t, token t + 1) and of (sample s, sample s + 1) against uniform."""
    draws, size = 40_000, 8
    run = jax.jit(sample, static_argnums=2)
    flat = jnp.zeros((draws, size))
    first, *_ = run(flat, keys(draws, token=0), params())
    second, *_ = run(flat, keys(draws, token=1), params())
    uniform = np.full(size * size, 1 / size**2)
    for left, right in ((first, second), (first[0::2], first[1::2])):
        counts = np.bincount(np.asarray(left) * size + np.asarray(right), minlength=size * size)
        assert chi_square_fits(counts, uniform)


def test_rare_tokens_are_drawn_at_their_rate():
    """One token in 4096 of a large vocabulary of equals: the noise has no coarse upper tail."""
    draws, size = 2000, 4096
    tokens, *_ = jax.jit(sample, static_argnums=2)(jnp.zeros((draws, size)), keys(draws), params())
    counts = np.bincount(np.asarray(tokens) // 64, minlength=size // 64)
    assert chi_square_fits(counts, np.full(64, 1 / 64))
    assert len(np.unique(tokens)) > 1500  # 1582 expected of 2000 draws from 4096


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_logprob_is_of_the_full_softmax_at_the_temperature(temperature):
    logits = np.random.default_rng(3).normal(size=(64, 40), scale=2).astype(np.float32)
    # Greedy sampling has no filters.
    filters = {} if temperature else {"top_k": 5, "top_p": 0.9, "min_p": 0.01}
    settings = params(temperature=temperature, **filters)
    tokens, logprobs, kept = jax.jit(sample, static_argnums=2)(logits, keys(64), settings)
    z = logits.astype(np.float64) / (temperature or 1)
    expected = np.log(softmax(z))[np.arange(64), np.asarray(tokens)]
    np.testing.assert_allclose(logprobs, expected, atol=1e-5)
    assert tokens.dtype == jnp.int32 and logprobs.dtype == jnp.float32 and kept is None
    if temperature == 0:
        np.testing.assert_array_equal(tokens, logits.argmax(-1))


def test_a_draw_depends_on_its_key_alone():
    logits = jnp.asarray(np.random.default_rng(4).normal(size=(6, 100)), jnp.float32)
    run = jax.jit(sample, static_argnums=2)
    tokens, *_ = run(logits, keys(6), params())
    order = jnp.asarray([3, 0, 5])
    some, *_ = run(logits[order], keys(6)[order], params())
    np.testing.assert_array_equal(some, tokens[order])


def test_default_path_has_no_sort_no_loop_and_settings_that_are_off_add_nothing():
    def program(settings):
        return str(jax.make_jaxpr(lambda z, k: sample(z, k, settings))(jnp.zeros((2, 50)), keys(2)))

    default = program(params())
    assert not re.search(r"\b(sort|top_k|while|scan|cumsum)\[", default)
    assert program(params(top_k=50)) == default  # the whole vocabulary
    every_filter = program(params(top_k=3, top_p=0.5, min_p=0.1))
    assert not re.search(r"\b(sort|top_k)\[", every_filter)


def test_stop_tokens():
    settings = params(stop_token_ids=(3, 7))
    np.testing.assert_array_equal(settings.is_stop(jnp.asarray([3, 4, 7])), [True, False, True])
    np.testing.assert_array_equal(params().is_stop(jnp.asarray([3, 4])), [False, False])
