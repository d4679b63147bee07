"""Queries and new entries of a decode step from its merged projection, in a kernel for Hopper.

A CTA has a slot. TMA loads the rows of its heads into shared memory, where they are normed and
turned by rope. It stores them where decode attention reads them. XLA makes three kernels of this.

Shape letters: see inputs.py, and A = N + 2 K heads, L = G rounded up to 8, P = H / 2 pairs
that rope turns, X = K L rows of a slot's queries.
"""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from jaxrl_llm.kernels.decode_attention.pipeline import padded_rows
from jaxrl_llm.kernels.hopper import Interpret, Ref, RegisterLayout, along, load_whole
from jaxrl_llm.kernels.mosaic import plgpu

HEAD_DIMS = (64, 128, 256)
# Without norms XLA makes one kernel of it, to which it adds the sum of a split matmul's parts.
MIN_SLOTS_WITHOUT_NORMS = 128
_MAX_ROWS = 256  # rows of a TMA copy
_VECTOR = 8  # features that a thread loads at once: 16 bytes
_LANES, _WARPS = 32, 4


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class HeadNorms:
    """The RMS norms of each query and of each key, as `models.layers.RMSNorm` computes them."""

    q_H: jax.Array
    k_H: jax.Array
    eps: float = field(metadata={"static": True})
    unit_offset: bool = field(metadata={"static": True})  # the weights are these plus 1, in float32


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepHeads:
    """The heads of each slot's new token before norms and rope: queries, then keys, then values."""

    heads_BAH: jax.Array
    cos_BP: jax.Array  # float32, of pairs (i, i + H / 2)
    sin_BP: jax.Array
    norms: HeadNorms | None
    query_scale: float = field(metadata={"static": True})  # factor of queries after rope


def heads_fit(
    shape: tuple[int, int, int], dtype: jax.typing.DTypeLike, num_pairs: int, *, with_norms: bool
) -> bool:
    """Check that the kernel takes heads [B, A, H] with so many pairs, and is the fastest way."""
    B, A, H = shape
    takes = dtype == jnp.bfloat16 and H in HEAD_DIMS and num_pairs == H // 2 and A <= _MAX_ROWS
    return takes and (with_norms or B >= MIN_SLOTS_WITHOUT_NORMS)


