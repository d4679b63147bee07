"""Strict operations equal the ordinary ones, whatever their chunks and tiles."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled import compiled
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxrl_llm.kernels import strict_matmul as module
from jaxrl_llm.kernels.strict import Strict, by_rows, strict_sum
from jaxrl_llm.kernels.strict_matmul import Tile
from jaxrl_llm.kernels.strict_norm import norm_kernel, strict_norm
from jaxrl_llm.numerics import rms_norm


@pytest.mark.parametrize("rows", [1, 4, 9])
def test_chunks_of_rows_give_the_function_and_its_gradient(rows):
    rng = np.random.default_rng(0)
    x, w = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((2, 4, 5), (5, 3)))
    strict = Strict(rows=rows, block=8)

    def run(w, x):
        return jnp.tanh(x @ w), x.sum(axis=-1)

    def loss(compute):
        def total(w, x):
            y, sums = compute(w, x)
            return (y**2).sum() + (sums * y[..., 0]).sum()

        return compiled(jax.value_and_grad(total, argnums=(0, 1)), w, x)

    ours, expected = loss(lambda w, x: by_rows(strict, run, w, x)), loss(run)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), ours, expected
    )


@pytest.mark.parametrize("width", [96, 7])
def test_the_strict_sum_is_a_sum(width):
    x = jax.random.normal(jax.random.key(0), (3, width))
    value, gradient = jax.value_and_grad(lambda x: (strict_sum(x) ** 2).sum())(x)
    sums = np.asarray(x, np.float64).sum(axis=-1)
    np.testing.assert_allclose(value, (sums**2).sum(), rtol=1e-5)
    np.testing.assert_allclose(gradient, np.repeat(2 * sums[:, None], width, 1), rtol=1e-4)
    normed = rms_norm(x, jnp.ones(width), 1e-6, strict_sum)
    np.testing.assert_allclose(normed, rms_norm(x, jnp.ones(width), 1e-6), rtol=1e-5)


interpreted = pytest.mark.skipif(
    not hasattr(plgpu, "InterpretGPUParams"), reason="the interpreter of jax 0.10 has no wgmma"
)


def matrices(*shapes):
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(size=shape), jnp.bfloat16) for shape in shapes]


def product(x, w, tile):
    interpret = plgpu.InterpretGPUParams(detect_races=True)
    return np.asarray(module.strict_matmul(x, w, tile, interpret=interpret), np.float32)


@interpreted
@pytest.mark.parametrize("tile", [Tile(rows=128, stages=3), Tile(outputs=64, stages=2, group=2)])
def test_the_matmul_kernel_with_every_tile(tile):
    x, w = matrices((150, 192), (192, 128))
    expected = np.asarray(x, np.float32) @ np.asarray(w, np.float32)
    np.testing.assert_allclose(product(x, w, tile), expected, rtol=1e-2, atol=0.1)


@interpreted
def test_chains_have_the_same_bits_together_and_apart(monkeypatch):
    monkeypatch.setattr(module, "LONG", 128)
    x, w = matrices((150, 320), (320, 128))
    whole = product(x, w, Tile())
    monkeypatch.setattr(module, "CHAIN", 128)
    assert module.chain_length(320) == 128  # two whole chains and half of one
    together, apart = product(x, w, Tile(outputs=64, stages=2)), product(x, w, Tile(apart=True))
    np.testing.assert_array_equal(together, apart)
    np.testing.assert_allclose(together, whole, rtol=1e-2, atol=0.1)


@interpreted
def test_the_norm_kernel_is_the_norm():
    x = jax.random.normal(jax.random.key(0), (3, 640))
    weight = jax.random.normal(jax.random.key(1), (640,)).astype(jnp.bfloat16)
    found = norm_kernel(x, weight, 1e-6, interpret=plgpu.InterpretGPUParams(detect_races=True))
    expected = rms_norm(x, weight, 1e-6)
    assert found.dtype == expected.dtype
    np.testing.assert_allclose(
        *(np.asarray(y, np.float32) for y in (found, expected)), rtol=1e-2, atol=1e-3
    )


def test_a_norm_that_the_kernel_does_not_take_keeps_its_gradient():
    x, weight = jax.random.normal(jax.random.key(0), (2, 3, 96)), jnp.linspace(0.5, 2, 96)

    def loss(norm, x, weight):
        return (norm(x, weight, 1e-6) ** 3).sum()

    ours, expected = (
        compiled(jax.value_and_grad(partial(loss, norm), argnums=(0, 1)), x, weight)
        for norm in (strict_norm, rms_norm)
    )
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), ours, expected)


@pytest.mark.parametrize("depth", [64, 4096, 4160, 8960, 11008, 18944])
def test_chains_cover_what_they_contract(depth):
    length = module.chain_length(depth)
    assert length % module.DEPTH == 0 and (length == depth or length <= module.CHAIN)
    assert (depth > module.LONG) == (length < depth)


def test_tiles_divide_what_the_kernel_takes():
    for rows in (1, 64, 300, 20_000):
        for outputs in (64, 192, 256, 8960):
            for depth in (1536, 8960):
                assert outputs % module.default_tile(rows, depth, outputs).outputs == 0


def test_few_rows_take_a_cta_for_each_chain():
    assert module.default_tile(256, 8960, 1536).apart
    assert not module.default_tile(16384, 8960, 1536).apart
    assert not module.default_tile(256, 1536, 1536).apart
    assert module.default_tile(9216, 1536, 17920).rows > module.default_tile(256, 1536, 17920).rows
