"""Strict kernels compiled for an H200: they fit, and nothing is spilled."""

import jax
import jax.numpy as jnp
import pytest
from target import abstract, compiled_in_a_process, needs_compiler

from jaxrl_llm.kernels.strict_matmul import default_tile, strict_matmul

pytestmark = needs_compiler

SHAPES = [(16384, 1536, 8960), (1024, 1536, 256), (64, 8960, 1536)]  # rows, inputs, outputs


def compile_matmul(M: int, D: int, F: int) -> None:
    arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((M, D), (D, F))]
    jax.jit(strict_matmul).lower(*abstract(arrays)).compile()


def test_the_shapes_take_different_tiles():
    assert len({default_tile(M, F) for M, _, F in SHAPES}) == 2
    assert default_tile(1024, 8960).rows == 128


@pytest.mark.parametrize("shape", SHAPES)
def test_nothing_is_spilled(shape):
    code = f"from test_strict_compiles import compile_matmul; compile_matmul{shape}"
    logs, _ = compiled_in_a_process(code)
    assert logs and all("0 bytes spill stores" in log for log in logs), logs
