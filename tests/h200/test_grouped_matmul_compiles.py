"""Grouped matmuls of experts through the real compiler, at the sizes of a 30B-A3B layer."""

import jax
import jax.numpy as jnp
import pytest
from target import abstract, compiled_in_a_process, needs_compiler

from jaxrl_llm.kernels.grouped_matmul import grouped_matmul

pytestmark = needs_compiler


def compile_gradient(rows: int) -> int:
    """Compile the output and both gradients of that many rows; their temporaries in bytes."""
    shapes = [(rows, 2048), (128, 2048, 768)]
    x, weights = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes)
    sizes = jax.ShapeDtypeStruct((128,), jnp.int32)

    def loss(x, weights, sizes):
        y = grouped_matmul(x, weights, sizes, "pallas")
        return jnp.sum(y.astype(jnp.float32) ** 2)

    gradient = jax.jit(jax.grad(loss, argnums=(0, 1)))
    compiled = gradient.lower(*abstract((x, weights, sizes))).compile()
    return compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("rows", [512, 32768])
def test_nothing_is_spilled_and_no_dense_matmul_is_needed(rows):
    """One of every expert would mask the rows 128 times: 16 GiB for 4,096 tokens of 8 experts."""
    code = f"from test_grouped_matmul_compiles import *; assert compile_gradient({rows}) < 2**29"
    logs, _ = compiled_in_a_process(code)
    assert len(logs) == 3  # the output, and the gradients of rows and weights
    assert all("0 bytes spill stores" in log for log in logs), logs
