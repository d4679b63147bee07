"""Grouped matmuls, ours interpreted and XLA's, against a loop over groups."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

from jaxrl_llm.kernels import grouped_matmul as module
from jaxrl_llm.kernels.grouped_matmul import grouped_matmul, rows, weights

SIZES = {
    # Small groups: chunks of 64 rows, one that is moved up, runs of rows, an empty group.
    "small": (141, (70, 0, 9, 50), 128, 128),
    # Large ones: tiles of two chunks, a second one moved up, and one without rows.
    "large": (270, (130, 70), 128, 128),
    # Inputs and outputs that are no multiples of a tile.
    "padded": (80, (40, 33), 72, 136),
}


@pytest.mark.parametrize("sizes", SIZES)
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
def test_rows_and_both_gradients(monkeypatch, implementation, sizes):
    """Uneven groups and rows of none, which are NaN for the kernels. Small integers: no rounding.

    A CTA goes through several jobs.
    """
    monkeypatch.setattr(rows, "SMS", 2)
    monkeypatch.setattr(weights, "SMS", 3)
    rng = np.random.default_rng(0)
    M, sizes, D, F = SIZES[sizes]
    G, used = len(sizes), sum(sizes)
    x, kernels, cotangent = (
        rng.integers(-2, 3, shape).astype(np.float32) for shape in ((M, D), (G, D, F), (M, F))
    )
    expected, x_gradient, of_weights = np.zeros((M, F)), np.zeros((M, D)), np.zeros((G, D, F))
    group = np.repeat(np.arange(G), sizes)
    for g in range(G):
        of_group = np.flatnonzero(group == g)
        expected[of_group] = x[of_group] @ kernels[g]
        x_gradient[of_group] = cotangent[of_group] @ kernels[g].T
        of_weights[g] = x[of_group].T @ cotangent[of_group]
    if implementation == "pallas":
        x[used:] = cotangent[used:] = np.nan

    bf16 = functools.partial(jnp.asarray, dtype=jnp.bfloat16)
    y, gradient = jax.vjp(
        lambda x, w: grouped_matmul(
            x, w, jnp.array(sizes), implementation, interpret=InterpretGPUParams()
        ),
        bf16(x),
        bf16(kernels),
    )
    if implementation == "pallas":  # padded weights are not kept for the backward pass
        kept = sum(leaf.size for leaf in jax.tree.leaves(gradient))
        assert kept == x.size + kernels.size + G
    found = gradient(bf16(cotangent))
    for one, other in zip((y, *found), (expected, x_gradient, of_weights), strict=True):
        np.testing.assert_array_equal(one, bf16(other))


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("kind", ["skewed", "with empty groups", "no rows"])
def test_row_tiles_hold_every_row_once_but_for_moved_chunks(kind, chunks):
    M, G = 1000, 9
    rng = np.random.default_rng(1)
    loads = np.exp(1.5 * rng.normal(size=G))
    sizes = rng.multinomial(900, loads / loads.sum())
    if kind == "with empty groups":
        sizes[[0, 4, 8]] = 0
    if kind == "no rows":
        sizes[:] = 0
    tiles, number = rows.row_tiles(jnp.asarray(sizes), M, chunks)
    group = np.repeat(np.arange(G + 1), [*sizes, M - sizes.sum()])
    covered = np.full(M, -1)
    chunk_sizes = []
    for g, *fields in np.asarray(tiles)[: int(number[0])]:
        for first, size in zip(fields[::2], fields[1::2], strict=True):
            assert (group[first : first + size] == g).all()
            covered[first : first + size] = g
            chunk_sizes.append((np.count_nonzero(group == g) >= 64, size))
    np.testing.assert_array_equal(covered, group)
    assert all(size in (0, 64) for large, size in chunk_sizes if large)
    assert int(number[0]) <= tiles.shape[0]


def test_row_tiles_are_cheap_to_compile():
    """XLA folds constants of scatters and scans for a second a layer of 30B-A3B with LoRA."""
    program = jax.jit(lambda sizes: rows.row_tiles(sizes, 4096, 1))
    text = program.lower(jax.ShapeDtypeStruct((128,), jnp.int32)).as_text()
    assert "stablehlo.gather" in text
    assert not any(f"stablehlo.{name}" in text for name in ("scatter", "while", "reduce_window"))
    assert "chlo.scan" not in text and "cumsum" not in text


def test_the_kernel_is_for_bfloat16_and_whole_tiles_or_many_rows(monkeypatch):
    monkeypatch.setattr(module, "on_hopper", lambda: True)
    by_kernel = []
    monkeypatch.setattr(
        module, "_by_kernel", lambda *operands: by_kernel.append(0) or jnp.full((), 7)
    )
    sizes = jnp.array([3, 1])
    for rows_, taken in ((module.PADDED_ROWS - 1, 0), (module.PADDED_ROWS, 1)):
        grouped_matmul(jnp.ones((rows_, 64), "bfloat16"), jnp.ones((2, 64, 128), "bfloat16"), sizes)
        assert len(by_kernel) == taken
    x, kernels = jnp.ones((4, 128), jnp.bfloat16), jnp.ones((2, 128, 256), jnp.bfloat16)
    assert (grouped_matmul(x, kernels, sizes) == 7).all()
    for others in (x[:, :64], kernels[:, :64]), (x.astype("float32"), kernels.astype("float32")):
        assert not (grouped_matmul(*others, sizes) == 7).any()


@pytest.mark.nightly
def test_float8_weights_give_the_bits_of_the_same_weights_in_bfloat16(monkeypatch):
    """Every value that float8 has but NaN; more steps than stages, and rows of none."""
    monkeypatch.setattr(rows, "SMS", 2)
    rng = np.random.default_rng(3)
    M, sizes, D, F = 141, (70, 0, 9, 50), 384, 256
    x = jnp.asarray(rng.normal(size=(M, D)), jnp.bfloat16).at[sum(sizes) :].set(jnp.nan)
    values = np.concatenate([np.arange(0x7F), np.arange(0x80, 0xFF)]).astype(np.uint8)
    kernels = jnp.asarray(rng.choice(values, (len(sizes), D, F)).view(jnp.float8_e4m3fn))
    expected = rows.multiply_rows(
        jnp.pad(x, ((0, -M % 8), (0, 0))),
        kernels.astype(jnp.bfloat16),
        jnp.array(sizes),
        interpret=InterpretGPUParams(),
    )
    found = module.frozen_matmul(x, kernels, jnp.array(sizes), interpret=InterpretGPUParams())
    assert found.dtype == jnp.bfloat16 and found.shape == (M, F)
    np.testing.assert_array_equal(found, expected[:M])
    assert np.abs(np.float32(found)).max() > 0


@pytest.mark.skipif(
    jax.__version_info__ < (0, 11), reason="the interpreter transposes from 0.11 on"
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("rank", [3, 32])
def test_low_rank_factors_and_scales_of_frozen_weights(monkeypatch, rank, dtype):
    """Small integers: no rounding. Two column tiles, several jobs of a CTA, an empty group."""
    monkeypatch.setattr(rows, "SMS", 2)
    rng = np.random.default_rng(4)
    M, sizes, D, F = 141, (70, 0, 9, 50), 384, 256
    G, used = len(sizes), sum(sizes)
    x, a = rng.integers(-1, 2, (M, D)), rng.integers(-1, 2, (G, D, rank)) / 16
    kernels, b = rng.integers(-2, 3, (G, D, F)), rng.integers(-1, 2, (G, rank, F))
    scale = 2.0 ** rng.integers(-2, 3, (G, F))
    expected = np.zeros((M, F))
    group = np.repeat(np.arange(G), sizes)
    for g in range(G):
        own = np.flatnonzero(group == g)
        low = np.asarray(jnp.asarray(x[own] @ a[g], jnp.bfloat16), np.float64)
        expected[own] = x[own] @ (kernels[g] * scale[g]) + low @ b[g]
    found = module.frozen_matmul(
        jnp.asarray(x, jnp.bfloat16).at[used:].set(jnp.nan),
        jnp.asarray(kernels, dtype),
        jnp.array(sizes),
        scale_GF=jnp.asarray(scale, jnp.float32),
        factors=(jnp.asarray(a, jnp.bfloat16), jnp.asarray(b, jnp.bfloat16)),
        interpret=InterpretGPUParams(),
    )
    np.testing.assert_array_equal(found, jnp.asarray(expected, jnp.bfloat16))
