"""Strict log-probs of a mixture of experts: batch, slots, rows and replay change no bit."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_strict import GROUP, MODEL, STRICT, N, P, R, compiled, generated, prompts, scored

from jaxrl_llm.kernels.strict import Strict
from jaxrl_llm.learner.micro_batches import Packed, Padded
from jaxrl_llm.learner.rows import ROUTES, rows_of, sample_fields
from jaxrl_llm.models.base import init_params, model_spec
from jaxrl_llm.models.config import Mixture

pytestmark = pytest.mark.nightly

__all__ = ["prompts"]

MIXTURE = Mixture(num_experts=5, experts_per_token=2, expert_size=24, normalized=True)
SPEC = model_spec(
    replace(MODEL, family="qwen3_moe", attention_bias=False, qk_norm=True, mixture=MIXTURE)
)
EVERY = np.arange(N)


@pytest.fixture(scope="module")
def params():
    return init_params(SPEC, jax.random.key(1))


@pytest.fixture(scope="module")
def samples(params, prompts):
    return generated(params, prompts, STRICT, EVERY, SPEC, group=GROUP, record_routes=True)


def fields_of(prompts, samples):
    arrays = map(jnp.asarray, (*prompts, samples.tokens, samples.lengths))
    return sample_fields(*arrays) | {"mask": jnp.asarray(samples.mask)}


def logprobs_of(params, fields, micro_batches, strict: Strict | None = STRICT):
    """Log-probs of all samples, of which `micro_batches` makes one part."""
    rows = rows_of(micro_batches.split(fields).at(0), None if strict is None else strict.align)
    return scored(params, rows, strict, SPEC)


def of_parts(params, fields, micro_batches, strict: Strict | None = STRICT):
    """The gradient of the sum of all log-probs, and these."""

    def loss(params, fields):
        found = logprobs_of(params, fields, micro_batches, strict)
        return (found * fields["mask"]).sum(), found

    # What is compared to rounding only is compiled fast.
    run = jax.jit if strict is None else compiled
    return run(jax.grad(loss, has_aux=True))(params, fields)


def equal_bits(found, expected, mask):
    seen = np.asarray(mask) > 0
    assert seen.sum() > 60
    np.testing.assert_array_equal(np.asarray(found)[seen], np.asarray(expected)[seen])


@pytest.mark.slow
def test_slots_and_batch_change_no_bit(params, prompts, samples):
    """The chosen experts are the same too."""
    chosen = np.arange(4, 9)
    found = generated(
        params, prompts, STRICT, chosen, SPEC, group=1, num_slots=3, record_routes=True
    )
    np.testing.assert_array_equal(found.tokens, samples.tokens[chosen])
    np.testing.assert_array_equal(found.routes, samples.routes[chosen])
    np.testing.assert_array_equal(
        found.logprobs * found.mask, (samples.logprobs * samples.mask)[chosen]
    )


def test_rows_with_a_gradient_have_the_samplers_bits(params, prompts, samples):
    """Padded rows that choose by themselves, and packed ones that replay the rollout."""
    fields = fields_of(prompts, samples)
    replayed = fields | {ROUTES: samples.routes}
    packed = Packed(row_tokens=600, group=GROUP, align=STRICT.align)
    assert int(packed.split(fields).num) == 1
    gradient, of_packed = of_parts(params, replayed, packed)
    of_padded = compiled(lambda *inputs: logprobs_of(*inputs, Padded()))(params, fields)
    for logprobs in (of_padded, of_packed):
        equal_bits(logprobs, samples.logprobs, samples.mask)
    expected, ordinary = of_parts(params, fields, Padded(), strict=None)
    seen = np.asarray(samples.mask) > 0
    assert (np.asarray(ordinary) != np.asarray(samples.logprobs))[seen].any(), "it could not fail"
    np.testing.assert_allclose(
        np.asarray(ordinary)[seen], np.asarray(samples.logprobs)[seen], rtol=1e-4, atol=1e-5
    )
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=3e-4), gradient, expected
    )


@pytest.mark.slow
@pytest.mark.parametrize("given", [(0, 1), (4, 2)])
def test_adversarial_routings_have_the_same_bits_in_all_rows(params, prompts, samples, given):
    """Every token is sent to the same two experts."""
    fields = fields_of(prompts, samples)
    routes = np.broadcast_to(np.int8(given), (N, P + R, 1, 2))
    fields |= {ROUTES: jnp.asarray(routes)}
    packed = Packed(row_tokens=600, group=GROUP, align=STRICT.align)
    _, found = of_parts(params, fields, packed)
    _, expected = of_parts(params, fields, Padded())
    equal_bits(found, expected, samples.mask)
    assert (np.asarray(found) != np.asarray(samples.logprobs))[np.asarray(samples.mask) > 0].any()
