"""Flash attention on Hopper GPUs: padding, meshes and the custom gradient around the kernels.

Shape letters: those of common.py.
"""

import math
from collections.abc import Mapping
from functools import partial

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, PartitionSpec
from jaxtyping import Array

from jaxrl_llm.kernels.flash_attention.backward import backward, backward_schedules
from jaxrl_llm.kernels.flash_attention.common import HEAD_DIMS, Tuning, default_tuning
from jaxrl_llm.kernels.flash_attention.forward import forward, forward_schedule
from jaxrl_llm.kernels.flash_attention.visibility import Ranges, Schedule, Visibility, ranges_of
from jaxrl_llm.kernels.hopper import Interpret

# Names under which rematerialisation may keep an attention's result, and its small schedules.
ATTENTION = "attention"
SCHEDULE = "attention schedule"

# q, k, v, output, log-sum-exp, ranges, and the schedules of the gradient kernels.
Residuals = tuple[Array, Array, Array, Array, Array, Ranges, tuple[Schedule, Schedule] | None]


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
    interpret: Interpret = None,
) -> Array:
    """`attention` by our kernels, for any T.

    With a mesh in scope (`jax.set_mesh`) whose axes are automatic, every device computes its own
    rows and heads. The axis "tensor" splits the heads and the other axes the rows, where they
    divide evenly. Without a mesh the operands must be on one device.

    Guarantees: padding that `lengths` or `visibility` declares may hold anything, NaN included. An
    undeclared NaN can reach earlier tokens of its block.
    Raises: ValueError for operands that the kernels do not take.
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

    of_heads = {name for name in automatic if name.partition(".")[0] == "tensor"}
    by_rows = _dividing(sorted(automatic - of_heads), mesh.shape, q_BTNH.shape[0])
    by_heads = _dividing(sorted(of_heads), mesh.shape, q_BTNH.shape[2])
    if by_heads:
        # With fewer KV heads than devices, copy them until every device has its own.
        parts = math.prod(mesh.shape[name] for name in by_heads)
        repeats = math.lcm(k_BTKH.shape[2], parts) // k_BTKH.shape[2]
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


def _dividing(axes: list[str], sizes: Mapping[str, int], size: int) -> tuple[str, ...] | None:
    """The axes if they divide `size` evenly, else None: every device computes all of it."""
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
    interpret: Interpret,
) -> Array:
    T, S = q_BTNH.shape[1], k_BTKH.shape[1]
    padded, num_keys = tuning.padded(T), tuning.padded(S)
    ranges = ranges_of(
        T,
        padded,
        causal=causal,
        window=window,
        lengths=lengths,
        visibility=visibility,
        num_keys=num_keys,
    )
    real_BT = None
    if visibility is not None:
        real_BT = visibility.real()
    elif lengths is not None:
        real_BT = jnp.arange(T) < lengths[:, None]

    of_part = visibility is not None and visibility.last_BT is not None

    def prepared(x: Array, size: int, real_BT: Array | None) -> Array:
        if real_BT is not None:
            # An unseen key has weight 0, and 0 * NaN is NaN.
            x = jnp.where(real_BT[:, :, None, None], x, 0)
        return jnp.pad(x, ((0, 0), (0, size - x.shape[1]), (0, 0), (0, 0)))

    q = prepared(q_BTNH, padded, real_BT)
    k, v = (prepared(x, num_keys, None if of_part else real_BT) for x in (k_BTKH, v_BTKH))
    out: Array = mosaic_attention(q, k, v, ranges, tuning, interpret)
    return out[:, :T]


@partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def mosaic_attention(
    q_BTNH: Array,
    k_BTKH: Array,
    v_BTKH: Array,
    ranges: Ranges,
    tuning: Tuning,
    interpret: Interpret,
) -> Array:
    """softmax(q k^T / sqrt(H)) v over the keys in `ranges`; 0 for a token that sees nothing.

    Requires: bfloat16, H in HEAD_DIMS, T a multiple of the blocks (`Tuning.padded`), one device or
    a shard_map. All tokens are finite, padding too: an unseen key has weight 0, and 0 * NaN is NaN.
    """
    return forward(q_BTNH, k_BTKH, v_BTKH, ranges, None, tuning, interpret)[0]


def _attention_forward(
    q: Array, k: Array, v: Array, ranges: Ranges, tuning: Tuning, interpret: Interpret
) -> tuple[Array, Residuals]:
    schedules = None
    if ranges.values_RCT is not None:
        # Made here and kept, so that all layers share one: with rematerialisation XLA does not see
        # that the layers' schedules are equal. In plain causal rows they are constants.
        made = (
            forward_schedule(ranges, q.shape[0], tuning),
            backward_schedules(ranges, q.shape[0], q.shape[2], k.shape[2], tuning),
        )
        ranges, schedules = jax.tree.map(
            lambda x: checkpoint_name(jnp.asarray(x), SCHEDULE), (ranges, made)
        )
    of_forward, of_backward = schedules or (None, None)
    # Named, so that rematerialisation may keep both instead of running the kernel again.
    saved = forward(q, k, v, ranges, of_forward, tuning, interpret)
    out, lse = (checkpoint_name(x, ATTENTION) for x in saved)
    return out, (q, k, v, out, lse, ranges, of_backward)


def _attention_backward(
    tuning: Tuning, interpret: Interpret, residuals: Residuals, dout_BTNH: Array
) -> tuple[Array, Array, Array, None]:
    q, k, v, out, lse, ranges, schedules = residuals
    dq, dk, dv = backward(q, k, v, out, lse, ranges, schedules, dout_BTNH, tuning, interpret)
    return dq, dk, dv, None


mosaic_attention.defvjp(_attention_forward, _attention_backward)
