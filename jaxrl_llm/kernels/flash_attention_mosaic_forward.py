"""Attention on Hopper GPUs: the forward kernel in Pallas (Mosaic GPU), and what kernels share.

A program owns a tile of queries of one head: a producer warpgroup loads blocks of keys and values
by TMA into a ring of shared-memory stages, two consumer warpgroups each hold their half of the
queries and take turns at the tensor cores (FlashAttention-3, arXiv:2407.08608). Blocks of keys
that no query of the tile sees are never loaded, and blocks that all see are not masked.

Shape letters: B batch, T tokens, N query heads, K KV heads, G = N / K query heads a KV head,
H head dim; R, C, Q, K and I in schedules as in visibility.py. Inside a kernel: `block_q` queries
of a warpgroup, `block_k` keys of a step.
"""

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from jaxrl_llm.kernels.hopper import SMS
from jaxrl_llm.kernels.visibility import Ranges, Schedule, query_schedule

HEAD_DIMS = (64, 96, 128, 256)
NUM_CONSUMERS = 2
MOST_SLOW = 65_535  # programs along the grid's slow axis, by CUDA
LOG2_E = math.log2(math.e)
# Below every real score but finite: exp2(-inf - LOWEST) is 0 where exp2(-inf + inf) would be NaN.
LOWEST = -1e30
WGMMA = plgpu.Layout.WGMMA
BY_ROW = plgpu.Layout.WGMMA.reduce(1)
BY_COLUMN = plgpu.Layout.WGMMA.reduce(0)
P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """Sizes of the kernels: tokens a block, stages of the ring of loaded blocks.

    In the forward and dq kernels a program owns 2 `block_q` queries and loops over blocks of
    `block_k` keys; in the dkv kernel it owns 2 `dkv_block_k` keys and loops over `dkv_block_q`
    queries. Blocks that belong to a warpgroup are multiples of 64, and all divide the padded row.
    `take_turns` alternates the consumers' use of the tensor cores. `dkv_split` computes dk and dv
    in a kernel each, for head dims whose two accumulators do not fit into registers together.
    """

    block_q: int = 64
    block_k: int = 128
    stages: int = 2
    take_turns: bool = True
    dq_block_q: int = 64
    dq_block_k: int = 64
    dq_stages: int = 2
    dkv_block_q: int = 64
    dkv_block_k: int = 64
    dkv_stages: int = 2
    dkv_split: bool = False

    def padded(self, length: int) -> int:
        """The least multiple of every block that holds a row of `length` tokens."""
        multiple = math.lcm(
            2 * self.block_q,
            self.block_k,
            2 * self.dq_block_q,
            self.dq_block_k,
            self.dkv_block_q,
            2 * self.dkv_block_k,
        )
        return -(-length // multiple) * multiple


def default_tuning(head_dim: int, *, plain: bool = False) -> Tuning:
    """Sizes that fit the registers and the 227 KB of shared memory of an H200.

    `plain`: for whole causal rows, whose few masks leave registers for larger blocks.
    """
    if head_dim <= 64:
        if plain:
            return Tuning(stages=4, dq_block_k=128, dq_stages=2, dkv_stages=3)
        return Tuning(stages=4, dq_stages=4, dkv_stages=4)
    if head_dim <= 128:
        return Tuning(dq_stages=3, dkv_stages=3)
    return Tuning(block_k=64, dq_stages=1, dkv_stages=1, dkv_split=True)


def lowered_once(run: Callable[P, R]) -> Callable[P, R]:
    """`run` of arrays, then `tuning` and `interpret`, in a jit of its own.

    So it is lowered and compiled once for all layers of a model: a kernel takes 0.2 s of each. Not
    when interpreted: the interpreter's callbacks may wait for threads that the program holds.
    """
    num_arguments = len(inspect.signature(run).parameters)
    jitted = jax.jit(run, static_argnums=(num_arguments - 2, num_arguments - 1))

    @wraps(run)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        return (jitted if args[-1] is None else run)(*args, **kwargs)

    return call


def forward_schedule(ranges: Ranges, num_rows: int, tuning: Tuning) -> Schedule:
    """What the programs of the forward kernel do."""
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
    tuning: Tuning,
    interpret: Any,
) -> tuple[Array, Array]:
    """Output, and the log-sum-exp of the scaled scores in bits: float32 [B, N, T].

    The log-sum-exp of a token that sees nothing is +inf, which makes its weights 0. The schedule
    is made here unless it is given.
    """
    B, T, N, H = q_BTNH.shape
    block_q, block_k, stages = tuning.block_q, tuning.block_k, tuning.stages
    return kernel_call(
        partial(_forward_kernel, tuning=tuning),
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
            k_smem=matrix_smem((stages, block_k, H)),
            v_smem=matrix_smem((stages, block_k, H)),
            lse_smem=plgpu.SMEM((NUM_CONSUMERS, block_q), jnp.float32),
            q_loaded=plgpu.Barrier(num_barriers=NUM_CONSUMERS),
            k_loaded=plgpu.Barrier(num_barriers=stages),
            v_loaded=plgpu.Barrier(num_barriers=stages),
            k_free=plgpu.Barrier(num_arrivals=NUM_CONSUMERS, num_barriers=stages),
            v_free=plgpu.Barrier(num_arrivals=NUM_CONSUMERS, num_barriers=stages),
            turn=plgpu.Barrier(num_arrivals=NUM_CONSUMERS),
            **spill_scratch((block_q, block_k), interpret),
        ),
        interpret=interpret,
    )


