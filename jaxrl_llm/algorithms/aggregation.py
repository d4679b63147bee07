"""Aggregation of a loss: from one value a token, [B, R], to one number.

Every function is f(x, mask, *, global_tokens, global_sequences). It returns the CONTRIBUTION of
these rows to the number of the whole mini-batch: it divides by the counts of the mini-batch, which
`global_counts` gives. So the results of micro-batches of any sizes add up, and gradient
accumulation equals the full batch. `prompt_mean` also takes `prompt_weights`, which the function of
that name gives.

A sequence with an empty mask adds 0 and is not counted.
"""

import functools
import inspect
from collections.abc import Callable

import jax.numpy as jnp

from jaxrl_llm.algorithms.shapes import SampleIds, Samples, Scalar, Tokens
from jaxrl_llm.numerics import masked_count, masked_mean, masked_sum, safe_divide


def global_counts(mask: Tokens) -> tuple[Scalar, Scalar]:
    """(tokens, sequences with a token) of the mask of a whole mini-batch, as float32."""
    return masked_count(mask), masked_count(jnp.max(mask, axis=1, initial=0.0))


def prompt_weights(mask: Tokens, group_ids: SampleIds) -> Samples:
    """The weight of each row's tokens in `prompt_mean`, from the mask of a whole mini-batch.

    It is 1 / (tokens of the row's prompt * prompts with a token), and 0 for a prompt without one.
    """
    tokens = masked_count(mask, axis=1)
    same = group_ids[:, None] == group_ids[None, :]
    of_prompt = jnp.sum(jnp.where(same, tokens[None, :], 0.0), axis=1)
    has_earlier = jnp.any(jnp.tril(same, k=-1), axis=1)
    prompts = jnp.sum(~has_earlier & (of_prompt > 0), dtype=jnp.float32)
    return safe_divide(jnp.ones_like(of_prompt), of_prompt * prompts)


def reads_prompts(aggregate: Callable[..., Scalar]) -> bool:
    """True if an aggregation takes `prompt_weights`."""
    return "prompt_weights" in inspect.signature(aggregate).parameters


def token_mean(
    x: Tokens, mask: Tokens, *, global_tokens: Scalar, global_sequences: Scalar
) -> Scalar:
    """Mean over all tokens: long responses weigh more. The default, and the choice of DAPO."""
    return safe_divide(masked_sum(x, mask), global_tokens)


def token_sum(
    x: Tokens, mask: Tokens, *, global_tokens: Scalar, global_sequences: Scalar
) -> Scalar:
    """Sum over all tokens without a division: the gradient grows with the batch."""
    return masked_sum(x, mask)


def seq_mean_token_sum(
    x: Tokens, mask: Tokens, *, global_tokens: Scalar, global_sequences: Scalar
) -> Scalar:
    """Mean over sequences of the sum over their tokens, as for the likelihood of responses."""
    return safe_divide(masked_sum(x, mask), global_sequences)


def seq_mean_token_mean(
    x: Tokens, mask: Tokens, *, global_tokens: Scalar, global_sequences: Scalar
) -> Scalar:
    """Mean over sequences of the mean over their tokens: all responses weigh the same (GRPO)."""
    return safe_divide(jnp.sum(masked_mean(x, mask, axis=1)), global_sequences)


def seq_mean_token_sum_norm(
    x: Tokens,
    mask: Tokens,
    *,
    global_tokens: Scalar,
    global_sequences: Scalar,
    scale: int | None = None,
) -> Scalar:
    """Mean over sequences of the sum over their tokens divided by a constant length (Dr.GRPO).

    `scale` is that length in tokens. None takes the padded width R, which must then be equal in all
    batches. Liu et al. 2025, arXiv:2503.20783.
    """
    return safe_divide(masked_sum(x, mask), global_sequences * (scale or mask.shape[1]))


def prompt_mean(
    x: Tokens,
    mask: Tokens,
    *,
    global_tokens: Scalar,
    global_sequences: Scalar,
    prompt_weights: Samples,
) -> Scalar:
    """Mean over prompts of the mean over the tokens of all their samples.

    All prompts weigh the same, and inside a prompt long responses weigh more. A prompt is the rows
    of a mini-batch with the same `group_ids`: where a mini-batch has only some of a prompt's
    samples, the mean is over these. ScaleRL, Khatri et al. 2025, arXiv:2510.13786.
    """
    return masked_sum(x * prompt_weights[:, None], mask)


# The names of verl's configs, and prompt-mean. Code uses the functions.
AGGREGATIONS: dict[str, Callable[..., Scalar]] = {
    "token-mean": token_mean,
    "token-sum": token_sum,
    "seq-mean-token-sum": seq_mean_token_sum,
    "seq-mean-token-mean": seq_mean_token_mean,
    "seq-mean-token-sum-norm": seq_mean_token_sum_norm,
    "prompt-mean": prompt_mean,
}


def aggregation(name: str, *, scale: int | None = None) -> Callable[..., Scalar]:
    """The aggregation of that name; `scale` is the length of `seq-mean-token-sum-norm`.

    Raises: ValueError for a scale that the named aggregation does not use.
    """
    if scale is None:
        return AGGREGATIONS[name]
    if name != "seq-mean-token-sum-norm":
        raise ValueError(
            f"a loss scale of {scale} with '{name}': it is the length, in tokens, by which "
            "seq-mean-token-sum-norm alone divides; leave it None otherwise"
        )
    return functools.partial(seq_mean_token_sum_norm, scale=scale)
