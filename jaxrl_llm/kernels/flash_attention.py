"""Attention of whole rows: cuDNN's or our kernels' on an NVIDIA GPU, XLA's elsewhere.

Shape letters: B batch, T query tokens, S key tokens (T == S), N query heads, K KV heads,
G = N / K query heads a KV head, H head dim.

Rows are padded on the right, so under a causal mask no real token sees padding and `lengths` is
needed only without one. Packed rows, prompts shared by several responses and padding anywhere are
described by a `Visibility` instead.
"""

from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from jaxrl_llm.kernels.flash_attention_mosaic import (
    ATTENTION,
    HEAD_DIMS,
    SCHEDULE,
    default_tuning,
    hopper_attention,
)
from jaxrl_llm.kernels.hopper import on_hopper
from jaxrl_llm.kernels.visibility import Visibility, packed_visibility

__all__ = [
    "ATTENTION",
    "SCHEDULE",
    "Implementation",
    "Visibility",
    "attention",
    "attention_reference",
    "chosen_attention",
    "packed_visibility",
    "visible_keys",
]

# By head dim, tokens of plain causal rows on which our kernels take no longer than cuDNN, both
# passes together, but for 1 % at 4,096 and head dim 128 (measured on an H200: docs/benchmarks.md).
AHEAD = {
    64: range(1024, 4096 + 1),
    96: range(1024, 16384 + 1),  # measured at 1,024, 4,096 and 16,384
    128: range(1024, 4096 + 1),
}

# "exact" is "auto" without cuDNN, whose gradient adds up in no fixed order.
Implementation = Literal["auto", "exact", "pallas", "cudnn", "xla"]


def attention(
    q_BTNH: Float[Array, "B T N H"],
    k_BTKH: Float[Array, "B T K H"],
    v_BTKH: Float[Array, "B T K H"],
    *,
    causal: bool = True,
    window: int | None = None,
    lengths: Int[Array, " B"] | None = None,
    visibility: Visibility | None = None,
    implementation: Implementation = "auto",
) -> Float[Array, "B T N H"]:
    """softmax(q k^T / sqrt(H)) v with grouped KV heads, in the dtype of q.

    `window` lets a token see the last `window` positions, its own included; it needs `causal`.
    `lengths` (int32, tokens) hides keys at or past a row's length; outputs of queries there are 0.
    `visibility` says instead, token by token, which keys are seen; what its padding tokens hold
    (NaN too) reaches no output and no gradient, and theirs are 0.
    "cudnn" runs on an NVIDIA GPU in bf16 or float16 with H a multiple of 8 and at most 256, and an
    odd T costs a padded copy there; it takes no visibility. "pallas" is our kernels for Hopper:
    bf16, H of 64, 96, 128 or 256, T best a multiple of 128, gradients the same bits every run; on
    several devices it needs the mesh in scope (`jax.set_mesh`) or a shard_map around it, without
    which each computes all rows. "auto" takes what was measured to be fastest, both passes together
    (`chosen_attention`), "exact" the same of those whose gradient has the same bits in every run.
    ValueError for shapes that do not fit.
    """
    _check(q_BTNH, k_BTKH, v_BTKH, causal, window, lengths, visibility)
    T, H = q_BTNH.shape[1], q_BTNH.shape[3]
    plain = causal and window is None and lengths is None and visibility is None
    implementation = chosen_attention(
        implementation,
        q_BTNH.dtype,
        H,
        ranges=visibility is not None,
        plain_length=T if plain else None,
    )
    masks: dict[str, Any] = dict(causal=causal, window=window, lengths=lengths)
    if implementation == "pallas":
        return hopper_attention(q_BTNH, k_BTKH, v_BTKH, **masks, visibility=visibility)
    if implementation == "cudnn":
        if visibility is not None:
            raise ValueError("cudnn attention takes no visibility: use pallas, xla or auto")
        out_BTNH = _attention_cudnn(q_BTNH, k_BTKH, v_BTKH, causal, window, lengths)
        return checkpoint_name(out_BTNH, ATTENTION)
    if implementation == "xla":
        out_BTNH = _attention_xla(q_BTNH, k_BTKH, v_BTKH, **masks, visibility=visibility)
        return checkpoint_name(out_BTNH, ATTENTION)
    raise ValueError(f"attention implementation {implementation!r}: use pallas, auto, cudnn or xla")


