"""Attention on Hopper GPUs: the gradient's two kernels in Pallas (Mosaic GPU).

One kernel gives dq, a tile of queries a program that loops over keys; the other dk and dv, a tile
of keys a program that loops over the queries of all heads that share them. Every sum is made by
one program in a fixed order, without atomics, so gradients are the same bits in every run. The
weights are computed again from the forward pass's log-sum-exp (FlashAttention-2,
arXiv:2307.08691).

Shape letters as in flash_attention_mosaic_forward.py. With P the weights, dP = dO V^T and
delta = rowsum(dO * O): dS = P * (dP - delta), dQ = dS K / sqrt(H), dK = dS^T Q / sqrt(H),
dV = P^T dO.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from jaxrl_llm.kernels.flash_attention_mosaic_forward import (
    BY_COLUMN,
    BY_ROW,
    LOG2_E,
    NUM_CONSUMERS,
    Tuning,
    accumulator,
    along,
    drain,
    is_whole,
    kernel_call,
    key_block,
    load_ranges,
    load_vector,
    lowered_once,
    matrix_smem,
    multiply_add,
    positions,
    ring_slot,
    sees,
    spill_scratch,
    split_index,
)
from jaxrl_llm.kernels.visibility import Ranges, key_schedule, query_schedule


@lowered_once
def backward(
    q_BTNH: Array,
    k_BTKH: Array,
    v_BTKH: Array,
    out_BTNH: Array,
    lse_BNT: Array,
    ranges: Ranges,
    dout_BTNH: Array,
    tuning: Tuning,
    interpret: Any,
) -> tuple[Array, Array, Array]:
    """dq, dk and dv from the forward pass's inputs, output and log-sum-exp (in bits)."""
    dout_BTNH = dout_BTNH.astype(q_BTNH.dtype)
    if ranges.values_RCT is not None:
        # Nothing may come in through a token that sees nothing: 0 * NaN would reach dv of real
        # ones. In plain causal rows each sees itself, and a copy of the cotangent is saved.
        real_BTN = jnp.isfinite(lse_BNT).swapaxes(1, 2)
        dout_BTNH = jnp.where(real_BTN[..., None], dout_BTNH, 0)
    delta_BNT = jnp.einsum(
        "BTNH,BTNH->BNT", out_BTNH, dout_BTNH, preferred_element_type=jnp.float32
    )
    stats_BN2T = jnp.stack([lse_BNT, delta_BNT], axis=2)
    operands = (q_BTNH, k_BTKH, v_BTKH, dout_BTNH, stats_BN2T)
    dq_BTNH = _dq(operands, ranges, tuning, interpret)
    if tuning.dkv_split:
        (dk_BTKH,) = _dkv(operands, ranges, tuning, interpret, ("dk",))
        (dv_BTKH,) = _dkv(operands, ranges, tuning, interpret, ("dv",))
    else:
        dk_BTKH, dv_BTKH = _dkv(operands, ranges, tuning, interpret, ("dk", "dv"))
    return dq_BTNH, dk_BTKH, dv_BTKH


def _dq(operands: tuple[Array, ...], ranges: Ranges, tuning: Tuning, interpret: Any) -> Array:
    B, _, N, H = operands[0].shape
    block_q, block_k, stages = tuning.dq_block_q, tuning.dq_block_k, tuning.dq_stages
    schedule = query_schedule(
        ranges, B, block_q=block_q, block_k=block_k, tile_q=NUM_CONSUMERS * block_q
    )
    return kernel_call(
        partial(_dq_kernel, tuning=tuning),
        schedule,
        ranges,
        operands,
        name="flash_attention_dq",
        num_heads=N,
        out=jax.ShapeDtypeStruct(operands[0].shape, operands[0].dtype),
        scratch=dict(
            q_smem=matrix_smem((NUM_CONSUMERS, block_q, H)),
            do_smem=matrix_smem((NUM_CONSUMERS, block_q, H)),
            k_smem=matrix_smem((stages, block_k, H)),
            v_smem=matrix_smem((stages, block_k, H)),
            mine_loaded=plgpu.Barrier(num_arrivals=2, num_barriers=NUM_CONSUMERS),
            k_loaded=plgpu.Barrier(num_barriers=stages),
            v_loaded=plgpu.Barrier(num_barriers=stages),
            k_free=plgpu.Barrier(num_arrivals=NUM_CONSUMERS, num_barriers=stages),
            v_free=plgpu.Barrier(num_arrivals=NUM_CONSUMERS, num_barriers=stages),
            **spill_scratch((block_q, block_k), interpret),
        ),
        interpret=interpret,
    )


