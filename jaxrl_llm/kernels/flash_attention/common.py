"""Parts that the forward and gradient kernels of flash attention share.

Shape letters of this package: B rows of the batch, T query tokens, S key tokens (T == S unless the
queries are a part of the row), N query heads, K KV heads, G = N / K query heads of a KV head, H
head dim. In a kernel `block_q` queries belong to a warpgroup, and a step has `block_k` keys.
"""

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial, wraps
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array

from jaxrl_llm.kernels.flash_attention.visibility import Ranges, Schedule
from jaxrl_llm.kernels.hopper import (
    LOG2_E,
    SMS,
    Interpret,
    Ref,
    RegisterLayout,
    ScratchType,
    along,
    load_whole,
)
from jaxrl_llm.kernels.mosaic import plgpu

HEAD_DIMS = (64, 96, 128, 256)
NUM_CONSUMERS = 2
MAX_SLOW_AXIS = 65_535  # CTAs along the grid's slow axis, by CUDA
# Below every real score but finite: exp2(-inf - LOWEST) is 0 where exp2(-inf + inf) would be NaN.
LOWEST = -1e30
P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """Sizes of the kernels: tokens of a block, stages of the ring of loaded blocks.

    In the forward and dq kernels a CTA owns 2 `block_q` queries and loops over blocks of `block_k`
    keys. In the dkv kernel it owns 2 `dkv_block_k` keys and loops over blocks of `dkv_block_q`
    queries. `ping_pong` lets the two consumers alternate at the tensor cores. `dkv_split` computes
    dk and dv in a kernel each, for head dims whose two accumulators exceed the registers.

    Requires: the blocks that a warpgroup owns are multiples of 64.
    """

    block_q: int = 64
    block_k: int = 128
    stages: int = 2
    ping_pong: bool = True
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

    `plain` is for whole causal rows: they have few masked blocks, which leaves registers for
    larger blocks.
    """
    if head_dim <= 64:
        if plain:
            return Tuning(stages=4, dq_block_k=128, dq_stages=2, dkv_stages=3)
        return Tuning(stages=4, dq_stages=4, dkv_stages=4)
    if head_dim <= 128:
        return Tuning(dq_stages=3, dkv_stages=3)
    return Tuning(block_k=64, dq_stages=1, dkv_stages=1, dkv_split=True)


def strict_tuning(head_dim: int, block: int) -> Tuning:
    """The sizes for strict sums, with the blocks of keys that decoding has too."""
    return replace(default_tuning(head_dim), block_k=block)


def lowered_once(run: Callable[P, R]) -> Callable[P, R]:
    """Wrap `run(*arrays, softcap, tuning, interpret)` in a jit of its own.

    A kernel takes 0.2 s to lower and 0.2 s to compile. The jit does both once for all layers of a
    model. There is no jit in interpret mode: the interpreter's callbacks may wait for threads that
    the program holds.
    """
    num_arguments = len(inspect.signature(run).parameters)
    jitted = jax.jit(run, static_argnums=range(num_arguments - 3, num_arguments))

    @wraps(run)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        return (jitted if args[-1] is None else run)(*args, **kwargs)

    return call


def kernel_call(
    body: Callable[..., None],
    schedule: Schedule,
    ranges: Ranges,
    operands: tuple[Array, ...],
    *,
    name: str,
    num_heads: int,
    out: Any,
    scratch: dict[str, ScratchType],
    interpret: Interpret,
) -> Any:
    """Run `body` for every head of every tile job, with one producer and two consumers per CTA.

    `out` is a pytree of ShapeDtypeStructs, and the result has its structure. CTAs start in the
    order of the grid, whose last axis is the fastest. With the head axis fastest, the longest jobs
    of all heads come first and short ones fill the gaps at the end. Plain rows with jobs for half
    of the SMs or more run head after head. The jobs of two heads balance, and the keys or queries
    of a head stay in the L2 cache.
    """
    num_jobs = schedule.jobs.shape[0]
    grid = [("job", num_jobs), ("head", num_heads)]
    plain = ranges.values_RCT is None
    if (plain and num_jobs >= SMS // 2) or num_jobs > MAX_SLOW_AXIS:
        grid.reverse()
    index = [jnp.asarray(schedule.jobs)]
    if ranges.values_RCT is not None:
        index += [jnp.asarray(schedule.full_RQK), jnp.asarray(ranges.values_RCT)]
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


def matrix_smem(shape: tuple[int, ...]) -> ScratchType:
    """Shared memory of bfloat16 matrices in the tiles that TMA writes and wgmma reads."""
    # 64 columns in a 128-byte swizzle; a head dim of 96 takes 32 in 64 bytes.
    columns = 64 if shape[-1] % 64 == 0 else 32
    transforms = (plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(2 * columns))
    return plgpu.SMEM(shape, jnp.bfloat16, transforms=transforms)


def key_ring(stages: int, block_k: int, H: int) -> dict[str, ScratchType]:
    """Scratch for `load_keys_and_values`: a ring of blocks, and barriers for loaded and free."""

    def free() -> ScratchType:
        return plgpu.Barrier(num_arrivals=NUM_CONSUMERS, num_barriers=stages)

    return dict(
        k_smem=matrix_smem((stages, block_k, H)),
        v_smem=matrix_smem((stages, block_k, H)),
        k_loaded=plgpu.Barrier(num_barriers=stages),
        v_loaded=plgpu.Barrier(num_barriers=stages),
        k_free=free(),
        v_free=free(),
    )


def load_keys_and_values(
    k: tuple[Ref, Ref, Ref, Ref],
    v: tuple[Ref, Ref, Ref, Ref],
    *,
    row: Array,
    kv_head: Array,
    num_steps: Array,
    block_of: Callable[[Array], Array],
    block_k: int,
    stages: int,
) -> None:
    """The producer's loop: load a block of keys and of values per step.

    `k` and `v` are (global memory, ring, loaded, free). `block_of(step)` is the step's key block.
    """

    @pl.loop(0, num_steps)
    def _load(j: Array) -> None:
        stage = ring_stage(j, stages)
        keys = pl.ds(block_of(j) * block_k, block_k)
        for ref, smem, loaded, free in (k, v):
            pl.when(j >= stages)(partial(plgpu.barrier_wait, free.at[stage]))
            plgpu.copy_gmem_to_smem(ref.at[row, keys, kv_head], smem.at[stage], loaded.at[stage])

    drain((k[3], v[3]), num_steps, stages)


def spill_scratch(shape: tuple[int, ...], interpret: Interpret) -> dict[str, ScratchType]:
    """Scratch for `multiply_add`: a matrix per consumer in interpret mode, else none."""
    return {} if interpret is None else {"spill": matrix_smem((NUM_CONSUMERS, *shape))}


def soft_capped(s: Array, head_dim: int, softcap: float | None) -> Array:
    """tanh(s / sqrt(H) / cap) of scores s that are not scaled; without a cap s itself."""
    return s if softcap is None else jnp.tanh(s * (head_dim**-0.5 / softcap))


def base_2_factor(head_dim: int, softcap: float | None) -> float:
    """The factor from what `soft_capped` gives to the exponent of the softmax in base 2."""
    return (head_dim**-0.5 if softcap is None else softcap) * LOG2_E


def sloped(p: Array, s: Array, softcap: float | None) -> Array:
    """Weights times the derivative of the cap, 1 - s^2 with s from `soft_capped`.

    It is 0 where p is 0 and s is finite.
    """
    return p if softcap is None else p - p * s * s


def load_ranges(
    ranges_ref: Ref, row: Array, tokens: slice | pl.Slice, layout: RegisterLayout
) -> tuple[Array, ...]:
    """The ranges of some tokens: one vector for each of the C arrays, () in plain causal rows."""
    if ranges_ref is None:
        return ()
    range_row = row if ranges_ref.shape[0] > 1 else 0
    return tuple(
        load_whole(ranges_ref.at[range_row, c, tokens], layout) for c in range(ranges_ref.shape[1])
    )


def sees(ranges: tuple[Array, ...], query: Array, key: Array, axis: int) -> Array:
    """Which query sees which key. `query` and `key` are positions; `axis` is the queries' axis.

    An even number of ranges ends with `last`, see `Ranges`.
    """
    of_parts = len(ranges) in (2, 4)
    seen = key <= (along(ranges[-1], key.shape, axis) if of_parts else query)
    if ranges:
        seen &= key >= along(ranges[0], key.shape, axis)
    if len(ranges) > 2:
        seen |= (key >= along(ranges[1], key.shape, axis)) & (
            key < along(ranges[2], key.shape, axis)
        )
    return seen


def positions(shape: tuple[int, ...], axis: int, base: Array) -> Array:
    """Positions in the row along an axis of a block that starts at `base`."""
    return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=plgpu.Layout.WGMMA) + base


def split_index(refs: tuple[Ref, ...], num_index: int) -> tuple[Ref, Ref, Ref, tuple[Ref, ...]]:
    """Tile jobs, full blocks and ranges (None in plain causal rows), and the other references."""
    jobs_ref, *rest = refs[:num_index]
    full_ref, ranges_ref = rest or (None, None)
    return jobs_ref, full_ref, ranges_ref, refs[num_index:]


def is_full(
    full_ref: Ref, row: Array, query: Array, key: Array, keys: int, block: tuple[Array, Array]
) -> Array:
    """Check that every query of a block sees every one of its keys, so that no mask is needed.

    `query` and `key` are the block's first positions. `block` is (query block, key block) in the
    schedule's table. Plain causal rows have no table, so that a step waits for no load.
    """
    if full_ref is None:
        return key + keys - 1 <= query
    return full_ref[row if full_ref.shape[0] > 1 else 0, *block] != 0


def ring_stage(step: Array, stages: int) -> Array:
    """The stage of the ring that a step uses."""
    return lax.rem(step, jnp.asarray(stages, step.dtype))


def drain(free: tuple[Ref, ...], num_steps: Array, stages: int) -> None:
    """Wait until the last stages are free: a CTA must not end before all barrier phases."""

    @pl.loop(jnp.maximum(num_steps - stages, 0), num_steps)
    def _wait(j: Array) -> None:
        for barrier in free:
            plgpu.barrier_wait(barrier.at[ring_stage(j, stages)])


def key_block(first: Array, num_first: Array, second: Array, step: Array) -> Array:
    """The key block of a step: blocks of the first range, then of the second."""
    return jnp.where(step < num_first, first + step, second + step - num_first)
