"""States of a gated delta rule in the engine: slots, groups, tails, and the trainer's log-probs."""

import functools

import jax
import numpy as np
from tiny import HYBRID, MODEL

from jaxrl_llm.generation.engine import generate
from jaxrl_llm.generation.packed_prompts import RowSizes
from jaxrl_llm.generation.sampler import SamplingParams
from jaxrl_llm.generation.session import Engine, EngineSettings
from jaxrl_llm.generation.settings import GenerationSettings
from jaxrl_llm.learner.forward import ForwardSettings, response_logprobs
from jaxrl_llm.learner.rows import packed_rows, padded_rows, plan_packing
from jaxrl_llm.models.base import init_params, model_spec
from jaxrl_llm.models.families import config_from_hf

P, R, GROUPS, GROUP, VOCAB = 6, 10, 4, 3, 24
N = GROUPS * GROUP
SPEC = model_spec(config_from_hf(MODEL | HYBRID | {"vocab_size": VOCAB}))
SAMPLING = SamplingParams(max_new_tokens=R, stop_token_ids=(1, 2))


@functools.cache
def params():
    found = jax.jit(lambda key: init_params(SPEC, key))(jax.random.key(3))
    # Larger than at the start of training, so that contexts matter and lengths are uneven.
    return jax.tree.map(lambda x: np.asarray(x) * 6 if x.ndim > 1 else x, found)


def prompts():
    rng = np.random.default_rng(0)
    lengths = np.array([1, 6, 2, 4], np.int32)  # one token: its state is empty
    tokens = rng.integers(3, VOCAB, (GROUPS, P)).astype(np.int32)
    tokens = np.where(np.arange(P) < lengths[:, None], tokens, 9999)  # padding reaches nothing
    return tokens.repeat(GROUP, axis=0), lengths.repeat(GROUP)


@functools.cache
def run(**options):
    settings = GenerationSettings(sampling=SAMPLING, pad_id=VOCAB - 1, **options)
    ids = np.arange(N, dtype=np.uint32)

    @jax.jit
    def go(params):
        return generate(SPEC, params, *prompts(), ids, jax.random.key(1), settings)

    return jax.tree.map(np.asarray, go(params()))


def test_samples_do_not_depend_on_slots():
    """Slots that are refilled, moved together or waiting have the states of their own samples."""
    found = run(
        num_slots=5,
        group=GROUP,
        prefill=RowSizes(rows=1, tokens=13, prompts=3),
        tail_slots=(2,),
        cache_tokens=28,
        tokens_a_page=2,
    )
    whole = run()
    lengths = whole.mask.sum(axis=1)
    assert lengths.min() < 4 and lengths.max() == R
    assert found.stalled_slot_steps > 0 and found.prefills > 1
    np.testing.assert_array_equal(found.tokens, whole.tokens)
    np.testing.assert_allclose(found.logprobs, whole.logprobs, atol=1e-5)


def test_a_tail_carries_the_states_of_its_own_slots():
    """A loop that also held the other slots' states would write them in each step on a GPU."""
    how = {"num_slots": 5, "group": GROUP, "tail_slots": (2,)}
    settings = GenerationSettings(sampling=SAMPLING, pad_id=VOCAB - 1, **how)
    ids = np.arange(N, dtype=np.uint32)

    def go(params):
        return generate(SPEC, params, *prompts(), ids, jax.random.key(1), settings)

    # The value heads, value and key dims of the memories that a loop carries.
    memory = SPEC.config.delta.value_heads, SPEC.config.delta.value_dim, SPEC.config.delta.key_dim
    carried = [
        {
            aval.shape[0]
            for aval in equation.params["body_jaxpr"].out_avals
            if aval.shape[1:] == memory
        }
        for equation in jax.make_jaxpr(go)(params()).eqns
        if equation.primitive.name == "while"
    ]
    prompts_and = {GROUPS}  # a prompt has a row of its own
    assert carried == [prompts_and | {5}, prompts_and | {2}]


def test_log_probs_are_those_of_the_trainer():
    """In padded rows, and in packed rows whose responses share a prompt."""
    whole, (tokens, lengths) = run(), prompts()
    of_responses = whole.mask.sum(axis=1).astype(np.int32)
    samples = tokens, lengths, whole.tokens

    @jax.jit
    def padded(params):
        how = {"spec": SPEC, "settings": ForwardSettings()}
        return response_logprobs(params, padded_rows(*samples, None, of_responses), **how)[0]

    @jax.jit
    def packed(params):
        plan = plan_packing(lengths, of_responses, row_tokens=40, group=GROUP, num_replicas=1)

        def row(part):
            rows = packed_rows(plan, part, *samples, of_responses)
            how = {"spec": SPEC, "settings": ForwardSettings()}
            return response_logprobs(params, rows, **how)[0]

        return jax.lax.map(row, np.arange(N)).sum(axis=0)

    for logprobs in (padded, packed):
        found = np.asarray(logprobs(params())) * whole.mask
        np.testing.assert_allclose(found, whole.logprobs, atol=2e-5)


def test_sessions_keep_a_state_in_its_slot():
    """Each answer is the batch loop's, also when a slot is taken again or waits for its turn."""
    whole, (tokens, lengths) = run(num_slots=0), prompts()
    settings = EngineSettings(
        max_context=P + R, num_slots=3, cache_tokens=100, stop_ids=(1, 2), steps=4,
        sampling=SamplingParams(max_new_tokens=R),
    )  # fmt: skip
    engine = Engine(SPEC, params(), settings)
    key = np.asarray(jax.random.key_data(jax.random.key(1)))
    sequences = [
        engine.add(tokens[i, : lengths[i]].tolist(), limit=3, seed_key=key, sample_id=i)
        for i in range(N)
    ]
    while engine.has_work:
        for each in engine.step():
            if each.status == "waiting" and each.stop_reason == "length" and len(each.response) < R:
                engine.append(each, [], limit=R - len(each.response))
            elif each.status == "waiting":
                engine.finish(each)
    for i, each in enumerate(sequences):
        assert each.response == whole.tokens[i][whole.mask[i] == 1].tolist()
