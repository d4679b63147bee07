"""Attention of whole rows in plain jax.numpy: the float32 reference and XLA's implementation.

Shape letters: see common.py.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm.kernels.flash_attention.visibility import Visibility
from jaxrl_llm.kernels.head_chunks import split
from jaxrl_llm.kernels.partial_softmax import soft_cap, softmax_with_sinks
from jaxrl_llm.kernels.strict import Block, Runs, Strict, attend_in_blocks

# Queries whose scores XLA's attention holds at once: with 32 heads and 8,192 keys, 1 GiB.
MOST_QUERIES = 1024


def attention_reference(
    q_BTNH: Float[Array, "B T N H"],
    k_BTKH: Float[Array, "B S K H"],
    v_BTKH: Float[Array, "B S K H"],
    *,
    causal: bool = True,
    window: int | None = None,
    lengths: Int[Array, " B"] | None = None,
    visibility: Visibility | None = None,
    sinks: Float[Array, " N"] | None = None,
    softcap: float | None = None,
) -> Float[Array, "B T N H"]:
    """The attention in float32 with repeated KV heads: what every implementation must equal.

    Raises: ValueError as `attention` does.
    """
    check_inputs(q_BTNH, k_BTKH, v_BTKH, causal, window, lengths, visibility)
    q_BTNH = _zero_unseeing(q_BTNH, visibility)
    k_BTKH, v_BTKH = (_zero_unseen(x, visibility) for x in (k_BTKH, v_BTKH))
    groups = q_BTNH.shape[2] // k_BTKH.shape[2]
    q = q_BTNH.astype(jnp.float32)
    k = jnp.repeat(k_BTKH.astype(jnp.float32), groups, axis=2)
    v = jnp.repeat(v_BTKH.astype(jnp.float32), groups, axis=2)
    scores = soft_cap(jnp.einsum("BTNH,BSNH->BNTS", q, k) / jnp.sqrt(q.shape[-1]), softcap)
    visible = visible_keys(k.shape[1], causal, window, lengths, visibility)[:, None]
    scores = jnp.where(visible, scores, -1e30)
    if sinks is not None:  # one more key, whose value is 0
        column = jnp.broadcast_to(sinks.astype(jnp.float32)[:, None, None], (*scores.shape[:3], 1))
        scores = jnp.concatenate([scores, column], axis=-1)
        visible = jnp.concatenate([visible, visible.any(-1, keepdims=True)], axis=-1)
    weights = jnp.where(visible, jnp.exp(scores - scores.max(-1, keepdims=True)), 0.0)
    weights = weights / jnp.maximum(weights.sum(-1, keepdims=True), 1e-30)
    out = jnp.einsum("BNTS,BSNH->BTNH", weights[..., : v.shape[1]], v)
    return _zero_unseeing(_zero_padding(out, lengths), visibility)


def attention_xla(
    q_BTNH: Array,
    k_BSKH: Array,
    v_BSKH: Array,
    causal: bool,
    window: int | None,
    lengths: Array | None,
    visibility: Visibility | None,
    sinks_N: Array | None = None,
    softcap: float | None = None,
) -> Array:
    """The attention by XLA, which materialises the scores of MOST_QUERIES queries at once."""
    q_BTNH = _zero_unseeing(q_BTNH, visibility)
    k_BSKH, v_BSKH = (_zero_unseen(x, visibility) for x in (k_BSKH, v_BSKH))
    B, T, N, H = q_BTNH.shape
    K = k_BSKH.shape[2]
    visible_BTS = visible_keys(k_BSKH.shape[1], causal, window, lengths, visibility)
    sinks_KG11 = None if sinks_N is None else sinks_N.reshape(K, N // K, 1, 1)

    def attend(q_BtKGH: Array, visible_BtS: Array, k_BSKH: Array, v_BSKH: Array) -> Array:
        scores = jnp.einsum(
            "BTKGH,BSKH->BKGTS", q_BtKGH, k_BSKH, preferred_element_type=jnp.float32
        )
        # Not -inf: a row without a visible key would become NaN, and so would its gradient.
        scores = soft_cap(scores * H**-0.5, softcap)
        visible = visible_BtS[:, None, None]
        scores = jnp.where(visible, scores, jnp.finfo(jnp.float32).min)
        weights = softmax_with_sinks(scores, sinks_KG11).astype(v_BSKH.dtype)
        return jnp.einsum("BKGTS,BSKH->BTKGH", weights, v_BSKH)

    q_BTKGH = q_BTNH.reshape(B, T, K, N // K, H)
    if T <= MOST_QUERIES:
        out_BTKGH = attend(q_BTKGH, visible_BTS, k_BSKH, v_BSKH)
    else:
        out_BTKGH = _in_parts(attend, q_BTKGH, visible_BTS, k_BSKH, v_BSKH)
    return _zero_unseeing(_zero_padding(out_BTKGH.reshape(B, T, N, H), lengths), visibility)


def _in_parts(
    attend: Callable[..., Array], q_BTKGH: Array, visible_BTS: Array, k_BSKH: Array, v_BSKH: Array
) -> Array:
    """`attend` for a part of the queries after the other, in the backward pass too.

    The gradients of keys and values are summed over the parts in float32.
    """
    T, dtype = q_BTKGH.shape[1], k_BSKH.dtype
    number = -(-T // MOST_QUERIES)
    keys, values = (x.astype(jnp.float32) for x in (k_BSKH, v_BSKH))

    @jax.checkpoint
    def part(q_BtKGH: Array, visible_BtS: Array) -> Array:
        return attend(q_BtKGH, visible_BtS, keys.astype(dtype), values.astype(dtype))

    queries = split(q_BTKGH, 1, number), split(visible_BTS, 1, number)
    out = jax.lax.map(lambda one: part(*one), queries)  # [parts, B, T / parts, K, G, H]
    out = jnp.moveaxis(out, 0, 2)
    return out.reshape(out.shape[0], -1, *out.shape[3:])[:, :T]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def attention_strict(
    strict: Strict, q_BTNH: Array, k_BSKH: Array, v_BSKH: Array, visibility: Visibility
) -> Array:
    """The attention with a fixed order of sums, by XLA; see `kernels.strict`.

    A token's keys are the keys of its prefix, then of its run, each in blocks from its first.
    The gradient equals the gradient of `attention_xla`.
    """
    B, T, N, H = q_BTNH.shape
    (_, S, K, _), block = k_BSKH.shape, strict.block
    row_X = jnp.repeat(jnp.arange(B), T)
    none_BT, token_BT = jnp.zeros((B, T), jnp.int32), jnp.broadcast_to(jnp.arange(T), (B, T))
    start_BT = jnp.broadcast_to(visibility.start_BT, (B, T))
    end_BT = jnp.where(start_BT <= token_BT, token_BT + 1, start_BT)
    first, first_end = visibility.prefix_start_BT, visibility.prefix_end_BT
    if first is None or first_end is None:
        first = first_end = none_BT
    runs = Runs(*(x.reshape(-1) for x in (first, first_end, start_BT, end_BT)))

    def block_at(place: tuple[Array, Runs], step: Array) -> Block:
        row_C, runs = place
        _, key_CJ, has_CJ = runs.block(step, block)
        index_CJ = row_C[:, None] * S + jnp.clip(key_CJ, 0, S - 1)
        k_CJKH, v_CJKH = (x.reshape(B * S, K, H)[index_CJ] for x in (k_BSKH, v_BSKH))
        return k_CJKH, v_CJKH, has_CJ

    q_XNH, steps_X = q_BTNH.reshape(B * T, N, H), runs.steps(block)
    out = attend_in_blocks(strict, q_XNH, steps_X, (row_X, runs), block_at)
    return out.reshape(q_BTNH.shape)


def _strict_backward(
    strict: Strict, residuals: tuple[Array, Array, Array, Visibility], gradient: Array
) -> tuple[Array, Array, Array, None]:
    *operands, visibility = residuals

    def plain(q: Array, k: Array, v: Array) -> Array:
        return attention_xla(q, k, v, True, None, None, visibility)

    return *jax.vjp(plain, *operands)[1](gradient), None


attention_strict.defvjp(
    lambda *operands: (attention_strict(*operands), operands[1:]), _strict_backward
)


def visible_keys(
    length: int,
    causal: bool,
    window: int | None,
    lengths: Int[Array, " B"] | None,
    visibility: Visibility | None = None,
) -> Bool[Array, "#B T S"]:
    """Which of `length` keys each query sees: bool [B or 1, T, S]."""
    if visibility is not None:
        return visibility.dense(length)
    t, s = jnp.arange(length)[:, None], jnp.arange(length)[None, :]
    visible = jnp.ones((1, length, length), bool)
    if causal:
        visible &= s <= t
    if window is not None:
        visible &= s > t - window
    if lengths is not None:
        visible = visible & (s < lengths[:, None, None])
    return visible


def check_inputs(
    q_BTNH: Array,
    k_BTKH: Array,
    v_BTKH: Array,
    causal: bool,
    window: int | None,
    lengths: Array | None,
    visibility: Visibility | None,
) -> None:
    """Assert that shapes and masks fit together."""
    B, T, N, H = q_BTNH.shape
    K = k_BTKH.shape[2]
    of_part = visibility is not None and visibility.last_BT is not None
    keys = k_BTKH.shape[1] if of_part else T
    assert k_BTKH.shape == v_BTKH.shape == (B, keys, K, H), (k_BTKH.shape, v_BTKH.shape)
    assert N % K == 0, (N, K)
    if visibility is not None:  # it says all of which keys a token sees
        assert causal and window is None and lengths is None
        assert visibility.start_BT.shape == (B, T), visibility.start_BT.shape


def _zero_padding(out_BTNH: Array, lengths: Array | None) -> Array:
    if lengths is None:
        return out_BTNH
    real = jnp.arange(out_BTNH.shape[1])[None, :] < lengths[:, None]
    return jnp.where(real[:, :, None, None], out_BTNH, 0)


def _zero_unseeing(x_BTNH: Array, visibility: Visibility | None) -> Array:
    """Zeros for the tokens that see nothing, whatever they hold."""
    if visibility is None:
        return x_BTNH
    return jnp.where(visibility.real()[:, :, None, None], x_BTNH, 0)


def _zero_unseen(x_BSKH: Array, visibility: Visibility | None) -> Array:
    """`_zero_unseeing` of keys, where each query has its key; keys of other queries are finite."""
    if visibility is None or visibility.last_BT is not None:
        return x_BSKH
    return _zero_unseeing(x_BSKH, visibility)