def _dq_kernel(
    *refs: Any,
    num_index: int,
    tuning: Tuning,
    q_smem: Any,
    do_smem: Any,
    k_smem: Any,
    v_smem: Any,
    mine_loaded: Any,
    k_loaded: Any,
    v_loaded: Any,
    k_free: Any,
    v_free: Any,
    spill: Any = None,
) -> None:
    items_ref, whole_ref, ranges_ref, operands = split_index(refs, num_index)
    q_ref, k_ref, v_ref, do_ref, stats_ref, dq_ref = operands
    block_q, block_k, stages = tuning.dq_block_q, tuning.dq_block_k, tuning.dq_stages
    num_groups, H = q_ref.shape[2] // k_ref.shape[2], q_ref.shape[3]
    head, item = lax.axis_index("head"), lax.axis_index("item")
    warpgroup = lax.axis_index("warpgroup")
    row, tile, first, num_first, second, num = (items_ref[item, i] for i in range(6))

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
        lse, delta = (load_vector(stats_ref.at[row, head, i, queries], BY_ROW) for i in range(2))
        ranges = load_ranges(ranges_ref, row, queries, BY_ROW)
        plgpu.barrier_wait(mine_loaded.at[warpgroup])

        def step(j: Array, dq_acc: Any) -> None:
            slot = ring_slot(j, stages)
            block = key_block(first, num_first, second, j)
            key_base = block * block_k
            whole = is_whole(whole_ref, row, base, key_base, block_k, (q_block, block))

            def one_block(s_acc: Any, dp_acc: Any) -> None:
                plgpu.barrier_wait(k_loaded.at[slot])
                plgpu.wgmma(s_acc, my_q, k_smem.at[slot].transpose((1, 0)))
                plgpu.barrier_wait(v_loaded.at[slot])
                plgpu.wgmma(dp_acc, my_do, v_smem.at[slot].transpose((1, 0)))
                s = plgpu.wgmma_accumulator_load(s_acc, wait_n=1)

                def masked(s: Array) -> Array:
                    query = positions(s.shape, 0, base)
                    key = positions(s.shape, 1, key_base)
                    return jnp.where(sees(ranges, query, key, 0), s, -jnp.inf)

                s = lax.cond(whole, lambda s: s, masked, s)
                p = jnp.exp2(s * (H**-0.5 * LOG2_E) - along(lse, s.shape))
                dp = dp_acc[...]
                plgpu.barrier_arrive(v_free.at[slot])
                ds = (p * (dp - along(delta, dp.shape))).astype(jnp.bfloat16)
                multiply_add(dq_acc, ds, k_smem.at[slot], my_spill)

            scores = accumulator(block_q, block_k)
            pl.run_scoped(one_block, scores, scores)
            plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(k_free.at[slot])

        def all_blocks(dq_acc: Any) -> Array:
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
        kv_head = lax.div(head, jnp.asarray(num_groups, head.dtype))

        @pl.loop(0, num)
        def _load(j: Array) -> None:
            slot = ring_slot(j, stages)
            keys = pl.ds(key_block(first, num_first, second, j) * block_k, block_k)
            for ref, smem, loaded, free in (
                (k_ref, k_smem, k_loaded, k_free),
                (v_ref, v_smem, v_loaded, v_free),
            ):
                pl.when(j >= stages)(partial(plgpu.barrier_wait, free.at[slot]))
                plgpu.copy_gmem_to_smem(ref.at[row, keys, kv_head], smem.at[slot], loaded.at[slot])

        drain((k_free, v_free), num, stages)


