"""Ragged decode attention on Hopper, in Pallas' Mosaic GPU dialect.

Shape letters: B slots, O pages of slots' own entries, T pages a slot at most, R entries of a page,
N query heads, K KV heads, G = N / K, C prompt rows, P prompt entries, H head dim, S splits of a
slot's tokens, M = 64 rows of a tensor-core tile, J entries of a block.

A unit of work is one KV head of one part of a slot's tokens: a slot that fills its pages has S
parts, one with fewer tokens fewer, so that the longest is not what all wait for. A fixed number of
programs (decode_attention_program.py), each of a single warpgroup, goes through the units. For each
it walks the blocks of the slot's prompt row and then of its own pages that hold visible entries,
and no others. The G queries of the head are the first rows of a tensor-core tile; the other rows
are whatever shared memory held. Rows of a matrix product never mix, so they cost nothing that is
waited for and are never stored.

Two programs share an SM: while one computes, the other's loads are in flight. Each loads the first
blocks of its next unit while it ends the one before, so loads never wait for results. Units go to
programs in order, forwards and backwards in turn: where a plan lists those that hold something, the
longest first, the programs' sums differ by less than the longest unit.

Where slots share prompts, those may have been read before, once for all of their slots: see
`decode_attention_shared`. A program then reads its slot's own pages, and takes the prompt's part of
the result, which was loaded meanwhile, in at the end.

A unit's result depends on its own slot's tokens and on S alone, so a slot's output has the
same bits whatever the batch size, its index, or the other slots.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxrl_llm.kernels.decode_attention_plan import MAX_SPLITS, Units, part_blocks
from jaxrl_llm.kernels.decode_attention_program import (
    PROGRAMS_PER_SM,
    SMS,
    TILE_ROWS,
    Blocks,
    DecodeTuning,
    Program,
    Scratch,
    Unit,
    default_tuning,
    num_blocks,
    scratch_types,
)

HEAD_DIMS = (64, 128)
CACHE_DTYPES = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float8_e4m3fn))
_MAX_SMEM = 226 * 1024  # of a program, less its barriers


@dataclasses.dataclass(frozen=True)
class PromptParts:
    """The attention over every slot's prompt, already computed in S parts.

    Row `places_B[b]` * G + g of item `items_B[b]` has the log-sum-exps of slot b's query g.
    """

    out_BKSGH: Float[Array, "B K S G H"]  # normalised, without the values' scale
    sums_WKSM: Float[Array, "W K S M"]  # log-sum-exps in base 2
    items_B: Int[Array, " B"]
    places_B: Int[Array, " B"]

    @property
    def num_splits(self) -> int:
        return self.out_BKSGH.shape[2]


def decode_attention_mosaic(
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
    window: int | None = None,
    scales_K: tuple[Float[Array, " K"], Float[Array, " K"]] | None = None,
    num_splits: int = 1,
    tuning: DecodeTuning | None = None,
    units: Units | None = None,
    prompts: PromptParts | None = None,
    interpret: Any = None,
) -> Float[Array, "B N H"]:
    """The kernel, and with `num_splits` > 1 the merge of its parts in one fused XLA operation.

    See `decode_attention.prefix_decode_attention` for the arguments, which it has checked (also
    with `check_supported`); `scales_K` are those of keys and of values, float32. Entries past a
    length, NaN included, never change the result. `interpret` runs the kernel on the CPU
    (InterpretGPUParams). `units` are those to go through, whose `num_splits` is taken; without
    them, all parts of all slots. With `prompts` (and without a window), the kernel reads the slots'
    own pages only, and merges the prompts' part into what it finds.
    """
    B, N, H = q_BNH.shape
    K = k_own_OKRH.shape[1]
    G = N // K
    tuning = tuning or default_tuning(H, k_own_OKRH.dtype)
    num_splits = units.num_splits if units is not None else num_splits
    entries = pages_BT.shape[1] * k_own_OKRH.shape[2]
    entries += k_prefix_CKPH.shape[2] if prompts is None else 0
    if window is not None:
        entries = min(entries, window + 2 * tuning.block)  # a block more at either end
    blocks_of_part = part_blocks(entries, num_splits, tuning.block)
    numbers = [prefix_rows_B, prefix_lengths_B, lengths_B]
    if prompts is not None:
        numbers += [prompts.items_B, prompts.places_B]
    if units is not None:
        numbers += [units.parts_U, units.num_units]
    out_types = [jax.ShapeDtypeStruct((B, K, num_splits, G, H), q_BNH.dtype)]
    if num_splits > 1:
        out_types.append(jax.ShapeDtypeStruct((B, K, num_splits, TILE_ROWS), jnp.float32))
    num_programs = min(PROGRAMS_PER_SM * SMS, B * K * num_splits)
    outputs = plgpu.kernel(
        _make_body(
            window,
            num_splits,
            tuning,
            num_programs=num_programs,
            num_units=B * K * num_splits,
            blocks_of_part=blocks_of_part,
            pages_a_slot=pages_BT.shape[1],
            listed=units is not None,
            with_prompts=prompts is not None,
        ),
        out_type=out_types,
        scratch_types=scratch_types(
            H,
            k_own_OKRH.dtype,
            tuning,
            with_sums=num_splits > 1,
            rows_before_out=_rows_before_out(G, prompts.num_splits if prompts else 0),
            num_prompt_parts=prompts.num_splits if prompts else 0,
            interpreted=interpret is not None,
        ),
        grid=(num_programs,),
        grid_names=("program",),
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            reduction_scratch_bytes=0,  # rows are reduced within a warp
        ),
        interpret=interpret,
        kernel_name="prefix_decode_attention",
    )(
        q_BNH.reshape(B, K, G, H),
        k_prefix_CKPH,
        v_prefix_CKPH,
        k_own_OKRH,
        v_own_OKRH,
        pages_BT.astype(jnp.int32).reshape(-1),
        *((prompts.out_BKSGH, prompts.sums_WKSM) if prompts is not None else ()),
        *(x.astype(jnp.int32) for x in numbers),
        *(scales_K or ()),
    )
    if num_splits == 1:
        return outputs[0].reshape(B, N, H)
    out_BKSGH, sums_BKSM = outputs
    parts_B = None
    if units is not None:
        blocks_B = num_blocks(lengths_B, tuning.block)
        if prompts is None:
            blocks_B += num_blocks(prefix_lengths_B, tuning.block)
        parts_B = jnp.maximum(num_blocks(blocks_B, blocks_of_part), 1)
    out_BKGH = _merge(out_BKSGH, sums_BKSM[..., :G], parts_B)
    return out_BKGH.astype(q_BNH.dtype).reshape(B, N, H)


def check_supported(
    q_BNH: Array,
    k_prefix_CKPH: Array,
    k_own_OKRH: Array,
    tuning: DecodeTuning,
    num_splits: int,
    prompt_splits: int = 0,
) -> None:
    """ValueError, with the remedy, for what the kernel does not take."""
    H = q_BNH.shape[2]
    G = q_BNH.shape[1] // k_own_OKRH.shape[1]
    P, R = k_prefix_CKPH.shape[2], k_own_OKRH.shape[2]
    if H not in HEAD_DIMS:
        raise ValueError(f"head_dim is {H}: the kernel takes {HEAD_DIMS}; use 'xla' for others")
    if G >= TILE_ROWS:
        raise ValueError(f"{G} query heads a KV head: the kernel takes 63; use 'xla' for more")
    if not 1 <= num_splits <= MAX_SPLITS:
        raise ValueError(f"num_splits is {num_splits}: use 1 to {MAX_SPLITS}")
    if tuning.smem(H, k_own_OKRH.dtype, _rows_before_out(G, prompt_splits)) > _MAX_SMEM:
        raise ValueError(f"{tuning} needs more than {_MAX_SMEM} bytes: use fewer stages")
    if q_BNH.dtype != jnp.bfloat16 or k_own_OKRH.dtype not in CACHE_DTYPES:
        raise ValueError(
            f"q is {q_BNH.dtype}, the cache {k_own_OKRH.dtype}: the kernel takes bfloat16, and "
            "bfloat16 or float8_e4m3fn for the cache; use 'xla' for others"
        )
    if not P or not R or P % tuning.block or R % tuning.block:
        raise ValueError(
            f"the cache has prompt rows of {P} and pages of {R} entries: "
            f"round both up to multiples of {tuning.block}, at least one"
        )


def _rows_before_out(G: int, num_prompt_parts: int) -> int:
    """Queries of a unit and of the next one, then the parts of the prompt's result."""
    return (2 + num_prompt_parts) * G


