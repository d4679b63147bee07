"""Ragged decode attention on Hopper, in Pallas' Mosaic GPU dialect.

Shape letters: B slots, O pages of slots' own entries, T pages a slot at most, R entries of a page,
N query heads, K KV heads, G = N / K, L = G rounded up to 8, C prompt rows, P prompt entries, H head
dim, S splits of a slot's tokens, M = 64 rows of a tensor-core tile, J entries of a block.

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
`decode_attention_shared`. A program then reads its slot's own pages only. One fused XLA operation
merges all the parts of a slot.

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
from jaxtyping import Array, Bool, Float, Int

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
    rows_a_slot,
    scratch_types,
)

HEAD_DIMS = (64, 128)
CACHE_DTYPES = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float8_e4m3fn))
_MAX_SMEM = 226 * 1024  # of a program, less its barriers


@dataclasses.dataclass(frozen=True)
class PromptParts:
    """The attention over every slot's prompt, already computed in S parts."""

    out_BKSLH: Float[Array, "B K S L H"]  # normalised, without the values' scale
    sums_BKSL: Float[Array, "B K S L"]  # log-sum-exps in base 2


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
    """The kernel, and the merge of its parts.

    See `decode_attention.prefix_decode_attention` for the arguments, which it has checked (also
    with `check_supported`); `scales_K` are those of keys and of values, float32. Entries past a
    length, NaN included, never change the result. `interpret` runs the kernel on the CPU
    (InterpretGPUParams). `units` are those to go through, whose `num_splits` is taken; without
    them, all parts of all slots. With `prompts` (and without a window), the kernel reads the slots'
    own pages only, and merges the prompts' part into what it finds.
    """
    B, N, H = q_BNH.shape
    K = k_own_OKRH.shape[1]
    q_BKLH = padded_queries(q_BNH, K)
    L = q_BKLH.shape[2]
    tuning = tuning or default_tuning(H, k_own_OKRH.dtype)
    num_splits = units.num_splits if units is not None else num_splits
    entries = pages_BT.shape[1] * k_own_OKRH.shape[2]
    entries += k_prefix_CKPH.shape[2] if prompts is None else 0
    if window is not None:
        entries = min(entries, window + 2 * tuning.block)  # a block more at either end
    blocks_of_part = part_blocks(entries, num_splits, tuning.block)
    numbers = [prefix_rows_B, prefix_lengths_B, lengths_B]
    if units is not None:
        numbers += [units.parts_U, units.num_units]
    num_programs = min(PROGRAMS_PER_SM * SMS, B * K * num_splits)
    out_BKSLH, sums_BKSL = plgpu.kernel(
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
        out_type=[
            jax.ShapeDtypeStruct((B, K, num_splits, L, H), q_BNH.dtype),
            jax.ShapeDtypeStruct((B, K, num_splits, L), jnp.float32),
        ],
        scratch_types=scratch_types(
            H,
            k_own_OKRH.dtype,
            tuning,
            tiled=True,
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
        q_BKLH,
        k_prefix_CKPH,
        v_prefix_CKPH,
        k_own_OKRH,
        v_own_OKRH,
        pages_BT.astype(jnp.int32).reshape(-1),
        *(x.astype(jnp.int32) for x in numbers),
        *(() if scales_K is None else (scales_K[0],)),
    )
    parts_B = None  # all; of listed units those that hold something were written, and the first
    if units is not None:
        blocks_B = num_blocks(lengths_B, tuning.block)
        if prompts is None:
            blocks_B += num_blocks(prefix_lengths_B, tuning.block)
        parts_B = num_blocks(blocks_B, blocks_of_part)
    parts: list[Part] = [
        (out_BKSLH[:, :, s], sums_BKSL[:, :, s], s < parts_B if s and parts_B is not None else None)
        for s in range(num_splits)
    ]
    if prompts is not None:
        outs, sums = (jnp.moveaxis(x, 2, 0) for x in (prompts.out_BKSLH, prompts.sums_BKSL))
        parts += [(out, sum_, prefix_lengths_B > 0) for out, sum_ in zip(outs, sums, strict=True)]
    out_BKLH = _merge(parts)
    if scales_K is not None:
        out_BKLH *= scales_K[1][:, None, None]
    return out_BKLH[:, :, : N // K].astype(q_BNH.dtype).reshape(B, N, H)


def padded_queries(q_BNH: Float[Array, "B N H"], K: int) -> Float[Array, "B K L H"]:
    """The queries of each KV head, rounded up to whole groups of 8 rows."""
    B, N, H = q_BNH.shape
    q_BKGH = q_BNH.reshape(B, K, N // K, H)
    return jnp.pad(q_BKGH, ((0, 0), (0, 0), (0, rows_a_slot(N // K) - N // K), (0, 0)))


def check_supported(
    q_BNH: Array,
    k_prefix_CKPH: Array,
    k_own_OKRH: Array,
    tuning: DecodeTuning,
    num_splits: int,
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
    if tuning.smem(H, k_own_OKRH.dtype) > _MAX_SMEM:
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
        q_BKLH: Any,
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
        rows_B, prefix_lengths_B, lengths_B = next(given), next(given), next(given)
        parts_U, num_listed = (next(given), next(given)) if listed else (None, None)
        *k_scale_K, out_BKSLH, sums_BKSL = given
        K, L, H = q_BKLH.shape[1:]
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
            k_scale = k_scale_K[0][unit.head] if k_scale_K else 1.0
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

        def load_queries(unit: Unit) -> None:
            rows = memory.q_MH.at[pl.ds(0, L)]
            plgpu.copy_gmem_to_smem(q_BKLH.at[unit.slot, unit.head], rows, memory.q_barrier)

        def run_unit(round: Any, carry: tuple[Unit, Unit, Any]) -> tuple[Unit, Unit, Any]:
            unit, following, first_step = carry
            after = unit_of(round + 2)  # read from memory a whole unit before it is used
            program = program_at(unit, following, first_step)
            program.fill_ring()
            plgpu.barrier_wait(memory.q_barrier)
            q = program.queries(tiled=True)
            plgpu.commit_smem()  # all of it is read

            @pl.when(round + 1 < rounds)
            def _() -> None:
                load_queries(following)

            program.store(*program.attend(q))
            where = (unit.slot, unit.head, unit.part)
            plgpu.copy_smem_to_gmem(memory.out_MH.at[pl.ds(0, L)], out_BKSLH.at[where])
            plgpu.copy_smem_to_gmem(memory.sums_M.at[pl.ds(0, L)], sums_BKSL.at[where])
            return following, after, first_step + unit.blocks.steps

        first, second = unit_of(jnp.int32(0)), unit_of(jnp.int32(1))
        program_at(Unit.nothing(), first, jnp.int32(0)).fill_ring()
        load_queries(first)
        lax.fori_loop(0, rounds, run_unit, (first, second, jnp.int32(0)))
        plgpu.wait_smem_to_gmem(0)

    return body


# Its result, its base-2 log-sum-exps, and the slots for which it was written (None: all).
Part = tuple[Float[Array, "B K L H"], Float[Array, "B K L"], Bool[Array, " B"] | None]


def _merge(parts: list[Part]) -> Float[Array, "B K L H"]:
    """The attention over all parts, float32.

    Written part by part, without reductions, so that XLA makes a single loop of it.
    """

    def written(x: Array, where_B: Array | None, otherwise: float) -> Array:
        if where_B is None:
            return x
        return jnp.where(where_B.reshape(-1, *(1,) * (x.ndim - 1)), x, otherwise)

    results = [written(out, where_B, 0.0).astype(jnp.float32) for out, _, where_B in parts]
    if len(parts) == 1:
        return results[0]
    sums = [written(sums_BKL, where_B, -jnp.inf) for _, sums_BKL, where_B in parts]
    highest = sums[0]
    for part in sums[1:]:
        highest = jnp.maximum(highest, part)
    highest = jnp.where(highest == -jnp.inf, 0.0, highest)  # no token at all
    weights = [jnp.exp2(part - highest)[..., None] for part in sums]
    total = sum(weights[1:], weights[0])
    weighted = [weight * result for weight, result in zip(weights, results, strict=True)]
    return sum(weighted[1:], weighted[0]) / jnp.where(total == 0.0, 1.0, total)