def _dkv(
    operands: tuple[Array, ...],
    ranges: Ranges,
    tuning: Tuning,
    interpret: Any,
    wanted: tuple[str, ...],
) -> tuple[Array, ...]:
    k_BTKH = operands[1]
    B, _, K, H = k_BTKH.shape
    block_q, block_k, stages = tuning.dkv_block_q, tuning.dkv_block_k, tuning.dkv_stages
    schedule = key_schedule(
        ranges, B, block_q=block_q, block_k=block_k, tile_k=NUM_CONSUMERS * block_k
    )
    mine = matrix_smem((NUM_CONSUMERS, block_k, H))
    return kernel_call(
        partial(_dkv_kernel, tuning=tuning, wanted=wanted),
        schedule,
        ranges,
        operands,
        name="flash_attention_" + "_".join(wanted),
        num_heads=K,
        out=tuple(jax.ShapeDtypeStruct(k_BTKH.shape, k_BTKH.dtype) for _ in wanted),
        scratch=dict(
            k_smem=mine,
            # dv alone needs no values. A gradient leaves from the keys' place or the values'.
            v_smem=mine if "dk" in wanted else None,
            q_smem=matrix_smem((stages, block_q, H)),
            do_smem=matrix_smem((stages, block_q, H)),
            stats_smem=plgpu.SMEM((stages, 2, block_q), jnp.float32),
            mine_loaded=plgpu.Barrier(
                num_arrivals=2 if "dk" in wanted else 1, num_barriers=NUM_CONSUMERS
            ),
            # A step's queries come with their statistics.
            q_loaded=plgpu.Barrier(num_arrivals=2, num_barriers=stages),
            do_loaded=plgpu.Barrier(num_barriers=stages),
            q_free=plgpu.Barrier(num_arrivals=NUM_CONSUMERS, num_barriers=stages),
            do_free=plgpu.Barrier(num_arrivals=NUM_CONSUMERS, num_barriers=stages),
            **spill_scratch((block_k, block_q), interpret),
        ),
        interpret=interpret,
    )


