"""One token of every slot by the gated delta rule, in a kernel for Hopper.

A CTA has a head of a slot, whose memory is read once and written once, in place. The first values
are computed while the others load. A slot that begins reads the memory of its prompt instead of its
own. A free slot reads and writes no memory.

Shape letters: see inputs.py, and A prompts.
"""

from functools import partial
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from jaxrl_llm.kernels.hopper import (
    SHARED_BYTES_RESERVED,
    SM_SHARED_BYTES,
    Interpret,
    Ref,
    along,
    by_column,
    by_row,
    load_whole,
    on_hopper,
    zeros,
)
from jaxrl_llm.kernels.mosaic import plgpu

ROWS = 64  # values that are computed at a time


def kernel_fits(memory_BNVH: jax.Array) -> bool:
    """Check that the kernel takes these sizes: values by 64, keys of 64 or 128, on a Hopper GPU.

    The memory of a head is in shared memory as a whole, with barriers of a few bytes.
    """
    V, H = memory_BNVH.shape[2:]
    in_shared_memory = 4 * V * H < SM_SHARED_BYTES - SHARED_BYTES_RESERVED
    return V % ROWS == 0 and H in (64, 128) and in_shared_memory and on_hopper()


def step_in_kernel(
    q_BGH: jax.Array,
    k_BGH: jax.Array,
    v_BNV: jax.Array,
    decay_BN: jax.Array,
    rate_BN: jax.Array,
    own_BNVH: jax.Array,
    source_B: jax.Array,
    prompts_ANVH: jax.Array | None = None,
    interpret: Interpret = None,
) -> tuple[jax.Array, jax.Array]:
    """The outputs [B, N, V] of a token of each slot, and the memory after it.

    `source_B` is -1 for a free slot, whose output is 0, 0 for a slot's own memory, and else the
    number of its prompt plus 1.

    Requires: `kernel_fits`.
    """
    B, N, V, H = own_BNVH.shape
    given = () if prompts_ANVH is None else (prompts_ANVH,)
    parts = V // ROWS
    # In these tiles neither TMA nor a load into registers has bank conflicts.
    transforms = (plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(128))
    scratch = dict(
        memory_smem=plgpu.SMEM((parts, ROWS, H), jnp.float32, transforms=transforms),
        loaded=plgpu.Barrier(num_barriers=parts),
    )

    def with_scratch(*refs: Ref) -> None:
        pl.run_scoped(partial(_body, *refs), collective_axes=(), **scratch)

    kernel: Any = pl.kernel(
        with_scratch,
        out_type=jax.ShapeDtypeStruct((B, N, V), jnp.float32),
        mesh=plgpu.Mesh(grid=(B, N), grid_names=("slot", "head")),
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, reduction_scratch_bytes=0
        ),
        interpret=interpret if interpret is not None else False,
        name="gated_delta_step",
    )

    @jax.jit  # a reference to global memory exists only inside a jit
    def written_in_place(own_BNVH: jax.Array, *others: jax.Array) -> tuple[jax.Array, jax.Array]:
        own_ref = jax.new_ref(own_BNVH, memory_space=plgpu.GMEM)
        out = kernel(own_ref, *others)
        return out, jax.freeze(own_ref)

    gates_BN2 = jnp.stack([decay_BN, rate_BN], axis=-1)
    return written_in_place(
        own_BNVH, source_B.astype(jnp.int32), q_BGH, k_BGH, v_BNV, gates_BN2, *given
    )


def _body(
    own_ref: Ref,
    source_ref: Ref,
    q_ref: Ref,
    k_ref: Ref,
    v_ref: Ref,
    gates_ref: Ref,
    *rest: Ref,
    memory_smem: Ref,
    loaded: Ref,
) -> None:
    *prompts, out_ref = rest
    _, N, V, H = own_ref.shape
    b, n = lax.axis_index("slot"), lax.axis_index("head")
    g = lax.div(n, jnp.int32(N // k_ref.shape[1]))
    source = source_ref[b]
    parts = [pl.ds(i * ROWS, ROWS) for i in range(V // ROWS)]

    def load(ref: Ref) -> None:
        for i, rows in enumerate(parts):
            plgpu.copy_gmem_to_smem(ref.at[rows], memory_smem.at[i], loaded.at[i])

    own = own_ref.at[b, n]
    pl.when(source == 0 if prompts else source >= 0)(lambda: load(own))
    for ref in prompts:
        prompt = ref.at[jnp.maximum(source - 1, 0), n]
        pl.when(source > 0)(partial(load, prompt))

    @pl.when(source < 0)
    def _free() -> None:
        for rows in parts:
            out_ref[b, n, rows] = zeros((ROWS,), by_row())

    @pl.when(source >= 0)
    def _live() -> None:
        k, q = (
            along(load_whole(ref.at[b, g], by_column()), (ROWS, H), 1) for ref in (k_ref, q_ref)
        )
        decay, rate = gates_ref[b, n, 0], gates_ref[b, n, 1]
        for i, rows in enumerate(parts):
            value = load_whole(v_ref.at[b, n, rows], by_row())
            plgpu.barrier_wait(loaded.at[i])
            memory = load_whole(memory_smem.at[i], plgpu.Layout.WGMMA) * decay
            new = rate * (value - jnp.sum(memory * k, axis=1))
            memory = memory + along(new, (ROWS, H)) * k
            memory_smem[i, :, :] = memory
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(memory_smem.at[i], own.at[rows])
            out_ref[b, n, rows] = jnp.sum(memory * q, axis=1)
        plgpu.wait_smem_to_gmem(0)
