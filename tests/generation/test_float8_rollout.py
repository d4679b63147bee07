"""Generation in 8 bits of mixtures and hybrids against the trainer's pass over the same tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import DEEPSEEK, EXPERTS, GPT_OSS, HYBRID, MODEL
from tiny_models import HYBRID_EXPERTS, with_rule

from jaxrl_llm.generation.engine import generate
from jaxrl_llm.generation.sampler import SamplingParams
from jaxrl_llm.generation.settings import GenerationSettings
from jaxrl_llm.kernels.flash_attention import attention_reference
from jaxrl_llm.models.base import bind, init_params, model_spec
from jaxrl_llm.models.experts import Routing
from jaxrl_llm.models.families import config_from_hf

P, R, N = 5, 6, 6
SLOW = pytest.mark.slow


@pytest.mark.nightly
@pytest.mark.parametrize(
    "config",
    [
        pytest.param(config_from_hf(MODEL | HYBRID), id="hybrid"),
        pytest.param(HYBRID_EXPERTS, id="hybrid of experts", marks=SLOW),
        pytest.param(config_from_hf(MODEL | EXPERTS), id="experts", marks=SLOW),
        pytest.param(config_from_hf(MODEL | GPT_OSS), id="gpt_oss", marks=SLOW),
        pytest.param(config_from_hf(MODEL | DEEPSEEK), id="deepseek", marks=SLOW),
    ],
)
def test_log_probs_are_near_the_trainers_with_the_recorded_experts(config):
    spec = model_spec(config)
    params = jax.jit(lambda key: init_params(spec, key))(jax.random.key(3))
    params = jax.tree.map(lambda x: np.asarray(x) * (6 if x.ndim > 1 else 1), params)
    tokens = np.random.default_rng(0).integers(3, 20, (N, P)).astype(np.int32)
    sampling = SamplingParams(max_new_tokens=R)
    experts = config.mixture is not None
    settings = GenerationSettings(
        sampling=sampling, quantization="float8", record_routes=experts, num_slots=4
    )

    @jax.jit
    def sampled(params):
        lengths, ids = np.full(N, P, np.int32), np.arange(N, dtype=np.uint32)
        return generate(spec, params, tokens, lengths, ids, jax.random.key(1), settings)

    @jax.jit
    def of_trainer(params, tokens_BT, routes):
        def attend(q, k, v, layer_cache, /, **how):
            return attention_reference(q, k, v, causal=True, **how), None

        model, positions = bind(spec, params), jnp.arange(P + R)[None]
        how = {"attend": with_rule(attend), "routing": Routing(chosen_BTLK=routes)}
        hidden, _, routed = model.routed(tokens_BT, positions, **how)
        return jax.nn.log_softmax(model.logits(hidden)), routed and routed.chosen_BTK

    found = sampled(params)
    every = jnp.concatenate([tokens, found.tokens], axis=1)
    logprobs, taken = of_trainer(params, every, found.routes)
    expected = np.take_along_axis(logprobs[:, P - 1 : -1], found.tokens[..., None], axis=-1)[..., 0]
    gap = np.abs(found.logprobs - expected)
    assert 0 < gap.mean() < 0.1
    if experts:  # the last token of a response is read by no step
        recorded = np.asarray(found.routes)[:, :-1]
        assert (recorded >= 0).all()
        np.testing.assert_array_equal(np.moveaxis(taken, 0, 2)[:, :-1], recorded)
