"""The gradient of the gated delta rule, compiled for an H200: no scatter, nothing is sorted."""

import re

import jax
import jax.numpy as jnp
import pytest
from target import abstract, needs_compiler

from jaxrl_llm.kernels.gated_delta import Inputs, Runs, Streams, gated_delta

pytestmark = needs_compiler
T, G, N, H, V, W = 512, 2, 4, 128, 128, 4
# Of an exact run, whose Triton matmuls are an error without a card.
OPTIONS = {"xla_gpu_exclude_nondeterministic_ops": True, "xla_gpu_enable_triton_gemm": False}


@pytest.mark.parametrize("shared", [False, True], ids=["own", "shared"])
def test_a_gradient_has_no_scatter(shared):
    """With and without shared prompts; an exact run would sort the updates of a scatter."""

    def array(*shape, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(shape, dtype)

    shapes = ((G, H), (G, H), (N, V))
    inputs = Inputs(
        streams=Streams(*(array(1, T, *shape, dtype=jnp.bfloat16) for shape in shapes)),
        kernels=Streams(*(array(*shape, W, dtype=jnp.bfloat16) for shape in shapes)),
        log_decay_BTN=array(1, T, N),
        rate_BTN=array(1, T, N),
    )
    runs = Runs(*[array(1, T, dtype=jnp.int32)] * (3 if shared else 1))

    def total(inputs, runs, given):
        return (gated_delta(inputs, runs) * given).sum()

    traced = abstract((inputs, runs, array(1, T, N, V)))
    program = jax.jit(jax.grad(total)).lower(*traced).compile(compiler_options=OPTIONS)
    found = set(re.findall(r" (\w[\w-]*)\(", program.as_text()))
    assert "fusion" in found and "while" in found
    assert not found & {"scatter", "sort", "select-and-scatter"}