def attention_reference(
    q_BTNH: Float[Array, "B T N H"],
    k_BTKH: Float[Array, "B T K H"],
    v_BTKH: Float[Array, "B T K H"],
    *,
    causal: bool = True,
    window: int | None = None,
    lengths: Int[Array, " B"] | None = None,
    visibility: Visibility | None = None,
) -> Float[Array, "B T N H"]:
    """The same in float32, KV heads repeated: what every implementation is compared with."""
    _check(q_BTNH, k_BTKH, v_BTKH, causal, window, lengths, visibility)
    q_BTNH, k_BTKH, v_BTKH = (_zero_unseeing(x, visibility) for x in (q_BTNH, k_BTKH, v_BTKH))
    groups = q_BTNH.shape[2] // k_BTKH.shape[2]
    q = q_BTNH.astype(jnp.float32)
    k = jnp.repeat(k_BTKH.astype(jnp.float32), groups, axis=2)
    v = jnp.repeat(v_BTKH.astype(jnp.float32), groups, axis=2)
    scores = jnp.einsum("BTNH,BSNH->BNTS", q, k) / jnp.sqrt(q.shape[-1])
    visible = visible_keys(q.shape[1], causal, window, lengths, visibility)[:, None]
    scores = jnp.where(visible, scores, -1e30)
    weights = jnp.where(visible, jnp.exp(scores - scores.max(-1, keepdims=True)), 0.0)
    weights = weights / jnp.maximum(weights.sum(-1, keepdims=True), 1e-30)
    out = jnp.einsum("BNTS,BSNH->BTNH", weights, v)
    return _zero_unseeing(_zero_padding(out, lengths), visibility)


def visible_keys(
    length: int,
    causal: bool,
    window: int | None,
    lengths: Int[Array, " B"] | None,
    visibility: Visibility | None = None,
) -> Array:
    """Which key each query sees: bool [B or 1, T, S]."""
    if visibility is not None:
        return visibility.dense()
    t, s = jnp.arange(length)[:, None], jnp.arange(length)[None, :]
    visible = jnp.ones((1, length, length), bool)
    if causal:
        visible &= s <= t
    if window is not None:
        visible &= s > t - window
    if lengths is not None:
        visible = visible & (s < lengths[:, None, None])
    return visible


