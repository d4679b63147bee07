"""Activations in float8: the kernels, interpreted, and XLA against numpy's float64."""

import jax.numpy as jnp
import numpy as np
import pytest
from compiled import compiled

# Public as plgpu.InterpretGPUParams from jax 0.11 on.
from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

from jaxrl_llm.kernels.float8 import FLOAT8, FLOAT8_MAX, gated_float8, rms_norm_float8

IMPLEMENTATIONS = [
    {"implementation": "xla"},
    {"implementation": "pallas", "interpret": InterpretGPUParams(detect_races=True)},
]


def gated_case(rows, features, dtype=jnp.bfloat16):
    rng = np.random.default_rng(0)
    y = 30 * rng.normal(size=(rows, 2 * features))
    y[0] = 0
    row, column = rng.uniform(size=(rows, 1)), rng.uniform(size=2 * features)
    return y.astype(dtype), row.astype(np.float32), column.astype(np.float32)


def run(function, *arrays, implementation, **settings):
    """The result; XLA's from one program, which the interpreter's callbacks do not allow."""
    settings["implementation"] = implementation
    if implementation == "xla":
        return compiled(function, *arrays, **settings)
    return function(*map(jnp.asarray, arrays), **settings)


def check(found, exact):
    """Each row's largest value becomes 448, and values keep 3 bits of mantissa."""
    values, scale = (np.asarray(x.astype(jnp.float32), np.float64) for x in found)
    assert found.values.dtype == FLOAT8 and scale.shape == (len(exact), 1)
    peak = np.abs(exact).max(axis=1)
    np.testing.assert_allclose(
        scale[:, 0], np.where(peak > 0, peak / FLOAT8_MAX, 1.0), rtol=2 * 2**-8
    )
    # Half of the last bit, the bfloat16 that came before, and subnormals.
    error = np.abs(values * scale - exact)
    assert np.all(error <= 0.07 * np.abs(exact) + 2**-9 * scale)
    assert np.linalg.norm(error) < 0.03 * np.linalg.norm(exact)


@pytest.mark.parametrize("settings", IMPLEMENTATIONS)
@pytest.mark.parametrize("features", [128, 640, 1152])
def test_gate(settings, features):
    y, row, column = gated_case(3, features)
    scaled = np.asarray(y, np.float64) * np.asarray(row, np.float64) * np.asarray(column)
    gate, up = np.split(scaled, 2, axis=1)
    check(run(gated_float8, y, row, column, **settings), gate / (1 + np.exp(-gate)) * up)


@pytest.mark.parametrize("settings", IMPLEMENTATIONS)
@pytest.mark.parametrize("features", [128, 896])
def test_norm(settings, features):
    rng = np.random.default_rng(0)
    x = 5 * rng.normal(size=(3, features)).astype(np.float32)
    x[0] = 0
    scale = rng.normal(size=features).astype(jnp.bfloat16)
    exact = np.asarray(x, np.float64)
    exact = exact / np.sqrt(np.mean(exact**2, axis=1, keepdims=True) + 1e-5)
    found = run(rms_norm_float8, x, scale, eps=1e-5, **settings)
    check(found, exact * np.asarray(scale, np.float64))


def test_what_the_kernels_cannot_take_goes_to_xla_or_is_refused():
    found = compiled(gated_float8, *gated_case(2, 96))
    assert found.values.shape == (2, 96) and found.scale.shape == (2, 1)
    for case in (gated_case(2, 96), gated_case(2, 128, jnp.float32)):
        with pytest.raises(ValueError, match="use 'xla'"):
            gated_float8(*case, implementation="pallas")
    with pytest.raises(ValueError, match="multiples of 128"):
        rms_norm_float8(
            jnp.ones((2, 64)), jnp.ones(64, jnp.bfloat16), eps=1e-5, implementation="pallas"
        )
