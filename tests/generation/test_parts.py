"""Responses in parts: other policies go on, and one policy gives the response of one go."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pieces import Pieces
from test_generation import P, R, model, prompts

from jaxrl_llm.arguments import seed_of
from jaxrl_llm.config import Config, DataConfig, ModelSettings
from jaxrl_llm.distributed.mesh import make_mesh
from jaxrl_llm.distributed.multihost import HostRows
from jaxrl_llm.generation.engine import generate
from jaxrl_llm.generation.sampler import SamplingParams
from jaxrl_llm.generation.settings import GenerationSettings
from jaxrl_llm.generation.stop_strings import stop_strings
from jaxrl_llm.learner.rows import KEPT, ROUTES
from jaxrl_llm.plan.generating import Generation
from jaxrl_llm.plan.parts import GenerateInParts, Part
from jaxrl_llm.plan.roles import make_role
from jaxrl_llm.plan.sessions import Sessions
from jaxrl_llm.program.stage import StepContext
from jaxrl_llm.types import Prompt

N, GROUP = 16, 2
STRINGS = stop_strings(("aba", "bbb"), Pieces())
SAMPLING = SamplingParams(max_new_tokens=R, stop_token_ids=(1, 2, 5), stop_strings=STRINGS)
FILTERED = replace(SAMPLING, top_k=12, top_p=0.95, temperature=2.0)
GREEDY = replace(SAMPLING, temperature=0.0)


def stage_of(family, sampling):
    """The stage of a model, its weights, and the prompts of N samples."""
    spec, params = model(family)
    settings = GenerationSettings(
        sampling=sampling,
        group=GROUP,
        num_slots=3,
        record_routes=spec.config.mixture is not None,
        record_kept=sampling is FILTERED,
    )
    how = Generation(samples=N, dtype="float32", seed=seed_of(7), settings=settings)
    data = replace(DataConfig(), max_prompt_length=P, max_response_length=R)
    role = make_role("actor", spec, ModelSettings(dtype="float32"), make_mesh(data=1))
    sizes = {"prompt": P, "response": R, "pad_id": 0}
    sessions = Sessions(replace(Config(), data=data))
    return GenerateInParts(model=role, how=how, sessions=sessions, **sizes), params


def batch_of(stage, step, seed=0):
    """A context with responses without a token, the prompts, their lengths and the ids."""
    tokens, lengths, _ = prompts(N // GROUP, seed)
    texts = [
        Prompt(token_ids=tuple(row[:n].tolist()), text="")
        for row, n in zip(tokens, lengths, strict=True)
    ]
    everyone = np.arange(N)
    rows = HostRows(num_rows=N, held=everyone, owned=everyone, shared=False)
    context = StepContext(prompts=dict(enumerate(texts)), n=GROUP, rows=rows, policy_version=0)
    ids = np.arange(N, dtype=np.uint32) + 100
    stage.begin(context, step, ids)
    return context, np.repeat(tokens, GROUP, axis=0), np.repeat(lengths, GROUP), ids


def fields_of(stage, context, step, ids):
    return stage(context, step, sample_ids=ids, states={}).writes


@pytest.mark.parametrize(
    ("family", "sampling"),
    [
        ("qwen2", SAMPLING),
        ("qwen2", FILTERED),
        pytest.param("qwen2", GREEDY, marks=pytest.mark.slow),
        pytest.param("experts", SAMPLING, marks=pytest.mark.slow),
        pytest.param("gpt_oss", SAMPLING, marks=pytest.mark.slow),
    ],
    ids=["qwen2", "filters", "greedy", "experts", "gpt_oss"],
)
def test_parts_that_a_checkpoint_kept_are_a_response_of_one_go(family, sampling):
    """Another batch takes part in each call. Between its parts a batch is read from its fields."""
    stage, params = stage_of(family, sampling)
    states = {"actor": params}
    context, tokens, lengths, ids = batch_of(stage, step=3)
    whole = jax.jit(
        lambda: generate(
            model(family)[0], params, tokens, lengths, ids, stage.how.keys(3), stage.how.settings
        )
    )()
    whole = jax.tree.map(np.asarray, whole)
    for version, (number, step) in enumerate([(3, 4), (2, 5), (R, 6)]):
        other, *_ = batch_of(stage, step, seed=step)
        parts = [Part(context=context, tokens=number), Part(context=other, tokens=2)]
        stage.advance(parts, version, states)
        assert max(len(each.tokens) for each in other.responses) == 2
        fields = fields_of(stage, context, 3, ids)
        context, *_ = batch_of(stage, step=3)  # as after a resume
        stage.restore(context, fields)
    assert 0 < (whole.lengths > 5).sum() < N  # some go on, some had ended
    np.testing.assert_array_equal(fields["mask"], whole.mask)
    np.testing.assert_array_equal(fields["response_lengths"], whole.lengths)
    np.testing.assert_array_equal(fields["responses"] * whole.mask, whole.tokens * whole.mask)
    np.testing.assert_allclose(fields["rollout_logprobs"], whole.logprobs, atol=1e-5)
    of_place = np.repeat([0, 1, 2], [3, 2, R - 5])
    np.testing.assert_array_equal(fields["policy_versions"], np.where(whole.mask > 0, of_place, -1))
    assert (KEPT in fields) == (sampling is FILTERED) == (whole.kept is not None)
    if whole.kept is not None:
        np.testing.assert_array_equal(fields[KEPT], whole.kept)
    assert (ROUTES in fields) == (whole.routes is not None)
    if whole.routes is not None:
        np.testing.assert_array_equal(fields[ROUTES], whole.routes)


def test_a_part_has_the_log_probs_and_experts_of_its_own_weights():
    """The second policy has other experts for the tokens of the first; those do not count."""
    stage, params = stage_of("experts", SAMPLING)
    other = jax.tree.map(lambda x: jnp.roll(x, 1, axis=-1) if x.ndim > 1 else x, params)
    context, *_, ids = batch_of(stage, step=3)
    stage.advance([Part(context=context, tokens=4)], 0, {"actor": params})
    before = fields_of(stage, context, 3, ids)
    stage.advance([Part(context=context, tokens=R)], 1, {"actor": other})
    after = fields_of(stage, context, 3, ids)
    longer = after["response_lengths"] > before["response_lengths"]
    assert longer.any() and (before["response_lengths"] <= 4).all()
    for name in ("responses", "rollout_logprobs", "policy_versions"):
        first = before["mask"] > 0
        np.testing.assert_array_equal(after[name][first], before[name][first])
    known = before[ROUTES] >= 0
    np.testing.assert_array_equal(after[ROUTES][known], before[ROUTES][known])
    assert (after[ROUTES][longer] >= 0).sum() > known[longer].sum()


def test_no_part_goes_beyond_its_tokens_or_the_response():
    stage, params = stage_of("qwen2", replace(SAMPLING, stop_token_ids=(), stop_strings=None))
    context, *_, ids = batch_of(stage, step=1)
    lengths = []
    for version in range(4):
        stage.advance([Part(context=context, tokens=5)], version, {"actor": params})
        lengths.append(fields_of(stage, context, 1, ids)["response_lengths"].tolist())
    assert lengths == [[5] * N, [10] * N, [R] * N, [R] * N]
