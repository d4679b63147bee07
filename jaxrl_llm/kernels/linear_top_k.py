"""Log-probabilities of K tokens per position from hidden states, without materialising logits.

`linear_logprob` explains chunks, dtypes, meshes and soft caps.

Shape letters: N positions (possibly several axes), D model width, V vocabulary, K tokens of a
position, G chunks, C positions of a chunk.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxrl_llm.kernels.head_chunks import (
    chunk_logits,
    head_gradients,
    join,
    num_chunks,
    split,
    uncapped,
)


def linear_logprobs_at(
    hidden_ND: Float[Array, "*N D"],
    weight_VD: Float[Array, "V D"],
    ids_NK: Int[Array, "*N K"],
    *,
    temperature: float = 1.0,
    softcap: float | None = None,
    chunk: int | None = None,
) -> Float[Array, "*N K"]:
    """log p(id) of K given tokens under softmax(hidden @ weight.T / temperature), in float32.

    The gradient flows to hidden and weight.

    Requires: the K ids of a position differ.
    """
    shape = hidden_ND.shape[:-1]
    number = num_chunks(shape, weight_VD.shape[0], chunk)
    hidden_GCD, ids_GCK = (split(x, len(shape) - 1, number) for x in (hidden_ND, ids_NK))
    return _join_each(_scan(hidden_GCD, weight_VD, ids_GCK, temperature, softcap), shape[-1])


def linear_top_k(
    hidden_ND: Float[Array, "*N D"],
    weight_VD: Float[Array, "V D"],
    k: int,
    *,
    temperature: float = 1.0,
    softcap: float | None = None,
    chunk: int | None = None,
) -> tuple[Int[Array, "*N K"], Float[Array, "*N K"]]:
    """The k likeliest tokens of each position, best first, and their log-probs; no gradient."""
    *_, tokens = shape = hidden_ND.shape[:-1]
    hidden_GCD = split(hidden_ND, len(shape) - 1, num_chunks(shape, weight_VD.shape[0], chunk))

    def body(_: None, hidden_CD: Array) -> tuple[None, tuple[Array, Array]]:
        logits_CV = chunk_logits(hidden_CD, weight_VD, temperature, softcap)
        top_CK, ids_CK = jax.lax.top_k(logits_CV, k)
        lse_C = jax.nn.logsumexp(logits_CV, axis=-1)
        return None, (ids_CK.astype(jnp.int32), top_CK - lse_C[..., None])

    ids, logprobs = jax.lax.scan(body, None, jax.lax.stop_gradient(hidden_GCD))[1]
    return _join_each(ids, tokens), jax.lax.stop_gradient(_join_each(logprobs, tokens))


def _join_each(x_GCK: Array, tokens: int) -> Array:
    return jax.vmap(lambda x_GC: join(x_GC, tokens), in_axes=-1, out_axes=-1)(x_GCK)


def _forward(
    hidden_GCD: Array,
    weight_VD: Array,
    ids_GCK: Array,
    temperature: float,
    softcap: float | None,
) -> tuple[Array, Array]:
    """(logprobs [G, C, K], log-sum-exp [G, C])."""

    def body(_: None, chunk: tuple[Array, Array]) -> tuple[None, tuple[Array, Array]]:
        hidden_CD, ids_CK = chunk
        logits_CV = chunk_logits(hidden_CD, weight_VD, temperature, softcap)
        lse_C = jax.nn.logsumexp(logits_CV, axis=-1)
        chosen_CK = jnp.take_along_axis(logits_CV, ids_CK, axis=-1)
        return None, (chosen_CK - lse_C[..., None], lse_C)

    return jax.lax.scan(body, None, (hidden_GCD, ids_GCK))[1]


def _primal(*operands: Any) -> Array:
    return _forward(*operands)[0]


def _scan_fwd(*operands: Any) -> tuple[Array, tuple[Array, Array, Array, Array]]:
    logprobs, lse = _forward(*operands)
    hidden_GCD, weight_VD, ids_GCK, *_ = operands
    return logprobs, (hidden_GCD, weight_VD, ids_GCK, lse)


def _scan_bwd(
    temperature: float,
    softcap: float | None,
    saved: tuple[Array, Array, Array, Array],
    grad_GCK: Array,
) -> tuple[Array, Array, None]:
    """With z the logits over the temperature, p = softmax(z):

    d sum_k g_k logprob_k / dz = sum_k g_k onehot_k - p sum_k g_k.
    """
    hidden_GCD, weight_VD, ids_GCK, lse_GC = saved
    vocabulary = jnp.arange(weight_VD.shape[0], dtype=ids_GCK.dtype)

    def grad_logits(hidden_CD: Array, ids_CK: Array, lse_C: Array, grad_CK: Array) -> Array:
        logits_CV = chunk_logits(hidden_CD, weight_VD, temperature, softcap)
        grad_logits_CV = -jnp.exp(logits_CV - lse_C[..., None]) * grad_CK.sum(-1, keepdims=True)
        # Comparisons: a scatter on a GPU adds in no fixed order.
        for k in range(ids_CK.shape[-1]):
            is_chosen_CV = ids_CK[..., k, None] == vocabulary
            grad_logits_CV += jnp.where(is_chosen_CV, grad_CK[..., k, None], 0.0)
        return uncapped(grad_logits_CV, logits_CV, temperature, softcap)

    saved_GC = (ids_GCK, lse_GC, grad_GCK)
    return *head_gradients(grad_logits, hidden_GCD, weight_VD, saved_GC), None


_scan = jax.custom_vjp(_primal, nondiff_argnums=(3, 4))
_scan.defvjp(_scan_fwd, _scan_bwd)