def _make_body(
    window: int | None,
    num_splits: int,
    tuning: DecodeTuning,
    *,
    num_programs: int,
    num_units: int,
    blocks_of_part: int,
    pages_a_slot: int,
    listed: bool,
    with_prompts: bool,
) -> Callable[..., None]:
    """The kernel's body: `num_units` units at most, fewer where they are `listed`."""

    def body(
        q_BKGH: Any,
        k_prefix_CKPH: Any,
        v_prefix_CKPH: Any,
        k_own_OKRH: Any,
        v_own_OKRH: Any,
        pages: Any,  # B * T
        *others: Any,
        **scratch: Any,
    ) -> None:
        memory = Scratch(**scratch)
        given = iter(others)
        prompts = (next(given), next(given)) if with_prompts else None
        rows_B, prefix_lengths_B, lengths_B = next(given), next(given), next(given)
        items_and_places: Any = (next(given), next(given)) if with_prompts else None
        parts_U, num_listed = (next(given), next(given)) if listed else (None, None)
        *scales_K, out_BKSGH, sums_BKSM = (*given, None) if num_splits == 1 else given
        K, G, H = q_BKGH.shape[1:]
        me = lax.axis_index("program").astype(jnp.int32)
        count = jnp.int32(num_units) if num_listed is None else num_listed[0] * K

        def index_of(round: Any) -> Any:
            """The number of my unit in a round, forwards and backwards in turn."""
            position = jnp.where(lax.rem(round, jnp.int32(2)) == 0, me, num_programs - 1 - me)
            return round * num_programs + position

        last_round = lax.div(count, jnp.int32(num_programs))  # perhaps not whole
        rounds = last_round + (index_of(last_round) < count).astype(jnp.int32)

        def unit_of(round: Any) -> Unit:
            """My unit of a round; without a block where the rounds are over."""
            index = jnp.minimum(index_of(round), num_units - 1)
            head, which = lax.rem(index, jnp.int32(K)), lax.div(index, jnp.int32(K))
            slot_and_part = which if parts_U is None else parts_U[which]
            slot = lax.div(slot_and_part, jnp.int32(num_splits))
            part = lax.rem(slot_and_part, jnp.int32(num_splits))
            row, prefix_length, length = rows_B[slot], prefix_lengths_B[slot], lengths_B[slot]
            read_here = jnp.int32(0) if with_prompts else prefix_length
            blocks = Blocks.of(read_here, length, part, blocks_of_part, window, tuning.block)
            steps = jnp.where(round < rounds, blocks.steps, 0)
            return Unit(dataclasses.replace(blocks, steps=steps), slot, head, row, part)

        def program_at(unit: Unit, following: Unit, first_step: Any) -> Program:
            k_scale = scales_K[0][unit.head] if scales_K else 1.0
            return Program(
                memory=memory,
                unit=unit,
                following=following,
                first_step=first_step,
                block=tuning.block,
                stages=tuning.stages,
                window=window,
                to_base_2=k_scale * (H**-0.5 * math.log2(math.e)),
                keys=(None if with_prompts else k_prefix_CKPH, k_own_OKRH),
                values=(None if with_prompts else v_prefix_CKPH, v_own_OKRH),
                page_of=lambda slot, number: pages[
                    slot * pages_a_slot + jnp.minimum(number, pages_a_slot - 1)
                ],
            )

        def load_queries(unit: Unit, round: Any) -> None:
            rows = memory.rows_H.at[pl.ds(lax.rem(round, jnp.int32(2)) * G, G)]
            plgpu.copy_gmem_to_smem(q_BKGH.at[unit.slot, unit.head], rows, memory.q_barrier)

        def run_unit(round: Any, carry: tuple[Unit, Unit, Any]) -> tuple[Unit, Unit, Any]:
            unit, following, first_step = carry
            after = unit_of(round + 2)  # read from memory a whole unit before it is used
            program = program_at(unit, following, first_step)
            program.fill_ring()
            slot, head, part = unit.slot, unit.head, unit.part
            plgpu.barrier_wait(memory.q_barrier)
            q = program.queries(lax.rem(round, jnp.int32(2)) * G)
            plgpu.commit_smem()  # all of the unit before is read: its places may be written

            @pl.when(round + 1 < rounds)
            def _() -> None:
                load_queries(following, round + 1)

            if prompts is None:
                acc, high, total = program.attend(q)
            else:
                num_parts = prompts[0].shape[2]
                item, place_in_item = (x[slot] for x in items_and_places)
                joins = (part == 0) & (prefix_lengths_B[slot] > 0)

                @pl.when(joins)
                def _() -> None:
                    for s in range(num_parts):
                        out_GH = memory.rows_H.at[pl.ds((2 + s) * G, G)]
                        sums_M = memory.prompt_sums.at[s, pl.ds(0, TILE_ROWS)]
                        for part_s, place in (
                            (prompts[0].at[slot, head, s], out_GH),
                            (prompts[1].at[item, head, s], sums_M),
                        ):
                            plgpu.copy_gmem_to_smem(part_s, place, memory.prompt_barrier)

                acc, high, total = lax.cond(
                    joins,
                    lambda *state: program.join_prompt(state, num_parts, G, 2 * G, place_in_item),
                    lambda *state: state,
                    *program.attend(q),
                )

            v_scale = scales_K[1][head] if scales_K else 1.0
            scale = v_scale / jnp.where(total == 0.0, 1.0, total)  # no step at all leaves zeros
            program.store(acc * lax.broadcast_in_dim(scale, acc.shape, [0]), high, total)
            out_GH = memory.rows_H.at[pl.ds(memory.rows_H.shape[0] - TILE_ROWS, G)]
            plgpu.copy_smem_to_gmem(out_GH, out_BKSGH.at[slot, head, part])
            if sums_BKSM is not None:
                plgpu.copy_smem_to_gmem(memory.sums_M, sums_BKSM.at[slot, head, part])
            return following, after, first_step + unit.blocks.steps

        first, second = unit_of(jnp.int32(0)), unit_of(jnp.int32(1))
        program_at(Unit.nothing(), first, jnp.int32(0)).fill_ring()
        load_queries(first, jnp.int32(0))
        lax.fori_loop(0, rounds, run_unit, (first, second, jnp.int32(0)))
        plgpu.wait_smem_to_gmem(0)

    return body


