"""Chunked log-probs of several tokens a position against whole logits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled import compiled
from finite_differences import numeric_gradient

from jaxrl_llm.kernels.linear_top_k import linear_logprobs_at, linear_top_k

VOCAB, WIDTH, K = 11, 5, 3


def case(shape, seed=0):
    rng = np.random.default_rng(seed)
    hidden = jnp.array(rng.normal(size=(*shape, WIDTH)), jnp.float32)
    weight = jnp.array(rng.normal(size=(VOCAB, WIDTH)), jnp.float32)
    ids = np.argsort(rng.random((*shape, VOCAB)), axis=-1)[..., :K]
    return hidden, weight, jnp.array(ids, jnp.int32)


def whole(hidden, weight, temperature, softcap=None):
    logits = jnp.einsum("...d,vd->...v", hidden, weight)
    if softcap is not None:
        logits = softcap * jnp.tanh(logits / softcap)
    return jax.nn.log_softmax(logits / temperature)


SHAPES = [
    ((7,), 1000, 1.0, None),  # one chunk
    ((7,), 2, 0.6, 1.5),  # a padded remainder
    ((3, 6), 6, 0.6, None),  # 3 rows, 2 positions of each in a chunk
    ((3, 7), 9, 1.0, None),  # rows with a padded remainder
]


@pytest.mark.parametrize(("shape", "chunk", "temperature", "softcap"), SHAPES)
def test_log_probs_and_gradients_equal_whole_logits(shape, chunk, temperature, softcap):
    hidden, weight, ids = case(shape)
    ramp = jnp.linspace(0.5, 2.0, ids.size).reshape(ids.shape)
    how = dict(temperature=temperature, softcap=softcap)

    def chunked(hidden, weight):
        found = linear_logprobs_at(hidden, weight, ids, chunk=chunk, **how)
        return (ramp * found).sum(), found

    def plain(hidden, weight):
        chosen = jnp.take_along_axis(whole(hidden, weight, **how), ids, axis=-1)
        return (ramp * chosen).sum(), chosen

    (got, found), (expected, chosen) = (
        jax.jit(jax.grad(fn, argnums=(0, 1), has_aux=True))(hidden, weight)
        for fn in (chunked, plain)
    )
    np.testing.assert_allclose(found, chosen, atol=2e-6)
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-5)


def test_gradient_by_finite_differences():
    hidden, weight, ids = case((2,), seed=3)

    def total(x):
        logits = x @ np.asarray(weight, np.float64).T
        logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        return float((np.take_along_axis(logp, np.asarray(ids), -1) ** 2).sum())

    def loss(x):
        return jnp.square(linear_logprobs_at(x, weight, ids, chunk=1)).sum()

    np.testing.assert_allclose(
        jax.jit(jax.grad(loss))(hidden),
        numeric_gradient(total, np.asarray(hidden)),
        rtol=1e-3,
        atol=1e-3,
    )


@pytest.mark.parametrize(("shape", "chunk", "temperature", "softcap"), SHAPES)
def test_the_likeliest_tokens_are_those_of_whole_logits(shape, chunk, temperature, softcap):
    hidden, weight, _ = case(shape)
    how = dict(temperature=temperature, softcap=softcap)
    ids, logprobs = compiled(linear_top_k, hidden, weight, k=K, chunk=chunk, **how)
    expected = compiled(whole, hidden, weight, **how)
    order = np.argsort(-np.asarray(expected), axis=-1)[..., :K]
    np.testing.assert_array_equal(ids, order)
    np.testing.assert_allclose(logprobs, np.take_along_axis(expected, order, -1), atol=2e-6)
    everything, all_logprobs = compiled(linear_top_k, hidden, weight, k=VOCAB)
    assert (np.sort(everything, axis=-1) == np.arange(VOCAB)).all()
    np.testing.assert_allclose(np.exp(all_logprobs).sum(-1), 1.0, rtol=1e-5)


def test_whole_logits_never_exist():
    """Of the shapes in the programs, forward and backward, none is [positions, vocabulary]."""
    tokens, vocab, chunk = 64, 96, 8
    hidden, weight = jnp.ones((tokens, 4)), jnp.ones((vocab, 4))
    ids = jnp.tile(jnp.arange(K), (tokens, 1))

    def loss(hidden, weight):
        top = linear_top_k(hidden, weight, K, chunk=chunk)[1]
        return (top * linear_logprobs_at(hidden, weight, ids, chunk=chunk)).sum()

    text = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(hidden, weight).as_text()
    assert f"{chunk}x{vocab}x" in text and f"{tokens}x{vocab}x" not in text
    assert f"{tokens // chunk}x{chunk}x{vocab}x" not in text
