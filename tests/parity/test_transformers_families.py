"""Newer families against transformers: packed and padded rows, gradients, greedy generation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden import make_goldens

from jaxrl_llm.generation.engine import generate
from jaxrl_llm.generation.sampler import SamplingParams
from jaxrl_llm.generation.settings import GenerationSettings
from jaxrl_llm.kernels.flash_attention import attention, packed_visibility
from jaxrl_llm.kernels.gated_delta import Runs, chunking_of, gated_delta
from jaxrl_llm.models import families
from jaxrl_llm.models.attention import Mixers
from jaxrl_llm.models.base import bind, model_spec

torch = pytest.importorskip("torch", reason="pip install -e '.[parity]'")
pytestmark = pytest.mark.torch

NAMES = [
    *("smollm3", "granite", "phi3_window", "phi3_partial_longrope"),
    *("olmo2", "glm4", "gemma", "gemma2", "gemma3_text", "gpt_oss", "qwen3_5"),
]
EVERY = [*NAMES, "deepseek_v3", "deepseek_v3_plain", "glm4_moe_lite"]
EVERY += ["qwen3_next", "qwen3_5_moe"]
LENGTHS = (9, 3, 7)  # of the sequences in a packed row
P, R = 9, 8  # tokens of the longest prompt and of a response


def both(name):
    """Their model, our spec and the parameters that both have."""
    # As a run exports it: longrope has one set of factors for rows of every length.
    config = families.config_from_hf(make_goldens.CASES[name]).for_context(P + R)
    hf = families.to_hf_config(config) | {"pad_token_id": 0}
    theirs = make_goldens.build(hf, seed=5)
    weights, params = make_goldens.weights(theirs), {}
    for path, tensor in families.hf_names(config, "causal_lm").items():
        node = params
        for part in path[:-1]:
            node = node.setdefault(part, {})
        parts = [part.to_ours(weights[part.name]) for part in tensor.parts]
        node[path[-1]] = jnp.asarray(tensor.joined(parts))
    return theirs, model_spec(config), params


def our_logits(spec, params, tokens, positions, numbers):
    """Logits of rows of several sequences, which `numbers` counts from 1; 0 is padding."""

    def attend(q, k, v, cache, /, *, window, **how):
        return attention(
            q, k, v, visibility=packed_visibility(numbers, window=window), **how
        ), cache

    def recur(inputs, cache):
        real = numbers > 0
        start = jnp.where(real, jnp.arange(tokens.shape[1]) - positions, tokens.shape[1])
        return gated_delta(inputs, chunking_of(Runs(start), inputs.kernels.q.shape[-1])), cache

    model = bind(spec, params)
    return model.logits(model(tokens, positions, attend=Mixers(attend, recur))[0])


@pytest.mark.parametrize("name", NAMES)
def test_packed_rows(name):
    """Each sequence of a packed row has the logits, and its part of the gradient, of its own."""
    theirs, spec, params = both(name)
    rng = np.random.default_rng(2)
    rows = [rng.integers(0, 40, n).astype(np.int32) for n in LENGTHS]
    tokens = np.concatenate([*rows, np.zeros(2, np.int32)])[None]
    positions = np.concatenate([*map(np.arange, LENGTHS), np.zeros(2, int)])[None]
    numbers = np.repeat([1, 2, 3, 0], [*LENGTHS, 2])[None]
    weights = rng.standard_normal((*tokens.shape, 40)).astype(np.float32)

    @jax.jit
    def loss(params):
        logits = our_logits(spec, params, tokens, positions, jnp.asarray(numbers))
        return jnp.sum(jnp.where(numbers[..., None] > 0, logits * weights, 0)), logits

    (_, logits), gradient = jax.value_and_grad(loss, has_aux=True)(params)
    total, begin = torch.zeros(()), 0
    for row in rows:
        expected = theirs(input_ids=torch.from_numpy(row)[None].long()).logits[0]
        part = slice(begin, begin + len(row))
        np.testing.assert_allclose(logits[0, part], expected.detach().numpy(), atol=1e-4)
        total, begin = total + (expected * torch.from_numpy(weights[0, part])).sum(), part.stop
    total.backward()
    named = {key: value.grad.numpy() for key, value in theirs.named_parameters()}
    for path, tensor in families.hf_names(spec.config, "causal_lm").items():
        expected, found = tensor.to_ours(named[tensor.name]), gradient
        for part in path:
            found = found[part]
        scale = np.abs(expected).max()
        np.testing.assert_allclose(found, expected, atol=1e-4 * max(scale, 1.0), err_msg=path)


# Windows, soft caps, sinks, partial rope, latent attention, experts, gated delta rules.
KINDS = {"phi3_partial_longrope", "gemma3_text", "gpt_oss", "deepseek_v3", "qwen3_next", "qwen3_5"}


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=() if x in KINDS else pytest.mark.slow) for x in EVERY]
)
def test_greedy_generation(name):
    """Our prefill of padded prompts and our decode steps choose the tokens of theirs."""
    theirs, spec, params = both(name)
    rng = np.random.default_rng(4)
    lengths = np.array([9, 2, 5], np.int32)
    prompts = rng.integers(1, 40, (3, P)).astype(np.int32)
    settings = GenerationSettings(
        sampling=SamplingParams(max_new_tokens=R, temperature=0.0), num_slots=2
    )

    @jax.jit
    def run(params):
        ids, key = np.arange(3, dtype=np.uint32), jax.random.key(0)
        return generate(spec, params, prompts, lengths, ids, key, settings)

    found = run(params)
    for row, length, tokens, logprobs in zip(
        prompts, lengths, found.tokens, found.logprobs, strict=True
    ):
        sequence = torch.from_numpy(row[:length]).long()[None]
        for token, logprob in zip(tokens, logprobs, strict=True):
            with torch.no_grad():
                expected = theirs(input_ids=sequence).logits[0, -1].log_softmax(-1)
            assert int(token) == int(expected.argmax())
            np.testing.assert_allclose(logprob, expected.max().item(), atol=1e-4)
            sequence = torch.cat([sequence, expected.argmax()[None, None]], dim=1)
