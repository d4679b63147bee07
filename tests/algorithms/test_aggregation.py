"""The aggregations by hand, and that micro-batches add up."""

from functools import cache

import jax
import numpy as np
import pytest
from compiled import compiled
from finite_differences import numeric_gradient

from jaxrl_llm.algorithms.aggregation import (
    AGGREGATIONS,
    aggregation,
    global_counts,
    prompt_weights,
    reads_prompts,
)

X = np.float32([[1.0, 2.0, 3.0], [4.0, 9.0, 9.0], [9.0, 9.0, 9.0]])
MASK = np.float32([[1.0, 1.0, 1.0], [1.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
BY_HAND = {  # sequence sums 6 and 4, means 2 and 4; the third sequence has no token
    "token-mean": 10 / 4,
    "token-sum": 10.0,
    "seq-mean-token-sum": (6 + 4) / 2,
    "seq-mean-token-mean": (2 + 4) / 2,
    "seq-mean-token-sum-norm": (6 + 4) / 2 / 3,
    "prompt-mean": (2 + 4) / 2,
}
GROUPS = np.int32([7, 2, 7, 5, 2, 7])  # not side by side; 5 is one sample alone


def counts(mask, name="token-mean", rows=slice(None)):
    """The counts of a mini-batch, as the `rows` of a micro-batch see them."""
    tokens, sequences = global_counts(mask)
    known = {"global_tokens": tokens, "global_sequences": sequences}
    if reads_prompts(AGGREGATIONS[name]):
        known["prompt_weights"] = prompt_weights(mask, GROUPS[: mask.shape[0]])[rows]
    return known


@cache
def with_gradient(name):
    """(x, mask, the mask of the whole batch, the first row) to the value and its gradient."""

    def value(x, mask, whole, start=0):
        rows = slice(start, start + x.shape[0])
        return AGGREGATIONS[name](x, mask, **counts(whole, name, rows))

    return jax.jit(jax.value_and_grad(value), static_argnums=3)


def test_every_name_has_a_case():
    assert BY_HAND.keys() == AGGREGATIONS.keys()


@pytest.mark.parametrize("name", list(BY_HAND))
def test_by_hand(name, checked):
    def value(x, mask):
        return checked(AGGREGATIONS[name])(x, mask, **counts(mask, name)), counts(mask)

    got, found = compiled(value, X, MASK)
    assert (found["global_tokens"], found["global_sequences"]) == (4.0, 2.0)
    np.testing.assert_allclose(got, BY_HAND[name], rtol=1e-6)


def loops(name, x, mask):
    """The definition of an aggregation, row by row, in float64."""
    rows = [row[keep > 0] for row, keep in zip(x, mask, strict=True)]
    groups = GROUPS[: len(rows)]
    prompts = [
        np.concatenate([row for row, own in zip(rows, groups, strict=True) if own == group])
        for group in sorted(set(groups.tolist()))
    ]
    rows = [row for row in rows if row.size]
    tokens = np.concatenate(rows)
    return {
        "token-mean": lambda: tokens.mean(),
        "token-sum": lambda: tokens.sum(),
        "seq-mean-token-sum": lambda: np.mean([row.sum() for row in rows]),
        "seq-mean-token-mean": lambda: np.mean([row.mean() for row in rows]),
        "seq-mean-token-sum-norm": lambda: np.mean([row.sum() / x.shape[1] for row in rows]),
        "prompt-mean": lambda: np.mean([tokens.mean() for tokens in prompts if tokens.size]),
    }[name]()


@pytest.mark.parametrize("name", list(BY_HAND))
def test_value_and_gradient_against_loops_and_finite_differences(name):
    x = np.random.default_rng(1).normal(size=(5, 4))
    mask = np.arange(4) < np.array([4, 0, 1, 3, 2])[:, None]
    known = mask.astype(np.float32)
    value, gradient = with_gradient(name)(x.astype(np.float32), known, known)
    np.testing.assert_allclose(value, loops(name, x, mask), rtol=1e-5)
    expected = numeric_gradient(lambda x: loops(name, x, mask), x)
    np.testing.assert_allclose(gradient, expected, atol=1e-5)


@pytest.mark.parametrize("name", list(BY_HAND))
@pytest.mark.parametrize("sizes", [(1,) * 6, (4, 2), (1, 5)])
def test_micro_batches_add_up_in_value_and_gradient(name, sizes):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(6, 5)).astype(np.float32)
    mask = (np.arange(5) < np.array([5, 0, 3, 1, 2, 4])[:, None]).astype(np.float32)
    run = with_gradient(name)
    value, gradient = run(x, mask, mask)
    starts = np.cumsum((0, *sizes))
    slices = [slice(a, b) for a, b in zip(starts[:-1], starts[1:], strict=True)]
    parts = [run(x[s], mask[s], mask, s.start) for s in slices]
    np.testing.assert_allclose(sum(p[0] for p in parts), value, rtol=1e-6)
    np.testing.assert_array_equal(np.concatenate([p[1] for p in parts]), gradient)


def test_a_prompt_weighs_by_its_tokens_in_the_whole_mini_batch():
    """Lengths 3, 1 and 0, 2 of the prompts 7 and 2; prompt 5 has no token and is not counted."""
    mask = (np.arange(3) < np.array([3, 2, 1, 0, 0])[:, None]).astype(np.float32)
    weights = compiled(prompt_weights, mask, GROUPS[:5])
    np.testing.assert_allclose(weights, [1 / 8, 1 / 4, 1 / 8, 0, 1 / 4], rtol=1e-6)


def test_scale():
    fn = aggregation("seq-mean-token-sum-norm", scale=10)
    found = compiled(lambda x, mask: fn(x, mask, **counts(mask)), X, MASK)
    np.testing.assert_allclose(found, 0.5, rtol=1e-6)
    with pytest.raises(ValueError, match="leave it None"):
        aggregation("token-mean", scale=10)
