"""The Hopper attention kernels through the real compiler: registers, spills, shared memory."""

import dataclasses
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from target import abstract, compiled_in_a_process, h200_mesh, needs_compiler, one_h200

from jaxrl_llm.kernels import flash_attention
from jaxrl_llm.kernels.flash_attention import attention, packed_visibility
from jaxrl_llm.kernels.mesh_split import MeshSplit

pytestmark = needs_compiler

# Masked blocks are rare, and the spills up to head dim 128 are values kept for them alone. At 256
# accumulators fill the registers, so that kernels of whole rows spill too: today's most.
SPILL_LIMIT = {64: 0, 96: 20, 128: 320, 256: 508}
SHARED_MEMORY_LIMIT = 227 * 1024


SMS = flash_attention.backward.SMS


def compile_gradient(head_dim: int, part: bool = False, softcap: float | None = None) -> None:
    """Forward and gradient kernels, of packed rows with a shared prefix and of whole rows.

    The packed rows' keys are divided among programs, whole rows' are not, as in many rows.
    """
    flash_attention.backward.SMS = SMS

    def loss(q, k, v, segments, prefixes):
        visibility = packed_visibility(segments, prefixes)
        how = {"softcap": softcap, "implementation": "pallas"}
        out = attention(q, k, v, visibility=visibility, **how)
        # The schedules of packed rows are made by now, whole rows' in the backward pass.
        flash_attention.backward.SMS = 0
        whole = attention(q, k, v, **how)
        return jnp.sum(out.astype(jnp.float32) ** 2 + whole.astype(jnp.float32) ** 2)

    def loss_of_part(q, k, v, segments, prefixes):
        """Of the queries of the last half of the rows."""
        ranges = packed_visibility(segments, prefixes)
        half = jax.tree.map(lambda x: x[:, 512:], ranges)
        last = jnp.broadcast_to(jnp.arange(512, 1024), half.start_BT.shape)
        half = dataclasses.replace(half, last_BT=last)
        out = attention(q[:, 512:], k, v, visibility=half, implementation="pallas")
        return jnp.sum(out.astype(jnp.float32) ** 2)

    shapes = [(2, 1024, heads, head_dim) for heads in (8, 2, 2)]
    arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    ids = [jax.ShapeDtypeStruct((2, 1024), jnp.int32)] * 2
    gradient = jax.jit(jax.grad(loss_of_part if part else loss, argnums=(0, 1, 2)))
    gradient.lower(*abstract((*arrays, *ids), one_h200())).compile()


@pytest.mark.parametrize(
    "head_dim", [128, *(pytest.param(dim, marks=pytest.mark.slow) for dim in (64, 96, 256))]
)
def test_forward_and_gradient_fit_registers_and_shared_memory(head_dim):
    # Forward, dq, dk and dv by one kernel or, where they fill the registers, by two; and the sums
    # of the parts of the packed rows' dk and dv.
    fits(head_dim, 10 if head_dim == 256 else 8, f"compile_gradient({head_dim})")


@pytest.mark.nightly
@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_part_of_the_queries_fits_too(head_dim):
    fits(head_dim, 5, f"compile_gradient({head_dim}, part=True)")


@pytest.mark.slow
@pytest.mark.parametrize(("head_dim", "num_kernels"), [(128, 8), (256, 10)])
def test_a_soft_cap_takes_no_more_registers(head_dim, num_kernels):
    fits(head_dim, num_kernels, f"compile_gradient({head_dim}, softcap=50.0)")


def fits(head_dim, num_kernels, compiling):
    """Compile in a process of its own: little is spilled, and shared memory suffices."""
    logs, resources = compiled_in_a_process(f"from {Path(__file__).stem} import *; {compiling}")
    assert len(resources) == num_kernels, logs
    for log in logs:
        (spilled,) = re.findall(r"(\d+) bytes spill stores", log.split("Function properties")[-1])
        assert int(spilled) <= SPILL_LIMIT[head_dim], log
        assert "wgmma" not in log, log  # ptxas says so when it has to run wgmma one by one
    for kernel in resources:
        (used,) = re.findall(r"smem_scratch_bytes=(\d+)", kernel)
        assert int(used) <= SHARED_MEMORY_LIMIT, kernel


def test_kernels_compile_on_a_mesh_that_is_in_scope():
    mesh = h200_mesh((1, 2, 2))
    split = MeshSplit(rows=("data", "fsdp"), heads=("tensor",))
    rows, whole = (NamedSharding(mesh, PartitionSpec(axes)) for axes in (("data", "fsdp"), None))
    shapes = [(4, 256, heads, 64) for heads in (4, 2, 2)]
    arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]

    def run(q, k, v):
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return attention(q, k, v, implementation="pallas", split=split)

    lowered = jax.jit(run, out_shardings=whole).lower(*abstract(arrays, rows))
    text = lowered.compile().as_text()
    (call,) = (line for line in text.splitlines() if "custom-call(" in line and "mosaic" in line)
    assert "bf16[2,256,2,64]" in call  # its own rows and heads
