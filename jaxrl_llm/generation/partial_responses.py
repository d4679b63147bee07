"""Partial rollouts: a response is interrupted after some tokens and continued by newer weights.

The batch of step t begins with the policy of version b = max(0, t - 1 - max_staleness); a version
counts updates. Each version from b to t - 2 adds at most `tokens` tokens to a response that has not
ended. Version t - 1, the newest before the step, generates the rest. So the step and the length of
a response decide where it is interrupted, never a clock.

Shape letters: N samples, P prompt tokens, R response tokens, K tokens that filters keep at most.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.generation.sampler import SamplingParams

NO_VERSION = -1  # the version of a token that no policy sampled


@dataclass(frozen=True, kw_only=True)
class ResponseParts:
    """Lengths of the parts of a response. Versions and steps may be traced."""

    max_staleness: int  # 1 or more
    tokens: int  # most tokens of a part, 1 or more

    def first_version(self, step: jax.Array) -> jax.Array:
        """The policy that begins the responses of `step`."""
        return jnp.maximum(step - 1 - self.max_staleness, 0)

    def limit(self, version: jax.Array, step: jax.Array, longest: int) -> jax.Array:
        """New tokens that a response of `step` may get under policy `version`."""
        return jnp.where(version >= step - 1, longest, self.tokens).astype(jnp.int32)


class Responses(NamedTuple):
    """Responses so far, each padded on the right."""

    tokens_NR: jax.Array
    lengths_N: jax.Array  # int32
    mask_NR: jax.Array  # 1 for a sampled token
    logprobs_NR: jax.Array  # under the policy that sampled the token
    versions_NR: jax.Array  # int32, version of this policy; NO_VERSION outside of the mask
    kept_NRK: jax.Array | None = None  # ids of the tokens that filters kept; None without filters

    def last_N(self, x_NR: jax.Array) -> jax.Array:
        """The entry of each response's last token; of an empty one the first."""
        at_N1 = jnp.maximum(self.lengths_N - 1, 0)[:, None]
        return jnp.take_along_axis(x_NR, at_N1, axis=1)[:, 0]


def versions_of(mask_NR: jax.Array, version: jax.Array | int) -> jax.Array:
    """The version of each token of responses that one policy sampled, int32 [N, R]."""
    return jnp.where(mask_NR > 0, version, NO_VERSION).astype(jnp.int32)


def are_unfinished(
    responses: Responses, prompt_lengths_N: jax.Array, sampling: SamplingParams
) -> jax.Array:
    """True for each response that was cut before its end, bool [N]; False without a prompt."""
    cut_N = responses.lengths_N < responses.tokens_NR.shape[1]
    stopped_N = sampling.have_ended(responses.tokens_NR, responses.lengths_N)
    return cut_N & ~stopped_N & (prompt_lengths_N > 0)


def join(
    prompts_NP: jax.Array, prompt_lengths_N: jax.Array, responses: Responses
) -> tuple[jax.Array, jax.Array]:
    """Prompt and response as one prompt, [N, P + R], padded on the right; its length [N]."""
    room = responses.tokens_NR.shape[1]
    whole_NT = jnp.pad(prompts_NP, ((0, 0), (0, room)))
    moved_NT = _moved(responses.tokens_NR, prompt_lengths_N, whole_NT.shape[1])
    begins_N1 = prompt_lengths_N[:, None]
    places_T = jnp.arange(whole_NT.shape[1])
    return jnp.where(places_T < begins_N1, whole_NT, moved_NT), (
        prompt_lengths_N + responses.lengths_N
    )


def append(responses: Responses, new: Responses) -> Responses:
    """Each response with the tokens of `new` after its own.

    Requires: both together have R tokens at most.
    """
    room, lengths_N = responses.tokens_NR.shape[1], responses.lengths_N
    places_R = jnp.arange(room)
    longer_N = lengths_N + new.lengths_N
    added_NR = (places_R >= lengths_N[:, None]) & (places_R < longer_N[:, None])

    def joined(before: jax.Array, after: jax.Array) -> jax.Array:
        added = added_NR.reshape(*added_NR.shape, *[1] * (before.ndim - 2))
        return jnp.where(added, _moved(after, lengths_N, room), before)

    kept = responses.kept_NRK, new.kept_NRK

    return Responses(
        tokens_NR=joined(responses.tokens_NR, new.tokens_NR),
        lengths_N=longer_N,
        mask_NR=joined(responses.mask_NR, new.mask_NR),
        logprobs_NR=joined(responses.logprobs_NR, new.logprobs_NR),
        versions_NR=joined(responses.versions_NR, new.versions_NR),
        kept_NRK=None if kept[0] is None or kept[1] is None else joined(kept[0], kept[1]),
    )


def routes_in_place(
    part_NSLK: jax.Array,
    prompt_lengths_N: jax.Array,
    begun_N: jax.Array,
    *,
    prompt: int,
    response: int,
) -> jax.Array:
    """The experts of each sample's prompt and response, [N, P + R, L, K], P being `prompt`.

    `part_NSLK` is the engine's record of a part. Its prompts end with the first `begun_N` tokens
    of the response, and its new tokens are the last `response` places.
    """
    place_T, lengths_N1, begun_N1 = (
        jnp.arange(prompt + response), prompt_lengths_N[:, None], begun_N[:, None]
    )  # fmt: skip
    column_T = place_T - prompt
    new_N = part_NSLK.shape[1] - response + column_T - begun_N1
    of_response_NT = jnp.where(column_T < begun_N1, lengths_N1 + column_T, new_N)
    from_NT = jnp.where(column_T < 0, place_T, of_response_NT)
    none_NT = (column_T < 0) & (place_T >= lengths_N1)
    routes = jnp.take_along_axis(part_NSLK, from_NT[..., None, None], axis=1)
    return jnp.where(none_NT[..., None, None], -1, routes)


def join_routes(before: jax.Array, after: jax.Array) -> jax.Array:
    """The experts that each token had when it was first read to choose the next one.

    A part computes the tokens before it again, under newer weights: those experts do not count.
    """
    return jnp.where(before >= 0, before, after)


def _moved(x: jax.Array, by_N: jax.Array, width: int) -> jax.Array:
    """Each row of [N, R, ...] moved to the right by its number of places; any values before it."""
    from_NT = jnp.clip(jnp.arange(width) - by_N[:, None], 0, x.shape[1] - 1)
    return jnp.take_along_axis(x, from_NT.reshape(*from_NT.shape, *[1] * (x.ndim - 2)), axis=1)
