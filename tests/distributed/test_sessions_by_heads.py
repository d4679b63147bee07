"""Sessions on replicas of several devices that share the heads: the samples of one device."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from further import further
from test_mesh_generation import GPT_OSS, QWEN3_NEXT, SPEC, VOCAB, P, R, inputs
from tiny import DEEPSEEK, EXPERTS, MODEL

from jaxrl_llm.config import MeshConfig
from jaxrl_llm.distributed.layout import generation_layout, mesh_of
from jaxrl_llm.distributed.sharding import shardings
from jaxrl_llm.generation.engine_group import EngineGroup, engines_on, replicas_here
from jaxrl_llm.generation.sampler import SamplingParams
from jaxrl_llm.generation.session import Engine, EngineSettings
from jaxrl_llm.models.base import model_spec
from jaxrl_llm.models.families import config_from_hf
from jaxrl_llm.plan.sessions import routes_of

CONTEXT, TURN = 48, 5
KEY = np.asarray(jax.random.key_data(jax.random.key(4)))


def converse(engines: EngineGroup):
    """Two turns of each of six prompts, of two samples each, with 20 ids observed between them."""
    _, tokens, lengths, ids, _ = inputs()
    observed = np.random.default_rng(2).integers(6, VOCAB, (6, 20)).tolist()
    sequences, turns = {}, {}
    for i in [i for i in range(7) if lengths[i]]:
        prompt = tokens[i, : lengths[i]].tolist()
        beginning = engines.beginning(prompt)
        for sample in (0, 1):
            sequence = engines.add(
                prompt,
                beginning=beginning,
                limit=TURN,
                seed_key=KEY,
                sample_id=2 * int(ids[i]) + sample,
            )
            sequences[sequence.sample_id], turns[sequence] = sequence, 1
    while engines.has_work:
        for sequence in engines.step():
            if sequence.status == "waiting" and turns[sequence] == 1:
                turns[sequence] = 2
                engines.append(sequence, observed[sequence.sample_id % 6], limit=TURN)
            elif sequence.status == "waiting":
                engines.finish(sequence)
    engines.close()
    return sequences


@pytest.mark.parametrize(
    ("model", "sizes"),
    further(
        [
            ({}, {"fsdp": 2, "tensor": 2}),
            (GPT_OSS, {"data": 2, "tensor": 2}),
            (EXPERTS, {"tensor": 4}),
            (QWEN3_NEXT, {"fsdp": 2, "tensor": 2}),
            (DEEPSEEK, {"fsdp": 2, "tensor": 2}),
        ]
    ),
)
def test_replicas_that_share_heads(model, sizes):
    spec = model_spec(config_from_hf(MODEL | model)) if model else SPEC
    params = inputs(spec)[0]
    settings = EngineSettings(
        max_context=CONTEXT,
        num_slots=4,
        cache_tokens=4 * CONTEXT,
        stop_ids=(1, 2),
        sampling=SamplingParams(max_new_tokens=R),
        num_beginnings=3,
        beginning_tokens=P,
        group=2,
        entries=4,
        record_routes=spec.config.mixture is not None,
    )
    alone = converse(EngineGroup([Engine(spec, params, settings)]))
    devices = jax.devices()[: int(np.prod(list(sizes.values())))]
    mesh = mesh_of(MeshConfig(**sizes), [spec.config.num_kv_heads], devices=devices)
    layout = generation_layout(mesh, spec.config.num_kv_heads)
    places = shardings(spec.axes, spec.params, mesh, layout.rules)
    replicas = replicas_here(layout)
    assert len(replicas) == len(devices) // sizes["tensor"]
    settings = replace(settings, in_generation_form=True)  # heads that are split are not merged
    engines = engines_on(spec, jax.device_put(params, places), settings, replicas)
    assert {x.layout is not None for x in engines.engines} == {True}
    by_heads = [x for x in jax.tree.leaves(engines.engines[0]._cache) if x.ndim == 5]
    whole = spec.config.latent is not None
    assert by_heads and all(x.sharding.is_fully_replicated == whole for x in by_heads)
    split = converse(engines)
    assert split.keys() == alone.keys()
    for key, sequence in split.items():
        assert sequence.tokens == alone[key].tokens
        assert sequence.sampled == alone[key].sampled
        np.testing.assert_allclose(sequence.logprobs, alone[key].logprobs, atol=2e-5)
        if spec.config.mixture is not None:
            np.testing.assert_array_equal(routes_of(sequence), routes_of(alone[key]))
