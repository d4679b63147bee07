"""Chunked log-probs against whole logits, in value, gradient, precision and memory."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled import compiled
from finite_differences import numeric_gradient
from jax.extend.core import ClosedJaxpr, Jaxpr

from jaxrl_llm.kernels import head_chunks as module
from jaxrl_llm.kernels.linear_logprob import (
    linear_logprob,
    linear_logprob_reference,
    sum_squared_probs,
)
from jaxrl_llm.kernels.strict import Strict


def case(shape=(7,), width=5, vocab=11, dtype=jnp.float32, seed=0):
    rng = np.random.default_rng(seed)
    hidden = jnp.array(rng.normal(size=(*shape, width)), dtype)
    weight = jnp.array(rng.normal(size=(vocab, width)), dtype)
    return hidden, weight, jnp.array(rng.integers(0, vocab, shape), jnp.int32)


def total(fn, targets, has_aux=False, **settings):
    """A scalar that weighs every token and both outputs differently; with the outputs if asked."""

    def loss(hidden, weight):
        logprobs, entropy = fn(hidden, weight, targets, **settings)
        ramp = jnp.linspace(0.5, 2.0, targets.size).reshape(targets.shape)
        value = (ramp * logprobs).sum() + (ramp[..., ::-1] * entropy).sum()
        return (value, (logprobs, entropy)) if has_aux else value

    return loss


@pytest.mark.parametrize(
    ("shape", "chunk", "temperature", "softcap"),
    [
        ((7,), 1000, 1.0, None),  # one chunk
        ((7,), 2, 0.6, 1.5),  # a padded remainder: 4 chunks of 2
        ((12,), 5, 1.0, None),  # divides at 3 chunks of 4
        ((3, 6), 6, 0.6, None),  # 3 rows, 2 tokens of each in a chunk
        ((3, 7), 9, 1.0, None),  # rows with a padded remainder
        ((2, 2, 3), 1, 1.0, None),  # fewer tokens than rows: one of each row
        ((1,), 4, 0.6, None),
    ],
)
def test_values_and_gradients_equal_whole_logits(shape, chunk, temperature, softcap):
    hidden, weight, targets = case(shape)

    @partial(jax.jit, static_argnums=0)
    def results(fn, hidden, weight):
        loss = total(fn, targets, has_aux=True)
        return jax.grad(loss, argnums=(0, 1), has_aux=True)(hidden, weight)

    how = {"temperature": temperature, "softcap": softcap}
    chunked = partial(linear_logprob, chunk=chunk, with_entropy=True, **how)
    whole = partial(linear_logprob_reference, **how)
    (got, outputs), (expected, expected_outputs) = (
        results(fn, hidden, weight) for fn in (chunked, whole)
    )
    for a, b in zip(outputs, expected_outputs, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-6)
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)


@jax.jit
def loss_before_lengths(hidden, weight, targets, wanted, lengths):
    """Gradients and outputs of two losses: in chunks up to the lengths, and of whole logits."""

    def loss(fn, hidden, weight, **settings):
        logprobs, entropy = fn(hidden, weight, targets, temperature=0.6, **settings)
        return jnp.where(wanted, logprobs * 3 + entropy, 0).sum(), (logprobs, entropy)

    chunked = partial(loss, linear_logprob, lengths=lengths, chunk=4, with_entropy=True)
    whole = partial(loss, linear_logprob_reference)
    finite = jnp.nan_to_num(hidden)
    return [
        jax.grad(fn, argnums=(0, 1), has_aux=True)(x, weight)
        for fn, x in ((chunked, hidden), (whole, finite))
    ]


@pytest.mark.parametrize(
    ("lengths", "computed"), [([5, 2], 6), ([6, 0], 6), ([0, 0], 0), ([1, 3], 4), ([8, 7], 8)]
)
def test_chunks_behind_the_lengths_are_not_computed(lengths, computed):
    """Two rows of 8 tokens, two of each in a chunk; a NaN anywhere in one would be everywhere."""
    hidden, weight, targets = case((2, 8))
    hidden = np.where(np.arange(8)[:, None] < computed, hidden, np.nan)
    lengths = np.array(lengths, np.int32)
    wanted = np.arange(8) < lengths[:, None]
    found = loss_before_lengths(hidden, weight, targets, wanted, lengths)
    (gradients, results), (expected, whole) = jax.tree.map(np.asarray, found)
    for a, b in zip(gradients, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)
    for a, b in zip(results, whole, strict=True):
        np.testing.assert_allclose(a[wanted], b[wanted], atol=2e-6)
        assert (a[:, computed:] == 0).all()


def test_shapes_hold(checked):
    hidden, weight, targets = case((2, 5))
    logprobs, none = linear_logprob(hidden, weight, targets)
    assert logprobs.shape == (2, 5) and none is None
    checked(linear_logprob_reference)(hidden, weight, targets)


def test_against_float64_finite_differences():
    hidden, weight, targets = case((4,), width=3, vocab=5)
    w = np.array(weight, np.float64)

    def numpy_loss(h):
        logits = h @ w.T / 0.7
        logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        entropy = -(np.exp(logprobs) * logprobs).sum(-1)
        ramp = np.linspace(0.5, 2.0, 4)
        return (ramp * logprobs[np.arange(4), np.array(targets)]).sum() + ramp[::-1] @ entropy

    loss = total(linear_logprob, targets, chunk=3, temperature=0.7, with_entropy=True)
    value, gradient = jax.jit(jax.value_and_grad(loss))(hidden, weight)
    np.testing.assert_allclose(value, numpy_loss(np.array(hidden)), rtol=1e-5)
    expected = numeric_gradient(numpy_loss, np.array(hidden))
    np.testing.assert_allclose(gradient, expected, atol=1e-4)


def test_a_chunk_does_not_see_the_others():
    hidden, weight, targets = case((9,))
    changed = hidden.at[4].set(jnp.inf)
    run = jax.jit(partial(linear_logprob, chunk=2))
    before, after = (run(x, weight, targets)[0] for x in (hidden, changed))
    keep = np.arange(9) != 4
    np.testing.assert_array_equal(np.array(before)[keep], np.array(after)[keep])


def test_bfloat16_accumulates_in_float32():
    # The weight gradient is a sum over tokens: in bfloat16 it would stop growing after some 256
    # equal terms. Here 4096 tokens in 64 chunks add the same one.
    hidden, weight = np.ones((4096, 2), jnp.bfloat16), np.zeros((4, 2), jnp.bfloat16)
    targets = np.zeros(4096, np.int32)

    def loss(weight):
        logprobs, _ = linear_logprob(hidden, weight, targets, chunk=64)
        return logprobs.sum(), logprobs

    gradient, logprobs = compiled(jax.grad(loss, has_aux=True), weight)
    assert logprobs.dtype == jnp.float32
    assert gradient.dtype == jnp.bfloat16
    expected = 4096 * (np.eye(4)[0] - 0.25)
    np.testing.assert_allclose(
        np.array(gradient, np.float32), np.stack([expected] * 2, axis=1), rtol=1e-2
    )


def test_bfloat16_is_near_float32():
    hidden, weight, targets = case((16,), width=8, dtype=jnp.bfloat16)
    settings = dict(chunk=5, with_entropy=True)
    logprobs, entropy = compiled(linear_logprob, hidden, weight, targets, **settings)
    whole = compiled(linear_logprob_reference, hidden, weight, targets)
    np.testing.assert_allclose(logprobs, whole[0], atol=1e-5)  # the inputs are exact in both
    np.testing.assert_allclose(entropy, whole[1], atol=1e-5)
    got, expected = (
        compiled(jax.grad(loss), hidden, weight)
        for loss in (
            total(linear_logprob, targets, **settings),
            total(linear_logprob_reference, targets),
        )
    )
    np.testing.assert_allclose(np.array(got, np.float32), np.array(expected, np.float32), atol=0.05)


def sizes(jaxpr: Jaxpr):
    """(elements, primitive) of every value in a jaxpr and in those inside it."""
    for equation in jaxpr.eqns:
        for variable in equation.outvars:
            yield int(np.prod(variable.aval.shape)), equation.primitive.name
        for parameter in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda x: isinstance(x, Jaxpr | ClosedJaxpr)
        ):
            if isinstance(parameter, ClosedJaxpr):
                yield from sizes(parameter.jaxpr)
            elif isinstance(parameter, Jaxpr):
                yield from sizes(parameter)


def count(operation, fn, *args):
    names = [name for _, name in sizes(jax.make_jaxpr(fn)(*args).jaxpr)]
    return names.count(operation)


def test_no_array_is_larger_than_one_chunk_of_logits():
    tokens, width, vocab, chunk = 256, 4, 512, 16
    hidden, weight, targets = case((tokens,), width, vocab)
    loss = total(linear_logprob, targets, chunk=chunk, with_entropy=True)
    gradient = jax.value_and_grad(loss, argnums=(0, 1))
    largest = max(sizes(jax.make_jaxpr(gradient)(hidden, weight).jaxpr))
    assert largest[0] == chunk * vocab, largest
    memory = jax.jit(gradient).lower(hidden, weight).compile().memory_analysis()
    assert memory.temp_size_in_bytes < tokens * vocab * 4 / 2  # whole logits would take it twice


def test_entropy_costs_one_more_sum_and_nothing_unless_asked_for():
    hidden, weight, targets = case((8,))

    def run(hidden, with_entropy):
        return linear_logprob(hidden, weight, targets, chunk=2, with_entropy=with_entropy)

    for operation, with_entropy in (("exp", 1), ("reduce_max", 1), ("reduce_sum", 3)):
        assert count(operation, lambda h: run(h, True), hidden) == with_entropy
    assert count("exp", lambda h: run(h, False), hidden) == 1
    assert count("reduce_sum", lambda h: run(h, False), hidden) == 2


@pytest.mark.parametrize("strict", [None, Strict(rows=4, block=8)])
def test_no_tokens(strict):
    hidden, weight, targets = case((0,))
    function = partial(linear_logprob, with_entropy=True, strict=strict)
    logprobs, entropy = function(hidden, weight, targets)
    assert logprobs.shape == entropy.shape == (0,)
    gradient = jax.grad(lambda w: function(hidden, w, targets)[0].sum())(weight)
    np.testing.assert_array_equal(gradient, 0.0)


@pytest.mark.parametrize("chunk", [None, 1, 3])
def test_squared_probabilities_equal_those_of_whole_logits(chunk):
    rng = np.random.default_rng(0)
    hidden, weight = (rng.normal(size=size).astype(np.float32) for size in ((2, 5, 8), (11, 8)))
    weights = np.exp(np.einsum("btd,vd->btv", np.float64(hidden), np.float64(weight)) / 0.7)
    probs = weights / weights.sum(-1, keepdims=True)
    found = compiled(sum_squared_probs, hidden, weight, temperature=0.7, chunk=chunk)
    np.testing.assert_allclose(found, (probs**2).sum(-1), rtol=1e-5)
    gradient = compiled(jax.grad(lambda h: sum_squared_probs(h, weight, chunk=chunk).sum()), hidden)
    np.testing.assert_array_equal(gradient, 0.0)


@pytest.mark.parametrize("wanted", [None, 11])
def test_strict_chunks_have_the_gradient_of_whole_logits(monkeypatch, wanted):
    """The backward pass joins three chunks of four tokens; no token past the wanted ones counts."""
    hidden, weight, targets = case((1, 32))
    monkeypatch.setattr(module, "DEFAULT_CHUNK_LOGITS", 3 * 4 * 11)
    seen = jnp.arange(32)[None] < (32 if wanted is None else wanted)

    def loss(fn, hidden, weight, **settings):
        logprobs, entropy = fn(hidden, weight, targets, temperature=0.6, **settings)
        return jnp.where(seen, logprobs * 3 + entropy, 0).sum(), (logprobs, entropy)

    lengths = None if wanted is None else jnp.array([wanted])
    strictly = partial(
        loss, linear_logprob, lengths=lengths, with_entropy=True, strict=Strict(rows=4, block=8)
    )
    given = hidden if wanted is None else hidden.at[:, 12:].set(jnp.nan)
    (gradients, outputs), (expected, expected_outputs) = (
        jax.jit(jax.grad(fn, argnums=(0, 1), has_aux=True))(x, weight)
        for fn, x in ((strictly, given), (partial(loss, linear_logprob_reference), hidden))
    )
    for a, b in zip(gradients, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)
    for a, b in zip(outputs, expected_outputs, strict=True):
        np.testing.assert_allclose(a[seen], b[seen], atol=2e-6)
