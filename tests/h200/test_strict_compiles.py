"""Strict kernels compiled for an H200: they fit, and nothing is spilled."""

from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
from target import abstract, compiled_in_a_process, needs_compiler

from jaxrl_llm.kernels.strict_matmul import default_tile, strict_matmul
from jaxrl_llm.kernels.strict_norm import norm_kernel

pytestmark = needs_compiler

# Rows, inputs, outputs: large and small tiles, a chain of many together and apart.
SHAPES = [(16384, 1536, 8960), (1024, 1536, 256), (9216, 8960, 1536), (256, 8960, 1536)]


def compile_matmul(M: int, D: int, F: int) -> None:
    arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((M, D), (D, F))]
    jax.jit(strict_matmul).lower(*abstract(arrays)).compile()


def compile_norm(M: int, D: int) -> None:
    arrays = [
        jax.ShapeDtypeStruct((M, D), jnp.float32),
        jax.ShapeDtypeStruct((D,), jnp.bfloat16),
    ]
    jax.jit(partial(norm_kernel, eps=1e-6)).lower(*abstract(arrays)).compile()


def test_the_shapes_take_different_tiles():
    assert len({default_tile(*shape) for shape in SHAPES}) == len(SHAPES)


def test_nothing_is_spilled():
    """In one process, whose start takes as long as a kernel."""
    calls = [*(f"compile_matmul{shape}" for shape in SHAPES), "compile_norm(256, 1536)"]
    code = f"from {Path(__file__).stem} import *; {'; '.join(calls)}"
    logs, _ = compiled_in_a_process(code)
    assert len(logs) >= len(calls)
    assert all("0 bytes spill stores" in log for log in logs), logs
