"""Log-probabilities of chosen tokens from hidden states, without materialising the logits.

For 16k tokens and a vocabulary of 152k, float32 logits take 10 GB, and so does their gradient.
Here only one chunk of them exists at a time, forward and backward. The backward pass is a
`jax.custom_vjp` for two reasons. It accumulates the weight's gradient in float32 also for a bf16
weight, and it reuses the log-sum-exp, so that recomputing a chunk takes one matmul.

Shape letters: N tokens (possibly several axes), D model width, V vocabulary, K chunks, C tokens of
a chunk.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxrl_llm.kernels.head_chunks import (
    are_whole_chunks,
    chunk_by_chunk,
    chunk_logits,
    head_gradients,
    head_logits,
    in_chunks,
    join,
    num_chunks,
    over_whole_chunks,
    split,
    uncapped,
)
from jaxrl_llm.kernels.partial_softmax import soft_cap
from jaxrl_llm.kernels.strict import Strict
from jaxrl_llm.kernels.vocabulary_sums import sums_of_columns

Saved = tuple[Array, Array, Array, Array | None, Array, Array | None]


def linear_logprob(
    hidden_ND: Float[Array, "*N D"],
    weight_VD: Float[Array, "V D"],
    targets_N: Int[Array, " *N"],
    *,
    lengths: Int[Array, "*M"] | None = None,
    temperature: float = 1.0,
    chunk: int | None = None,
    with_entropy: bool = False,
    softcap: float | None = None,
    strict: Strict | None = None,
) -> tuple[Float[Array, " *N"], Float[Array, " *N"] | None]:
    """(log p(target), entropy or None) under softmax(hidden @ weight.T / temperature), in float32.

    `chunk` is the number of tokens whose logits exist at once, over all devices. None takes what
    fits 1 GiB. `lengths` ([] or [B]) is the number of tokens wanted per row, from its first. Chunks
    past the longest row are not computed. The entropy, in nats, costs one more sum over the logits.
    With a `softcap` logits x become softcap * tanh(x / softcap), before the temperature.

    Chunks split the last axis before D. Under a mesh pass [B, T, D] with B sharded: every device
    then works on its rows of every chunk, and no hidden state moves. The weight may be sharded over
    V, not over D. Its gradient is reduced across devices once per chunk, so prefer few, large
    chunks on many devices.

    With `strict`, all tokens are one axis, in chunks of `strict.rows`. A token's log-prob then has
    the bits of `strict_logprob` in any batch. `lengths` are of one row only, and nothing is capped.

    Guarantees: gradients flow through both results, and the weight's is accumulated in float32.
    Tokens of chunks that are not computed get 0 and no gradient. Other unwanted tokens get
    unspecified numbers.
    """
    assert strict is None or softcap is None, "config rules refuse both"
    tokens = {"vocab": weight_VD.shape[0], "lengths": lengths, "strict": strict}
    if strict is not None and not are_whole_chunks(targets_N, strict):

        def run(targets_X: Array, hidden_XD: Array, lengths: Array | None) -> Any:
            how: Any = {"temperature": temperature, "with_entropy": with_entropy, "strict": strict}
            return linear_logprob(hidden_XD, weight_VD, targets_X, lengths=lengths, **how)

        return over_whole_chunks(run, targets_N, hidden_ND, **tokens)
    (targets_KC, hidden_KCD), stop, join = in_chunks(targets_N, hidden_ND, chunk=chunk, **tokens)
    how = (temperature, softcap, with_entropy, strict is not None)
    return jax.tree.map(join, _scan(hidden_KCD, weight_VD, targets_KC, stop, *how))


def strict_logits(hidden_CD: Array, weight_VD: Array) -> Array:
    """float32 logits of a chunk, apart from what is computed before and after."""
    logits_CV = head_logits(jax.lax.optimization_barrier(hidden_CD), weight_VD)
    return jax.lax.optimization_barrier(logits_CV)


def strict_sums(logits_CV: Array, temperature: float) -> Array:
    """`sums_of_columns` of a chunk's logits over the temperature, as every caller has them."""
    logits_CV = jax.lax.optimization_barrier(logits_CV)
    return jax.lax.optimization_barrier(sums_of_columns(logits_CV / temperature))