def _merge(
    out_BKSGH: Float[Array, "B K S G H"],
    sums_BKSG: Float[Array, "B K S G"],
    parts_B: Int[Array, " B"] | None,
) -> Float[Array, "B K G H"]:
    """The attention over all parts from each part's result and base-2 log-sum-exp, float32.

    A slot's parts from `parts_B` on were never written. Written part by part, without reductions,
    so that XLA makes a single loop of it.
    """
    parts = range(out_BKSGH.shape[2])

    def written(x: Array, s: int, otherwise: float) -> Array:
        if parts_B is None or s == 0:
            return x
        return jnp.where((s < parts_B).reshape(-1, *(1,) * (x.ndim - 1)), x, otherwise)

    sums = [written(sums_BKSG[:, :, s], s, -jnp.inf) for s in parts]
    highest = sums[0]
    for s in parts:
        highest = jnp.maximum(highest, sums[s])
    highest = jnp.where(highest == -jnp.inf, 0.0, highest)  # no token at all
    weights = [jnp.exp2(sums[s] - highest)[..., None] for s in parts]
    total = sum(weights[1:], weights[0])
    results = [written(out_BKSGH[:, :, s], s, 0.0).astype(jnp.float32) for s in parts]
    out = sum((weights[s] * results[s] for s in parts[1:]), weights[0] * results[0])
    return out / jnp.where(total == 0.0, 1.0, total)
