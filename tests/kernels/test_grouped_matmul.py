"""Grouped matmuls of jax's Mosaic kernels, interpreted, against a loop over groups."""

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxrl_llm.kernels import grouped_matmul as module
from jaxrl_llm.kernels.grouped_matmul import grouped_matmul

D, F = 128, 128


@pytest.fixture
def interpreted(monkeypatch):
    """jax's kernels take no such argument, and ask the first device for its processors."""
    kernel = functools.partial(plgpu.kernel, interpret=InterpretGPUParams())
    monkeypatch.setattr(plgpu, "kernel", kernel)
    monkeypatch.setattr(jax, "devices", lambda *_: [SimpleNamespace(core_count=4)])


@pytest.mark.parametrize("sizes", [(70, 0, 9, 50), (0, 0, 130, 0)])
@pytest.mark.parametrize(
    "implementation",
    [
        "xla",
        pytest.param(
            "pallas",
            marks=pytest.mark.skipif(
                jax.__version_info__ < (0, 11), reason="the interpreter transposes from 0.11 on"
            ),
        ),
    ],
)
def test_rows_and_both_gradients(interpreted, implementation, sizes):
    """Uneven groups, empty ones, one for all, and rows of none. Small integers: no rounding."""
    rng = np.random.default_rng(0)
    M, G = 140, len(sizes)
    x, weights = rng.integers(-2, 3, (M, D)), rng.integers(-2, 3, (G, D, F))
    cotangent = rng.integers(-2, 3, (M, F))
    group = np.repeat(np.arange(G), sizes)
    used = len(group)
    expected = np.zeros((M, F))
    expected[:used] = np.einsum("md,mdf->mf", x[:used], weights[group])
    x_gradient = np.zeros((M, D))
    x_gradient[:used] = np.einsum("mf,mdf->md", cotangent[:used], weights[group])
    of_weights = np.zeros((G, D, F))
    for i, g in enumerate(group):
        of_weights[g] += np.outer(x[i], cotangent[i])

    bf16 = functools.partial(jnp.asarray, dtype=jnp.bfloat16)
    y, gradient = jax.vjp(
        lambda x, w: grouped_matmul(x, w, jnp.array(sizes), implementation), bf16(x), bf16(weights)
    )
    found = gradient(bf16(cotangent))
    for one, other in zip((y, *found), (expected, x_gradient, of_weights), strict=True):
        np.testing.assert_array_equal(one, bf16(other))


def test_the_kernel_is_for_bfloat16_and_whole_tiles(monkeypatch):
    monkeypatch.setattr(module, "on_hopper", lambda: True)
    monkeypatch.setattr(module, "_by_kernel", lambda *operands: ("kernel",) * 4)
    sizes = jnp.array([3, 1])
    x, weights = jnp.ones((4, 128), jnp.bfloat16), jnp.ones((2, 128, 256), jnp.bfloat16)
    assert grouped_matmul(x, weights, sizes) == ("kernel",) * 4
    assert grouped_matmul(x[:, :64], weights[:, :64], sizes).shape == (4, 256)
    assert grouped_matmul(x.astype("float32"), weights.astype("float32"), sizes).shape == (4, 256)