def strict_logprob(
    logits_CV: Array, sums_CM: Array, targets_C: Array, temperature: float
) -> tuple[Array, Array]:
    """Log-probs of a chunk's targets, and the log-sum-exp of the logits over the temperature.

    Requires: a chunk as large as every other caller's, and its `strict_sums`.
    """
    inputs = jax.lax.optimization_barrier((logits_CV, sums_CM, targets_C))
    logits_CV, sums_CM, targets_C = inputs
    chosen_C = jnp.take_along_axis(logits_CV, targets_C[:, None], axis=-1, mode="clip")[:, 0]
    lse_C = jax.nn.logsumexp(sums_CM, axis=-1)
    return jax.lax.optimization_barrier((chosen_C / temperature - lse_C, lse_C))


def sum_squared_probs(
    hidden_ND: Float[Array, "*N D"],
    weight_VD: Float[Array, "V D"],
    *,
    temperature: float = 1.0,
    softcap: float | None = None,
    chunk: int | None = None,
) -> Float[Array, " *N"]:
    """Sum over the vocabulary of p^2, p = softmax(hidden @ weight.T / temperature), in float32.

    Shapes, `softcap` and `chunk` are as in `linear_logprob`. The result has no gradient.
    """
    shape = hidden_ND.shape[:-1]
    hidden_KCD = split(hidden_ND, len(shape) - 1, num_chunks(shape, weight_VD.shape[0], chunk))

    def body(_: None, hidden_CD: Array) -> tuple[None, Array]:
        logits_CV = chunk_logits(hidden_CD, weight_VD, temperature, softcap)
        lse_C = jax.nn.logsumexp(logits_CV, axis=-1)
        return None, jnp.sum(jnp.exp(2.0 * (logits_CV - lse_C[..., None])), axis=-1)

    squares_KC = jax.lax.scan(body, None, jax.lax.stop_gradient(hidden_KCD))[1]
    return join(squares_KC, shape[-1])


def linear_logprob_reference(
    hidden_ND: Float[Array, "*N D"],
    weight_VD: Float[Array, "V D"],
    targets_N: Int[Array, " *N"],
    *,
    temperature: float = 1.0,
    softcap: float | None = None,
) -> tuple[Float[Array, " *N"], Float[Array, " *N"]]:
    """`linear_logprob` with entropy from whole logits, in float32: what the tests compare with."""
    hidden_ND, weight_VD = hidden_ND.astype(jnp.float32), weight_VD.astype(jnp.float32)
    logits_NV = soft_cap(jnp.einsum("...d,vd->...v", hidden_ND, weight_VD), softcap) / temperature
    logprobs_NV = jax.nn.log_softmax(logits_NV)
    chosen_N = jnp.take_along_axis(logprobs_NV, targets_N[..., None], axis=-1)[..., 0]
    return chosen_N, -jnp.sum(jnp.exp(logprobs_NV) * logprobs_NV, axis=-1)


def _is_target(targets_C: Array, vocab: int) -> Array:
    # A comparison: a gather from logits that are sharded over the vocabulary would move them all.
    return targets_C[..., None] == jnp.arange(vocab, dtype=targets_C.dtype)


def _forward(
    hidden_KCD: Array,
    weight_VD: Array,
    targets_KC: Array,
    stop: Array | None,
    temperature: float,
    softcap: float | None,
    with_entropy: bool,
    strictly: bool,
) -> tuple[Array, Array, Array | None]:
    """(logprobs, log-sum-exp, entropy or None), each [K, C]."""

    def body(carry, chunk):
        hidden_CD, targets_C = chunk
        if strictly:
            logits_CV = strict_logits(hidden_CD, weight_VD)
            sums_CM = strict_sums(logits_CV, temperature)
            found_C, lse_C = strict_logprob(logits_CV, sums_CM, targets_C, temperature)
            entropy_C = _strict_entropy(logits_CV, lse_C, temperature) if with_entropy else None
            return carry, (found_C, lse_C, entropy_C)
        logits_CV = chunk_logits(hidden_CD, weight_VD, temperature, softcap)
        chosen_C, top_C, total_C, mean_C = _sums(logits_CV, targets_C, with_entropy)
        log_total_C = jnp.log(total_C)
        found_C = chosen_C - log_total_C
        entropy_C = None
        if mean_C is not None:
            # Not lse - sum(p * logits), a small difference of large numbers.
            entropy_C = log_total_C - mean_C / total_C
        return carry, (found_C, top_C + log_total_C, entropy_C)

    return chunk_by_chunk(body, None, (hidden_KCD, targets_KC), stop)[1]


