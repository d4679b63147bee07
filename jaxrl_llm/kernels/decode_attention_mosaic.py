"""Ragged decode attention on Hopper, in Pallas' Mosaic GPU dialect.

Shape letters: B slots, O pages of slots' own entries, T pages a slot at most, R entries of a page,
N query heads, K KV heads, G = N / K, L = G rounded up to 8, X and Y rows of a slot, C prompt rows,
P prompt entries, H head dim, S splits of a slot's tokens, M = 64 rows of a tensor-core tile, J
entries of a block, U listed units, W items, I slots of an item.

A unit of work is one KV head of one part of a slot's tokens: a slot that fills its pages has S
parts, one with fewer tokens fewer, so that the longest is not what all wait for. A fixed number of
programs (decode_attention_program.py), each of a single warpgroup, goes through the units. For each
it walks the blocks of the slot's prompt row and then of its own pages that hold visible entries,
and no others. The L queries of the head are the columns of its products
(decode_attention_products.py); more than 16 are the first rows of a tile, whose other rows hold
anything: rows of a matrix product never mix, and these are never stored.

Where slots share prompts, a plan has items of up to I = 64 // L slots that see the same entries of
the same prompt row. Their queries fill a tile's rows, and units of another kind read the parts of a
prompt once for all of them; a slot's own units then read its pages only. One fused XLA operation
merges the parts of a slot; the result of a slot that is one part is written as it is.

Two or three programs share an SM (`Forms.programs_per_sm`): while one computes, the others' loads
are in flight. Each loads the first blocks of its next unit while it ends the one before, so loads
never wait for results. Units go to programs in order, forwards and backwards in turn, the longest
first where a plan lists those that hold something.

Parts are a matter of a slot's own tokens, of S and of the caches' room, so a slot's output has the
same bits whatever the batch size, its index, the other slots, or those that it shares an item with.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm.kernels.decode_attention_plan import (
    MAX_SPLITS,
    DecodePlan,
    entries_seen,
    part_blocks,
)
from jaxrl_llm.kernels.decode_attention_products import (
    Products,
    QueriesAsColumns,
    QueriesAsRows,
)
from jaxrl_llm.kernels.decode_attention_program import (
    MOST_GROUP_ROWS,
    REDUCTION_BYTES,
    TILE_ROWS,
    Blocks,
    DecodeTuning,
    Forms,
    Program,
    Scratch,
    Unit,
    default_tuning,
    num_blocks,
    operand_dtype,
    rows_a_slot,
    scratch_types,
)
from jaxrl_llm.kernels.hopper import SMS

HEAD_DIMS = (64, 128)
CACHE_DTYPES = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float8_e4m3fn))
_MOST_PAIRED = 8  # parts that are merged by one kernel; no more were timed
_MAX_SMEM = 226 * 1024  # of a program, less its barriers


def decode_attention_mosaic(
    q_BNH: Float[Array, "B N H"],
    new_BK2H: Float[Array, "B K 2 H"],
    prefix_CK2PH: Float[Array, "C K 2 P H"],
    prefix_rows_B: Int[Array, " B"],
    prefix_lengths_B: Int[Array, " B"],
    own_OK2RH: Float[Array, "O K 2 R H"],
    pages_BT: Int[Array, "B T"],
    lengths_B: Int[Array, " B"],
    *,
    window: int | None = None,
    num_splits: int = 1,
    tuning: DecodeTuning | None = None,
    plan: DecodePlan | None = None,
    interpret: Any = None,
) -> tuple[Float[Array, "B N H"], Float[Array, "O K 2 R H"]]:
    """The kernel, and the merge of its parts.

    See `decode_attention.prefix_decode_attention` for the arguments, which it has checked (also
    with `check_supported`). Entries past a length, NaN included, never change the result.
    `interpret` runs the kernel on the CPU (InterpretGPUParams). A `plan` (without a window) lists
    the units, and has their `num_splits`; without one, they are all parts of all slots.
    """
    B, N, H = q_BNH.shape
    K, cache_dtype = own_OK2RH.shape[1], own_OK2RH.dtype
    L = rows_a_slot(N // K)
    queries_BXH, new_BYH, first_new = rows_of_slots(q_BNH, new_BK2H)
    tuning = tuning or default_tuning(H, cache_dtype)
    units, prompts = (None, None) if plan is None else (plan.units, plan.prompts)
    num_splits = num_splits if units is None else units.num_splits
    entries = pages_BT.shape[1] * own_OK2RH.shape[3]
    entries += prefix_CK2PH.shape[3] if prompts is None else 0
    entries = entries_seen(entries, window, tuning.block)
    forms = Forms.of(L, with_items=prompts is not None)
    sizes = _Sizes(
        num_splits=num_splits,
        prompt_splits=0 if prompts is None else prompts.num_splits,
        slots_of_item=0 if prompts is None else TILE_ROWS // L,
        blocks_of_part=part_blocks(entries, num_splits, tuning.block),
        pages_a_slot=pages_BT.shape[1],
        most_units=B * K * (num_splits + (0 if prompts is None else prompts.num_splits)),
        whole=num_splits == 1 and not forms.rows,
        programs=SMS * forms.programs_per_sm(tuning, H, L, cache_dtype),
    )
    numbers = _numbers(prefix_rows_B, prefix_lengths_B, lengths_B, plan)
    out_types = [jax.ShapeDtypeStruct((B, K, N // K, H), q_BNH.dtype)]
    if not sizes.whole:
        out_types = [
            jax.ShapeDtypeStruct(shape, dtype)
            for splits in (sizes.num_splits, sizes.prompt_splits)[: 1 + (prompts is not None)]
            for shape, dtype in (
                ((B, K, splits, L, H), q_BNH.dtype),
                ((B, K, splits, L), jnp.float32),
            )
        ]
    scratch = scratch_types(
        H,
        L,
        cache_dtype,
        tuning,
        forms,
        whole=sizes.whole,
        slots_of_item=sizes.slots_of_item,
        interpreted=interpret is not None,
    )
    body = _make_body(sizes, window, tuning, forms, L, first_new, numbers=tuple(numbers))

    def with_scratch(*refs: Any) -> None:
        pl.run_scoped(partial(body, *refs), collective_axes=(), **scratch)

    # Not plgpu.kernel: that of jax 0.10 takes no reference under jit.
    kernel: Any = pl.kernel(
        with_scratch,
        out_type=out_types,
        mesh=plgpu.Mesh(grid=(sizes.num_programs,), grid_names=("program",)),
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            reduction_scratch_bytes=REDUCTION_BYTES if forms.columns else 0,
        ),
        interpret=interpret if interpret is not None else False,
        name="prefix_decode_attention",
    )

    @jax.jit  # there is no reference to global memory outside of one
    def written_in_place(own_OK2RH: Array, *others: Array) -> tuple[Sequence[Array], Array]:
        own_ref = jax.new_ref(own_OK2RH, memory_space=plgpu.GMEM)
        outputs = kernel(queries_BXH, new_BYH, prefix_CK2PH, own_ref, *others)
        return outputs, jax.freeze(own_ref)

    outputs, own_OK2RH = written_in_place(
        own_OK2RH,
        pages_BT.astype(jnp.int32).reshape(-1),
        *(x.astype(jnp.int32) for x in numbers.values()),
    )
    if sizes.whole:
        out_BKGH = outputs[0]
    else:
        parts_B = None  # all; of listed units those that hold something were written, and the first
        if units is not None:
            blocks_B = num_blocks(lengths_B, tuning.block)
            if prompts is None:
                blocks_B += num_blocks(prefix_lengths_B, tuning.block)
            parts_B = num_blocks(blocks_B, sizes.blocks_of_part)
        parts = _parts(outputs, parts_B, prefix_lengths_B > 0)
        out_BKGH = _merge(parts)[:, :, : N // K]
    return out_BKGH.astype(q_BNH.dtype).reshape(B, N, H), own_OK2RH


def rows_of_slots(
    q_BNH: Float[Array, "B N H"], new_BK2H: Float[Array, "B K 2 H"]
) -> tuple[Float[Array, "B X H"], Float[Array, "B Y H"], int]:
    """Each slot's queries, its new keys and values, and the first row of the latter.

    A KV head's queries are rounded up to L rows. In one dtype all are rows of one array, twice
    returned: then one kernel writes what rope makes of them. Rows are whole groups of 8.
    """
    (B, K, _, H), operand = new_BK2H.shape, operand_dtype(new_BK2H.dtype)
    q_BKGH = q_BNH.astype(operand).reshape(B, K, -1, H)
    G = q_BKGH.shape[2]
    padding = ((0, 0), (0, 0), (0, rows_a_slot(G) - G), (0, 0))
    q_BXH = jnp.pad(q_BKGH, padding).reshape(B, -1, H)
    new_BYH = new_BK2H.reshape(B, 2 * K, H)
    if operand != new_BK2H.dtype:
        return q_BXH, new_BYH, 0
    first_new, rows = q_BXH.shape[1], q_BXH.shape[1] + 2 * K
    rest = jnp.zeros((B, rows_a_slot(rows) - rows, H), operand)
    together_BXH = jnp.concatenate([q_BXH, new_BYH, rest], axis=1)
    return together_BXH, together_BXH, first_new


def check_supported(
    q_BNH: Array,
    prefix_CK2PH: Array,
    own_OK2RH: Array,
    tuning: DecodeTuning,
    num_splits: int,
    interpreted: bool,
) -> None:
    """ValueError, with the remedy, for what the kernel does not take."""
    H = q_BNH.shape[2]
    G = q_BNH.shape[1] // own_OK2RH.shape[1]
    P, R = prefix_CK2PH.shape[3], own_OK2RH.shape[3]
    if H not in HEAD_DIMS:
        raise ValueError(f"head_dim is {H}: the kernel takes {HEAD_DIMS}; use 'xla' for others")
    if tuning.block == H and not interpreted:
        raise ValueError(
            f"block is {H}, as is head_dim, which is wrong on the card: use default_tuning({H})"
        )
    if G > MOST_GROUP_ROWS:
        raise ValueError(
            f"{G} query heads a KV head: the kernel takes {MOST_GROUP_ROWS}; use 'xla' for more"
        )
    if not 1 <= num_splits <= MAX_SPLITS:
        raise ValueError(f"num_splits is {num_splits}: use 1 to {MAX_SPLITS}")
    L = rows_a_slot(G)
    if Forms.of(L, with_items=True).smem(tuning, H, L, own_OK2RH.dtype) > _MAX_SMEM:
        raise ValueError(
            f"{tuning} needs more than {_MAX_SMEM} bytes: use a smaller block or fewer stages"
        )
    if q_BNH.dtype != jnp.bfloat16 or own_OK2RH.dtype not in CACHE_DTYPES:
        raise ValueError(
            f"q is {q_BNH.dtype}, the cache {own_OK2RH.dtype}: the kernel takes bfloat16, and "
            "bfloat16 or float8_e4m3fn for the cache; use 'xla' for others"
        )
    if not P or not R or P % tuning.block or R % tuning.block:
        raise ValueError(
            f"the cache has prompt rows of {P} and pages of {R} entries: "
            f"round both up to multiples of {tuning.block}, at least one"
        )


@dataclasses.dataclass(frozen=True)
class _Sizes:
    """Numbers of a call that its shapes and its plan's sizes decide."""

    num_splits: int
    prompt_splits: int
    slots_of_item: int  # 0 without items, as are the splits of a prompt
    blocks_of_part: int  # of a slot's part
    pages_a_slot: int
    most_units: int
    whole: bool  # each slot is one unit and its queries are columns: the result is written as it is
    programs: int  # that run at once

    @property
    def num_programs(self) -> int:
        return min(self.programs, self.most_units)


