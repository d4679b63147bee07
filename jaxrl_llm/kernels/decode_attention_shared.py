"""Prompts that several slots share, read once for all of them, on Hopper.

Shape letters: those of `decode_attention_mosaic`, and W items, I slots of an item.

An item is up to I = 64 // G slots that see the same entries of the same prompt row: their queries
fill the rows of one tensor-core tile, which a slot by itself would leave empty. A fixed number of
programs goes through the units of work, each one KV head and one of S parts of an item's prompt,
and reads the prompt for all of the item's slots. Each slot's share of the result, normalised, and
its log-sum-exps are merged by the kernel that reads the slot's own pages, which runs next.

Rows of a matrix product never mix and a part's blocks depend on the prompt's length alone, so a
slot's output has the same bits whichever slots it shares an item with.
"""

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxrl_llm.kernels.decode_attention_mosaic import PromptParts, decode_attention_mosaic
from jaxrl_llm.kernels.decode_attention_program import (
    PROGRAMS_PER_SM,
    SMS,
    TILE_ROWS,
    Blocks,
    DecodeTuning,
    Program,
    Scratch,
    Unit,
    scratch_types,
)

MAX_PROMPT_SPLITS = 4  # merging them takes time and shared memory of every slot's program


@partial(
    jax.tree_util.register_dataclass,
    data_fields=[
        "order_B",
        "num_items",
        "item_rows_W",
        "item_lengths_W",
        "item_counts_W",
        "item_slots_WI",
        "slot_items_B",
        "slot_places_B",
    ],
    meta_fields=["slots_per_prompt", "num_splits"],
)
@dataclasses.dataclass(frozen=True)
class SharedPromptPlan:
    """Which slots read a prompt together, and in which order slots start; see the function."""

    order_B: Int[Array, " B"]  # most own entries first
    num_items: Int[Array, " 1"]  # the items in use, which come first
    item_rows_W: Int[Array, " W"]
    item_lengths_W: Int[Array, " W"]
    item_counts_W: Int[Array, " W"]  # slots
    item_slots_WI: Int[Array, "W I"]  # past the count, any slot
    slot_items_B: Int[Array, " B"]
    slot_places_B: Int[Array, " B"]  # in the item
    slots_per_prompt: int
    num_splits: int | None


def shared_prompt_plan(
    prefix_rows_B: Int[Array, " B"],
    prefix_lengths_B: Int[Array, " B"],
    lengths_B: Int[Array, " B"],
    *,
    group_rows: int,
    slots_per_prompt: int,
    num_splits: int | None = None,
) -> SharedPromptPlan:
    """The plan of a decode step, made once and given to every layer's `prefix_decode_attention`.

    The first three are that function's. `group_rows` is N / K, the query heads of a KV head.
    `slots_per_prompt` is how many slots share a prompt as a rule: it only sizes the work, as does
    `num_splits`, the parts of a prompt that are read in parallel (None: chosen from the shapes;
    give it where batches of different sizes must agree to the bit). Slots share a prompt where
    both row and length are equal, in any order; those of length 0 read none. Raises ValueError for
    numbers out of range.
    """
    if not 1 <= group_rows < TILE_ROWS or slots_per_prompt < 1:
        raise ValueError(
            f"group_rows is {group_rows}, slots_per_prompt {slots_per_prompt}: "
            f"use 1 to {TILE_ROWS - 1}, and at least 1"
        )
    if num_splits is not None and not 1 <= num_splits <= MAX_PROMPT_SPLITS:
        raise ValueError(f"num_splits is {num_splits}: use 1 to {MAX_PROMPT_SPLITS}, or None")
    B, slots_of_item = prefix_rows_B.shape[0], TILE_ROWS // group_rows
    slots_B = jnp.arange(B, dtype=jnp.int32)

    def count(which_BB: Array) -> Array:
        return which_BB.sum(axis=1, dtype=jnp.int32)

    # Of slots b and c. Comparing every pair takes fewer and shorter kernels than sorting would.
    earlier_BB = slots_B < slots_B[:, None]
    reads_B = prefix_lengths_B > 0
    shares_BB = reads_B[:, None] & (prefix_rows_B == prefix_rows_B[:, None])
    shares_BB &= prefix_lengths_B == prefix_lengths_B[:, None]
    position_B = count(shares_BB & earlier_BB)
    place_B = position_B % slots_of_item
    leads_B = reads_B & (place_B == 0)
    # A slot's item is that of the slot of its prompt that leads it, numbered in order of leaders.
    number_B = count(leads_B & earlier_BB)
    leader_BB = shares_BB & (position_B == (position_B - place_B)[:, None])
    item_B = jnp.where(leader_BB, number_B, 0).sum(axis=1, dtype=jnp.int32)
    longer_BB = lengths_B > lengths_B[:, None]
    turn_B = count(longer_BB | ((lengths_B == lengths_B[:, None]) & earlier_BB))
    zeros_WI = jnp.zeros((B, slots_of_item), jnp.int32)  # one item a slot at most
    slots_WI = zeros_WI.at[jnp.where(reads_B, item_B, B), place_B].set(slots_B, mode="drop")
    return SharedPromptPlan(
        order_B=jnp.zeros((B,), jnp.int32).at[turn_B].set(slots_B, unique_indices=True),
        num_items=leads_B.sum(dtype=jnp.int32)[None],
        item_rows_W=prefix_rows_B[slots_WI[:, 0]].astype(jnp.int32),
        item_lengths_W=prefix_lengths_B[slots_WI[:, 0]].astype(jnp.int32),
        item_counts_W=count(reads_B & (item_B == slots_B[:, None])),
        item_slots_WI=slots_WI,
        slot_items_B=item_B,
        slot_places_B=place_B,
        slots_per_prompt=slots_per_prompt,
        num_splits=num_splits,
    )


