"""Forward passes over samples: log-probs, values and scores of responses.

A row is a prompt followed at once by its response, padded on the right, so causal attention alone
keeps padding out of every real token. Shape letters: B samples, P prompt, R response, T = P + R,
D hidden.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxrl_llm.kernels.flash_attention import Implementation, attention
from jaxrl_llm.kernels.linear_logprob import linear_logprob
from jaxrl_llm.learner.train_state import Params, cast
from jaxrl_llm.models.base import ModelSpec, bind


@dataclass(frozen=True, kw_only=True)
class ForwardSettings:
    """How a role's forward pass is computed, whatever its loss."""

    dtype: str = "float32"
    attention: Implementation = "auto"
    remat: bool = False
    gather: Callable[[Params], Params] = lambda params: params  # storage layout -> layout of use


def join_rows(
    prompts: Int[Array, "B P"],
    prompt_lengths: Int[Array, " B"],
    responses: Int[Array, "B R"],
) -> Int[Array, "B T"]:
    """Rows of prompt + response without a gap; what follows a response is its own padding."""
    num_prompt, num_response = prompts.shape[1], responses.shape[1]
    position = jnp.arange(num_prompt + num_response)
    from_prompt = jnp.broadcast_to(
        jnp.minimum(position, num_prompt - 1), (prompts.shape[0], position.size)
    )
    offset = jnp.clip(position - prompt_lengths[:, None], 0, num_response - 1)
    return jnp.where(
        position < prompt_lengths[:, None],
        jnp.take_along_axis(prompts, from_prompt, axis=1),
        jnp.take_along_axis(responses, offset, axis=1),
    )


def hidden_states(model: Any, tokens: Int[Array, "B T"], settings: ForwardSettings) -> Array:
    """Final hidden states [B, T, D] of a bound model, by full causal attention."""

    def attend(q: Array, k: Array, v: Array, cache: None, *, window: int | None):
        out = attention(q, k, v, causal=True, window=window, implementation=settings.attention)
        return out, cache

    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    hidden, _ = model(tokens, positions, attend=attend, remat=settings.remat)
    return hidden


def prepare(spec: ModelSpec, params: Params, settings: ForwardSettings) -> Any:
    """The module to compute with: cast first, so that a gather moves the smaller dtype."""
    return bind(spec, settings.gather(cast(params, settings.dtype)))


def _response_hidden(
    model: Any,
    settings: ForwardSettings,
    prompts: Int[Array, "B P"],
    prompt_lengths: Int[Array, " B"],
    responses: Int[Array, "B R"],
) -> Float[Array, "B R D"]:
    """Hidden states of the positions that predict each response token."""
    hidden = hidden_states(model, join_rows(prompts, prompt_lengths, responses), settings)
    index = prompt_lengths[:, None] - 1 + jnp.arange(responses.shape[1])
    return jnp.take_along_axis(hidden, jnp.maximum(index, 0)[..., None], axis=1)


def response_logprobs(
    params: Params,
    prompts: Int[Array, "B P"],
    prompt_lengths: Int[Array, " B"],
    responses: Int[Array, "B R"],
    *,
    spec: ModelSpec,
    settings: ForwardSettings,
    temperature: float = 1.0,
    with_entropy: bool = False,
) -> tuple[Float[Array, "B R"], Float[Array, "B R"] | None]:
    """Log-prob of each response token, and the entropy there (nats) when it is asked for.

    `temperature` must be the sampler's, or the ratio of the two log-probs is not a ratio of
    the same policy. A greedy rollout (0) is scored at 1.
    """
    model = prepare(spec, params, settings)
    hidden = _response_hidden(model, settings, prompts, prompt_lengths, responses)
    return linear_logprob(
        hidden,
        model.unembedding(),
        responses,
        temperature=temperature or 1.0,
        with_entropy=with_entropy,
    )


def response_values(
    params: Params,
    prompts: Int[Array, "B P"],
    prompt_lengths: Int[Array, " B"],
    responses: Int[Array, "B R"],
    *,
    spec: ModelSpec,
    settings: ForwardSettings,
) -> Float[Array, "B R"]:
    """Value of the state before each response token, float32."""
    model = prepare(spec, params, settings)
    hidden = _response_hidden(model, settings, prompts, prompt_lengths, responses)
    return model.scores(hidden)


def response_scores(
    params: Params,
    prompts: Int[Array, "B P"],
    prompt_lengths: Int[Array, " B"],
    responses: Int[Array, "B R"],
    mask: Float[Array, "B R"],
    *,
    spec: ModelSpec,
    settings: ForwardSettings,
) -> Float[Array, " B"]:
    """Reward model's score, read at the last token of the response, float32."""
    tokens = join_rows(prompts, prompt_lengths, responses)
    lengths = prompt_lengths + mask.sum(axis=1).astype(jnp.int32)
    return row_scores(params, tokens, lengths, spec=spec, settings=settings)


def row_scores(
    params: Params,
    tokens: Int[Array, "B T"],
    lengths: Int[Array, " B"],
    *,
    spec: ModelSpec,
    settings: ForwardSettings,
) -> Float[Array, " B"]:
    """Score at the last real token of each row, float32."""
    model = prepare(spec, params, settings)
    hidden = hidden_states(model, tokens, settings)
    last = jnp.maximum(lengths - 1, 0)[:, None, None]
    return model.scores(jnp.take_along_axis(hidden, last, axis=1))[:, 0]


def row_logprobs(
    params: Params,
    tokens: Int[Array, "B T"],
    *,
    spec: ModelSpec,
    settings: ForwardSettings,
) -> Float[Array, "B T"]:
    """Log-prob of each token given those before it; 0 at position 0, which nothing predicts."""
    model = prepare(spec, params, settings)
    hidden = hidden_states(model, tokens, settings)[:, :-1]
    logprobs, _ = linear_logprob(hidden, model.unembedding(), tokens[:, 1:])
    return jnp.pad(logprobs, ((0, 0), (1, 0)))


def in_micro_batches(
    fn: Callable[..., Any], num_micro_batches: int, *arrays: Array, shard: Callable[[Any], Any]
) -> Any:
    """fn over equal slices of the samples, one after the other, its outputs joined again.

    `shard` constrains a stacked [M, B/M, ...] array so that each slice spreads over the mesh.
    """
    if num_micro_batches == 1:
        return fn(*arrays)
    stacked = shard(split_micro_batches(arrays, num_micro_batches))
    _, out = jax.lax.scan(lambda carry, slices: (carry, fn(*slices)), None, stacked)
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), out)


def split_micro_batches(tree: Any, num_micro_batches: int) -> Any:
    """[B, ...] -> [M, B/M, ...] on every array of a pytree."""
    split = partial(_split, num_micro_batches=num_micro_batches)
    return jax.tree.map(split, tree)


def _split(x: Array, *, num_micro_batches: int) -> Array:
    assert x.shape[0] % num_micro_batches == 0, (x.shape, num_micro_batches)
    return x.reshape(num_micro_batches, x.shape[0] // num_micro_batches, *x.shape[1:])