def kernel_call(
    body: Callable[..., None],
    schedule: Schedule,
    ranges: Ranges,
    operands: tuple[Array, ...],
    *,
    name: str,
    num_heads: int,
    out: Any,
    scratch: dict[str, Any],
    interpret: Any,
) -> Any:
    """Run `body` for every head of every work item, with a producer and two consumers each.

    Programs start in the order of the grid, whose last axis is its fastest. With heads fastest all
    heads' longest items come first and short ones fill the gaps at the end. Plain rows with items
    for half of the card and more run head after head: those of two heads balance, and their keys,
    or queries, stay in the L2 cache.
    """
    num_items = schedule.items.shape[0]
    grid = [("item", num_items), ("head", num_heads)]
    if (ranges.values_RCT is None and num_items >= SMS // 2) or num_items > MOST_SLOW:
        grid.reverse()
    index = [jnp.asarray(schedule.items)]
    if ranges.values_RCT is not None:
        index += [jnp.asarray(schedule.whole_RQK), jnp.asarray(ranges.values_RCT)]
    kernel = plgpu.kernel(
        partial(body, num_index=len(index)),
        out_type=out,
        scratch_types=scratch,
        grid=tuple(size for _, size in grid),
        grid_names=tuple(name for name, _ in grid),
        num_threads=NUM_CONSUMERS + 1,
        thread_name="warpgroup",
        # Sums along a row stay within a warp: no scratch, so that three stages fit at 128.
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
        interpret=interpret,
        kernel_name=name,
    )
    return kernel(*index, *operands)


def matrix_smem(shape: tuple[int, ...]) -> Any:
    """Shared memory of bfloat16 matrices in the tiles that TMA writes and wgmma reads."""
    # 64 columns in a 128-byte swizzle; a head dim of 96 takes 32 in 64 bytes.
    columns = 64 if shape[-1] % 64 == 0 else 32
    transforms = (plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(2 * columns))
    return plgpu.SMEM(shape, jnp.bfloat16, transforms=transforms)


def accumulator(rows: int, columns: int) -> Any:
    """A float32 accumulator of wgmma, for `pl.run_scoped`."""
    return plgpu.WGMMAAccumulatorRef((rows, columns), jnp.float32)


def accumulate(acc: Array, product: Callable[[Any], None], interpreted: bool) -> Array:
    """`acc` plus what `product` adds to an accumulator reference."""
    if not interpreted:
        start: Any = plgpu.WGMMAAccumulatorRef.init(acc)
        return pl.run_state(product)(start)

    # The interpreter cannot start an accumulator from a value.
    def from_zero(ref: Any) -> Array:
        product(ref)
        return ref[...]

    return acc + pl.run_scoped(from_zero, accumulator(*acc.shape))


def multiply_add(ref: Any, a: Array, b_smem: Any, spill_smem: Any) -> None:
    """Add `a @ b_smem` to an accumulator reference, `a` being in registers.

    The interpreter takes operands from memory only: there `a` goes through `spill_smem`.
    """
    if spill_smem is None:
        plgpu.wgmma(ref, a, b_smem)
        return
    spill_smem[...] = a
    plgpu.commit_smem()
    plgpu.wgmma(ref, spill_smem, b_smem)


def spill_scratch(shape: tuple[int, ...], interpret: Any) -> dict[str, Any]:
    """Scratch for `multiply_add`: one matrix a consumer under the interpreter, else none."""
    return {} if interpret is None else {"spill": matrix_smem((NUM_CONSUMERS, *shape))}


def zeros(shape: tuple[int, ...], layout: Any, value: float = 0.0) -> Array:
    """A float32 array of `value` in registers."""
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


def along(vector: Array, shape: tuple[int, ...], axis: int = 0) -> Array:
    """A vector of row values (axis 0) or column values (axis 1) as a matrix."""
    return lax.broadcast_in_dim(vector, shape, [axis])


def load_whole(ref: Any, layout: Any) -> Array:
    """A whole reference into registers."""
    # jax 0.10 wants an index besides, jax 0.11 warns of one.
    whole = () if jax.__version_info__ >= (0, 11) else (...,)
    return plgpu.load(ref, *whole, layout=layout, optimized=False)


def load_ranges(ranges_ref: Any, row: Array, tokens: Any, layout: Any) -> tuple[Array, ...]:
    """The ranges of some tokens, one vector an array of the ranges."""
    if ranges_ref is None:
        return ()
    range_row = row if ranges_ref.shape[0] > 1 else 0
    return tuple(
        load_whole(ranges_ref.at[range_row, c, tokens], layout) for c in range(ranges_ref.shape[1])
    )


def sees(ranges: tuple[Array, ...], query: Array, key: Array, axis: int) -> Array:
    """Mask of queries and keys by position; `axis` is the queries' in the two matrices."""
    seen = key <= query
    if ranges:
        seen &= key >= along(ranges[0], key.shape, axis)
    if len(ranges) > 1:
        seen |= (key >= along(ranges[1], key.shape, axis)) & (
            key < along(ranges[2], key.shape, axis)
        )
    return seen


def positions(shape: tuple[int, ...], axis: int, base: Array) -> Array:
    """Positions in the row along an axis of a block that starts at `base`."""
    return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=WGMMA) + base


