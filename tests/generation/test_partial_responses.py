"""A response that is cut and goes on, and which policy may add how many tokens to it."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pieces import Pieces
from test_generation import P, R, model, prompts

from jaxrl_llm.distributed.layout import generation_layout
from jaxrl_llm.distributed.mesh import make_mesh
from jaxrl_llm.generation.engine import Samples, generate, generate_on_mesh
from jaxrl_llm.generation.partial_responses import (
    ResponseParts,
    Responses,
    append,
    are_unfinished,
    join,
    join_routes,
    routes_in_place,
    versions_of,
)
from jaxrl_llm.generation.sampler import SamplingParams
from jaxrl_llm.generation.settings import GenerationSettings
from jaxrl_llm.generation.stop_strings import stop_strings
from jaxrl_llm.models.base import init_params, model_spec

STRINGS = stop_strings(("aba", "bbb"), Pieces())
SAMPLING = SamplingParams(max_new_tokens=R, stop_token_ids=(1, 2, 5), stop_strings=STRINGS)
FILTERED = replace(SAMPLING, top_k=12, top_p=0.95, temperature=2.0)


def under(version, out):
    """The responses that the policy of a version sampled."""
    versions = versions_of(out.mask, version)
    return Responses(out.tokens, out.lengths, out.mask, out.logprobs, versions, out.kept)


@pytest.mark.parametrize(
    ("family", "sampling"),
    [
        ("qwen2", SAMPLING),
        ("qwen2", FILTERED),
        pytest.param("gpt_oss", SAMPLING, marks=pytest.mark.slow),
    ],
    ids=["qwen2", "filters", "gpt_oss"],
)
def test_a_response_in_parts_has_the_tokens_of_one_go(family, sampling):
    spec = model_spec(replace(model(family)[0].config, max_position_embeddings=P + 2 * R))
    params = init_params(spec, jax.random.key(3))
    params = jax.tree.map(lambda x: x * 6 if x.ndim > 1 else x, params)
    tokens, lengths, ids = prompts(5)
    mixed = spec.config.mixture is not None
    settings = GenerationSettings(
        sampling=sampling, num_slots=3, record_routes=mixed, record_kept=sampling is FILTERED
    )

    @jax.jit
    def both(params):
        key = jax.random.key(7)
        whole = generate(spec, params, tokens, lengths, ids, key, settings)
        limits = jnp.full(5, 4)
        first = generate(spec, params, tokens, lengths, ids, key, settings, limits_N=limits)
        parts = under(0, first)
        go_on = are_unfinished(parts, lengths, sampling)
        rows, longer = join(tokens, lengths, parts)
        longer, begun = jnp.where(go_on, longer, 0), parts.lengths_N
        rest = generate(
            spec, params, rows, longer, ids, key, settings, limits_N=R - begun, begun_N=begun
        )
        routes = None
        if first.routes is not None:
            place = partial(routes_in_place, prompt=P, response=R)
            routes = join_routes(first.routes, place(rest.routes, lengths, begun))
        return whole, first.mask, append(parts, under(3, rest)), routes

    whole, first, joined, routes = jax.tree.map(np.asarray, both(params))
    assert 0 < (whole.mask.sum(axis=1) > 4).sum() < 5  # some go on, some had ended
    np.testing.assert_array_equal(joined.mask_NR, whole.mask)
    np.testing.assert_array_equal(joined.lengths_N, whole.lengths)
    np.testing.assert_array_equal(joined.tokens_NR * whole.mask, whole.tokens * whole.mask)
    np.testing.assert_allclose(joined.logprobs_NR, whole.logprobs, atol=1e-5)
    expected = np.where(whole.mask == 0, -1, np.where(first == 1, 0, 3))
    np.testing.assert_array_equal(joined.versions_NR, expected)
    assert (joined.kept_NRK is not None) == (sampling is FILTERED)
    if joined.kept_NRK is not None:
        np.testing.assert_array_equal(joined.kept_NRK, whole.kept)
        found = (whole.kept == whole.tokens[..., None]).any(axis=-1)
        np.testing.assert_array_equal(found, whole.mask > 0)  # each token is one of those kept
    assert mixed == (routes is not None)
    if mixed:
        np.testing.assert_array_equal(routes, whole.routes)


def test_experts_of_parts_come_to_their_places():
    """One layer, one expert: numbers tell where each token's experts come from."""
    # A prompt of 2 of 3 tokens and 4 new ones. Of the first part 2 tokens, the last of them unread.
    before = jnp.array([[10, 11, -1, 12, -1, -1, -1], [10, 11, -1, 12, -1, -1, -1]])
    # The second part's prompts have 3 + 4 tokens. The second row does not go on.
    found = jnp.array([[20, 21, 22, 23, -1, -1, -1, 24, -1, -1, -1], [-1] * 11])
    place = partial(routes_in_place, prompt=3, response=4)
    after = place(found[..., None, None], jnp.array([2, 2]), jnp.array([2, 2]))
    joined = join_routes(before[..., None, None], after)[..., 0, 0]
    assert joined[0].tolist() == [10, 11, -1, 12, 23, 24, -1]
    assert joined[1].tolist() == before[1].tolist()
    # Of a new response, whose prompts the call made as wide.
    new = jnp.array([[30, 31, -1, -1, -1, -1, -1, 32, 33, 34, -1]])
    found = place(new[..., None, None], jnp.array([2]), jnp.array([0]))[..., 0, 0]
    assert found.tolist() == [[30, 31, -1, 32, 33, 34, -1]]