@dataclasses.dataclass(frozen=True)
class _Numbers:
    """The integers that say what to read, in global memory; None for those that a call lacks."""

    rows_B: Any = None  # without a list, as are the next two
    prefix_lengths_B: Any = None
    lengths_B: Any = None
    table: Any = None  # U * 4; with a list
    num_listed: Any = None
    num_items: Any = None  # with items, as are the rest
    item_rows_W: Any = None
    item_lengths_W: Any = None
    item_counts_W: Any = None
    item_slots: Any = None  # W * I


def _numbers(
    prefix_rows_B: Array, prefix_lengths_B: Array, lengths_B: Array, plan: DecodePlan | None
) -> dict[str, Array]:
    """Those that a call has, by their names in `_Numbers`."""
    if plan is None:
        return dict(rows_B=prefix_rows_B, prefix_lengths_B=prefix_lengths_B, lengths_B=lengths_B)
    units, prompts = plan.units, plan.prompts
    numbers = dict(table=units.table_U4.reshape(-1), num_listed=units.num_units)
    if prompts is not None:
        numbers |= dict(
            num_items=prompts.num_items,
            item_rows_W=prompts.item_rows_W,
            item_lengths_W=prompts.item_lengths_W,
            item_counts_W=prompts.item_counts_W,
            item_slots=prompts.item_slots_WI.reshape(-1),
        )
    return numbers