def _attention_xla(
    q_BTNH: Array,
    k_BSKH: Array,
    v_BSKH: Array,
    causal: bool,
    window: int | None,
    lengths: Array | None,
    visibility: Visibility | None,
) -> Array:
    q_BTNH, k_BSKH, v_BSKH = (_zero_unseeing(x, visibility) for x in (q_BTNH, k_BSKH, v_BSKH))
    B, T, N, H = q_BTNH.shape
    K = k_BSKH.shape[2]
    q_BTKGH = q_BTNH.reshape(B, T, K, N // K, H)
    scores = jnp.einsum("BTKGH,BSKH->BKGTS", q_BTKGH, k_BSKH, preferred_element_type=jnp.float32)
    visible = visible_keys(T, causal, window, lengths, visibility)[:, None, None]
    # Not -inf: a row with no visible key would turn into NaN, and its gradient with it.
    scores = jnp.where(visible, scores * H**-0.5, jnp.finfo(jnp.float32).min)
    weights = jax.nn.softmax(scores, axis=-1).astype(v_BSKH.dtype)
    out_BTKGH = jnp.einsum("BKGTS,BSKH->BTKGH", weights, v_BSKH)
    return _zero_unseeing(_zero_padding(out_BTKGH.reshape(B, T, N, H), lengths), visibility)


def _attention_cudnn(
    q_BTNH: Array,
    k_BSKH: Array,
    v_BSKH: Array,
    causal: bool,
    window: int | None,
    lengths: Array | None,
) -> Array:
    # A dense mask would be materialised as a bias: causality, window and lengths go in by name.
    B, T = q_BTNH.shape[:2]
    if lengths is not None:
        lengths = lengths.astype(jnp.int32)
    if T % 2:
        # JAX refuses the backward pass of an odd length (it takes an absent bias for a bias). One
        # more token at the end changes nothing for the others, once no query can see it.
        if not causal and lengths is None:
            lengths = jnp.full(B, T, jnp.int32)
        q_BTNH, k_BSKH, v_BSKH = (
            jnp.pad(x, ((0, 0), (0, 1), (0, 0), (0, 0))) for x in (q_BTNH, k_BSKH, v_BSKH)
        )
    out = jax.nn.dot_product_attention(
        q_BTNH,
        k_BSKH,
        v_BSKH,
        is_causal=causal,
        local_window_size=None if window is None else (window - 1, 0),
        query_seq_lengths=lengths,
        key_value_seq_lengths=lengths,
        implementation="cudnn",
    )
    return out[:, :T]


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


def chosen_attention(
    implementation: Implementation,
    dtype: Any,
    head_dim: int,
    *,
    ranges: bool,
    plain_length: int | None = None,
) -> Implementation:
    """What runs for that word; `ranges` says whether rows come with a `Visibility`.

    `plain_length` is the tokens of rows that are causal and no more. On others than those of
    `AHEAD`, as on whole rows of other kinds, cuDNN's backward pass is ahead of ours, or was when
    that was last measured, or nothing was measured.
    """
    if implementation not in ("auto", "exact"):
        return implementation
    half = dtype in (jnp.bfloat16, jnp.float16)
    cudnn_fits = half and head_dim % 8 == 0 and head_dim <= 256 and _on_nvidia_gpu()
    pallas_fits = dtype == jnp.bfloat16 and head_dim in HEAD_DIMS and on_hopper()
    ahead = (
        plain_length is not None
        and plain_length in AHEAD.get(head_dim, ())
        and default_tuning(head_dim, plain=True).padded(plain_length) == plain_length
    )
    if not ranges and implementation == "auto" and cudnn_fits and not (pallas_fits and ahead):
        return "cudnn"
    return "pallas" if pallas_fits else "xla"


def _on_nvidia_gpu() -> bool:
    if jax.default_backend() != "gpu":
        return False
    return "cuda" in jax.devices()[0].client.platform_version


def _check(
    q_BTNH: Array,
    k: Array,
    v: Array,
    causal: bool,
    window: int | None,
    lengths: Array | None,
    visibility: Visibility | None,
) -> None:
    B, T, N, H = q_BTNH.shape
    K = k.shape[2]
    if k.shape != (B, T, K, H) or v.shape != k.shape:
        raise ValueError(
            f"q {q_BTNH.shape} needs k and v of shape [{B}, {T}, KV heads, {H}], "
            f"not {k.shape} and {v.shape}"
        )
    if N % K:
        raise ValueError(f"{N} query heads cannot share {K} KV heads: give a divisor of {N}")
    if window is not None and (window < 1 or not causal):
        raise ValueError(f"window {window} with causal={causal}: a window is at least 1 and causal")
    if visibility is None:
        return
    if not causal or window is not None or lengths is not None:
        raise ValueError(
            "visibility says all of which keys a token sees: leave causal, window and lengths out "
            "(packed_visibility takes a window)"
        )
    if visibility.start_BT.shape != (B, T):
        raise ValueError(f"visibility {visibility.start_BT.shape} for rows of shape {(B, T)}")
