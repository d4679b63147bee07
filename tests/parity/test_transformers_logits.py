"""Live comparison with transformers on torch's CPU build, both ways, for every golden case."""

import importlib.util
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import our_params, their_tensors, with_rule

from jaxrl_llm.kernels.flash_attention import attention
from jaxrl_llm.models import families
from jaxrl_llm.models.base import bind, model_spec

pytestmark = pytest.mark.torch

_path = Path(__file__).parents[1] / "golden" / "make_goldens.py"
_spec = importlib.util.spec_from_file_location("make_goldens", _path)
make_goldens = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(make_goldens)


def our_output(spec, params, tokens):
    def attend(q, k, v, layer_cache, /, **how):
        return attention(q, k, v, **how), layer_cache

    def run(params, tokens):
        model = bind(spec, params)
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        hidden, _ = model(tokens, positions, attend=with_rule(attend))
        return model.logits(hidden) if spec.kind == "causal_lm" else model.scores(hidden)[..., None]

    return jax.jit(run)(params, tokens)


def nested(flat):
    tree = {}
    for path, value in flat.items():
        node = tree
        for part in path[:-1]:
            node = node.setdefault(part, {})
        node[path[-1]] = value
    return tree


@pytest.mark.parametrize("name", make_goldens.CASES)
def test_their_weights_give_their_logits(name):
    hf = make_goldens.CASES[name]
    model, tokens = make_goldens.build(hf, seed=7), make_goldens.tokens_for(hf, seed=7)
    weights = make_goldens.weights(model)
    # The config as this version of transformers writes it, not as the case spells it.
    config = families.config_from_hf(
        model.config.to_dict() | {"architectures": hf["architectures"]}
    )
    assert config == families.config_from_hf(hf)
    config = config.for_context(tokens.shape[1])
    _, kind = families.find_architecture(hf)
    names = families.hf_names(config, kind)
    assert {part.name for t in names.values() for part in t.parts} == set(weights)
    params = nested(our_params(names, weights))
    ours = our_output(model_spec(config, kind), params, tokens)
    np.testing.assert_allclose(ours, make_goldens.logits(model, tokens), atol=1e-4)


@pytest.mark.slow  # test_transformers_roundtrip.py exports every family, and compares there
@pytest.mark.parametrize("kind", ["causal_lm", "scalar"])
@pytest.mark.parametrize("name", make_goldens.CASES)
def test_our_weights_give_our_logits_there(name, kind):
    import torch
    import transformers

    # Exported as a run of rows of 14 tokens would.
    config = families.config_from_hf(make_goldens.CASES[name]).for_context(14)
    if config.mixture is not None:
        pytest.skip("test_transformers_experts.py compares whole folders")
    spec, names = model_spec(config, kind), families.hf_names(config, kind)
    rng = np.random.default_rng(3)
    flat = {p: 0.25 * rng.standard_normal(t.our_shape, np.float32) for p, t in names.items()}
    hf = families.to_hf_config(config, kind)
    if not hasattr(transformers, hf["architectures"][0]):
        pytest.skip(f"transformers has no {hf['architectures'][0]}")
    model = make_goldens.build({**hf, "pad_token_id": 0}, seed=0)
    found = their_tensors(names, flat)
    state = {name: torch.from_numpy(value.copy()) for name, value in found.items()}
    if kind == "causal_lm" and config.tie_word_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state, strict=True)
    tokens = make_goldens.tokens_for(hf, seed=3)
    ours = our_output(spec, nested(flat), tokens)
    np.testing.assert_allclose(ours, make_goldens.logits(model, tokens), atol=1e-4)
