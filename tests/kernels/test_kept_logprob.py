"""Log-probs over kept tokens against numpy in float64, and their gradient against differences."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.kernels.kept_logprob import kept_logprob
from jaxrl_llm.kernels.linear_logprob import linear_logprob
from jaxrl_llm.kernels.strict import Strict

N, D, V, K = 13, 6, 40, 5
TEMPERATURE = 0.7


def inputs():
    """Some tokens have fewer ids, one has none, and one has a target that was not kept."""
    rng = np.random.default_rng(0)
    hidden, weight = rng.normal(size=(N, D)), rng.normal(size=(V, D))
    ids = np.stack([rng.permutation(V)[:K] for _ in range(N)]).astype(np.int32)
    targets = ids[np.arange(N), rng.integers(0, 2, N)].copy()
    ids[3, 2:] = ids[4] = -1
    targets[4], targets[5] = 3, next(x for x in range(V) if x not in ids[5])
    return hidden.astype(np.float32), weight.astype(np.float32), targets, ids


def exact(hidden, weight, targets, ids, softcap):
    """Log-probs, entropies and sums of squares in float64, token by token."""
    z = hidden.astype(np.float64) @ weight.astype(np.float64).T
    z = (z if softcap is None else softcap * np.tanh(z / softcap)) / TEMPERATURE
    out = np.zeros((3, len(z)))
    for i, row in enumerate(ids):
        kept = row[row >= 0].tolist()
        if kept:
            p = np.exp(z[i, kept] - z[i, kept].max())
            p /= p.sum()
            chosen = np.log(p[kept.index(targets[i])]) if targets[i] in kept else 0.0
            out[:, i] = chosen, -(p * np.log(p)).sum(), (p**2).sum()
    return out


@pytest.mark.parametrize(("softcap", "length"), [(None, None), (3.0, None), (None, 9)])
def test_statistics_and_gradient(softcap, length):
    hidden, weight, targets, ids = inputs()
    lengths = None if length is None else jnp.int32(length)

    def found(hidden, weight):
        how = {"temperature": TEMPERATURE, "softcap": softcap, "chunk": 4, "lengths": lengths}
        return kept_logprob(hidden, weight, jnp.asarray(targets), jnp.asarray(ids), **how)

    seen = slice(0, length or N)
    expected = exact(hidden, weight, targets, ids, softcap)
    for x, y in zip(jax.jit(found)(hidden, weight), expected, strict=True):
        np.testing.assert_allclose(x[seen], y[seen], atol=1e-5)

    cotangents = np.random.default_rng(1).normal(size=(2, N))
    cotangents[:, length or N :] = 0

    def loss(hidden, weight):
        logprobs, entropy, _ = found(hidden, weight)
        return (logprobs * cotangents[0] + entropy * cotangents[1]).sum()

    gradients = jax.jit(jax.grad(loss, argnums=(0, 1)))(hidden, weight)
    arrays = hidden.astype(np.float64), weight.astype(np.float64)
    rng, step = np.random.default_rng(2), 1e-6
    for which in (0, 1):
        for _ in range(12):
            at = tuple(rng.integers(0, arrays[which].shape))
            moved = []
            for sign in (step, -step):
                changed = [x.copy() for x in arrays]
                changed[which][at] += sign
                moved.append((exact(*changed, targets, ids, softcap)[:2] * cotangents).sum())
            difference = (moved[0] - moved[1]) / (2 * step)
            np.testing.assert_allclose(gradients[which][at], difference, atol=2e-4)


def test_all_tokens_kept_are_the_whole_softmax():
    hidden, weight, targets, _ = inputs()
    every = jnp.broadcast_to(jnp.arange(V, dtype=jnp.int32)[::-1], (N, V))
    how = {"temperature": TEMPERATURE}

    def kept(hidden, weight):
        logprobs, entropy, _ = kept_logprob(hidden, weight, jnp.asarray(targets), every, **how)
        return logprobs, entropy

    def whole(hidden, weight):
        return linear_logprob(hidden, weight, jnp.asarray(targets), with_entropy=True, **how)

    def gradient(fn):
        return jax.grad(lambda *x: sum(y.sum() for y in fn(*x)), argnums=(0, 1))

    for found, expected in ((kept, whole), (gradient(kept), gradient(whole))):
        for x, y in zip(jax.jit(found)(hidden, weight), expected(hidden, weight), strict=True):
            np.testing.assert_allclose(x, y, atol=2e-5)


def test_rows_and_strict_chunks_give_the_same():
    """Two rows of tokens, and chunks of four tokens with a length that ends within one."""
    hidden, weight, targets, ids = inputs()
    whole = kept_logprob(hidden, weight, targets, ids, temperature=TEMPERATURE)
    pairs = [x[:12].reshape(2, 6, *x.shape[1:]) for x in (hidden, targets, ids)]
    rows = kept_logprob(pairs[0], weight, *pairs[1:], temperature=TEMPERATURE, chunk=4)
    strict = partial(kept_logprob, strict=Strict(rows=4, block=8), temperature=TEMPERATURE)
    cut = strict(hidden, weight, targets, ids, lengths=jnp.int32(N))

    def gradient(fn):
        return jax.grad(lambda h, w: fn(h, w, targets, ids, lengths=jnp.int32(N))[0].sum(), (0, 1))

    ordinary = gradient(partial(kept_logprob, temperature=TEMPERATURE))(hidden, weight)
    for x, y in zip(gradient(strict)(hidden, weight), ordinary, strict=True):
        np.testing.assert_allclose(x, y, atol=1e-5)
    for x, y, z in zip(whole, rows, cut, strict=True):
        np.testing.assert_allclose(y.reshape(-1), x[:12], atol=1e-6)
        np.testing.assert_allclose(z, x, atol=1e-6)