@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.slow), 1.0])
def test_responses_that_go_on_share_slots_with_new_ones(temperature):
    """Two calls give the same tokens, each row has its own key, and fewer steps are taken."""
    spec = model_spec(replace(model("qwen2")[0].config, max_position_embeddings=P + 2 * R))
    params = jax.tree.map(
        lambda x: x * 6 if x.ndim > 1 else x, init_params(spec, jax.random.key(3))
    )
    tokens, lengths, ids = prompts(3)
    twice = [jnp.repeat(x, 2, axis=0) for x in (tokens, lengths, ids)]
    new = Samples(
        twice[0], twice[1], jnp.arange(6, dtype=jnp.uint32), jax.random.key(7), None, None
    )
    sampling = SamplingParams(max_new_tokens=R, temperature=temperature)
    settings = GenerationSettings(sampling=sampling, group=2, num_slots=4)
    # One long response and one that is over: a call of their own would leave slots idle.
    older = jnp.pad(tokens, ((0, 0), (0, R)))
    keys = jax.random.split(jax.random.key(8), 3)
    going = jnp.where(jnp.arange(3) == 1, 0, lengths)
    limits, begun = jnp.array([R, R, 2]), jnp.array([1, 0, 2])
    continued = Samples(older, going, ids, keys, limits, begun)
    new = new._replace(limits=jnp.array([1, 2, R, 1, 3, R]))

    @jax.jit
    def run(params):
        single = replace(settings, group=1)
        first = generate(
            spec, params, *continued[:4], single, limits_N=continued.limits, begun_N=continued.begun
        )
        second = generate(spec, params, *new[:4], settings, limits_N=new.limits)
        layout = generation_layout(make_mesh(data=1), 2)
        both = generate_on_mesh(
            spec,
            params,
            *new[:4],
            settings,
            layout=layout,
            limits_N=new.limits,
            continued=jax.tree.map(lambda x: x[:, None], _in_pairs(continued)),
        )
        return first, second, both

    first, second, both = jax.tree.map(np.asarray, run(params))
    for name in ("tokens", "mask"):
        np.testing.assert_array_equal(getattr(both, name), getattr(second, name))
        np.testing.assert_array_equal(getattr(both.continued, name)[:3, 0], getattr(first, name))
    np.testing.assert_allclose(both.continued.logprobs[:3, 0], first.logprobs, atol=1e-5)
    assert both.steps[0] < first.steps + second.steps


def _in_pairs(continued):
    """As many rows as there are new ones: the others have no prompt."""
    return jax.tree.map(lambda x: jnp.concatenate([x, x]), continued)._replace(
        lengths=jnp.concatenate([continued.lengths, jnp.zeros_like(continued.lengths)])
    )


def test_the_newest_policy_takes_a_response_to_its_end():
    parts = ResponseParts(max_staleness=2, tokens=3)
    assert [int(parts.first_version(jnp.int32(step))) for step in (1, 2, 3, 4, 5)] == [
        *(0, 0, 0, 1, 2)
    ]
    limits = [int(parts.limit(jnp.int32(v), jnp.int32(5), 12)) for v in (2, 3, 4)]
    assert limits == [3, 3, 12]