@dataclasses.dataclass(frozen=True)
class _Work:
    """The units of one program, by round."""

    sizes: _Sizes
    numbers: _Numbers
    num_heads: int
    window: int | None
    block: int

    def num_rounds(self) -> Any:
        return self._rounds_of(self._count())

    def num_rounds_of_items(self) -> Any:
        """Those of units of items, which come first."""
        return self._rounds_of(self._num_of_items() * self.num_heads)

    def _rounds_of(self, num_units: Any) -> Any:
        last_round = lax.div(num_units, jnp.int32(self.sizes.num_programs))  # perhaps not whole
        return last_round + (self._index(last_round) < num_units).astype(jnp.int32)

    def unit(self, round: Any) -> Unit:
        """My unit of a round; without a block where the rounds are over. Items come first."""
        # The table is not read past its end, and its rows do not wait for the number of units.
        index = jnp.minimum(self._index(round), self.sizes.most_units - 1)
        K = jnp.int32(self.num_heads)
        head, which = lax.rem(index, K), lax.div(index, K)
        num_of_items = self._num_of_items()
        unit = self._own(head, jnp.maximum(which - num_of_items, 0))
        if self.numbers.num_items is not None:
            unit = jax.tree.map(
                partial(jnp.where, which < num_of_items), self._of_item(head, which), unit
            )
            # A slot's own units read no row and an item's no slot: one number, one register.
            where = jnp.where(unit.item < 0, unit.slot, unit.row)
            unit = dataclasses.replace(unit, slot=where, row=where)
        return jax.tree.map(
            partial(jnp.where, self._index(round) < self._count()), unit, unit.without_blocks()
        )

    def _count(self) -> Any:
        if self.numbers.num_listed is None:
            return jnp.int32(self.sizes.most_units)
        return (self.numbers.num_listed[0] + self._num_of_items()) * self.num_heads

    def _num_of_items(self) -> Any:
        """Units of items, of one head."""
        if self.numbers.num_items is None:
            return jnp.int32(0)
        return self.numbers.num_items[0] * self.sizes.prompt_splits

    def _index(self, round: Any) -> Any:
        """The number of my unit in a round, forwards and backwards in turn."""
        me, n = lax.axis_index("program").astype(jnp.int32), self.sizes.num_programs
        return round * n + jnp.where(lax.rem(round, jnp.int32(2)) == 0, me, n - 1 - me)

    def _own(self, head: Any, which: Any) -> Unit:
        """A part of a slot: of all, or of those listed."""
        numbers, splits = self.numbers, jnp.int32(self.sizes.num_splits)
        if numbers.table is None:
            slot, part = lax.div(which, splits), lax.rem(which, splits)
            row, prefix_length = numbers.rows_B[slot], numbers.prefix_lengths_B[slot]
            length = numbers.lengths_B[slot]
        else:
            last = numbers.table.shape[0] // 4 - 1
            first = jnp.minimum(which, last) * 4
            slot_and_part, row, prefix_length, length = (numbers.table[first + i] for i in range(4))
            slot, part = lax.div(slot_and_part, splits), lax.rem(slot_and_part, splits)
        if self.sizes.slots_of_item:
            prefix_length = jnp.int32(0)
        blocks = Blocks.of(
            prefix_length, length, part, self.sizes.blocks_of_part, self.window, self.block
        )
        return Unit(blocks, slot, head, row, part, jnp.int32(-1))

    def _of_item(self, head: Any, which: Any) -> Unit:
        """A part of an item's prompt; parts of a prompt are equal, to a block."""
        splits = jnp.int32(self.sizes.prompt_splits)
        last = self.numbers.item_rows_W.shape[0] - 1
        item, part = jnp.minimum(lax.div(which, splits), last), lax.rem(which, splits)
        length = self.numbers.item_lengths_W[item]
        in_part = num_blocks(num_blocks(length, self.block), self.sizes.prompt_splits)
        blocks = Blocks.of(length, jnp.int32(0), part, in_part, None, self.block)
        return Unit(blocks, jnp.int32(0), head, self.numbers.item_rows_W[item], part, item)


