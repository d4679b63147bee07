"""Prompts that several slots share, read once for all of them, on Hopper.

Shape letters: those of `decode_attention_mosaic`, and W items, I slots of an item.

An item is up to I = 64 // L slots that see the same entries of the same prompt row: their queries
fill the rows of one tensor-core tile, which a slot by itself would leave empty. A fixed number of
programs goes through the units of work, each one KV head and one of S parts of an item's prompt,
and reads the prompt for all of the item's slots. Each slot's share of the result, normalised, and
its log-sum-exps are merged with those of its own pages.

Rows of a matrix product never mix and a part's blocks depend on the prompt's length alone, so a
slot's output has the same bits whichever slots it shares an item with.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxrl_llm.kernels.decode_attention_mosaic import (
    PromptParts,
    decode_attention_mosaic,
    padded_queries,
)
from jaxrl_llm.kernels.decode_attention_plan import DecodePlan, SharedPrompts
from jaxrl_llm.kernels.decode_attention_program import (
    PROGRAMS_PER_SM,
    SMS,
    TILE_ROWS,
    Blocks,
    DecodeTuning,
    Program,
    Scratch,
    Unit,
    num_blocks,
    scratch_types,
)


def shared_decode_attention(
    q_BNH: Float[Array, "B N H"],
    k_prefix_CKPH: Float[Array, "C K P H"],
    v_prefix_CKPH: Float[Array, "C K P H"],
    prefix_rows_B: Int[Array, " B"],
    prefix_lengths_B: Int[Array, " B"],
    k_own_OKRH: Float[Array, "O K R H"],
    v_own_OKRH: Float[Array, "O K R H"],
    pages_BT: Int[Array, "B T"],
    lengths_B: Int[Array, " B"],
    *,
    plan: DecodePlan,
    scales_K: tuple[Float[Array, " K"], Float[Array, " K"]] | None,
    tuning: DecodeTuning,
    interpret: Any,
) -> Float[Array, "B N H"]:
    """`decode_attention_mosaic` by a plan: the prompts first, then the slots' own entries."""
    K = k_prefix_CKPH.shape[1]
    prompts = plan.prompts
    assert prompts is not None
    k_scale_K = None if scales_K is None else scales_K[0]
    options: dict[str, Any] = dict(tuning=tuning, interpret=interpret)
    parts = _prompt_parts(
        padded_queries(q_BNH, K), k_prefix_CKPH, v_prefix_CKPH, prompts, k_scale_K, **options
    )
    return decode_attention_mosaic(
        q_BNH,
        k_prefix_CKPH,
        v_prefix_CKPH,
        prefix_rows_B,
        prefix_lengths_B,
        k_own_OKRH,
        v_own_OKRH,
        pages_BT,
        lengths_B,
        scales_K=scales_K,
        units=plan.units,
        prompts=parts,
        **options,
    )


def _prompt_parts(
    q_BKLH: Array,
    k_prefix_CKPH: Array,
    v_prefix_CKPH: Array,
    prompts: SharedPrompts,
    k_scale_K: Array | None,
    *,
    tuning: DecodeTuning,
    interpret: Any,
) -> PromptParts:
    """The attention over each part of a slot's prompt. Slots that read none are left unwritten."""
    B, K, L, H = q_BKLH.shape
    W, num_splits = prompts.item_rows_W.shape[0], prompts.num_splits
    num_programs = min(PROGRAMS_PER_SM * SMS, W * K * num_splits)
    out_BKSLH, sums_BKSL = plgpu.kernel(
        _make_body(num_programs, num_splits, tuning),
        out_type=[
            jax.ShapeDtypeStruct((B, K, num_splits, L, H), q_BKLH.dtype),
            jax.ShapeDtypeStruct((B, K, num_splits, L), jnp.float32),
        ],
        scratch_types={
            **scratch_types(
                H,
                k_prefix_CKPH.dtype,
                tuning,
                tiled=False,
                interpreted=interpret is not None,
            ),
            # One arrival a slot of the item: each brings its own queries.
            "q_barrier": plgpu.Barrier(num_arrivals=prompts.item_slots_WI.shape[1]),
        },
        grid=(num_programs,),
        grid_names=("program",),
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            reduction_scratch_bytes=0,  # rows are reduced within a warp
        ),
        interpret=interpret,
        kernel_name="shared_prompt_attention",
    )(
        q_BKLH,
        k_prefix_CKPH,
        v_prefix_CKPH,
        prompts.num_items,
        prompts.item_rows_W,
        prompts.item_lengths_W,
        prompts.item_counts_W,
        prompts.item_slots_WI.reshape(-1),
        *(() if k_scale_K is None else (k_scale_K,)),
    )
    return PromptParts(out_BKSLH, sums_BKSL)


