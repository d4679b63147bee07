"""Grouped matmuls of experts through the real compiler, at sizes of 30B-A3B and gpt-oss layers."""

from pathlib import Path

import jax
import jax.numpy as jnp
from target import abstract, compiled_in_a_process, needs_compiler

from jaxrl_llm.kernels.float8 import FLOAT8
from jaxrl_llm.kernels.grouped_matmul import grouped_matmul, grouped_matmul_float8

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


def compile_cases() -> None:
    for sizes, most in CASES:
        found = compile_gradient(*sizes)
        assert found < most, (sizes, found)
    x, weights, sizes = (
        jax.ShapeDtypeStruct(shape, dtype)
        for shape, dtype in (
            ((1024, 2048), jnp.bfloat16),
            ((128, 2048, 768), FLOAT8),
            ((128,), jnp.int32),
        )
    )
    jax.jit(grouped_matmul_float8).lower(*abstract((x, weights, sizes))).compile()


def test_nothing_is_spilled_and_temporaries_are_small():
    """In one process, whose start takes as long as a kernel."""
    logs, _ = compiled_in_a_process(f"from {Path(__file__).stem} import *; compile_cases()")
    # The output and the gradients of rows and weights, and a decode step's float8 weights.
    assert len(logs) == 3 * len(CASES) + 1
    assert all("0 bytes spill stores" in log for log in logs), logs