def _sums(
    logits_CV: Array, targets_C: Array, with_mean: bool
) -> tuple[Array, Array, Array, Array | None]:
    """The target's logit less the maximum, the maximum, and the sum of p, not normalised.

    `with_mean` adds the sum of p times the logit less the maximum.

    All sums are of logits relative to their maximum, so that XLA reads the logits once.
    """
    top_C = jnp.max(logits_CV, axis=-1)
    relative_CV = logits_CV - top_C[..., None]
    weights_CV = jnp.exp(relative_CV)
    total_C = jnp.sum(weights_CV, axis=-1)
    is_target = _is_target(targets_C, logits_CV.shape[-1])
    chosen_C = jnp.sum(jnp.where(is_target, relative_CV, 0.0), axis=-1)
    mean_C = jnp.sum(weights_CV * relative_CV, axis=-1) if with_mean else None
    return chosen_C, top_C, total_C, mean_C


def _strict_entropy(logits_CV: Array, lse_C: Array, temperature: float) -> Array:
    """The entropy, apart from the log-probs: one pass over the logits."""
    logits_CV, lse_C = jax.lax.optimization_barrier((logits_CV, lse_C))
    logprobs_CV = logits_CV / temperature - lse_C[:, None]
    return -jnp.sum(jnp.exp(logprobs_CV) * logprobs_CV, axis=-1)


def _primal(*operands: Any) -> tuple[Array, Array | None]:
    logprobs, _, entropy = _forward(*operands)
    return logprobs, entropy


def _scan_fwd(*operands: Any) -> tuple[tuple[Array, Array | None], Saved]:
    logprobs, lse, entropy = _forward(*operands)
    hidden_KCD, weight_VD, targets_KC, stop, *_ = operands
    return (logprobs, entropy), (hidden_KCD, weight_VD, targets_KC, stop, lse, entropy)


def _scan_bwd(
    temperature: float,
    softcap: float | None,
    with_entropy: bool,
    strictly: bool,
    saved: Saved,
    grads: tuple[Array, Array | None],
) -> tuple[Array, Array, None, None]:
    """With z the logits over the temperature, p = softmax(z) and H the entropy:

    d logprob / dz = onehot - p;  dH / dz = -p (z - lse + H). `uncapped` goes on to the logits.
    """
    hidden_KCD, weight_VD, targets_KC, stop, lse_KC, entropy_KC = saved

    def grad_logits(hidden_CD, targets_C, lse_C, entropy_C, grad_C, grad_entropy_C):
        logits_CV = chunk_logits(hidden_CD, weight_VD, temperature, softcap)
        logprobs_CV = logits_CV - lse_C[..., None]
        weights_CV = grad_C[..., None]
        if with_entropy:
            weights_CV = weights_CV + grad_entropy_C[..., None] * (
                logprobs_CV + entropy_C[..., None]
            )
        is_target = _is_target(targets_C, weight_VD.shape[0])
        grad_logits_CV = jnp.where(is_target, grad_C[..., None], 0.0)
        grad_logits_CV = grad_logits_CV - jnp.exp(logprobs_CV) * weights_CV
        return uncapped(grad_logits_CV, logits_CV, temperature, softcap)

    kept = (targets_KC, lse_KC, entropy_KC, *grads)
    found = head_gradients(grad_logits, hidden_KCD, weight_VD, kept, stop, strictly=strictly)
    return *found, None, None


_scan = jax.custom_vjp(_primal, nondiff_argnums=(4, 5, 6, 7))
_scan.defvjp(_scan_fwd, _scan_bwd)
