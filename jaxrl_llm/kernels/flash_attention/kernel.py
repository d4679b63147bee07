"""Flash attention on Hopper GPUs: padding and the custom gradient around the kernels.

Shape letters: see common.py.
"""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array

from jaxrl_llm.kernels.flash_attention.backward import backward, backward_schedules
from jaxrl_llm.kernels.flash_attention.common import HEAD_DIMS, Tuning, default_tuning
from jaxrl_llm.kernels.flash_attention.forward import forward, forward_schedule
from jaxrl_llm.kernels.flash_attention.visibility import Ranges, Schedule, Visibility, ranges_of
from jaxrl_llm.kernels.hopper import LOG2_E, Interpret
from jaxrl_llm.kernels.partial_softmax import merge

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
    sinks: Array | None = None,
    softcap: float | None = None,
    tuning: Tuning | None = None,
    by_runs: bool = False,
    interpret: Interpret = None,
) -> Array:
    """`attention` by our kernels, for any T, of operands on one device or in a shard_map.

    `by_runs` computes a token's own run and its prefix apart and joins them; it takes no sinks and
    no soft cap.

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
    tuning = tuning or default_tuning(H, plain=plain)
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
    out: Array
    if sinks is not None:
        assert not by_runs
        out = mosaic_attention_with_sinks(q, k, v, sinks, ranges, softcap, tuning, interpret)
    elif by_runs and visibility is not None and visibility.prefix_start_BT is not None:
        assert softcap is None
        own = Visibility(start_BT=visibility.start_BT)
        prefix = replace(visibility, start_BT=jnp.full_like(visibility.start_BT, padded))
        apart = partial(ranges_of, T, padded, causal=True, window=None, lengths=None)
        parts = (apart(visibility=part) for part in (own, prefix))
        out = mosaic_attention_of_runs(q, k, v, (*parts, ranges), tuning, interpret)
    else:
        out = mosaic_attention(q, k, v, ranges, softcap, tuning, interpret)
    return out[:, :T]


@partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def mosaic_attention(
    q_BTNH: Array,
    k_BTKH: Array,
    v_BTKH: Array,
    ranges: Ranges,
    softcap: float | None,
    tuning: Tuning,
    interpret: Interpret,
) -> Array:
    """softmax(q k^T / sqrt(H)) v over the keys in `ranges`; 0 for a token that sees nothing.

    Requires: bfloat16, H in HEAD_DIMS, T a multiple of the blocks (`Tuning.padded`), one device or
    a shard_map. All tokens are finite, padding too: an unseen key has weight 0, and 0 * NaN is NaN.
    """
    return forward(q_BTNH, k_BTKH, v_BTKH, ranges, None, softcap, tuning, interpret)[0]


def _attention_forward(
    q: Array,
    k: Array,
    v: Array,
    ranges: Ranges,
    softcap: float | None,
    tuning: Tuning,
    interpret: Interpret,
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
    saved = forward(q, k, v, ranges, of_forward, softcap, tuning, interpret)
    out, lse = (checkpoint_name(x, ATTENTION) for x in saved)
    return out, (q, k, v, out, lse, ranges, of_backward)


@partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def mosaic_attention_of_runs(
    q_BTNH: Array,
    k_BTKH: Array,
    v_BTKH: Array,
    ranges: tuple[Ranges, Ranges, Ranges],
    tuning: Tuning,
    interpret: Interpret,
) -> Array:
    """`mosaic_attention`, with a pass over each token's own run and one over its prefix.

    So decode attention computes them, which reads a prompt once for several slots. `ranges` are
    for the runs, the prefixes, and both.
    """
    return _runs_forward(q_BTNH, k_BTKH, v_BTKH, ranges, tuning, interpret)[0]


def _runs_forward(
    q: Array,
    k: Array,
    v: Array,
    ranges: tuple[Ranges, Ranges, Ranges],
    tuning: Tuning,
    interpret: Interpret,
) -> tuple[Array, Residuals]:
    partials, lses = [], []
    for part in ranges[:2]:
        out, lse_BNT = forward(q, k, v, part, None, None, tuning, interpret)
        lse = jnp.where(lse_BNT == jnp.inf, -jnp.inf, lse_BNT)
        lses.append(lse)
        partials.append((out, lse.swapaxes(1, 2), None))
    out = lax.optimization_barrier(merge(lax.optimization_barrier(partials)).astype(q.dtype))
    total = jnp.logaddexp2(*lses)
    total = jnp.where(total == -jnp.inf, jnp.inf, total)  # a token that sees nothing
    out, total = (checkpoint_name(x, ATTENTION) for x in (out, total))
    of_backward = backward_schedules(ranges[2], q.shape[0], q.shape[2], k.shape[2], tuning)
    return out, (q, k, v, out, total, ranges[2], of_backward)


@partial(jax.custom_vjp, nondiff_argnums=(5, 6, 7))
def mosaic_attention_with_sinks(
    q_BTNH: Array,
    k_BTKH: Array,
    v_BTKH: Array,
    sinks_N: Array,
    ranges: Ranges,
    softcap: float | None,
    tuning: Tuning,
    interpret: Interpret,
) -> Array:
    """`mosaic_attention` with exp(sinks) in the softmax's sums.

    A sink is a key of value 0. So the output shrinks by the share of the other keys, and the
    gradient kernels need only the log-sum-exp of all.
    """
    return _sinks_forward(q_BTNH, k_BTKH, v_BTKH, sinks_N, ranges, softcap, tuning, interpret)[0]


def _sinks_forward(
    q: Array,
    k: Array,
    v: Array,
    sinks_N: Array,
    ranges: Ranges,
    softcap: float | None,
    tuning: Tuning,
    interpret: Interpret,
) -> tuple[Array, tuple[Residuals, Array]]:
    plain, residuals = _attention_forward(q, k, v, ranges, softcap, tuning, interpret)
    *_, lse_BNT, ranges, schedules = residuals
    sees_BNT = jnp.isfinite(lse_BNT)
    total_BNT = jnp.logaddexp2(lse_BNT, _in_base_2(sinks_N))
    share_BNT = jnp.where(sees_BNT, jnp.exp2(lse_BNT - total_BNT), 0.0)
    out = (plain.astype(jnp.float32) * share_BNT.swapaxes(1, 2)[..., None]).astype(q.dtype)
    total_BNT = jnp.where(sees_BNT, total_BNT, jnp.inf)
    return out, ((q, k, v, out, total_BNT, ranges, schedules), sinks_N)


def _in_base_2(sinks_N: Array) -> Array:
    return (sinks_N.astype(jnp.float32) * LOG2_E)[:, None]


def _sinks_backward(
    softcap: float | None,
    tuning: Tuning,
    interpret: Interpret,
    residuals: tuple[Residuals, Array],
    dout_BTNH: Array,
) -> tuple[Array, Array, Array, Array, None]:
    """The gradient of a sink: its weight times 0 - rowsum(dO * O), summed over all queries."""
    of_attention, sinks_N = residuals
    out, total_BNT = of_attention[3:5]
    dq, dk, dv, _ = _attention_backward(softcap, tuning, interpret, of_attention, dout_BTNH)
    delta_BTN = (out.astype(jnp.float32) * dout_BTNH.astype(jnp.float32)).sum(axis=-1)
    weight_BNT = jnp.exp2(_in_base_2(sinks_N) - total_BNT)
    # The cotangent of a token that sees nothing may be NaN.
    each_BNT = jnp.where(jnp.isfinite(total_BNT), -weight_BNT * delta_BTN.swapaxes(1, 2), 0.0)
    return dq, dk, dv, each_BNT.sum(axis=(0, 2)).astype(sinks_N.dtype), None


def _attention_backward(
    softcap: float | None,
    tuning: Tuning,
    interpret: Interpret,
    residuals: Residuals,
    dout_BTNH: Array,
) -> tuple[Array, Array, Array, None]:
    dq, dk, dv = backward(*residuals, dout_BTNH, softcap, tuning, interpret)
    return dq, dk, dv, None


mosaic_attention.defvjp(_attention_forward, _attention_backward)
mosaic_attention_with_sinks.defvjp(_sinks_forward, _sinks_backward)
mosaic_attention_of_runs.defvjp(_runs_forward, partial(_attention_backward, None))