def queries_and_entries(
    heads: StepHeads, num_kv_heads: int, interpret: Interpret = None
) -> tuple[jax.Array, jax.Array]:
    """Each slot's queries [B, X, H] after norms, rope and scale, and its new keys and values.

    The queries of a KV head are its first G of L rows; the others are not written. The second
    result is [B, K, 2, H].

    Requires: `heads_fit`.
    Guarantees: rounds as `RMSNorm` and `apply_rope` do.
    """
    heads_BAH, norms = heads.heads_BAH, heads.norms
    (B, A, H), K = heads_BAH.shape, num_kv_heads
    N = A - 2 * K
    L = padded_rows(N // K)
    rows = _rows_at_once(H)

    def held(num: int) -> Any:
        return plgpu.SMEM((-(-num // rows) * rows, H), heads_BAH.dtype)

    scratch = dict(
        q_smem=held(N),
        k_smem=held(K),
        v_smem=plgpu.SMEM((K, H), heads_BAH.dtype),
        loaded=plgpu.Barrier(num_arrivals=3),
    )
    more = {} if norms is None else {"eps": norms.eps, "unit_offset": norms.unit_offset}
    body = partial(_body, query_scale=heads.query_scale, **more)

    def with_scratch(*refs: Ref) -> None:
        pl.run_scoped(partial(body, *refs), collective_axes=(), **scratch)

    kernel: Any = pl.kernel(
        with_scratch,
        out_type=[
            jax.ShapeDtypeStruct((B, K * L, H), heads_BAH.dtype),
            jax.ShapeDtypeStruct((B, K, 2, H), heads_BAH.dtype),
        ],
        mesh=plgpu.Mesh(grid=(B,), grid_names=("slot",)),
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, reduction_scratch_bytes=0
        ),
        interpret=interpret if interpret is not None else False,
        name="heads_of_decode_step",
    )
    weights = () if norms is None else (norms.q_H, norms.k_H)
    return tuple(kernel(heads_BAH, heads.cos_BP, heads.sin_BP, *weights))


def _rows_at_once(H: int) -> int:
    """Heads of which the threads of a CTA hold a half each."""
    return _WARPS * _LANES * _VECTOR // (H // 2)


def _half(H: int) -> RegisterLayout:
    """The layout of halves of heads: a thread holds 8 neighbours, so both of a pair."""
    P, rows = H // 2, _rows_at_once(H)
    tiles = ((rows, P), (rows // _WARPS, P), (_VECTOR,))
    # Tiled so, an array ends in: warps, 1, rows of a warp, vectors of a row, features of a vector.
    return plgpu.Layout.TILED(
        plgpu.Tiling(tiles), warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1
    )


def _body(
    heads_ref: Ref,
    cos_ref: Ref,
    sin_ref: Ref,
    *rest: Ref,
    q_smem: Ref,
    k_smem: Ref,
    v_smem: Ref,
    loaded: Ref,
    query_scale: float,
    eps: float = 0.0,
    unit_offset: bool = False,
) -> None:
    *weights, queries_ref, new_ref = rest
    _, A, H = heads_ref.shape
    K = new_ref.shape[1]
    N, L = A - 2 * K, queries_ref.shape[1] // K
    G, P, rows = N // K, H // 2, _rows_at_once(H)
    b, layout = lax.axis_index("slot"), _half(H)
    by_feature = layout.reduce(0)

    for smem, first, num in ((q_smem, 0, N), (k_smem, N, K), (v_smem, N + K, K)):
        of_slot = heads_ref.at[b, pl.ds(first, num)]
        plgpu.copy_gmem_to_smem(of_slot, smem.at[pl.ds(0, num)], loaded)

    def for_each_row(ref: Ref) -> jax.Array:
        x_P = load_whole(ref, by_feature).astype(jnp.float32)
        return plgpu.layout_cast(along(x_P, (rows, P), 1), layout)

    cos, sin = for_each_row(cos_ref.at[b]), for_each_row(sin_ref.at[b])
    halves = [pl.ds(0, P), pl.ds(P, P)]

    def normed(halves_RP: list[jax.Array], weight_ref: Ref) -> list[jax.Array]:
        first, second = halves_RP
        mean = jnp.sum(first * first + second * second, axis=1) * (1 / H)
        factor = plgpu.layout_cast(along(lax.rsqrt(mean + eps), (rows, P), 0), layout)
        found = []
        for x, half in zip(halves_RP, halves, strict=True):
            weight, y = for_each_row(weight_ref.at[half]), x * factor
            y = y * (1 + weight) if unit_offset else _rounded(y) * weight
            found.append(_rounded(y))
        return found

    def finished(smem: Ref, weight_ref: Ref | None, scale: float) -> list[tuple[Ref, jax.Array]]:
        """Halves of rows in shared memory, and what is to be stored there."""
        found = []
        for start in range(0, smem.shape[0], rows):
            parts = [smem.at[pl.ds(start, rows), half] for half in halves]
            x = [load_whole(part, layout).astype(jnp.float32) for part in parts]
            first, second = x if weight_ref is None else normed(x, weight_ref)
            turned = first * cos - second * sin, second * cos + first * sin
            for part, y in zip(parts, turned, strict=True):
                y = y if scale == 1.0 else _rounded(y) * jnp.float32(scale)
                found.append((part, y.astype(smem.dtype)))
        return found

    plgpu.barrier_wait(loaded)
    q_weight, k_weight = weights or (None, None)
    # All are computed before the first is stored: the threads meet at each store.
    for part, y in [*finished(q_smem, q_weight, query_scale), *finished(k_smem, k_weight, 1.0)]:
        part[...] = y
    plgpu.commit_smem()
    if G == L:
        plgpu.copy_smem_to_gmem(q_smem.at[pl.ds(0, N)], queries_ref.at[b])
    else:
        for k in range(K):
            of_kv_head = queries_ref.at[b, pl.ds(k * L, G)]
            plgpu.copy_smem_to_gmem(q_smem.at[pl.ds(k * G, G)], of_kv_head)
    plgpu.copy_smem_to_gmem(k_smem.at[pl.ds(0, K)], new_ref.at[b, :, 0])
    plgpu.copy_smem_to_gmem(v_smem, new_ref.at[b, :, 1])
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _rounded(x: jax.Array) -> jax.Array:
    """Float32 values of bfloat16."""
    return x.astype(jnp.bfloat16).astype(jnp.float32)