@dataclasses.dataclass(frozen=True)
class _Transfers:
    """Queries of a unit's slots on their way in, results on their way out."""

    memory: Scratch
    numbers: _Numbers
    slots_of_item: int
    L: int
    first_new: int  # row of `new_BYH`
    queries_BXH: Any
    new_BYH: Any
    own_outputs: tuple[Any, ...]
    prompt_outputs: tuple[Any, Any] | None

    def _rows(self, place: int) -> Any:
        return pl.ds(place * self.L, self.L)

    def load_queries(self, unit: Unit, place: Any) -> None:
        """To the rows of a tile; those of a slot alone that are columns to one of two places.

        With a slot's own the new key and value.
        """

        def start(slot: Any, rows: Any, barrier: Any) -> None:
            of_head = self.queries_BXH.at[slot, pl.ds(unit.head * self.L, self.L)]
            plgpu.copy_gmem_to_smem(of_head, rows, barrier)

        q_MH, q_2LH = self.memory.q_MH, self.memory.q_2LH

        @pl.when(unit.item < 0)
        def _() -> None:
            rows = q_MH.at[self._rows(0)] if q_2LH is None else q_2LH.at[place]
            start(unit.slot, rows, self.memory.q_barrier)
            new_2H = self.new_BYH.at[unit.slot, pl.ds(self.first_new + 2 * unit.head, 2)]
            plgpu.copy_gmem_to_smem(new_2H, self.memory.new_22H.at[place], self.memory.q_barrier)

        if self.slots_of_item:

            @pl.when(unit.item >= 0)
            def _() -> None:
                for i in range(self.slots_of_item):
                    slot = self.numbers.item_slots[unit.item * self.slots_of_item + i]
                    start(slot, q_MH.at[self._rows(i)], self.memory.item_barrier)

    def wait_for_queries(self, unit: Unit) -> None:
        @pl.when(unit.item < 0)
        def _() -> None:
            plgpu.barrier_wait(self.memory.q_barrier)

        if self.slots_of_item:

            @pl.when(unit.item >= 0)
            def _() -> None:
                plgpu.barrier_wait(self.memory.item_barrier)

    def write_result(self, unit: Unit) -> None:
        def start(outputs: tuple[Any, ...], slot: Any, place: int) -> None:
            rows, where = self._rows(place), (slot, unit.head, unit.part)
            plgpu.copy_smem_to_gmem(self.memory.out_MH.at[rows], outputs[0].at[where])
            plgpu.copy_smem_to_gmem(self.memory.sums_M.at[rows], outputs[1].at[where])

        if len(self.own_outputs) == 1:
            (out_BKGH,) = self.own_outputs
            out_GH = self.memory.out_MH.at[pl.ds(0, out_BKGH.shape[2])]
            plgpu.copy_smem_to_gmem(out_GH, out_BKGH.at[unit.slot, unit.head])
            return

        @pl.when(unit.item < 0)
        def _() -> None:
            start(self.own_outputs, unit.slot, 0)

        prompt_outputs = self.prompt_outputs
        if prompt_outputs is not None:
            item = jnp.maximum(unit.item, 0)
            count = jnp.where(unit.item < 0, 0, self.numbers.item_counts_W[item])
            for place in range(self.slots_of_item):

                @pl.when(place < count)
                def _(place: int = place) -> None:
                    slot = self.numbers.item_slots[item * self.slots_of_item + place]
                    start(prompt_outputs, slot, place)