def _make_body(num_programs: int, num_splits: int, tuning: DecodeTuning) -> Callable[..., None]:
    """The kernel's body: units `program`, `program` + `num_programs`, and so on."""

    def body(
        q_BKLH: Any,
        k_prefix_CKPH: Any,
        v_prefix_CKPH: Any,
        num_items: Any,
        item_rows_W: Any,
        item_lengths_W: Any,
        item_counts_W: Any,
        item_slots: Any,  # W * I
        *scale_and_outputs: Any,
        **scratch: Any,
    ) -> None:
        memory = Scratch(**scratch)
        *k_scale_K, out_BKSLH, sums_BKSL = scale_and_outputs
        K, L, H = q_BKLH.shape[1:]
        slots_of_item = TILE_ROWS // L
        first = lax.axis_index("program").astype(jnp.int32)

        def unit(turn: Any, _: None) -> None:
            index = first + turn * num_programs
            item = lax.div(index, jnp.int32(K * num_splits))
            head = lax.rem(lax.div(index, jnp.int32(num_splits)), jnp.int32(K))
            part = lax.rem(index, jnp.int32(num_splits))
            row, count = item_rows_W[item], item_counts_W[item]
            k_scale = k_scale_K[0][head] if k_scale_K else 1.0
            none = jnp.int32(0)
            length = item_lengths_W[item]
            in_part = num_blocks(num_blocks(length, tuning.block), num_splits)  # equal parts
            blocks = Blocks.of(length, none, part, in_part, None, tuning.block)
            program = Program(
                memory=memory,
                unit=Unit(blocks, slot=none, head=head, row=row, part=part),
                following=Unit.nothing(),
                first_step=none,
                block=tuning.block,
                stages=tuning.stages,
                window=None,
                to_base_2=k_scale * (H**-0.5 * math.log2(math.e)),
                keys=(k_prefix_CKPH, None),
                values=(v_prefix_CKPH, None),
            )

            def read_queries(i: Any, _: None) -> None:
                slot, rows = item_slots[item * slots_of_item + i], memory.q_MH.at[pl.ds(i * L, L)]
                plgpu.copy_gmem_to_smem(q_BKLH.at[slot, head], rows, memory.q_barrier)

            def write_result(i: Any, _: None) -> None:
                slot, rows = item_slots[item * slots_of_item + i], pl.ds(i * L, L)
                plgpu.copy_smem_to_gmem(memory.out_MH.at[rows], out_BKSLH.at[slot, head, part])
                plgpu.copy_smem_to_gmem(memory.sums_M.at[rows], sums_BKSL.at[slot, head, part])

            first_blocks = [program.find(i) for i in range(tuning.stages)]
            program.load(first_blocks[0], 0, keys=True)
            lax.fori_loop(0, slots_of_item, read_queries, None)
            program.load(first_blocks[0], 0, keys=False)
            for i in range(1, tuning.stages):
                program.load(first_blocks[i], i, keys=True)
                program.load(first_blocks[i], i, keys=False)
            plgpu.barrier_wait(memory.q_barrier)
            program.store(*program.attend(program.queries(tiled=False)))
            lax.fori_loop(0, count, write_result, None)

        units = num_items[0] * (K * num_splits)
        turns = lax.div(units - first + (num_programs - 1), jnp.int32(num_programs))
        lax.fori_loop(0, jnp.maximum(turns, 0), unit, None)
        plgpu.wait_smem_to_gmem(0)

    return body
