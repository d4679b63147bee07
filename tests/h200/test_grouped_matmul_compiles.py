"""Grouped matmuls of experts through the real compiler, at sizes of 30B-A3B and gpt-oss layers."""

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from target import abstract, compiled_in_a_process, needs_compiler

from jaxrl_llm.kernels.float8 import FLOAT8
from jaxrl_llm.kernels.grouped_matmul import frozen_matmul, grouped_matmul

pytestmark = needs_compiler


def compile_gradient(rows: int, groups: int = 128, inputs: int = 2048, outputs: int = 768) -> int:
    """Compile the output and both gradients of that many rows; their temporaries in bytes."""
    shapes = [(rows, inputs), (groups, inputs, outputs)]
    x, weights = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes)
    sizes = jax.ShapeDtypeStruct((groups,), jnp.int32)

    def loss(x, weights, sizes):
        y = grouped_matmul(x, weights, sizes, "pallas")
        return jnp.sum(y.astype(jnp.float32) ** 2)

    gradient = jax.jit(jax.grad(loss, argnums=(0, 1)))
    compiled = gradient.lower(*abstract((x, weights, sizes))).compile()
    return compiled.memory_analysis().temp_size_in_bytes


# Sizes, and the most bytes of temporaries.
CASES = [
    # A dense matmul of every expert would mask the rows 128 times: 16 GiB for 4,096 tokens of 8.
    ((512,), 2**29),
    ((32768,), 2**29),
    # gpt-oss-20b's experts, between tiles: padded weights and the gradient of these.
    ((8192, 32, 2880, 2880), 2.5 * 32 * 2944 * 2944 * 2),
]


def compile_cases(number: int, frozen: int) -> None:
    for sizes, most in CASES[:number]:
        found = compile_gradient(*sizes)
        assert found < most, (sizes, found)
    for weights, rank in FROZEN[:frozen]:
        compile_frozen(weights, rank)


# Weights of a decode step, and the rank of factors.
FROZEN = [(FLOAT8, 64), (FLOAT8, 0), (jnp.bfloat16, 16)]


def compile_frozen(dtype: jnp.dtype, rank: int, D: int = 2048, F: int = 768) -> None:
    M, G = 1024, 128

    def array(shape: tuple[int, ...], dtype: jnp.dtype = jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    weights, sizes = array((G, D, F), dtype), array((G,), jnp.int32)
    scale = array((G, F), jnp.float32) if dtype == FLOAT8 else None
    factors = (array((G, D, rank)), array((G, rank, F))) if rank else None
    run = jax.jit(
        lambda x, w, n, scale, factors: frozen_matmul(x, w, n, scale_GF=scale, factors=factors)
    )
    run.lower(*abstract((array((M, D)), weights, sizes, scale, factors))).compile()


@pytest.mark.parametrize(
    ("number", "frozen"),
    [(1, 1), pytest.param(len(CASES), len(FROZEN), marks=pytest.mark.nightly)],
)
def test_nothing_is_spilled_and_temporaries_are_small(number, frozen):
    """In one process, whose start takes as long as a kernel."""
    code = f"from {Path(__file__).stem} import *; compile_cases({number}, {frozen})"
    logs, _ = compiled_in_a_process(code)
    # The output and the gradients of rows and weights, and of frozen weights.
    assert len(logs) == 3 * number + frozen
    assert all("0 bytes spill stores" in log for log in logs), logs