def _make_body(
    sizes: _Sizes,
    window: int | None,
    tuning: DecodeTuning,
    forms: Forms,
    L: int,
    first_new: int,
    *,
    numbers: tuple[str, ...],
) -> Callable[..., None]:
    """The kernel's body; `numbers` are the names of those that it is given."""

    def body(
        queries_BXH: Any,
        new_BYH: Any,
        prefix_CK2PH: Any,
        own_OK2RH: Any,  # read, and written where the new tokens belong
        pages: Any,  # B * T
        *others: Any,
        **scratch: Any,
    ) -> None:
        memory = Scratch(**scratch)
        given = _Numbers(**dict(zip(numbers, others, strict=False)))
        outputs = others[len(numbers) :]
        K, H = own_OK2RH.shape[1], own_OK2RH.shape[4]
        work = _Work(sizes, given, K, window, tuning.block)
        transfers = _Transfers(
            memory=memory,
            numbers=given,
            slots_of_item=sizes.slots_of_item,
            L=L,
            first_new=first_new,
            queries_BXH=queries_BXH,
            new_BYH=new_BYH,
            own_outputs=outputs[:2],
            prompt_outputs=outputs[2:] or None,
        )
        rounds = work.num_rounds()

        def page_of(slot: Any, number: Any) -> Any:
            entry = slot * sizes.pages_a_slot + jnp.minimum(number, sizes.pages_a_slot - 1)
            return pages[jnp.minimum(entry, pages.shape[0] - 1)]  # an item's unit has no slot

        def program_at(unit: Unit, following: Unit, first_step: Any, place: Any) -> Program:
            return Program(
                memory=memory,
                unit=unit,
                following=following,
                first_step=first_step,
                block=tuning.block,
                stages=tuning.stages,
                to_base_2=H**-0.5 * math.log2(math.e),
                prefix_CK2PH=prefix_CK2PH,
                own_OK2RH=own_OK2RH,
                page_of=page_of,
                new_2H=memory.new_22H.at[place],
                newest_step=unit.blocks.newest_step(tuning.block),
            )

        def place_of(round: Any) -> Any:
            return lax.rem(round, jnp.int32(2))

        def run_unit(
            form: type[Products], round: Any, carry: tuple[Unit, Unit, Any]
        ) -> tuple[Unit, Unit, Any]:
            unit, following, first_step = carry
            program = program_at(unit, following, first_step, place_of(round))
            program.fill_ring()
            transfers.wait_for_queries(unit)
            program.write_newest()
            products = form(program)
            q = products.queries(place_of(round))
            plgpu.commit_smem()  # all of it is read that the next may replace

            @pl.when(round + 1 < rounds)
            def _() -> None:
                transfers.load_queries(following, place_of(round + 1))

            result = products.attend(q)
            # Of the unit before, and of this one's new entry, whose place is loaded anew next.
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            products.store(*result)
            plgpu.commit_smem()
            transfers.write_result(unit)
            after = work.unit(round + 2)
            return following, after, first_step + unit.blocks.steps

        first, second = work.unit(jnp.int32(0)), work.unit(jnp.int32(1))
        start = jnp.int32(0)
        program_at(first.without_blocks(), first, start, place_of(start)).fill_ring()

        @pl.when(rounds > 0)
        def _() -> None:
            transfers.load_queries(first, place_of(jnp.int32(0)))

        own = QueriesAsColumns if forms.columns else QueriesAsRows
        carry, of_items = (first, second, jnp.int32(0)), jnp.int32(0)
        if sizes.slots_of_item:
            of_items = work.num_rounds_of_items()
            carry = lax.fori_loop(0, of_items, partial(run_unit, QueriesAsRows), carry)
        lax.fori_loop(of_items, rounds, partial(run_unit, own), carry)
        plgpu.wait_smem_to_gmem(0)

    return body


