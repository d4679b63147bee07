"""Strict operations equal the ordinary ones, whatever their chunks and tiles."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxrl_llm.kernels.strict import Strict, by_rows, strict_sum
from jaxrl_llm.kernels.strict_matmul import Tile, default_tile, strict_matmul
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

        return jax.value_and_grad(total, argnums=(0, 1))(w, x)

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


@pytest.mark.skipif(
    not hasattr(plgpu, "InterpretGPUParams"), reason="the interpreter of jax 0.10 has no wgmma"
)
@pytest.mark.parametrize("tile", [Tile(rows=128, stages=3), Tile(outputs=64, stages=2, group=2)])
def test_the_matmul_kernel_with_every_tile(tile):
    rng = np.random.default_rng(0)
    x, w = (jnp.asarray(rng.normal(size=s), jnp.bfloat16) for s in ((150, 192), (192, 128)))
    found = strict_matmul(x, w, tile, interpret=plgpu.InterpretGPUParams(detect_races=True))
    expected = np.asarray(x, np.float32) @ np.asarray(w, np.float32)
    np.testing.assert_allclose(np.asarray(found, np.float32), expected, rtol=1e-2, atol=0.1)


def test_tiles_divide_what_the_kernel_takes():
    for rows in (1, 64, 300, 20_000):
        for outputs in (64, 192, 256, 8960):
            assert outputs % default_tile(rows, outputs).outputs == 0
