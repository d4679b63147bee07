"""Strict log-probs: the sampler's have the bits of the trainer's, whatever the batch and the rows.

The same samples are also scored by the ordinary forward pass, which must agree up to rounding.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import model_config

from jaxrl_llm.generation.engine import generate
from jaxrl_llm.generation.sampler import SamplingParams
from jaxrl_llm.generation.settings import GenerationSettings
from jaxrl_llm.kernels.strict import Strict
from jaxrl_llm.learner.forward import ForwardSettings, response_statistics
from jaxrl_llm.learner.rows import packed_rows, padded_rows, plan_packing
from jaxrl_llm.models.base import init_params, model_spec

MODEL = model_config(
    vocab_size=520,  # two rows of sums
    hidden_size=40,
    intermediate_size=72,
    num_layers=1,
    sliding_window=(None,),
    head_dim=12,
    max_position_embeddings=64,
    initializer_range=0.2,
)
SPEC = model_spec(MODEL)
GROUPS, GROUP, P, R = 4, 3, 21, 18
N = GROUPS * GROUP
STRICT = Strict(rows=16, block=8, align=8)
TEMPERATURE = 0.7
# As users have it. Tests leave out LLVM's optimisation and a pass of XLA to compile fast. Without
# them equal operations may become code that rounds differently, which depends on the processor.
OPTIONS = {
    "xla_backend_optimization_level": 3,
    "xla_llvm_disable_expensive_passes": False,
    "xla_disable_hlo_passes": "",
}
compiled = partial(jax.jit, compiler_options=OPTIONS)


@pytest.fixture(scope="module")
def params():
    return init_params(SPEC, jax.random.key(0))


@pytest.fixture(scope="module")
def prompts():
    """Prompts of 1 to 21 tokens, each for three samples."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(4, MODEL.vocab_size, (GROUPS, P)).repeat(GROUP, axis=0)
    return tokens, np.array([21, 1, 8, 13]).repeat(GROUP)


def generated(params, prompts, strict, chosen, spec=SPEC, top_p=1.0, **how):
    """What the engine gives for the chosen samples."""
    sampling = SamplingParams(
        max_new_tokens=R, stop_token_ids=(1, 2, 3), temperature=TEMPERATURE, top_p=top_p
    )
    settings = GenerationSettings(sampling=sampling, strict=strict, **how)
    key = jax.random.key(3, impl="threefry2x32")
    run = compiled(lambda params, *arrays: generate(spec, params, *arrays, key, settings))
    return run(params, *(x[chosen] for x in prompts), chosen)


def sampled(params, prompts, strict, chosen, **how):
    """Tokens, mask and log-probs of the chosen samples."""
    found = generated(params, prompts, strict, chosen, **how)
    return tuple(np.asarray(x) for x in (found.tokens, found.mask, found.logprobs))


@pytest.fixture(scope="module")
def samples(params, prompts):
    return sampled(params, prompts, STRICT, np.arange(N), group=GROUP)


def scored(params, rows, strict: Strict | None, spec=SPEC, kept=None):
    found = response_statistics(
        params,
        rows,
        spec=spec,
        settings=ForwardSettings(strict=strict),
        temperature=TEMPERATURE,
        with_entropy=True,
        kept=kept,
    )
    return found.logprobs


def equal_bits(found, samples, chosen=slice(None)):
    _, mask, logprobs = samples
    seen = mask[chosen] > 0
    assert seen.sum() > 20
    np.testing.assert_array_equal(np.asarray(found)[seen], logprobs[chosen][seen])


@pytest.mark.parametrize(
    ("chosen", "how"),
    [
        (np.arange(4, 9), {"group": 1, "num_slots": 3}),
        pytest.param(np.arange(N), {"group": GROUP, "num_slots": 5}, marks=pytest.mark.slow),
    ],
    ids=["a part of the batch in fewer slots", "fewer slots"],
)
def test_slots_and_batch_change_no_bit(params, prompts, samples, chosen, how):
    tokens, mask, logprobs = sampled(params, prompts, STRICT, chosen, **how)
    np.testing.assert_array_equal(tokens, samples[0][chosen])
    np.testing.assert_array_equal(mask, samples[1][chosen])
    equal_bits(logprobs, samples, chosen)


