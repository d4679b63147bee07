"""Attention on Hopper GPUs by our own kernels: padding, meshes and the custom gradient.

Shape letters: B batch, T tokens, N query heads, K KV heads, H head dim.
"""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, PartitionSpec
from jaxtyping import Array

from jaxrl_llm.kernels.flash_attention_mosaic_backward import backward, backward_schedules
from jaxrl_llm.kernels.flash_attention_mosaic_forward import (
    HEAD_DIMS,
    Tuning,
    default_tuning,
    forward,
    forward_schedule,
)
from jaxrl_llm.kernels.visibility import Ranges, Visibility, ranges_of

ATTENTION = "attention"  # the name under which an attention's result may be kept
SCHEDULE = "attention schedule"  # and that of what its kernels' programs do, small tables

__all__ = [
    "ATTENTION",
    "HEAD_DIMS",
    "SCHEDULE",
    "Tuning",
    "default_tuning",
    "hopper_attention",
    "mosaic_attention",
]


def hopper_attention(
    q_BTNH: Array,
    k_BTKH: Array,
    v_BTKH: Array,
    *,
    causal: bool = True,
    window: int | None = None,
    lengths: Array | None = None,
    visibility: Visibility | None = None,
    tuning: Tuning | None = None,
    interpret: Any = None,
) -> Array:
    """`flash_attention.attention` by our kernels, for any T.

    Under a mesh in scope (`jax.set_mesh`) whose axes are automatic, every device computes its own
    rows and heads: the axis "tensor" splits the heads, the others the rows, where they divide
    them. Without one the operands must be on one device. Padding may hold anything, NaN too, where
    `lengths` or `visibility` tells what is padding; elsewhere a NaN in a later token can reach
    earlier ones of its block. ValueError for operands that the kernels do not take.
    """
    H = q_BTNH.shape[-1]
    if H not in HEAD_DIMS or any(x.dtype != jnp.bfloat16 for x in (q_BTNH, k_BTKH, v_BTKH)):
        raise ValueError(
            f"pallas attention of {q_BTNH.dtype} with head dim {H}: it takes bfloat16 and head "
            f"dims {HEAD_DIMS}; cast q, k and v, or use implementation='xla'"
        )
    plain = causal and window is None and lengths is None and visibility is None
    local = partial(
        _attention_of_one_device,
        causal=causal,
        window=window,
        tuning=tuning or default_tuning(H, plain=plain),
        interpret=interpret,
    )
    mesh = jax.sharding.get_abstract_mesh()
    automatic = {
        name
        for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
        if kind == AxisType.Auto
    }
    if math.prod(mesh.shape[name] for name in automatic) == 1:
        return local(q_BTNH, k_BTKH, v_BTKH, lengths, visibility)

    by_rows = _dividing(sorted(automatic - {"tensor"}), mesh.shape, q_BTNH.shape[0])
    by_heads = _dividing(sorted(automatic & {"tensor"}), mesh.shape, q_BTNH.shape[2])
    if by_heads:
        # Fewer KV heads than devices: as many copies as give every device its own.
        repeats = math.lcm(k_BTKH.shape[2], mesh.shape["tensor"]) // k_BTKH.shape[2]
        if repeats > 1:
            k_BTKH, v_BTKH = (jnp.repeat(x, repeats, axis=2) for x in (k_BTKH, v_BTKH))
    heads, rows = PartitionSpec(by_rows, None, by_heads), PartitionSpec(by_rows)
    return jax.shard_map(
        local,
        in_specs=(heads, heads, heads, rows, rows),
        out_specs=heads,
        axis_names=automatic,
        check_vma=False,
    )(q_BTNH, k_BTKH, v_BTKH, lengths, visibility)


def _dividing(axes: list[str], sizes: Any, size: int) -> tuple[str, ...] | None:
    """The axes if together they divide a dimension evenly, else none: all compute all of it."""
    return tuple(axes) if axes and size % math.prod(sizes[name] for name in axes) == 0 else None


def _attention_of_one_device(
    q_BTNH: Array,
    k_BTKH: Array,
    v_BTKH: Array,
    lengths: Array | None,
    visibility: Visibility | None,
    *,
    causal: bool,
    window: int | None,
    tuning: Tuning,
    interpret: Any,
) -> Array:
    T = q_BTNH.shape[1]
    padded = tuning.padded(T)
    ranges = ranges_of(
        T, padded, causal=causal, window=window, lengths=lengths, visibility=visibility
    )
    real_BT = None
    if visibility is not None:
        real_BT = visibility.real()
    elif lengths is not None:
        real_BT = jnp.arange(T) < lengths[:, None]

    def prepared(x: Array) -> Array:
        if real_BT is not None:
            # A key that is not seen has weight 0, and 0 * NaN is NaN.
            x = jnp.where(real_BT[:, :, None, None], x, 0)
        return jnp.pad(x, ((0, 0), (0, padded - T), (0, 0), (0, 0)))

    q, k, v = (prepared(x) for x in (q_BTNH, k_BTKH, v_BTKH))
    out: Any = mosaic_attention(q, k, v, ranges, tuning, interpret)
    return out[:, :T]


@partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def mosaic_attention(
    q_BTNH: Array, k_BTKH: Array, v_BTKH: Array, ranges: Ranges, tuning: Tuning, interpret: Any
) -> Array:
    """softmax(q k^T / sqrt(H)) v over the keys in `ranges`; 0 for a token without any.

    bfloat16, H one of HEAD_DIMS, T a multiple of the tuning's blocks (`Tuning.padded`), on one
    device or inside a shard_map. Padding must be finite: a key that a query does not see gets
    weight 0, and 0 * NaN is NaN. `interpret` is None on a GPU, or InterpretGPUParams.
    """
    return forward(q_BTNH, k_BTKH, v_BTKH, ranges, None, tuning, interpret)[0]


def _attention_forward(
    q: Array, k: Array, v: Array, ranges: Ranges, tuning: Tuning, interpret: Any
) -> tuple[Array, tuple[Any, ...]]:
    schedules = None
    if ranges.values_RCT is not None:
        # Made here and kept, one schedule serves all layers: rematerialisation hides from XLA that
        # those of its layers are the same. In plain causal rows they are constants.
        made = (
            forward_schedule(ranges, q.shape[0], tuning),
            backward_schedules(ranges, q.shape[0], q.shape[2], k.shape[2], tuning),
        )
        ranges, schedules = jax.tree.map(
            lambda x: checkpoint_name(jnp.asarray(x), SCHEDULE), (ranges, made)
        )
    of_forward, of_backward = schedules or (None, None)
    # Named, so that rematerialisation may keep both and not run the kernel a second time.
    saved = forward(q, k, v, ranges, of_forward, tuning, interpret)
    out, lse = (checkpoint_name(x, ATTENTION) for x in saved)
    return out, (q, k, v, out, lse, ranges, of_backward)


def _attention_backward(
    tuning: Tuning, interpret: Any, residuals: tuple[Any, ...], dout_BTNH: Array
) -> tuple[Array, Array, Array, None]:
    q, k, v, out, lse, ranges, schedules = residuals
    dq, dk, dv = backward(q, k, v, out, lse, ranges, schedules, dout_BTNH, tuning, interpret)
    return dq, dk, dv, None


mosaic_attention.defvjp(_attention_forward, _attention_backward)
