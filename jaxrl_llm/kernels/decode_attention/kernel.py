"""The Mosaic GPU kernel of decode attention for Hopper, and the merge of its splits.

A tile job is one KV head of one split of a slot, or one KV head of one split of a prompt tile. A
fixed number of CTAs goes through the tile jobs. Each CTA is one warpgroup, and two or three share
an SM (`MatmulForms.ctas_per_sm`): while one computes, the loads of the others are in flight. A CTA
loads the first blocks of its next tile job while it finishes the current one. One fused XLA
operation merges the splits of a slot. docs/kernels.md has a picture.

Shape letters: see inputs.py, and L = G rounded up to 8, X and Y rows of a slot, S splits of a
slot, M = 64 rows of a tensor-core tile, J entries of a block, U tile jobs of slots, W prompt tiles,
I = 64 // L slots of a prompt tile.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxrl_llm.kernels.decode_attention.inputs import DecodeInputs
from jaxrl_llm.kernels.decode_attention.matmuls import (
    Matmuls,
    QueriesAsColumns,
    QueriesAsRows,
)
from jaxrl_llm.kernels.decode_attention.pipeline import (
    REDUCTION_BYTES,
    ROWS_HEAD_DIMS,
    TILE_ROWS,
    Blocks,
    DecodeTuning,
    MatmulForms,
    Pipeline,
    Scratch,
    TileJob,
    default_tuning,
    max_group_size,
    operand_dtype,
    padded_rows,
    scratch_types,
)
from jaxrl_llm.kernels.decode_attention.schedule import (
    DecodeSchedule,
    max_entries_read,
    split_blocks,
)
from jaxrl_llm.kernels.hopper import LOG2_E, SMS, Interpret, Ref, num_blocks
from jaxrl_llm.kernels.mosaic import plgpu
from jaxrl_llm.kernels.partial_softmax import PartialResult, merge

HEAD_DIMS = (*ROWS_HEAD_DIMS, 256)
CACHE_DTYPES = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float8_e4m3fn))
_MAX_SMEM = 226 * 1024  # shared memory of a CTA, less its barriers


def decode_attention_mosaic(
    inputs: DecodeInputs,
    *,
    window: int | None = None,
    num_splits: int = 1,
    tuning: DecodeTuning | None = None,
    schedule: DecodeSchedule | None = None,
    interpret: Interpret = None,
    strictly: bool = False,
    sinks: Float[Array, " N"] | None = None,
    softcap: float | None = None,
) -> tuple[Float[Array, "B N H"], Float[Array, "O K 2 R H"]]:
    """`prefix_decode_attention` by the kernel.

    Without a schedule the tile jobs are all splits of all slots. `strictly` computes as
    `flash_attention.forward` does.

    Requires: `inputs.check` and `check_supported` have passed; no schedule with a window.
    Guarantees: entries past a length, NaN included, change no result.
    """
    q_BNH, new_BK2H, prefix_CK2PH, _, _, own_OK2RH, page_table_BT, *_ = inputs
    B, N, H = q_BNH.shape
    K, cache_dtype = own_OK2RH.shape[1], own_OK2RH.dtype
    L = padded_rows(N // K)
    queries_BXH, new_BYH, first_new = rows_of_slots(inputs)
    tuning = tuning or default_tuning(H, cache_dtype)
    jobs, prompts = (None, None) if schedule is None else (schedule.jobs, schedule.prompts)
    num_splits = num_splits if jobs is None else jobs.num_splits
    entries = inputs.own_capacity + (inputs.prefix_capacity if prompts is None else 0)
    entries = max_entries_read(entries, window, tuning.block)
    forms = MatmulForms.of(L, with_prompt_tiles=prompts is not None, strictly=strictly)
    assert not strictly or (num_splits == 1 and prompts is not None and prompts.num_splits == 1)
    sizes = _Sizes(
        num_splits=num_splits,
        prompt_splits=0 if prompts is None else prompts.num_splits,
        slots_per_tile=0 if prompts is None else TILE_ROWS // L,
        blocks_per_split=split_blocks(entries, num_splits, tuning.block),
        pages_per_slot=page_table_BT.shape[1],
        max_jobs=B * K * (num_splits + (0 if prompts is None else prompts.num_splits)),
        direct_output=num_splits == 1 and not forms.rows and sinks is None,
        ctas=SMS * forms.ctas_per_sm(tuning, H, L, cache_dtype),
    )
    out_types = [jax.ShapeDtypeStruct((B, K, N // K, H), q_BNH.dtype)]
    if not sizes.direct_output:
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
        direct_output=sizes.direct_output,
        slots_per_tile=sizes.slots_per_tile,
        interpreted=interpret is not None,
    )
    arrays = _schedule_arrays(inputs, schedule)
    body = _make_body(
        sizes, window, tuning, forms, L, first_new, strictly, softcap, array_names=tuple(arrays)
    )

    def with_scratch(*refs: Ref) -> None:
        pl.run_scoped(partial(body, *refs), collective_axes=(), **scratch)

    # Not plgpu.kernel: in jax 0.10 it takes no reference under jit.
    kernel: Any = pl.kernel(
        with_scratch,
        out_type=out_types,
        mesh=plgpu.Mesh(grid=(sizes.num_ctas,), grid_names=("cta",)),
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            reduction_scratch_bytes=REDUCTION_BYTES if forms.columns else 0,
        ),
        interpret=interpret if interpret is not None else False,
        name="prefix_decode_attention",
    )

    @jax.jit  # a reference to global memory exists only inside a jit
    def written_in_place(own_OK2RH: Array, *others: Array) -> tuple[Sequence[Array], Array]:
        own_ref = jax.new_ref(own_OK2RH, memory_space=plgpu.GMEM)
        outputs = kernel(queries_BXH, new_BYH, prefix_CK2PH, own_ref, *others)
        return outputs, jax.freeze(own_ref)

    outputs, own_OK2RH = written_in_place(
        own_OK2RH,
        page_table_BT.astype(jnp.int32).reshape(-1),
        *(x.astype(jnp.int32) for x in arrays.values()),
    )
    if sizes.direct_output:
        out_BKGH = outputs[0]
    else:
        splits_B = None  # all splits were written
        if jobs is not None:  # only the first split, and those that hold an entry
            blocks_B = num_blocks(inputs.own_lengths_B, tuning.block)
            if prompts is None:
                blocks_B += num_blocks(inputs.prefix_lengths_B, tuning.block)
            splits_B = num_blocks(blocks_B, sizes.blocks_per_split)
        partials = _partial_results(outputs, splits_B, inputs.prefix_lengths_B > 0)
        if sinks is not None:
            partials.append(_sinks_part(sinks, partials[0]))
        out_BKGH = merge(partials)[:, :, : N // K]
    return out_BKGH.astype(q_BNH.dtype).reshape(B, N, H), own_OK2RH


def rows_of_slots(
    inputs: DecodeInputs,
) -> tuple[Float[Array, "B X H"], Float[Array, "B Y H"], int]:
    """Each slot's queries, its new keys and values, and the first row of the latter.

    A KV head's queries are padded to L rows, unless heads.py has written them so. If queries and
    cache have one dtype, the first two results are the same array, so that one XLA kernel writes
    all that rope gives.
    """
    q_BNH, new_BK2H = inputs.q_BNH, inputs.new_BK2H
    (B, K, _, H), operand = new_BK2H.shape, operand_dtype(new_BK2H.dtype)
    new_BYH = new_BK2H.reshape(B, 2 * K, H)
    if inputs.queries_BXH is not None:
        return inputs.queries_BXH, new_BYH, 0
    q_BKGH = q_BNH.astype(operand).reshape(B, K, -1, H)
    G = q_BKGH.shape[2]
    padding = ((0, 0), (0, 0), (0, padded_rows(G) - G), (0, 0))
    q_BXH = jnp.pad(q_BKGH, padding).reshape(B, -1, H)
    if operand != new_BK2H.dtype:
        return q_BXH, new_BYH, 0
    first_new, rows = q_BXH.shape[1], q_BXH.shape[1] + 2 * K
    rest = jnp.zeros((B, padded_rows(rows) - rows, H), operand)
    together_BXH = jnp.concatenate([q_BXH, new_BYH, rest], axis=1)
    return together_BXH, together_BXH, first_new


def check_supported(
    inputs: DecodeInputs,
    tuning: DecodeTuning,
    *,
    prompt_tiles: bool,
    interpreted: bool,
) -> None:
    """Raise ValueError, with the remedy, where the kernel would compute something else."""
    H, G = inputs.q_BNH.shape[2], inputs.group_size
    q_dtype, cache_dtype = inputs.q_BNH.dtype, inputs.own_OK2RH.dtype
    P, R = inputs.prefix_capacity, inputs.own_OK2RH.shape[3]
    if H not in HEAD_DIMS:
        raise ValueError(f"head_dim is {H}: the kernel takes {HEAD_DIMS}; use 'xla' for others")
    if tuning.block == H and not interpreted:
        raise ValueError(
            f"block and head_dim are both {H}, which gives wrong results on the GPU: use "
            f"default_tuning({H})"
        )
    if G > (most := max_group_size(H)):
        raise ValueError(
            f"{G} query heads per KV head: the kernel takes {most}; use 'xla' for more"
        )
    if prompt_tiles and H not in ROWS_HEAD_DIMS:
        raise ValueError(
            f"prompts that slots share with head_dim {H}: the kernel takes {ROWS_HEAD_DIMS}; make "
            "the schedule with slots_per_prompt=1"
        )
    if q_dtype != jnp.bfloat16 or cache_dtype not in CACHE_DTYPES:
        raise ValueError(
            f"q is {q_dtype}, the cache {cache_dtype}: the kernel takes bfloat16, and "
            "bfloat16 or float8_e4m3fn for the cache; use 'xla' for others"
        )
    if not P or not R or P % tuning.block or R % tuning.block:
        raise ValueError(
            f"the cache has prompt rows of {P} and pages of {R} entries: "
            f"round both up to multiples of {tuning.block}, at least one"
        )


@dataclasses.dataclass(frozen=True)
class _Sizes:
    """Static sizes of a call."""

    num_splits: int
    prompt_splits: int  # 0 without prompt tiles
    slots_per_tile: int  # 0 without prompt tiles
    blocks_per_split: int  # blocks in a split of a slot
    pages_per_slot: int
    max_jobs: int
    direct_output: bool  # a slot is one tile job, which writes the result itself: no merge
    ctas: int  # CTAs that run at once

    @property
    def num_ctas(self) -> int:
        return min(self.ctas, self.max_jobs)


@dataclasses.dataclass(frozen=True)
class _ScheduleRefs:
    """The int32 arrays that say what to read, in global memory. None if a call has no such one."""

    prefix_rows_B: Ref = None  # these three without a schedule
    prefix_lengths_B: Ref = None
    own_lengths_B: Ref = None
    table: Ref = None  # U * 4; these two with a schedule
    num_listed: Ref = None
    num_tiles: Ref = None  # these and the following with prompt tiles
    rows_W: Ref = None
    lengths_W: Ref = None
    num_slots_W: Ref = None
    slots: Ref = None  # W * I


def _schedule_arrays(inputs: DecodeInputs, schedule: DecodeSchedule | None) -> dict[str, Array]:
    """The arrays of a call, by their names in `_ScheduleRefs`."""
    if schedule is None:
        names = ("prefix_rows_B", "prefix_lengths_B", "own_lengths_B")
        return {name: getattr(inputs, name) for name in names}
    jobs, prompts = schedule.jobs, schedule.prompts
    arrays = dict(table=jobs.table_U4.reshape(-1), num_listed=jobs.num_jobs)
    if prompts is not None:
        arrays |= dict(
            num_tiles=prompts.num_tiles,
            rows_W=prompts.rows_W,
            lengths_W=prompts.lengths_W,
            num_slots_W=prompts.num_slots_W,
            slots=prompts.slots_WI.reshape(-1),
        )
    return arrays


@dataclasses.dataclass(frozen=True)
class _CtaJobs:
    """The tile jobs of this CTA, one per round. Those of prompt tiles come first.

    Jobs are dealt to the CTAs in order, forwards and backwards in turn.
    """

    sizes: _Sizes
    refs: _ScheduleRefs
    num_heads: int
    window: int | None
    block: int

    def num_rounds(self) -> jax.Array:
        return self._rounds_of(self._num_jobs())

    def num_prompt_rounds(self) -> jax.Array:
        """Rounds with a tile job of a prompt tile."""
        return self._rounds_of(self._num_prompt_splits() * self.num_heads)

    def _rounds_of(self, num_jobs: jax.Array) -> jax.Array:
        last_round = lax.div(num_jobs, jnp.int32(self.sizes.num_ctas))  # may be incomplete
        return last_round + (self._index(last_round) < num_jobs).astype(jnp.int32)

    def job(self, round: jax.Array) -> TileJob:
        """The tile job of a round. Past the last round it has no blocks."""
        # Clamped, so that the table is not read past its end. Reading it need not wait for the
        # number of jobs.
        index = jnp.minimum(self._index(round), self.sizes.max_jobs - 1)
        K = jnp.int32(self.num_heads)
        head, which = lax.rem(index, K), lax.div(index, K)
        num_prompt_splits = self._num_prompt_splits()
        job = self._slot_job(head, jnp.maximum(which - num_prompt_splits, 0))
        if self.refs.num_tiles is not None:
            job = jax.tree.map(
                partial(jnp.where, which < num_prompt_splits), self._prompt_job(head, which), job
            )
            # A slot's job reads no prompt row here, a prompt tile's no slot: one register for both.
            where = jnp.where(job.prompt_tile < 0, job.slot, job.row)
            job = dataclasses.replace(job, slot=where, row=where)
        return jax.tree.map(
            partial(jnp.where, self._index(round) < self._num_jobs()), job, job.without_blocks()
        )

    def _num_jobs(self) -> jax.Array:
        if self.refs.num_listed is None:
            return jnp.int32(self.sizes.max_jobs)
        return (self.refs.num_listed[0] + self._num_prompt_splits()) * self.num_heads

    def _num_prompt_splits(self) -> jax.Array:
        """Splits of all prompt tiles: their tile jobs of one head."""
        if self.refs.num_tiles is None:
            return jnp.int32(0)
        return self.refs.num_tiles[0] * self.sizes.prompt_splits

    def _index(self, round: jax.Array) -> jax.Array:
        """The index of this CTA's tile job in a round."""
        me, n = lax.axis_index("cta").astype(jnp.int32), self.sizes.num_ctas
        return round * n + jnp.where(lax.rem(round, jnp.int32(2)) == 0, me, n - 1 - me)

    def _slot_job(self, head: jax.Array, which: jax.Array) -> TileJob:
        """A split of a slot: of all slots, or of the schedule's list."""
        refs, splits = self.refs, jnp.int32(self.sizes.num_splits)
        if refs.table is None:
            slot, split = lax.div(which, splits), lax.rem(which, splits)
            row, prefix_length = refs.prefix_rows_B[slot], refs.prefix_lengths_B[slot]
            own_length = refs.own_lengths_B[slot]
        else:
            last = refs.table.shape[0] // 4 - 1
            first = jnp.minimum(which, last) * 4
            slot_and_split, row, prefix_length, own_length = (
                refs.table[first + i] for i in range(4)
            )
            slot, split = lax.div(slot_and_split, splits), lax.rem(slot_and_split, splits)
        if self.sizes.slots_per_tile:
            prefix_length = jnp.int32(0)
        blocks = Blocks.of(
            prefix_length, own_length, split, self.sizes.blocks_per_split, self.window, self.block
        )
        return TileJob(blocks, slot, head, row, split, jnp.int32(-1))

    def _prompt_job(self, head: jax.Array, which: jax.Array) -> TileJob:
        """A split of a prompt tile. Splits of one prompt differ by a block at most."""
        splits = jnp.int32(self.sizes.prompt_splits)
        last = self.refs.rows_W.shape[0] - 1
        tile, split = jnp.minimum(lax.div(which, splits), last), lax.rem(which, splits)
        length = self.refs.lengths_W[tile]
        in_split = num_blocks(num_blocks(length, self.block), self.sizes.prompt_splits)
        blocks = Blocks.of(length, jnp.int32(0), split, in_split, None, self.block)
        return TileJob(blocks, jnp.int32(0), head, self.refs.rows_W[tile], split, tile)


