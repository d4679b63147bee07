"""The five aggregations by hand, and that micro-batches add up."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from finite_differences import numeric_gradient

from jaxrl_llm.algorithms.aggregation import AGGREGATIONS, aggregation, global_counts

X = jnp.array([[1.0, 2.0, 3.0], [4.0, 9.0, 9.0], [9.0, 9.0, 9.0]])
MASK = jnp.array([[1.0, 1.0, 1.0], [1.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
BY_HAND = {  # sequence sums 6 and 4, means 2 and 4; the third sequence has no token
    "token-mean": 10 / 4,
    "token-sum": 10.0,
    "seq-mean-token-sum": (6 + 4) / 2,
    "seq-mean-token-mean": (2 + 4) / 2,
    "seq-mean-token-sum-norm": (6 + 4) / 2 / 3,
}


def counts(mask):
    tokens, sequences = global_counts(mask)
    return {"global_tokens": tokens, "global_sequences": sequences}


def test_every_name_has_a_case():
    assert BY_HAND.keys() == AGGREGATIONS.keys()


@pytest.mark.parametrize("name", list(BY_HAND))
def test_by_hand(name, checked):
    assert (counts(MASK)["global_tokens"], counts(MASK)["global_sequences"]) == (4.0, 2.0)
    got = checked(AGGREGATIONS[name])(X, MASK, **counts(MASK))
    np.testing.assert_allclose(got, BY_HAND[name], rtol=1e-6)


def loops(name, x, mask):
    """The definition of an aggregation, row by row, in float64."""
    rows = [row[keep > 0] for row, keep in zip(x, mask, strict=True)]
    rows = [row for row in rows if row.size]
    tokens = np.concatenate(rows)
    return {
        "token-mean": lambda: tokens.mean(),
        "token-sum": lambda: tokens.sum(),
        "seq-mean-token-sum": lambda: np.mean([row.sum() for row in rows]),
        "seq-mean-token-mean": lambda: np.mean([row.mean() for row in rows]),
        "seq-mean-token-sum-norm": lambda: np.mean([row.sum() / x.shape[1] for row in rows]),
    }[name]()


@pytest.mark.parametrize("name", list(BY_HAND))
def test_value_and_gradient_against_loops_and_finite_differences(name):
    x = np.random.default_rng(1).normal(size=(5, 4))
    mask = np.arange(4) < np.array([4, 0, 1, 3, 2])[:, None]
    ours, known = jnp.array(x, jnp.float32), jnp.array(mask, jnp.float32)
    value, gradient = jax.value_and_grad(lambda x: AGGREGATIONS[name](x, known, **counts(known)))(
        ours
    )
    np.testing.assert_allclose(value, loops(name, x, mask), rtol=1e-5)
    expected = numeric_gradient(lambda x: loops(name, x, mask), x)
    np.testing.assert_allclose(gradient, expected, atol=1e-5)


@pytest.mark.parametrize("name", list(BY_HAND))
@pytest.mark.parametrize("sizes", [(1,) * 6, (4, 2), (1, 5)])
def test_micro_batches_add_up_in_value_and_gradient(name, sizes):
    rng = np.random.default_rng(0)
    x = jnp.array(rng.normal(size=(6, 5)), jnp.float32)
    mask = jnp.array(np.arange(5) < np.array([5, 0, 3, 1, 2, 4])[:, None], jnp.float32)
    whole = counts(mask)
    fn = AGGREGATIONS[name]
    value, gradient = jax.value_and_grad(lambda x: fn(x, mask, **whole))(x)
    starts = np.cumsum((0, *sizes))
    slices = [slice(a, b) for a, b in zip(starts[:-1], starts[1:], strict=True)]
    parts = [jax.value_and_grad(lambda x, m: fn(x, m, **whole))(x[s], mask[s]) for s in slices]
    np.testing.assert_allclose(sum(p[0] for p in parts), value, rtol=1e-6)
    np.testing.assert_array_equal(np.concatenate([p[1] for p in parts]), gradient)


@pytest.mark.parametrize("name", list(BY_HAND))
def test_order_padding_and_empty_batches(name):
    fn = AGGREGATIONS[name]
    base = fn(X, MASK, **counts(MASK))
    order = jnp.array([2, 0, 1])
    np.testing.assert_allclose(fn(X[order], MASK[order], **counts(MASK)), base, rtol=1e-6)
    dirty = jnp.where(MASK > 0, X, jnp.nan)
    np.testing.assert_array_equal(fn(dirty, MASK, **counts(MASK)), base)
    empty = jnp.zeros_like(MASK)
    assert fn(X, empty, **counts(empty)) == 0.0
    assert np.isfinite(jax.grad(lambda x: fn(x, empty, **counts(empty)))(X)).all()


def test_scale_and_names():
    fn = aggregation("seq-mean-token-sum-norm", scale=10)
    np.testing.assert_allclose(fn(X, MASK, **counts(MASK)), 0.5, rtol=1e-6)
    assert aggregation("token-mean") is AGGREGATIONS["token-mean"]
    with pytest.raises(ValueError, match="did you mean 'token-mean'"):
        aggregation("token_mean")
    with pytest.raises(ValueError, match="leave it None"):
        aggregation("token-mean", scale=10)
    with pytest.raises(ValueError, match="positive length"):
        aggregation("seq-mean-token-sum-norm", scale=0)