def split_index(refs: tuple[Any, ...], num_index: int) -> tuple[Any, Any, Any, tuple[Any, ...]]:
    """Items, whole blocks and ranges (None in plain causal rows), and the other references."""
    items_ref, *rest = refs[:num_index]
    whole_ref, ranges_ref = rest or (None, None)
    return items_ref, whole_ref, ranges_ref, refs[num_index:]


def is_whole(whole_ref: Any, row: Array, query: Array, key: Array, keys: int, block: Any) -> Array:
    """Whether all queries of a block see all its keys; their first positions are `query`, `key`.

    `block` is its place in the schedule's table: query block, key block. Plain causal rows have
    none, and a step then waits for no load.
    """
    if whole_ref is None:
        return key + keys - 1 <= query
    return whole_ref[row if whole_ref.shape[0] > 1 else 0, *block] != 0


def ring_slot(step: Array, stages: int) -> Array:
    """The stage of the ring that a step uses."""
    return lax.rem(step, jnp.asarray(stages, step.dtype))


def drain(free: tuple[Any, ...], num_steps: Array, stages: int) -> None:
    """Wait until the last stages are free: a producer leaves no phase of a barrier unseen."""

    @pl.loop(jnp.maximum(num_steps - stages, 0), num_steps)
    def _wait(j: Array) -> None:
        for barrier in free:
            plgpu.barrier_wait(barrier.at[ring_slot(j, stages)])


