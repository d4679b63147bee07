"""The forward kernel of flash attention for Hopper, in Pallas' Mosaic GPU dialect.

A CTA owns a tile of queries of one head. A producer warpgroup loads blocks of keys and values by
TMA into a ring in shared memory. Two consumer warpgroups own half of the queries each and
alternate at the tensor cores (FlashAttention-3, arXiv:2407.08608). Key blocks that no query of the
tile sees are not loaded. Blocks that all queries see are not masked.

Shape letters: see common.py.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array

from jaxrl_llm.kernels.flash_attention.common import (
    LOWEST,
    NUM_CONSUMERS,
    Tuning,
    base_2_factor,
    is_full,
    kernel_call,
    key_block,
    key_ring,
    load_keys_and_values,
    load_ranges,
    lowered_once,
    matrix_smem,
    positions,
    ring_stage,
    sees,
    soft_capped,
    spill_scratch,
    split_index,
)
from jaxrl_llm.kernels.flash_attention.visibility import Ranges, Schedule, query_schedule
from jaxrl_llm.kernels.hopper import (
    LOG2_E,
    Interpret,
    Ref,
    accumulate,
    accumulator,
    along,
    by_row,
    multiply_add,
    zeros,
)
from jaxrl_llm.kernels.mosaic import plgpu


def forward_schedule(ranges: Ranges, num_rows: int, tuning: Tuning) -> Schedule:
    """The tile jobs of the forward kernel."""
    block_q = tuning.block_q
    tile_q = NUM_CONSUMERS * block_q
    return query_schedule(ranges, num_rows, block_q=block_q, block_k=tuning.block_k, tile_q=tile_q)


@lowered_once
def forward(
    q_BTNH: Array,
    k_BTKH: Array,
    v_BTKH: Array,
    ranges: Ranges,
    schedule: Schedule | None,
    softcap: float | None,
    tuning: Tuning,
    interpret: Interpret,
) -> tuple[Array, Array]:
    """The output, and the base-2 log-sum-exp of the scaled and capped scores, float32 [B, N, T].

    A schedule of None is made here. The log-sum-exp of a token that sees nothing is +inf, which
    makes its weights 0.
    """
    B, T, N, H = q_BTNH.shape
    block_q, block_k, stages = tuning.block_q, tuning.block_k, tuning.stages
    return kernel_call(
        partial(_forward_kernel, softcap=softcap, tuning=tuning),
        schedule or forward_schedule(ranges, B, tuning),
        ranges,
        (q_BTNH, k_BTKH, v_BTKH),
        name="flash_attention_forward",
        num_heads=N,
        out=(
            jax.ShapeDtypeStruct(q_BTNH.shape, q_BTNH.dtype),
            jax.ShapeDtypeStruct((B, N, T), jnp.float32),
        ),
        scratch=dict(
            q_smem=matrix_smem((NUM_CONSUMERS, block_q, H)),
            lse_smem=plgpu.SMEM((NUM_CONSUMERS, block_q), jnp.float32),
            q_loaded=plgpu.Barrier(num_barriers=NUM_CONSUMERS),
            turn=plgpu.Barrier(num_arrivals=NUM_CONSUMERS),
            **key_ring(stages, block_k, H),
            **spill_scratch((block_q, block_k), interpret),
        ),
        interpret=interpret,
    )


def _forward_kernel(
    *refs: Ref,
    num_index: int,
    softcap: float | None,
    tuning: Tuning,
    q_smem: Ref,
    k_smem: Ref,
    v_smem: Ref,
    lse_smem: Ref,
    q_loaded: Ref,
    k_loaded: Ref,
    v_loaded: Ref,
    k_free: Ref,
    v_free: Ref,
    turn: Ref,
    spill: Ref = None,
) -> None:
    jobs_ref, full_ref, ranges_ref, (q_ref, k_ref, v_ref, out_ref, lse_ref) = split_index(
        refs, num_index
    )
    block_q, block_k, stages = tuning.block_q, tuning.block_k, tuning.stages
    num_groups, H = q_ref.shape[2] // k_ref.shape[2], q_ref.shape[3]
    scale = base_2_factor(H, softcap)
    head, job = lax.axis_index("head"), lax.axis_index("job")
    warpgroup = lax.axis_index("warpgroup")
    row, tile, first, num_first, second, num = (jobs_ref[job, i] for i in range(6))

    def change_turns() -> None:
        if tuning.ping_pong:
            plgpu.barrier_arrive(turn)
            plgpu.barrier_wait(turn)

    @pl.when(warpgroup < NUM_CONSUMERS)
    def _consume() -> None:
        plgpu.set_max_registers(240, action="increase")
        q_block = NUM_CONSUMERS * tile + warpgroup
        base = q_block * block_q
        queries = pl.ds(base, block_q)
        my_q, my_lse = q_smem.at[warpgroup], lse_smem.at[warpgroup]
        my_spill = None if spill is None else spill.at[warpgroup]
        plgpu.copy_gmem_to_smem(q_ref.at[row, queries, head], my_q, q_loaded.at[warpgroup])
        ranges = load_ranges(ranges_ref, row, queries, by_row())
        plgpu.barrier_wait(q_loaded.at[warpgroup])

        @pl.when(num > 0)
        def _first_keys() -> None:
            plgpu.barrier_wait(k_loaded.at[0])

        # The second consumer begins when the first has issued the matmul of its first scores.
        pl.when(warpgroup == 1)(change_turns)

        def step(j: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            acc, top, total = carry
            stage = ring_stage(j, stages)
            block = key_block(first, num_first, second, j)
            key_base = block * block_k
            full = is_full(full_ref, row, base, key_base, block_k, (q_block, block))

            def scores(ref: Ref) -> Array:
                plgpu.wgmma(ref, my_q, k_smem.at[stage].transpose((1, 0)))
                change_turns()
                return ref[...]

            s = pl.run_scoped(scores, accumulator(block_q, block_k))
            plgpu.barrier_arrive(k_free.at[stage])
            s = soft_capped(s, H, softcap)

            def masked(s: Array) -> Array:
                query = positions(s.shape, 0, base)
                key = positions(s.shape, 1, key_base)
                return jnp.where(sees(ranges, query, key, 0), s, -jnp.inf)

            s = lax.cond(full, lambda s: s, masked, s)
            # The maximum is kept in base 2, so that the exponent below is one multiply-add.
            new_top = jnp.maximum(top, s.max(axis=1) * scale)
            p = jnp.exp2(s * scale - along(new_top, s.shape))
            shrink = jnp.exp2(top - new_top)
            acc *= along(shrink, acc.shape)
            total = total * shrink
            p16 = p.astype(jnp.bfloat16)
            if H <= 128:
                total += p.sum(axis=1)
                acc, new_top, total, p16 = lax.optimization_barrier((acc, new_top, total, p16))
            if tuning.ping_pong:
                plgpu.barrier_arrive(turn)
            plgpu.barrier_wait(v_loaded.at[stage])
            if tuning.ping_pong:
                plgpu.barrier_wait(turn)
            if H > 128:  # too few registers to hold both p and p16 before the matmul
                total += p.sum(axis=1)

            def values(ref: Ref) -> None:
                multiply_add(ref, p16, v_smem.at[stage], my_spill)

                @pl.when(j + 1 < num)
                def _next_keys() -> None:
                    plgpu.barrier_wait(k_loaded.at[ring_stage(j + 1, stages)])

            acc = accumulate(acc, values, interpreted=spill is not None)
            plgpu.barrier_arrive(v_free.at[stage])
            return acc, new_top, total

        start = (
            zeros((block_q, H), plgpu.Layout.WGMMA),
            zeros((block_q,), by_row(), LOWEST),
            zeros((block_q,), by_row()),
        )
        acc, top, total = lax.fori_loop(0, num, step, start)
        pl.when(warpgroup == 0)(change_turns)

        some = total > 0.0
        factor = jnp.where(some, 1.0 / total, 0.0)
        my_q[...] = (acc * along(factor, acc.shape)).astype(jnp.bfloat16)
        my_lse[...] = jnp.where(some, top + jnp.log(total) * LOG2_E, jnp.inf)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(my_q, out_ref.at[row, queries, head], commit_group=False)
        plgpu.copy_smem_to_gmem(my_lse, lse_ref.at[row, head, queries], commit_group=False)
        plgpu.commit_smem_to_gmem_group()
        plgpu.wait_smem_to_gmem(0)

    @pl.when(warpgroup == NUM_CONSUMERS)
    def _produce() -> None:
        plgpu.set_max_registers(24, action="decrease")
        load_keys_and_values(
            (k_ref, k_smem, k_loaded, k_free),
            (v_ref, v_smem, v_loaded, v_free),
            row=row,
            kv_head=lax.div(head, jnp.asarray(num_groups, head.dtype)),
            num_steps=num,
            block_of=partial(key_block, first, num_first, second),
            block_k=block_k,
            stages=stages,
        )
