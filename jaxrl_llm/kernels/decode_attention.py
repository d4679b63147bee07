"""Attention of one new token a row over its KV cache.

Shape letters: B rows, N query heads, K KV heads, G = N / K, S cache entries, H head dim. The cache
is [B, K, S, D]-like so that each head's keys are contiguous. Its whole length is read: entries
past a row's length cost time and must be finite (start the cache from zeros), not more.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def decode_attention(
    q_BNH: Float[Array, "B N H"],
    k_cache_BKSH: Float[Array, "B K S H"],
    v_cache_BKSH: Float[Array, "B K S H"],
    lengths_B: Int[Array, " B"],
    *,
    window: int | None = None,
) -> Float[Array, "B N H"]:
    """softmax(q k^T / sqrt(H)) v over the first `lengths_B` entries, in the dtype of q.

    `lengths_B` counts the valid entries, the current token's included, so the query stands at
    position lengths_B - 1. `window` keeps the last `window` of them. A row of length 0 gives 0.
    Raises ValueError for shapes that do not fit together.
    """
    _check(q_BNH, k_cache_BKSH, v_cache_BKSH, lengths_B)
    B, N, H = q_BNH.shape
    K = k_cache_BKSH.shape[1]
    q_BKGH = q_BNH.reshape(B, K, N // K, H)
    scores = jnp.einsum("BKGH,BKSH->BKGS", q_BKGH, k_cache_BKSH, preferred_element_type=jnp.float32)
    visible = _visible(k_cache_BKSH.shape[2], lengths_B, window)[:, None, None]
    scores = jnp.where(visible, scores * H**-0.5, jnp.finfo(jnp.float32).min)
    weights = jnp.where(visible, jax.nn.softmax(scores, axis=-1), 0.0).astype(v_cache_BKSH.dtype)
    return jnp.einsum("BKGS,BKSH->BKGH", weights, v_cache_BKSH).reshape(B, N, H)


def decode_attention_reference(
    q_BNH: Float[Array, "B N H"],
    k_cache_BKSH: Float[Array, "B K S H"],
    v_cache_BKSH: Float[Array, "B K S H"],
    lengths_B: Int[Array, " B"],
    *,
    window: int | None = None,
) -> Float[Array, "B N H"]:
    """The same in float32, KV heads repeated: what every implementation is compared with."""
    _check(q_BNH, k_cache_BKSH, v_cache_BKSH, lengths_B)
    groups = q_BNH.shape[1] // k_cache_BKSH.shape[1]
    k = jnp.repeat(k_cache_BKSH.astype(jnp.float32), groups, axis=1)
    v = jnp.repeat(v_cache_BKSH.astype(jnp.float32), groups, axis=1)
    scores = jnp.einsum("BNH,BNSH->BNS", q_BNH.astype(jnp.float32), k) / jnp.sqrt(k.shape[-1])
    visible = _visible(k.shape[2], lengths_B, window)[:, None]
    scores = jnp.where(visible, scores, -1e30)
    weights = jnp.where(visible, jnp.exp(scores - scores.max(-1, keepdims=True)), 0.0)
    weights = weights / jnp.maximum(weights.sum(-1, keepdims=True), 1e-30)
    return jnp.einsum("BNS,BNSH->BNH", weights, v)


def _visible(entries: int, lengths_B: Array, window: int | None) -> Array:
    """Which cache entries a row sees: bool [B, S]."""
    s = jnp.arange(entries)[None, :]
    visible = s < lengths_B[:, None]
    if window is not None:
        visible &= s >= lengths_B[:, None] - window
    return visible


def _check(q_BNH: Array, k_cache: Array, v_cache: Array, lengths_B: Array) -> None:
    B, N, H = q_BNH.shape
    _, K, S, _ = k_cache.shape
    if k_cache.shape != (B, K, S, H) or v_cache.shape != k_cache.shape or N % K:
        raise ValueError(
            f"q {q_BNH.shape} needs two caches of shape [{B}, divisor of {N}, entries, {H}], "
            f"not {k_cache.shape} and {v_cache.shape}"
        )
    if lengths_B.shape != (B,):
        raise ValueError(f"lengths has shape {lengths_B.shape}: give one length a row, ({B},)")