def key_block(first: Array, num_first: Array, second: Array, step: Array) -> Array:
    """The key block of a step: those of the first range, then those of the second."""
    return jnp.where(step < num_first, first + step, second + step - num_first)


def _forward_kernel(
    *refs: Any,
    num_index: int,
    tuning: Tuning,
    q_smem: Any,
    k_smem: Any,
    v_smem: Any,
    lse_smem: Any,
    q_loaded: Any,
    k_loaded: Any,
    v_loaded: Any,
    k_free: Any,
    v_free: Any,
    turn: Any,
    spill: Any = None,
) -> None:
    items_ref, whole_ref, ranges_ref, (q_ref, k_ref, v_ref, out_ref, lse_ref) = split_index(
        refs, num_index
    )
    block_q, block_k, stages = tuning.block_q, tuning.block_k, tuning.stages
    num_groups, H = q_ref.shape[2] // k_ref.shape[2], q_ref.shape[3]
    scale = H**-0.5 * LOG2_E
    head, item = lax.axis_index("head"), lax.axis_index("item")
    warpgroup = lax.axis_index("warpgroup")
    row, tile, first, num_first, second, num = (items_ref[item, i] for i in range(6))

    def change_turns() -> None:
        if tuning.take_turns:
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
        ranges = load_ranges(ranges_ref, row, queries, BY_ROW)
        plgpu.barrier_wait(q_loaded.at[warpgroup])

        @pl.when(num > 0)
        def _first_keys() -> None:
            plgpu.barrier_wait(k_loaded.at[0])

        # The second consumer begins when the first has issued its first scores.
        pl.when(warpgroup == 1)(change_turns)

        def step(j: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            acc, top, total = carry
            slot = ring_slot(j, stages)
            block = key_block(first, num_first, second, j)
            key_base = block * block_k
            whole = is_whole(whole_ref, row, base, key_base, block_k, (q_block, block))

            def scores(ref: Any) -> Array:
                plgpu.wgmma(ref, my_q, k_smem.at[slot].transpose((1, 0)))
                change_turns()
                return ref[...]

            s = pl.run_scoped(scores, accumulator(block_q, block_k))
            plgpu.barrier_arrive(k_free.at[slot])

            def masked(s: Array) -> Array:
                query = positions(s.shape, 0, base)
                key = positions(s.shape, 1, key_base)
                return jnp.where(sees(ranges, query, key, 0), s, -jnp.inf)

            s = lax.cond(whole, lambda s: s, masked, s)
            # The maximum is kept in bits, so that the exponent below is one multiply-add.
            new_top = jnp.maximum(top, s.max(axis=1) * scale)
            p = jnp.exp2(s * scale - along(new_top, s.shape))
            shrink = jnp.exp2(top - new_top)
            acc *= along(shrink, acc.shape)
            total = total * shrink
            p16 = p.astype(jnp.bfloat16)
            if H <= 128:
                total += p.sum(axis=1)
                acc, new_top, total, p16 = lax.optimization_barrier((acc, new_top, total, p16))
            if tuning.take_turns:
                plgpu.barrier_arrive(turn)
            plgpu.barrier_wait(v_loaded.at[slot])
            if tuning.take_turns:
                plgpu.barrier_wait(turn)
            if H > 128:  # too few registers to hold both p and p16 before the product
                total += p.sum(axis=1)

            def values(ref: Any) -> None:
                multiply_add(ref, p16, v_smem.at[slot], my_spill)

                @pl.when(j + 1 < num)
                def _next_keys() -> None:
                    plgpu.barrier_wait(k_loaded.at[ring_slot(j + 1, stages)])

            acc = accumulate(acc, values, interpreted=spill is not None)
            plgpu.barrier_arrive(v_free.at[slot])
            return acc, new_top, total

        start = (
            zeros((block_q, H), WGMMA),
            zeros((block_q,), BY_ROW, LOWEST),
            zeros((block_q,), BY_ROW),
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