def _dkv_kernel(
    *refs: Any,
    num_index: int,
    tuning: Tuning,
    wanted: tuple[str, ...],
    k_smem: Any,
    v_smem: Any,
    q_smem: Any,
    do_smem: Any,
    stats_smem: Any,
    mine_loaded: Any,
    q_loaded: Any,
    do_loaded: Any,
    q_free: Any,
    do_free: Any,
    spill: Any = None,
) -> None:
    items_ref, whole_ref, ranges_ref, operands = split_index(refs, num_index)
    q_ref, k_ref, v_ref, do_ref, stats_ref, *grad_refs = operands
    block_q, block_k, stages = tuning.dkv_block_q, tuning.dkv_block_k, tuning.dkv_stages
    num_groups, H = q_ref.shape[2] // k_ref.shape[2], q_ref.shape[3]
    kv_head, item = lax.axis_index("head"), lax.axis_index("item")
    warpgroup = lax.axis_index("warpgroup")
    row, tile, first, num = (items_ref[item, i] for i in (0, 1, 2, 5))
    num_steps = num * num_groups

    @pl.when(warpgroup < NUM_CONSUMERS)
    def _consume() -> None:
        plgpu.set_max_registers(240, action="increase")
        k_block = NUM_CONSUMERS * tile + warpgroup
        base = k_block * block_k
        keys = pl.ds(base, block_k)
        my_k = k_smem.at[warpgroup]
        my_v: Any = None if v_smem is None else v_smem.at[warpgroup]
        my_spill = None if spill is None else spill.at[warpgroup]
        for ref, smem in ((k_ref, my_k), (v_ref, my_v)):
            if smem is not None:
                plgpu.copy_gmem_to_smem(ref.at[row, keys, kv_head], smem, mine_loaded.at[warpgroup])
        plgpu.barrier_wait(mine_loaded.at[warpgroup])

        def step(j: Array, grad_accs: dict[str, Any]) -> None:
            slot = ring_slot(j, stages)
            block = first + lax.rem(j, num)
            query_base = block * block_q
            whole = is_whole(whole_ref, row, query_base, base, block_k, (block, k_block))

            def one_block(s_acc: Any, dp_acc: Any = None) -> None:
                plgpu.barrier_wait(q_loaded.at[slot])
                plgpu.wgmma(s_acc, my_k, q_smem.at[slot].transpose((1, 0)))
                plgpu.barrier_wait(do_loaded.at[slot])
                if dp_acc is not None:
                    plgpu.wgmma(dp_acc, my_v, do_smem.at[slot].transpose((1, 0)))
                s = plgpu.wgmma_accumulator_load(s_acc, wait_n=0 if dp_acc is None else 1)

                def masked(s: Array) -> Array:
                    queries = pl.ds(query_base, block_q)
                    ranges = load_ranges(ranges_ref, row, queries, BY_COLUMN)
                    query = positions(s.shape, 1, query_base)
                    key = positions(s.shape, 0, base)
                    return jnp.where(sees(ranges, query, key, 1), s, -jnp.inf)

                s = lax.cond(whole, lambda s: s, masked, s)
                lse = load_vector(stats_smem.at[slot, 0], BY_COLUMN)
                p = jnp.exp2(s * (H**-0.5 * LOG2_E) - along(lse, s.shape, 1))
                if "dv" in grad_accs:
                    p16 = p.astype(jnp.bfloat16)
                    multiply_add(grad_accs["dv"], p16, do_smem.at[slot], my_spill)
                if dp_acc is not None:
                    delta = load_vector(stats_smem.at[slot, 1], BY_COLUMN)
                    # The product into dv may still run.
                    dp = plgpu.wgmma_accumulator_load(dp_acc, wait_n=len(grad_accs) - 1)
                    ds = (p * (dp - along(delta, dp.shape, 1))).astype(jnp.bfloat16)
                    multiply_add(grad_accs["dk"], ds, q_smem.at[slot], my_spill)

            scores = accumulator(block_k, block_q)
            pl.run_scoped(one_block, *[scores] * (2 if "dk" in grad_accs else 1))
            if len(grad_accs) > 1:
                plgpu.wgmma_wait(1)
                plgpu.barrier_arrive(do_free.at[slot])
                plgpu.wgmma_wait(0)
            else:
                plgpu.wgmma_wait(0)
                plgpu.barrier_arrive(do_free.at[slot])
            plgpu.barrier_arrive(q_free.at[slot])

        def all_blocks(*accs: Any) -> tuple[Array, ...]:
            pl.loop(0, num_steps)(partial(step, grad_accs=dict(zip(wanted, accs, strict=True))))
            return tuple(acc[...] for acc in accs)

        grads = pl.run_scoped(all_blocks, *[accumulator(block_k, H)] * len(wanted))
        for name, grad, smem in zip(wanted, grads, (my_k, my_v), strict=False):
            scaled = grad * H**-0.5 if name == "dk" else grad
            smem[...] = scaled.astype(jnp.bfloat16)
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
            slot = ring_slot(j, stages)
            head = kv_head * num_groups + lax.div(j, num)
            queries = pl.ds((first + lax.rem(j, num)) * block_q, block_q)
            pl.when(j >= stages)(partial(plgpu.barrier_wait, q_free.at[slot]))
            plgpu.copy_gmem_to_smem(
                stats_ref.at[row, head, :, queries], stats_smem.at[slot], q_loaded.at[slot]
            )
            plgpu.copy_gmem_to_smem(
                q_ref.at[row, queries, head], q_smem.at[slot], q_loaded.at[slot]
            )
            pl.when(j >= stages)(partial(plgpu.barrier_wait, do_free.at[slot]))
            plgpu.copy_gmem_to_smem(
                do_ref.at[row, queries, head], do_smem.at[slot], do_loaded.at[slot]
            )

        drain((q_free, do_free), num_steps, stages)