# Its result, its base-2 log-sum-exps, and the slots for which it was written (None: all).
Part = tuple[Float[Array, "B K L H"], Float[Array, "B K L"], Bool[Array, " B"] | None]


def _parts(outputs: Sequence[Array], parts_B: Array | None, reads_B: Array) -> list[Part]:
    """The kernel's outputs by part: of the slots, then of the prompts if they are read by items.

    A slot has `parts_B` parts (None: all), one at least, and those of a prompt if it `reads` one.
    """
    out_BKSLH, sums_BKSL, *of_prompts = outputs
    parts: list[Part] = []
    for s in range(out_BKSLH.shape[2]):
        written_B = s < parts_B if s and parts_B is not None else None
        parts.append((out_BKSLH[:, :, s], sums_BKSL[:, :, s], written_B))
    if of_prompts:
        out_BKSLH, sums_BKSL = of_prompts
        prompt_splits = range(out_BKSLH.shape[2])
        parts += [(out_BKSLH[:, :, s], sums_BKSL[:, :, s], reads_B) for s in prompt_splits]
    return parts


def _merge(parts: list[Part]) -> Float[Array, "B K L H"]:
    """The attention over all parts, float32.

    Written part by part, without reductions, so that XLA makes a single loop of it. Few parts have
    a weight of their own each, 1 / sum over j of 2^(s_j - s_i): a sum of weights that all divide by
    would be a kernel by itself, which takes longer than the exponentials of every pair.
    """

    def written(x: Array, where_B: Array | None, otherwise: float) -> Array:
        if where_B is None:
            return x
        return jnp.where(where_B.reshape(-1, *(1,) * (x.ndim - 1)), x, otherwise)

    results = [written(out, where_B, 0.0).astype(jnp.float32) for out, _, where_B in parts]
    if len(parts) == 1:
        return results[0]
    sums = [written(sums_BKL, where_B, -jnp.inf) for _, sums_BKL, where_B in parts]

    def paired(i: int) -> Array:
        others = (jnp.exp2(s - sums[i]) for j, s in enumerate(sums) if j != i)
        return 1.0 / (1.0 + reduce(jnp.add, others))

    if len(parts) <= _MOST_PAIRED:
        ratios = [paired(i) for i in range(len(parts))]
    else:
        total = reduce(jnp.logaddexp2, sums)
        ratios = [jnp.exp2(s - total) for s in sums]
    # Without a token a ratio may be NaN, and the result is zeros.
    weights = [
        jnp.where(s == -jnp.inf, 0.0, ratio)[..., None]
        for s, ratio in zip(sums, ratios, strict=True)
    ]
    weighted = [weight * result for weight, result in zip(weights, results, strict=True)]
    return sum(weighted[1:], weighted[0])
