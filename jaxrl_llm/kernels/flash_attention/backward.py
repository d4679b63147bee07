"""The gradient kernels of flash attention for Hopper, in Pallas' Mosaic GPU dialect.

One kernel gives dq: a CTA owns a tile of queries and loops over keys. The other gives dk and dv: a
CTA owns a tile of keys and loops over the queries of all heads that share them. Key tiles with many
steps are split among CTAs, and a third kernel adds their partial gradients. The weights are
recomputed from the forward kernel's log-sum-exp (FlashAttention-2, arXiv:2307.08691). Every sum has
a fixed order and uses no atomics: gradients have the same bits in every run.

With P the weights, dP = dO V^T and delta = rowsum(dO * O): dS = P * (dP - delta),
dQ = dS K / sqrt(H), dK = dS^T Q / sqrt(H), dV = P^T dO. A soft cap multiplies dS by its derivative,
1 - tanh^2. Shape letters: see common.py.
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
    drain,
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
    sloped,
    soft_capped,
    spill_scratch,
    split_index,
)
from jaxrl_llm.kernels.flash_attention.visibility import (
    HostOrDevice,
    Ranges,
    Schedule,
    key_schedule,
    query_schedule,
)
from jaxrl_llm.kernels.hopper import (
    SMS,
    Interpret,
    Ref,
    accumulator,
    along,
    by_column,
    by_row,
    load_whole,
    multiply_add,
    zeros,
)
from jaxrl_llm.kernels.mosaic import plgpu


@lowered_once
def backward(
    q_BTNH: Array,
    k_BTKH: Array,
    v_BTKH: Array,
    out_BTNH: Array,
    lse_BNT: Array,
    ranges: Ranges,
    schedules: tuple[Schedule, Schedule] | None,
    dout_BTNH: Array,
    softcap: float | None,
    tuning: Tuning,
    interpret: Interpret,
) -> tuple[Array, Array, Array]:
    """dq, dk and dv from the forward pass's inputs, output and base-2 log-sum-exp.

    Schedules of None are made here.
    """
    dout_BTNH = dout_BTNH.astype(q_BTNH.dtype)
    if ranges.values_RCT is not None:
        # The cotangent of a token that sees nothing may be NaN, and 0 * NaN would reach dv of real
        # tokens. In plain causal rows every token sees itself, and the copy is not needed.
        real_BTN = jnp.isfinite(lse_BNT).swapaxes(1, 2)
        dout_BTNH = jnp.where(real_BTN[..., None], dout_BTNH, 0)
    delta_BTN = (out_BTNH.astype(jnp.float32) * dout_BTNH.astype(jnp.float32)).sum(axis=-1)
    # Without the barrier XLA fuses the sums into the stack, one thread per sum: ten times slower.
    delta_BTN, dout_BTNH = lax.optimization_barrier((delta_BTN, dout_BTNH))
    stats_BN2T = jnp.stack([lse_BNT, delta_BTN.swapaxes(1, 2)], axis=2)
    operands = (q_BTNH, k_BTKH, v_BTKH, dout_BTNH, stats_BN2T)
    B, _, N, _ = q_BTNH.shape
    of_dq, of_dkv = schedules or backward_schedules(ranges, B, N, k_BTKH.shape[2], tuning)
    dq_BTNH = _dq(operands, ranges, of_dq, softcap, tuning, interpret)
    of_keys = partial(_dkv, operands, ranges, of_dkv, softcap, tuning, interpret)
    if tuning.dkv_split:
        (dk_BTKH,), (dv_BTKH,) = of_keys(("dk",)), of_keys(("dv",))
    else:
        dk_BTKH, dv_BTKH = of_keys(("dk", "dv"))
    return dq_BTNH, dk_BTKH, dv_BTKH


def backward_schedules(
    ranges: Ranges, num_rows: int, num_heads: int, num_kv_heads: int, tuning: Tuning
) -> tuple[Schedule, Schedule]:
    """The tile jobs of the dq kernel, and of the kernels of dk and dv.

    All queries of a group's responses see its prompt. So the few tiles of the prompt's keys would
    take many times as long as all others. Few rows have fewer tiles than the GPU has SMs. In both
    cases tiles are split: a job is at most half of an SM's average share. Partial gradients take 4
    bytes per element where gradients take 2.
    """
    of_dq = query_schedule(
        ranges,
        num_rows,
        block_q=tuning.dq_block_q,
        block_k=tuning.dq_block_k,
        tile_q=NUM_CONSUMERS * tuning.dq_block_q,
    )
    tile_k = NUM_CONSUMERS * tuning.dkv_block_k
    num_tiles = num_rows * (ranges.num_keys // tile_k) * num_kv_heads
    # Rows that are not causal have prefixes too. Splitting them gains nothing.
    split = ranges.has_prefixes or num_tiles < 1.5 * SMS
    of_dkv = key_schedule(
        ranges,
        num_rows,
        block_q=tuning.dkv_block_q,
        block_k=tuning.dkv_block_k,
        tile_k=tile_k,
        num_groups=num_heads // num_kv_heads,
        extra_jobs=-(-2 * SMS // num_kv_heads) if split else 0,
    )
    return of_dq, of_dkv


def _dq(
    operands: tuple[Array, ...],
    ranges: Ranges,
    schedule: Schedule,
    softcap: float | None,
    tuning: Tuning,
    interpret: Interpret,
) -> Array:
    _, _, N, H = operands[0].shape
    block_q, block_k, stages = tuning.dq_block_q, tuning.dq_block_k, tuning.dq_stages
    return kernel_call(
        partial(_dq_kernel, softcap=softcap, tuning=tuning),
        schedule,
        ranges,
        operands,
        name="flash_attention_dq",
        num_heads=N,
        out=jax.ShapeDtypeStruct(operands[0].shape, operands[0].dtype),
        scratch=dict(
            q_smem=matrix_smem((NUM_CONSUMERS, block_q, H)),
            do_smem=matrix_smem((NUM_CONSUMERS, block_q, H)),
            mine_loaded=plgpu.Barrier(num_arrivals=2, num_barriers=NUM_CONSUMERS),
            **key_ring(stages, block_k, H),
            **spill_scratch((block_q, block_k), interpret),
        ),
        interpret=interpret,
    )


def _dq_kernel(
    *refs: Ref,
    num_index: int,
    softcap: float | None,
    tuning: Tuning,
    q_smem: Ref,
    do_smem: Ref,
    k_smem: Ref,
    v_smem: Ref,
    mine_loaded: Ref,
    k_loaded: Ref,
    v_loaded: Ref,
    k_free: Ref,
    v_free: Ref,
    spill: Ref = None,
) -> None:
    jobs_ref, full_ref, ranges_ref, operands = split_index(refs, num_index)
    q_ref, k_ref, v_ref, do_ref, stats_ref, dq_ref = operands
    block_q, block_k, stages = tuning.dq_block_q, tuning.dq_block_k, tuning.dq_stages
    num_groups, H = q_ref.shape[2] // k_ref.shape[2], q_ref.shape[3]
    unseen = -jnp.inf if softcap is None else LOWEST
    head, job = lax.axis_index("head"), lax.axis_index("job")
    warpgroup = lax.axis_index("warpgroup")
    row, tile, first, num_first, second, num = (jobs_ref[job, i] for i in range(6))

    @pl.when(warpgroup < NUM_CONSUMERS)
    def _consume() -> None:
        plgpu.set_max_registers(240, action="increase")
        q_block = NUM_CONSUMERS * tile + warpgroup
        base = q_block * block_q
        queries = pl.ds(base, block_q)
        my_q, my_do = q_smem.at[warpgroup], do_smem.at[warpgroup]
        my_spill = None if spill is None else spill.at[warpgroup]
        for ref, smem in ((q_ref, my_q), (do_ref, my_do)):
            plgpu.copy_gmem_to_smem(ref.at[row, queries, head], smem, mine_loaded.at[warpgroup])
        lse, delta = (load_whole(stats_ref.at[row, head, i, queries], by_row()) for i in range(2))
        ranges = load_ranges(ranges_ref, row, queries, by_row())
        plgpu.barrier_wait(mine_loaded.at[warpgroup])

        def step(j: Array, dq_acc: Ref) -> None:
            stage = ring_stage(j, stages)
            block = key_block(first, num_first, second, j)
            key_base = block * block_k
            full = is_full(full_ref, row, base, key_base, block_k, (q_block, block))

            def one_block(s_acc: Ref, dp_acc: Ref) -> None:
                plgpu.barrier_wait(k_loaded.at[stage])
                plgpu.wgmma(s_acc, my_q, k_smem.at[stage].transpose((1, 0)))
                plgpu.barrier_wait(v_loaded.at[stage])
                plgpu.wgmma(dp_acc, my_do, v_smem.at[stage].transpose((1, 0)))
                s = soft_capped(plgpu.wgmma_accumulator_load(s_acc, wait_n=1), H, softcap)

                def masked(s: Array) -> Array:
                    query = positions(s.shape, 0, base)
                    key = positions(s.shape, 1, key_base)
                    return jnp.where(sees(ranges, query, key, 0), s, unseen)

                s = lax.cond(full, lambda s: s, masked, s)
                p = jnp.exp2(s * base_2_factor(H, softcap) - along(lse, s.shape))
                p = sloped(p, s, softcap)
                dp = dp_acc[...]
                plgpu.barrier_arrive(v_free.at[stage])
                ds = (p * (dp - along(delta, dp.shape))).astype(jnp.bfloat16)
                multiply_add(dq_acc, ds, k_smem.at[stage], my_spill)

            scores = accumulator(block_q, block_k)
            pl.run_scoped(one_block, scores, scores)
            plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(k_free.at[stage])

        def all_blocks(dq_acc: Ref) -> Array:
            pl.loop(0, num)(partial(step, dq_acc=dq_acc))
            return dq_acc[...]

        dq = pl.run_scoped(all_blocks, accumulator(block_q, H))
        my_q[...] = (dq * H**-0.5).astype(jnp.bfloat16)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(my_q, dq_ref.at[row, queries, head])
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


def _dkv(
    operands: tuple[Array, ...],
    ranges: Ranges,
    schedule: Schedule,
    softcap: float | None,
    tuning: Tuning,
    interpret: Interpret,
    wanted: tuple[str, ...],
) -> tuple[Array, ...]:
    k_BTKH = operands[1]
    K, H = k_BTKH.shape[2:]
    block_q, block_k, stages = tuning.dkv_block_q, tuning.dkv_block_k, tuning.dkv_stages
    mine = matrix_smem((NUM_CONSUMERS, block_k, H))
    split = schedule.jobs_of_tile is not None
    if split:
        shape = (len(schedule.jobs), K, NUM_CONSUMERS * block_k, H)
        gradient = jax.ShapeDtypeStruct(shape, jnp.float32)
    else:
        gradient = jax.ShapeDtypeStruct(k_BTKH.shape, k_BTKH.dtype)
    grads = kernel_call(
        partial(_dkv_kernel, softcap=softcap, tuning=tuning, wanted=wanted, split=split),
        schedule,
        ranges,
        operands,
        name="flash_attention_" + "_".join(wanted),
        num_heads=K,
        out=(gradient,) * len(wanted),
        scratch=dict(
            k_smem=mine,
            # dv alone needs no values. Results are written through the keys' and values' memory.
            v_smem=mine if "dk" in wanted else None,
            q_smem=matrix_smem((stages, block_q, H)),
            do_smem=matrix_smem((stages, block_q, H)),
            stats_smem=plgpu.SMEM((stages, 2, block_q), jnp.float32),
            mine_loaded=plgpu.Barrier(
                num_arrivals=2 if "dk" in wanted else 1, num_barriers=NUM_CONSUMERS
            ),
            # A step loads its queries and their statistics.
            q_loaded=plgpu.Barrier(num_arrivals=2, num_barriers=stages),
            do_loaded=plgpu.Barrier(num_barriers=stages),
            q_free=plgpu.Barrier(num_arrivals=NUM_CONSUMERS, num_barriers=stages),
            do_free=plgpu.Barrier(num_arrivals=NUM_CONSUMERS, num_barriers=stages),
            **spill_scratch((block_k, block_q), interpret),
        ),
        interpret=interpret,
    )
    if schedule.jobs_of_tile is None:
        return grads
    return tuple(_sum_partials(grad, schedule.jobs_of_tile, k_BTKH, interpret) for grad in grads)


def _sum_partials(
    partials_JKtH: Array, jobs_of_tile: HostOrDevice, like_BTKH: Array, interpret: Interpret
) -> Array:
    """The gradient [B, T, K, H]: float32 partial gradients of its tiles of t keys, added in order.

    J are the tile jobs. `jobs_of_tile` is a field of `Schedule`.
    """
    B, T, K, H = like_BTKH.shape
    tile = partials_JKtH.shape[2]
    rows = tile // NUM_CONSUMERS

    def body(table_ref: Ref, partials_ref: Ref, out_ref: Ref, out_smem: Ref) -> None:
        head, index = lax.axis_index("head"), lax.axis_index("tile")
        warpgroup = lax.axis_index("warpgroup")
        mine = pl.ds(warpgroup * rows, rows)
        first, num = table_ref[index, 0], table_ref[index, 1]

        def add(i: Array, total: Array) -> Array:
            return total + load_whole(partials_ref.at[first + i, head, mine], plgpu.Layout.WGMMA)

        total = lax.fori_loop(0, num, add, zeros((rows, H), plgpu.Layout.WGMMA))
        my_smem = out_smem.at[warpgroup]
        my_smem[...] = total.astype(jnp.bfloat16)
        plgpu.commit_smem()
        row, tile_in_row = lax.div(index, T // tile), lax.rem(index, T // tile)
        keys = pl.ds(tile_in_row * tile + warpgroup * rows, rows)
        plgpu.copy_smem_to_gmem(my_smem, out_ref.at[row, keys, head])
        plgpu.wait_smem_to_gmem(0)

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(like_BTKH.shape, like_BTKH.dtype),
        scratch_types=dict(out_smem=matrix_smem((NUM_CONSUMERS, rows, H))),
        grid=(K, B * (T // tile)),
        grid_names=("head", "tile"),
        num_threads=NUM_CONSUMERS,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(reduction_scratch_bytes=0),
        interpret=interpret,
        kernel_name="flash_attention_sum_of_parts",
    )
    return kernel(jnp.asarray(jobs_of_tile), partials_JKtH)


def _dkv_kernel(
    *refs: Ref,
    num_index: int,
    softcap: float | None,
    tuning: Tuning,
    wanted: tuple[str, ...],
    split: bool,
    k_smem: Ref,
    v_smem: Ref,
    q_smem: Ref,
    do_smem: Ref,
    stats_smem: Ref,
    mine_loaded: Ref,
    q_loaded: Ref,
    do_loaded: Ref,
    q_free: Ref,
    do_free: Ref,
    spill: Ref = None,
) -> None:
    jobs_ref, full_ref, ranges_ref, operands = split_index(refs, num_index)
    q_ref, k_ref, v_ref, do_ref, stats_ref, *grad_refs = operands
    block_q, block_k, stages = tuning.dkv_block_q, tuning.dkv_block_k, tuning.dkv_stages
    num_groups, H = q_ref.shape[2] // k_ref.shape[2], q_ref.shape[3]
    unseen = -jnp.inf if softcap is None else LOWEST
    kv_head, job = lax.axis_index("head"), lax.axis_index("job")
    warpgroup = lax.axis_index("warpgroup")
    row, tile, first, begin, end, num = (jobs_ref[job, i] for i in range(6))
    num_steps = end - begin

    @pl.when(warpgroup < NUM_CONSUMERS)
    def _consume() -> None:
        plgpu.set_max_registers(240, action="increase")
        k_block = NUM_CONSUMERS * tile + warpgroup
        base = k_block * block_k
        keys = pl.ds(base, block_k)
        my_k = k_smem.at[warpgroup]
        my_v: Ref = None if v_smem is None else v_smem.at[warpgroup]
        my_spill = None if spill is None else spill.at[warpgroup]
        for ref, smem in ((k_ref, my_k), (v_ref, my_v)):
            if smem is not None:
                plgpu.copy_gmem_to_smem(ref.at[row, keys, kv_head], smem, mine_loaded.at[warpgroup])
        plgpu.barrier_wait(mine_loaded.at[warpgroup])

        def step(j: Array, grad_accs: dict[str, Ref]) -> None:
            stage = ring_stage(j, stages)
            block = first + lax.rem(begin + j, num)
            query_base = block * block_q
            full = is_full(full_ref, row, query_base, base, block_k, (block, k_block))

            def one_block(s_acc: Ref, dp_acc: Ref = None) -> None:
                plgpu.barrier_wait(q_loaded.at[stage])
                plgpu.wgmma(s_acc, my_k, q_smem.at[stage].transpose((1, 0)))
                plgpu.barrier_wait(do_loaded.at[stage])
                if dp_acc is not None:
                    plgpu.wgmma(dp_acc, my_v, do_smem.at[stage].transpose((1, 0)))
                s = plgpu.wgmma_accumulator_load(s_acc, wait_n=0 if dp_acc is None else 1)
                s = soft_capped(s, H, softcap)

                def masked(s: Array) -> Array:
                    queries = pl.ds(query_base, block_q)
                    ranges = load_ranges(ranges_ref, row, queries, by_column())
                    query = positions(s.shape, 1, query_base)
                    key = positions(s.shape, 0, base)
                    return jnp.where(sees(ranges, query, key, 1), s, unseen)

                s = lax.cond(full, lambda s: s, masked, s)
                lse = load_whole(stats_smem.at[stage, 0], by_column())
                p = jnp.exp2(s * base_2_factor(H, softcap) - along(lse, s.shape, 1))
                if "dv" in grad_accs:
                    p16 = p.astype(jnp.bfloat16)
                    multiply_add(grad_accs["dv"], p16, do_smem.at[stage], my_spill)
                if dp_acc is not None:
                    delta = load_whole(stats_smem.at[stage, 1], by_column())
                    # The matmul into dv may still run.
                    dp = plgpu.wgmma_accumulator_load(dp_acc, wait_n=len(grad_accs) - 1)
                    p = sloped(p, s, softcap)
                    ds = (p * (dp - along(delta, dp.shape, 1))).astype(jnp.bfloat16)
                    multiply_add(grad_accs["dk"], ds, q_smem.at[stage], my_spill)

            scores = accumulator(block_k, block_q)
            pl.run_scoped(one_block, *[scores] * (2 if "dk" in grad_accs else 1))
            if len(grad_accs) > 1:
                plgpu.wgmma_wait(1)
                plgpu.barrier_arrive(do_free.at[stage])
                plgpu.wgmma_wait(0)
            else:
                plgpu.wgmma_wait(0)
                plgpu.barrier_arrive(do_free.at[stage])
            plgpu.barrier_arrive(q_free.at[stage])

        def all_blocks(*accs: Ref) -> tuple[Array, ...]:
            pl.loop(0, num_steps)(partial(step, grad_accs=dict(zip(wanted, accs, strict=True))))
            return tuple(acc[...] for acc in accs)

        grads = pl.run_scoped(all_blocks, *[accumulator(block_k, H)] * len(wanted))
        scales = [H**-0.5 if name == "dk" else 1.0 for name in wanted]
        if split:

            @pl.when(num_steps > 0)
            def _write_partial() -> None:
                mine = pl.ds(warpgroup * block_k, block_k)
                for grad, scale, ref in zip(grads, scales, grad_refs, strict=True):
                    ref[job, kv_head, mine] = grad * scale

            return
        for grad, scale, smem in zip(grads, scales, (my_k, my_v), strict=False):
            smem[...] = (grad * scale).astype(jnp.bfloat16)
        plgpu.commit_smem()
        for smem, ref in zip((my_k, my_v), grad_refs, strict=False):
            plgpu.copy_smem_to_gmem(smem, ref.at[row, keys, kv_head], commit_group=False)
        plgpu.commit_smem_to_gmem_group()
        plgpu.wait_smem_to_gmem(0)

    @pl.when(warpgroup == NUM_CONSUMERS)
    def _produce() -> None:
        plgpu.set_max_registers(24, action="decrease")

        @pl.loop(0, num_steps)
        def _load(j: Array) -> None:
            stage = ring_stage(j, stages)
            head = kv_head * num_groups + lax.div(begin + j, num)
            queries = pl.ds((first + lax.rem(begin + j, num)) * block_q, block_q)
            pl.when(j >= stages)(partial(plgpu.barrier_wait, q_free.at[stage]))
            plgpu.copy_gmem_to_smem(
                stats_ref.at[row, head, :, queries], stats_smem.at[stage], q_loaded.at[stage]
            )
            plgpu.copy_gmem_to_smem(
                q_ref.at[row, queries, head], q_smem.at[stage], q_loaded.at[stage]
            )
            pl.when(j >= stages)(partial(plgpu.barrier_wait, do_free.at[stage]))
            plgpu.copy_gmem_to_smem(
                do_ref.at[row, queries, head], do_smem.at[stage], do_loaded.at[stage]
            )

        drain((q_free, do_free), num_steps, stages)