def choose_prompt_splits(
    num_slots: int, num_kv_heads: int, num_entries: int, plan: SharedPromptPlan, block: int
) -> int:
    """Parts into which each prompt is split, a power of two, from shapes and the plan's numbers.

    So many that as many units as programs are to be expected, but no part shorter than a block
    when the prompt fills its `num_entries`.
    """
    if plan.num_splits is not None:
        return plan.num_splits
    shared = min(plan.slots_per_prompt, plan.item_slots_WI.shape[1])
    units = num_kv_heads * math.ceil(num_slots / shared)
    wanted = min(PROGRAMS_PER_SM * SMS / units, num_entries / block)
    return 2 ** max(0, min(int(math.log2(MAX_PROMPT_SPLITS)), math.floor(math.log2(wanted))))


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
    plan: SharedPromptPlan,
    scales_K: tuple[Float[Array, " K"], Float[Array, " K"]] | None,
    num_splits: int,
    tuning: DecodeTuning,
    interpret: Any,
) -> Float[Array, "B N H"]:
    """`decode_attention_mosaic` by a plan: the prompts first, then the slots' own entries."""
    B, N, H = q_BNH.shape
    _, K, P, _ = k_prefix_CKPH.shape
    out_BKSGH, sums_WKSM = _prompt_parts(
        q_BNH.reshape(B, K, N // K, H),
        k_prefix_CKPH,
        v_prefix_CKPH,
        plan,
        k_scale_K=None if scales_K is None else scales_K[0],
        num_splits=choose_prompt_splits(B, K, P, plan, tuning.block),
        tuning=tuning,
        interpret=interpret,
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
        num_splits=num_splits,
        tuning=tuning,
        order_B=plan.order_B,
        prompts=PromptParts(out_BKSGH, sums_WKSM, plan.slot_items_B, plan.slot_places_B),
        interpret=interpret,
    )


def _prompt_parts(
    q_BKGH: Array,
    k_prefix_CKPH: Array,
    v_prefix_CKPH: Array,
    plan: SharedPromptPlan,
    *,
    k_scale_K: Array | None,
    num_splits: int,
    tuning: DecodeTuning,
    interpret: Any,
) -> tuple[Array, Array]:
    """The attention over each part of a slot's prompt [B, K, S, G, H], in the dtype of q.

    It is without the values' scale. And, for each item's rows, the base-2 log-sum-exps, float32
    [W, K, S, M]. Slots that are in no item, and items that are not in use, are left unwritten.
    """
    B, K, G, H = q_BKGH.shape
    W = plan.item_rows_W.shape[0]
    num_programs = min(PROGRAMS_PER_SM * SMS, W * K * num_splits)
    return plgpu.kernel(
        _make_body(num_programs, num_splits, tuning),
        out_type=[
            jax.ShapeDtypeStruct((B, K, num_splits, G, H), q_BKGH.dtype),
            jax.ShapeDtypeStruct((W, K, num_splits, TILE_ROWS), jnp.float32),
        ],
        scratch_types={
            **scratch_types(
                H,
                k_prefix_CKPH.dtype,
                tuning,
                with_sums=True,
                rows_before_out=0,
                interpreted=interpret is not None,
            ),
            # One arrival a slot of the item: each brings its own queries.
            "q_barrier": plgpu.Barrier(num_arrivals=plan.item_slots_WI.shape[1]),
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
        q_BKGH,
        k_prefix_CKPH,
        v_prefix_CKPH,
        plan.num_items,
        plan.item_rows_W,
        plan.item_lengths_W,
        plan.item_counts_W,
        plan.item_slots_WI.reshape(-1),
        *(() if k_scale_K is None else (k_scale_K,)),
    )


def _make_body(num_programs: int, num_splits: int, tuning: DecodeTuning) -> Callable[..., None]:
    """The kernel's body: units `program`, `program` + `num_programs`, and so on."""

    def body(
        q_BKGH: Any,
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
        *k_scale_K, out_BKSGH, sums_WKSM = scale_and_outputs
        K, G, H = q_BKGH.shape[1:]
        slots_of_item = TILE_ROWS // G
        first = lax.axis_index("program").astype(jnp.int32)

        def unit(turn: Any, _: None) -> None:
            index = first + turn * num_programs
            item = lax.div(index, jnp.int32(K * num_splits))
            head = lax.rem(lax.div(index, jnp.int32(num_splits)), jnp.int32(K))
            part = lax.rem(index, jnp.int32(num_splits))
            row, count = item_rows_W[item], item_counts_W[item]
            k_scale = k_scale_K[0][head] if k_scale_K else 1.0
            none = jnp.int32(0)
            blocks = Blocks.of(item_lengths_W[item], none, part, num_splits, None, tuning.block)
            program = Program(
                memory=memory,
                unit=Unit(blocks, slot=none, head=head, row=row),
                following=Unit.nothing(),
                first_step=none,
                block=tuning.block,
                stages=tuning.stages,
                window=None,
                to_base_2=k_scale * (H**-0.5 * math.log2(math.e)),
                keys=(k_prefix_CKPH, None),
                values=(v_prefix_CKPH, None),
            )
            rows_H = memory.rows_H

            def read_queries(i: Any, _: None) -> None:
                slot, rows = item_slots[item * slots_of_item + i], rows_H.at[pl.ds(i * G, G)]
                plgpu.copy_gmem_to_smem(q_BKGH.at[slot, head], rows, memory.q_barrier)

            def write_result(i: Any, _: None) -> None:
                slot, rows = item_slots[item * slots_of_item + i], rows_H.at[pl.ds(i * G, G)]
                plgpu.copy_smem_to_gmem(rows, out_BKSGH.at[slot, head, part])

            first_blocks = [program.find(i) for i in range(tuning.stages)]
            program.load(first_blocks[0], 0, keys=True)
            lax.fori_loop(0, slots_of_item, read_queries, None)
            program.load(first_blocks[0], 0, keys=False)
            for i in range(1, tuning.stages):
                program.load(first_blocks[i], i, keys=True)
                program.load(first_blocks[i], i, keys=False)
            plgpu.barrier_wait(memory.q_barrier)
            acc, high, total = program.attend(program.queries(0))

            scale = 1.0 / jnp.where(total == 0.0, 1.0, total)  # a part without a block
            program.store(acc * lax.broadcast_in_dim(scale, acc.shape, [0]), high, total)
            plgpu.copy_smem_to_gmem(memory.sums_M, sums_WKSM.at[item, head, part])
            lax.fori_loop(0, count, write_result, None)
            plgpu.wait_smem_to_gmem(0)

        units = num_items[0] * (K * num_splits)
        turns = lax.div(units - first + (num_programs - 1), jnp.int32(num_programs))
        lax.fori_loop(0, jnp.maximum(turns, 0), unit, None)

    return body
