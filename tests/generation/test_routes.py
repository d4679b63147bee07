"""Routing replay: the rollout records the experts of every token, and the trainer takes them."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from further import further
from tiny import model_config

from jaxrl_llm.generation.engine import generate
from jaxrl_llm.generation.sampler import SamplingParams
from jaxrl_llm.generation.settings import GenerationSettings
from jaxrl_llm.learner.forward import ForwardSettings, response_statistics
from jaxrl_llm.learner.micro_batches import Packed, Padded
from jaxrl_llm.learner.rows import ROUTES, rows_of, sample_fields
from jaxrl_llm.models.base import init_params, model_spec
from jaxrl_llm.models.config import Mixture

VOCAB, P, R, GROUP = 23, 5, 7, 2
MIXTURE = Mixture(num_experts=6, experts_per_token=2, expert_size=8, normalized=True)
SPEC = model_spec(
    model_config(
        family="qwen3_moe", vocab_size=VOCAB, attention_bias=False, qk_norm=True, mixture=MIXTURE
    )
)
ROWS = {"padded": Padded(), "packed": Packed(row_tokens=40, group=GROUP)}


@pytest.fixture(scope="module")
def params():
    found = init_params(SPEC, jax.random.key(3))
    return jax.tree.map(lambda x: x * 6 if x.ndim > 1 else x, found)


@pytest.fixture(scope="module")
def rollout(params):
    """Samples of three prompts, one of them empty, and what the engine says of them."""
    rng = np.random.default_rng(1)
    lengths = np.repeat([3, 0, 5], GROUP).astype(np.int32)
    prompts = np.repeat(rng.integers(1, VOCAB, (3, P)), GROUP, axis=0).astype(np.int32)
    sampling = SamplingParams(max_new_tokens=R, stop_token_ids=(1, 2, 5, 7))
    settings = GenerationSettings(
        sampling=sampling, group=GROUP, num_slots=3, pad_id=0, record_routes=True
    )
    key, ids = jax.random.key(7), np.arange(6, dtype=np.uint32)
    run = jax.jit(lambda params: generate(SPEC, params, prompts, lengths, ids, key, settings))
    out = run(params)
    fields = sample_fields(jnp.asarray(prompts), jnp.asarray(lengths), out.tokens, out.lengths)
    return out, fields | {ROUTES: out.routes}


def passed(params, fields, kind):
    """Log-probs, and for each token of the rows its experts and the recorded ones."""

    if kind == "packed":
        assert int(ROWS[kind].split(fields).num) == 1
    return jax.tree.map(np.asarray, pass_over(params, fields, kind))


@partial(jax.jit, static_argnames="kind")
def pass_over(params, fields, kind):
    part = ROWS[kind].split(fields).at(0)
    rows = rows_of(part)
    found = response_statistics(params, rows, spec=SPEC, settings=ForwardSettings())
    recorded = rows.routes if ROUTES in fields else None
    return found.logprobs, jnp.moveaxis(found.routed.chosen_BTK, 0, 2), recorded, rows.real


@pytest.mark.parametrize("kind", further(ROWS))
def test_the_record_is_the_choice_of_a_plain_pass(params, rollout, kind):
    out, fields = rollout
    assert out.routes.dtype == jnp.int8
    assert out.routes.shape == (6, P + R, 2, 2)
    without = {name: x for name, x in fields.items() if name != ROUTES}
    _, own, _, real = passed(params, without, kind)
    logprobs, taken, recorded, _ = passed(params, fields, kind)
    known = (recorded >= 0).all(axis=(2, 3))
    # Nothing reads the last token of a response: it alone has no record.
    lengths = np.asarray(fields["response_lengths"])
    assert real.sum() - known.sum() == (lengths > 0).sum() >= 4
    if kind == "padded":  # an empty prompt has padding only
        assert real[2:4].sum() == 0
    np.testing.assert_array_equal(own[known], recorded[known])
    np.testing.assert_array_equal(taken[real], own[real])
    mask = np.asarray(out.mask)
    np.testing.assert_allclose(logprobs * mask, out.logprobs, atol=1e-4)


@pytest.mark.parametrize("kind", [pytest.param("padded", marks=pytest.mark.slow), "packed"])
def test_a_changed_router_takes_the_recorded_experts(params, rollout, kind):
    _, fields = rollout
    without = {name: x for name, x in fields.items() if name != ROUTES}
    changed = jax.tree.map_with_path(
        lambda path, x: (
            x + 3 * jax.random.normal(jax.random.key(0), x.shape) if "router" in str(path) else x
        ),
        params,
    )
    _, own, _, _ = passed(changed, without, kind)
    _, taken, recorded, _ = passed(changed, fields, kind)
    known = (recorded >= 0).all(axis=(2, 3))
    assert (own[known] != recorded[known]).mean() > 0.2
    np.testing.assert_array_equal(taken[known], recorded[known])