@dataclasses.dataclass(frozen=True)
class _Transfers:
    """Copies between global and shared memory: queries and new entries in, results out."""

    memory: Scratch
    refs: _ScheduleRefs
    slots_per_tile: int
    L: int
    first_new: int  # row of `new_BYH`
    queries_BXH: Ref
    new_BYH: Ref
    slot_outputs: tuple[Ref, ...]
    prompt_outputs: tuple[Ref, Ref] | None

    def _rows(self, index: int) -> slice | pl.Slice:
        return pl.ds(index * self.L, self.L)

    def load_queries(self, job: TileJob, buffer: jax.Array) -> None:
        """Start loading the queries of a job; for a slot also its new key and value.

        Queries as rows go to the rows of one tile, queries as columns to one of two buffers.
        """

        def start(slot: jax.Array, rows: Ref, barrier: Ref) -> None:
            of_head = self.queries_BXH.at[slot, pl.ds(job.head * self.L, self.L)]
            plgpu.copy_gmem_to_smem(of_head, rows, barrier)

        q_MH, q_2LH = self.memory.q_MH, self.memory.q_2LH

        @pl.when(job.prompt_tile < 0)
        def _() -> None:
            rows = q_MH.at[self._rows(0)] if q_2LH is None else q_2LH.at[buffer]
            start(job.slot, rows, self.memory.q_barrier)
            new_2H = self.new_BYH.at[job.slot, pl.ds(self.first_new + 2 * job.head, 2)]
            plgpu.copy_gmem_to_smem(new_2H, self.memory.new_22H.at[buffer], self.memory.q_barrier)

        if self.slots_per_tile:

            @pl.when(job.prompt_tile >= 0)
            def _() -> None:
                for i in range(self.slots_per_tile):
                    slot = self.refs.slots[job.prompt_tile * self.slots_per_tile + i]
                    start(slot, q_MH.at[self._rows(i)], self.memory.gathered_q_barrier)

    def wait_for_queries(self, job: TileJob) -> None:
        @pl.when(job.prompt_tile < 0)
        def _() -> None:
            plgpu.barrier_wait(self.memory.q_barrier)

        if self.slots_per_tile:

            @pl.when(job.prompt_tile >= 0)
            def _() -> None:
                plgpu.barrier_wait(self.memory.gathered_q_barrier)

    def write_result(self, job: TileJob) -> None:
        """Start writing the result of a job, to each slot of a prompt tile its rows."""

        def start(outputs: tuple[Ref, ...], slot: jax.Array, index: int) -> None:
            rows, where = self._rows(index), (slot, job.head, job.split)
            plgpu.copy_smem_to_gmem(self.memory.out_MH.at[rows], outputs[0].at[where])
            plgpu.copy_smem_to_gmem(self.memory.query_lse_M.at[rows], outputs[1].at[where])

        if len(self.slot_outputs) == 1:
            (out_BKGH,) = self.slot_outputs
            out_GH = self.memory.out_MH.at[pl.ds(0, out_BKGH.shape[2])]
            plgpu.copy_smem_to_gmem(out_GH, out_BKGH.at[job.slot, job.head])
            return

        @pl.when(job.prompt_tile < 0)
        def _() -> None:
            start(self.slot_outputs, job.slot, 0)

        prompt_outputs = self.prompt_outputs
        if prompt_outputs is not None:
            tile = jnp.maximum(job.prompt_tile, 0)
            count = jnp.where(job.prompt_tile < 0, 0, self.refs.num_slots_W[tile])
            for index in range(self.slots_per_tile):

                @pl.when(index < count)
                def _(index: int = index) -> None:
                    slot = self.refs.slots[tile * self.slots_per_tile + index]
                    start(prompt_outputs, slot, index)