@pytest.mark.nightly
def test_drafts_change_no_bit(params, prompts):
    """Nearly greedy samples, which repeat what their group has written."""
    how = {"top_p": 0.05, "group": GROUP, "num_slots": 8, "tail_slots": (8,)}
    plain, drafted = (
        generated(params, prompts, STRICT, np.arange(N), drafts=n, **how) for n in (0, 3)
    )
    np.testing.assert_array_equal(drafted.tokens, plain.tokens)
    np.testing.assert_array_equal(drafted.logprobs, plain.logprobs)
    assert drafted.drafts_accepted > 0


def test_padded_rows_have_the_samplers_bits(params, prompts, samples):
    # Arguments of the program: XLA folds what it computes from constants in bits of its own.
    arrays = tuple(map(jnp.asarray, (*prompts, samples[0])))

    def run(strict, align):
        compile_ = jax.jit if strict is None else compiled  # the ordinary one: to rounding
        return compile_(lambda *args: scored(args[0], padded_rows(*args[1:], align), strict))(
            params, *arrays
        )

    equal_bits(run(STRICT, STRICT.align), samples)
    ordinary, seen = np.asarray(run(None, None)), samples[1] > 0
    np.testing.assert_allclose(ordinary[seen], samples[2][seen], rtol=1e-4, atol=1e-5)
    assert (ordinary != samples[2])[seen].any(), "this test could not fail"


@pytest.mark.nightly
@pytest.mark.parametrize("group", [GROUP, pytest.param(1, marks=pytest.mark.slow)])
def test_packed_rows_with_a_gradient_have_the_samplers_bits(params, prompts, samples, group):
    """And the gradient equals the ordinary forward pass's."""
    tokens, mask, _ = samples
    arrays = tuple(map(jnp.asarray, (*prompts, tokens, mask.sum(axis=1).astype(np.int32))))

    def loss(params, row, plan, arrays, strict):
        logprobs = scored(params, packed_rows(plan, row, *arrays), strict)
        return logprobs.sum(), logprobs

    sums = []
    for strict in (STRICT, None):
        align = None if strict is None else strict.align
        sizes = {"row_tokens": 70, "group": group, "num_replicas": 1}
        plan = plan_packing(arrays[1], arrays[3], align=align, **sizes)
        compile_ = (
            jax.jit if strict is None else compiled
        )  # the ordinary one is compared to rounding
        run = compile_(jax.grad(partial(loss, strict=strict), has_aux=True))
        found = [run(params, jnp.int32(row), plan, arrays) for row in range(int(plan.num_rows))]
        assert len(found) > 2
        sums.append(jax.tree.map(lambda *x: sum(map(np.asarray, x)), *found))
    equal_bits(sums[0][1], samples)
    close = partial(np.testing.assert_allclose, rtol=1e-3, atol=2e-4)
    jax.tree.map(close, sums[0][0], sums[1][0])


@pytest.mark.nightly
@pytest.mark.parametrize("packed", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_log_probs_over_kept_tokens_have_the_samplers_bits(params, prompts, packed):
    """And a part of the batch in fewer slots has the same tokens and bits."""
    every = np.arange(N)
    how = {"top_p": 0.95, "record_kept": True}
    out = generated(params, prompts, STRICT, every, group=GROUP, **how)
    samples = tuple(np.asarray(x) for x in (out.tokens, out.mask, out.logprobs))
    few = generated(params, prompts, STRICT, every[4:9], num_slots=3, **how)
    np.testing.assert_array_equal(few.tokens, samples[0][4:9])
    equal_bits(few.logprobs, samples, slice(4, 9))
    arrays = tuple(map(jnp.asarray, (*prompts, out.tokens, out.lengths)))
    sizes = {"row_tokens": 70, "group": GROUP, "num_replicas": 1, "align": STRICT.align}
    plan = plan_packing(arrays[1], arrays[3], **sizes)

    def loss(params, row, plan, arrays, kept):
        if packed:
            rows = packed_rows(plan, row, *arrays)
        else:
            rows = padded_rows(*arrays[:3], STRICT.align, arrays[3])
        logprobs = scored(params, rows, STRICT, kept=kept)
        return logprobs.sum(), logprobs

    run = compiled(jax.grad(loss, has_aux=True))
    number = int(plan.num_rows) if packed else 1
    found = [run(params, jnp.int32(row), plan, arrays, out.kept)[1] for row in range(number)]
    equal_bits(sum(map(np.asarray, found)), samples)
    assert not np.array_equal(scored(params, padded_rows(*arrays[:3]), None), out.logprobs)
