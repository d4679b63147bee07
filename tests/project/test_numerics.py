"""Masked statistics against numpy on the selected entries; log-probs against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.numerics import (
    chosen_logprobs,
    masked_count,
    masked_mean,
    masked_quantiles,
    masked_sum,
    masked_var,
    masked_whiten,
    round_by_chance,
    safe_divide,
    to_every_token,
)

X = np.array([[1.0, 2.0, 4.0], [7.0, 3.0, 5.0]], np.float32)
MASK = np.array([[1.0, 1.0, 0.0], [1.0, 0.0, 0.0]], np.float32)  # selects 1, 2, 7


def test_statistics_of_the_selected_entries(checked):
    x, mask = jnp.array(X), jnp.array(MASK)
    assert checked(masked_sum)(x, mask) == 10.0
    assert checked(masked_count)(mask) == 3.0
    np.testing.assert_allclose(checked(masked_mean)(x, mask), 10 / 3, rtol=1e-6)
    np.testing.assert_allclose(checked(masked_mean)(x, mask, 1), [1.5, 7.0])
    np.testing.assert_allclose(checked(masked_mean)(x, mask, 0), [4.0, 2.0, 0.0])
    np.testing.assert_allclose(checked(masked_var)(x, mask), np.var([1, 2, 7], ddof=1), rtol=1e-6)
    np.testing.assert_allclose(masked_var(x, mask, unbiased=False), np.var([1, 2, 7]), rtol=1e-6)


PERCENTS = (1, 50, 99, 100)


@pytest.mark.parametrize("number", [1, 100, 1037])
def test_quantiles_are_those_of_the_selected_entries(checked, number):
    rng = np.random.default_rng(number)
    x = rng.standard_normal(2 * number).astype(np.float32)
    x[::7] = np.float32(0.25)  # equal entries
    mask = np.zeros(2 * number, bool)
    mask[rng.permutation(2 * number)[:number]] = True
    expected = np.quantile(x[mask], np.array(PERCENTS) / 100, method="inverted_cdf")
    x[~mask] = rng.choice(np.array([np.nan, np.inf, -np.inf], np.float32), number)
    found = checked(masked_quantiles)(jnp.array(x), jnp.array(mask), PERCENTS)
    np.testing.assert_array_equal(found, expected)


def test_quantiles_of_odd_numbers_and_of_none():
    x = jnp.array([0.0, -0.0, 1e-42, -3e38, 3e38, -1.0])
    found = masked_quantiles(x, jnp.ones(6), (1, 33, 50, 100))
    np.testing.assert_array_equal(found, np.array([-3e38, -1.0, 0.0, 3e38], np.float32))
    np.testing.assert_array_equal(masked_quantiles(x, jnp.zeros(6), (1, 99)), [0.0, 0.0])


def test_a_mesh_changes_no_bit_of_quantiles():
    x = np.random.default_rng(0).standard_normal((16, 40)).astype(np.float32)
    mask = np.arange(40) < np.arange(16)[:, None] + 9
    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    split = jax.NamedSharding(mesh, jax.P("data"))
    quantiles = jax.jit(masked_quantiles, static_argnums=2)
    alone = quantiles(x, mask, PERCENTS)
    spread = quantiles(jax.device_put(x, split), jax.device_put(mask, split), PERCENTS)
    np.testing.assert_array_equal(alone, spread)


def test_a_weight_of_every_token_has_its_gradient_summed_in_float32():
    weight, gradient = jnp.arange(4, dtype=jnp.bfloat16), jnp.full((8, 512, 4), 0.375, jnp.bfloat16)
    out, pull = jax.vjp(lambda weight: to_every_token(weight, gradient.shape), weight)
    np.testing.assert_array_equal(out, np.broadcast_to(weight, gradient.shape))
    (found,) = pull(gradient)
    assert found.dtype == jnp.bfloat16 and (found == 1536).all()


def test_whiten_by_hand(checked):
    # mean 10/3, unbiased variance 31/3
    expected = (np.array([1.0, 2.0, 7.0]) - 10 / 3) / np.sqrt(31 / 3)
    white = checked(masked_whiten)(jnp.array(X), jnp.array(MASK))
    np.testing.assert_allclose(
        white, [[expected[0], expected[1], 0], [expected[2], 0, 0]], atol=1e-6
    )
    kept = masked_whiten(jnp.array(X), jnp.array(MASK), shift_mean=False)
    np.testing.assert_allclose(kept, np.where(MASK > 0, white + 10 / 3, 0), atol=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_padding_changes_nothing(bad):
    x = jnp.array(np.where(MASK > 0, X, bad))
    mask = jnp.array(MASK)
    for fn in (masked_sum, masked_mean, masked_var, masked_whiten):
        np.testing.assert_array_equal(fn(x, mask), fn(jnp.array(X), mask))


def test_empty_and_single_selections_are_zero_and_finite():
    x, none = jnp.array(X), jnp.zeros((2, 3))
    one = none.at[0, 1].set(1.0)
    assert masked_mean(x, none) == 0.0
    assert masked_var(x, none) == 0.0
    assert masked_var(x, one) == 0.0
    np.testing.assert_array_equal(masked_whiten(x, none), np.zeros((2, 3)))
    np.testing.assert_array_equal(masked_whiten(x, one), np.zeros((2, 3)))
    assert np.isfinite(jax.grad(lambda x: masked_mean(x, none))(x)).all()
    assert np.isfinite(jax.grad(safe_divide, argnums=(0, 1))(1.0, 0.0)).all()


def test_boolean_and_bfloat16_inputs():
    mask = jnp.array(MASK) > 0
    assert masked_mean(jnp.array(X, jnp.bfloat16), mask).dtype == jnp.float32
    # 4096 ones: a bfloat16 sum would stop at 256
    assert masked_sum(jnp.ones(4096, jnp.bfloat16), jnp.ones(4096, bool)) == 4096.0


def test_chosen_logprobs_and_entropy(checked):
    logits = np.random.default_rng(0).normal(size=(2, 3, 5)) * 4
    ids = np.array([[0, 4, 2], [1, 1, 3]])
    probs = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    chosen = np.log(np.take_along_axis(probs, ids[..., None], -1)[..., 0])
    got = checked(chosen_logprobs)(jnp.array(logits, jnp.float32), jnp.array(ids))
    np.testing.assert_allclose(got, chosen, atol=1e-5)


def test_rounding_by_chance_keeps_the_mean_and_repeats():
    x = jnp.full(
        (64, 64), 1.0 + 2**-7 / 4, jnp.float32
    )  # a quarter of the way to the next bfloat16
    rounded = round_by_chance(x, jnp.int32(3), 5)
    assert rounded.dtype == jnp.bfloat16
    values, counts = np.unique(np.asarray(rounded, np.float32), return_counts=True)
    np.testing.assert_array_equal(values, [1.0, 1.0 + 2**-7])
    assert abs(counts[1] / x.size - 0.25) < 4 * np.sqrt(0.25 * 0.75 / x.size)
    np.testing.assert_array_equal(rounded, round_by_chance(x, jnp.int32(3), 5))
    for step, stream in ((4, 5), (3, 6)):
        assert not np.array_equal(rounded, round_by_chance(x, jnp.int32(step), stream))


def test_rounding_by_chance_keeps_what_needs_no_rounding():
    x = jnp.array([0.0, -0.0, 1.5, -3.0, jnp.inf, -jnp.inf, jnp.nan, 2.0**-130], jnp.float32)
    rounded = round_by_chance(x, jnp.int32(1), 0)
    np.testing.assert_array_equal(np.asarray(rounded, np.float32), x)
    lowest = jnp.float32(jnp.finfo(jnp.bfloat16).min)
    assert round_by_chance(lowest[None], jnp.int32(1), 0)[0] == lowest