def _make_body(
    sizes: _Sizes,
    window: int | None,
    tuning: DecodeTuning,
    forms: MatmulForms,
    L: int,
    first_new: int,
    strictly: bool,
    softcap: float | None,
    *,
    array_names: tuple[str, ...],
) -> Callable[..., None]:
    """The kernel's body. `array_names` are the fields of `_ScheduleRefs` that it is passed."""

    def body(
        queries_BXH: Ref,
        new_BYH: Ref,
        prefix_CK2PH: Ref,
        own_OK2RH: Ref,  # read, and written where the new tokens belong
        page_table: Ref,  # B * T
        *others: Ref,
        **scratch: Ref,
    ) -> None:
        memory = Scratch(**scratch)
        refs = _ScheduleRefs(**dict(zip(array_names, others, strict=False)))
        outputs = others[len(array_names) :]
        K, H = own_OK2RH.shape[1], own_OK2RH.shape[4]
        cta_jobs = _CtaJobs(sizes, refs, K, window, tuning.block)
        transfers = _Transfers(
            memory=memory,
            refs=refs,
            slots_per_tile=sizes.slots_per_tile,
            L=L,
            first_new=first_new,
            queries_BXH=queries_BXH,
            new_BYH=new_BYH,
            slot_outputs=outputs[:2],
            prompt_outputs=outputs[2:] or None,
        )
        rounds = cta_jobs.num_rounds()

        def page_of(slot: jax.Array, number: jax.Array) -> jax.Array:
            entry = slot * sizes.pages_per_slot + jnp.minimum(number, sizes.pages_per_slot - 1)
            # Clamped: the job of a prompt tile has no slot.
            return page_table[jnp.minimum(entry, page_table.shape[0] - 1)]

        def pipeline_at(
            job: TileJob, following: TileJob, first_step: jax.Array, buffer: jax.Array
        ) -> Pipeline:
            return Pipeline(
                memory=memory,
                job=job,
                following=following,
                first_step=first_step,
                block=tuning.block,
                stages=tuning.stages,
                to_base_2=(H**-0.5 if softcap is None else softcap) * math.log2(math.e),
                to_tanh=None if softcap is None else H**-0.5 / softcap,
                prefix_CK2PH=prefix_CK2PH,
                own_OK2RH=own_OK2RH,
                page_of=page_of,
                new_2H=memory.new_22H.at[buffer],
                newest_step=job.blocks.newest_step(tuning.block),
            )

        def buffer_of(round: jax.Array) -> jax.Array:
            return lax.rem(round, jnp.int32(2))

        def run_job(
            form: type[Matmuls], round: jax.Array, carry: tuple[TileJob, TileJob, jax.Array]
        ) -> tuple[TileJob, TileJob, jax.Array]:
            job, following, first_step = carry
            pipeline = pipeline_at(job, following, first_step, buffer_of(round))
            pipeline.fill_ring()
            transfers.wait_for_queries(job)
            pipeline.write_newest()
            matmuls = form(pipeline, strictly=strictly)
            q = matmuls.queries(buffer_of(round))
            plgpu.commit_smem()  # all reads are over that the next load of queries may overwrite

            @pl.when(round + 1 < rounds)
            def _() -> None:
                transfers.load_queries(following, buffer_of(round + 1))

            result = matmuls.attend(q)
            # For the previous job's result, whose shared memory is written next, and for this
            # job's new entry, whose buffer the next round loads again.
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            matmuls.store(*result)
            plgpu.commit_smem()
            transfers.write_result(job)
            after = cta_jobs.job(round + 2)
            return following, after, first_step + job.blocks.steps

        first, second = cta_jobs.job(jnp.int32(0)), cta_jobs.job(jnp.int32(1))
        start = jnp.int32(0)
        pipeline_at(first.without_blocks(), first, start, buffer_of(start)).fill_ring()

        @pl.when(rounds > 0)
        def _() -> None:
            transfers.load_queries(first, buffer_of(jnp.int32(0)))

        slot_form = QueriesAsColumns if forms.columns else QueriesAsRows
        carry, prompt_rounds = (first, second, jnp.int32(0)), jnp.int32(0)
        if sizes.slots_per_tile:
            prompt_rounds = cta_jobs.num_prompt_rounds()
            carry = lax.fori_loop(0, prompt_rounds, partial(run_job, QueriesAsRows), carry)
        lax.fori_loop(prompt_rounds, rounds, partial(run_job, slot_form), carry)
        plgpu.wait_smem_to_gmem(0)

    return body


