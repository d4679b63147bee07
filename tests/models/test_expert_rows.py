"""Adapters of experts where rows are few: against a loop over experts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.models import expert_rows
from jaxrl_llm.models.expert_rows import Stacked, low_rank_of_all
from jaxrl_llm.models.frozen import OF_EXPERTS, Quantized, quantize

SIZES = (3, 0, 5, 1)  # rows of each expert; two rows more belong to none


def test_factors_of_all_experts_give_each_row_those_of_its_own():
    draw = np.random.default_rng(0)
    x, a, b = (
        draw.standard_normal(shape).astype(np.float32) for shape in ((11, 6), (4, 6, 2), (4, 2, 7))
    )
    a[1] = 1e6  # of an expert without rows
    x[9:] = np.nan
    expected, start = np.zeros((11, 7), np.float32), 0
    for expert, size in enumerate(SIZES):
        rows = slice(start, start + size)
        expected[rows] = x[rows] @ a[expert] @ b[expert] if size else 0
        start += size

    def weighed(x, a, b):
        y = low_rank_of_all(x, a, b, jnp.asarray(SIZES))
        return (y * jnp.arange(1, 8)).sum(), y

    (of_x, of_a, of_b), y = jax.jit(jax.grad(weighed, (0, 1, 2), has_aux=True))(x, a, b)
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5)
    gradient, start = np.broadcast_to(np.arange(1, 8, dtype=np.float32), (11, 7)), 0
    assert not np.any(of_a[1]) and not np.any(of_b[1])
    assert not np.any(of_x[9:])
    for expert, size in enumerate(SIZES):
        rows = slice(start, start + size)
        start += size
        if size:
            back = gradient[rows] @ b[expert].T
            np.testing.assert_allclose(of_x[rows], back @ a[expert].T, rtol=1e-4, atol=1e-4)
            np.testing.assert_allclose(of_a[expert], x[rows].T @ back, rtol=1e-4, atol=1e-4)
            low = x[rows] @ a[expert]
            np.testing.assert_allclose(of_b[expert], low.T @ gradient[rows], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("frozen", [False, True])
def test_factors_in_one_kernel_have_the_gradients_of_matmuls_of_their_own(monkeypatch, frozen):
    draw = np.random.default_rng(1)
    x, w, a, b = (
        draw.standard_normal(shape).astype(np.float32)
        for shape in ((11, 6), (4, 6, 7), (4, 6, 2), (4, 2, 7))
    )
    kernel = quantize(jnp.asarray(w), OF_EXPERTS) if frozen else jnp.asarray(w)
    x[9:] = 0
    sizes, asked = jnp.asarray(SIZES), []

    def by_loop(x, weights, sizes, *, scale_GF=None, factors=None):
        """What the kernel computes; its own test compares it with a loop like this one."""
        asked.append(weights.dtype)
        number = np.repeat(np.arange(4), SIZES)
        own = weights.astype(x.dtype)[number]
        y = jnp.einsum("md,mdf->mf", x[:9], own)
        if scale_GF is not None:
            y *= scale_GF[number]
        a, b = factors
        y += jnp.einsum("md,mdr,mrf->mf", x[:9], a[number], b[number])
        return jnp.pad(y, ((0, 2), (0, 0)))

    def found(x, a, b):
        def weighed(x, a, b):
            y = Stacked(kernel, a, b, scale=1.5)(x, sizes)
            return (y * jnp.arange(1, 8)).sum(), y

        return jax.grad(weighed, (0, 1, 2), has_aux=True)(x, a, b)

    apart = found(x, a, b)
    monkeypatch.setattr(expert_rows, "frozen_matmul_pays", lambda x, weights, rank=0: rank == 2)
    monkeypatch.setattr(expert_rows, "frozen_matmul", by_loop)
    at_once = found(x, a, b)
    assert asked == [kernel.values.dtype if isinstance(kernel, Quantized) else np.float32]
    for one, other in zip(jax.tree.leaves(at_once), jax.tree.leaves(apart), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
