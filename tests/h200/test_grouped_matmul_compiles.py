"""Grouped matmuls of experts through the real compiler, at sizes of 30B-A3B and gpt-oss layers."""

import jax
import jax.numpy as jnp
import pytest
from target import abstract, compiled_in_a_process, needs_compiler

from jaxrl_llm.kernels.grouped_matmul import grouped_matmul

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


@pytest.mark.parametrize("rows", [512, 32768])
def test_nothing_is_spilled_and_no_dense_matmul_is_needed(rows):
    """One of every expert would mask the rows 128 times: 16 GiB for 4,096 tokens of 8 experts."""
    code = f"from test_grouped_matmul_compiles import *; assert compile_gradient({rows}) < 2**29"
    logs, _ = compiled_in_a_process(code)
    assert len(logs) == 3  # the output, and the gradients of rows and weights
    assert all("0 bytes spill stores" in log for log in logs), logs


def test_sizes_between_tiles_are_padded():
    """gpt-oss-20b's experts: the temporaries are padded weights and the gradient of these."""
    padded = 32 * 2944 * 2944 * 2
    code = (
        "from test_grouped_matmul_compiles import *; "
        f"assert compile_gradient(8192, 32, 2880, 2880) < 2.5 * {padded}"
    )
    logs, _ = compiled_in_a_process(code)
    assert len(logs) == 3
    assert all("0 bytes spill stores" in log for log in logs), logs