def _sinks_part(sinks_N: Array, like: PartialResult) -> PartialResult:
    """The sinks as a split whose entries have the value 0. Rows that pad a KV head get one too."""
    out_BKLH, lse_BKL, _ = like
    _, K, L = lse_BKL.shape
    sinks_KG = sinks_N.astype(jnp.float32).reshape(K, -1) * LOG2_E
    sinks_KL = jnp.pad(sinks_KG, ((0, 0), (0, L - sinks_KG.shape[1])))
    return jnp.zeros_like(out_BKLH), jnp.broadcast_to(sinks_KL, lse_BKL.shape), None


def _partial_results(
    outputs: Sequence[Array], splits_B: Array | None, reads_B: Array
) -> list[PartialResult]:
    """The kernel's outputs by split: of slots, then of prompts if there are any.

    A slot has `splits_B` splits (None: all), at least one, and a prompt's splits if it `reads` one.
    """
    out_BKSLH, lse_BKSL, *of_prompts = outputs
    partials: list[PartialResult] = []
    for s in range(out_BKSLH.shape[2]):
        written_B = s < splits_B if s and splits_B is not None else None
        partials.append((out_BKSLH[:, :, s], lse_BKSL[:, :, s], written_B))
    if of_prompts:
        out_BKSLH, lse_BKSL = of_prompts
        prompt_splits = range(out_BKSLH.shape[2])
        partials += [(out_BKSLH[:, :, s], lse_BKSL[:, :, s], reads_B) for s in prompt_splits]
    return partials
