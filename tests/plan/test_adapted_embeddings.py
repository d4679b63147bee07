"""Adapters of embeddings and heads, to which PEFT adds the weights of their base."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tiny import model_config
from tiny_iteration import random_params

from jaxrl_llm.checkpoint.peft import WEIGHTS, check_adapter, export_adapter, read_lora
from jaxrl_llm.config import ConfigError
from jaxrl_llm.models.base import ModelSpec, draw_params, model_spec
from jaxrl_llm.models.families import hf_names
from jaxrl_llm.models.lora import Lora
from jaxrl_llm.models.lora_targets import chosen_modules
from jaxrl_llm.plan.weights import first_adapters

CONFIG = replace(model_config(), tie_word_embeddings=False)


@pytest.fixture
def adapter(tmp_path) -> tuple[Path, ModelSpec, Any]:
    """PEFT's folder for targets embed_tokens and lm_head: `base_layer.weight` with A and B."""
    names = [tensor.name for tensor in hf_names(CONFIG, "causal_lm").values()]
    modules = chosen_modules(["q_proj", "embed_tokens", "lm_head"], names)
    spec = model_spec(CONFIG, lora=Lora(rank=2, alpha=4.0, modules=modules))
    own = draw_params(spec, spec.learned, jax.random.key(0))
    folder = export_adapter(tmp_path / "adapter", spec, own, base="")
    base = jax.tree.map(jnp.asarray, random_params(model_spec(CONFIG).params, 1, 0.2))
    tensors = load_file(folder / WEIGHTS)
    for path, name in (
        (("decoder", "embed", "table"), "model.embed_tokens"),
        (("head", "table"), "lm_head"),
    ):
        (theirs,) = hf_names(CONFIG, "causal_lm")[path].parts
        value: Any = base
        for part in path:
            value = value[part]
        tensors[f"base_model.model.{name}.base_layer.weight"] = np.array(
            theirs.to_hf(np.asarray(value))
        )
    save_file(tensors, folder / WEIGHTS)
    return folder, spec, base


def begun(folder: Path, spec: ModelSpec, base: Any) -> Any:
    role: Any = SimpleNamespace(name="actor", spec=spec, kept_shardings=None)
    settings: Any = SimpleNamespace(path="base", lora=SimpleNamespace(path=str(folder)))
    return first_adapters(role, base, settings, 0)


def test_the_weights_that_peft_adds_are_the_base(adapter):
    folder, spec, base = adapter
    lora = read_lora(folder, CONFIG, "causal_lm", dtype="float32", dropout=0.0)
    assert spec.lora is not None and lora.modules == spec.lora.modules
    check_adapter(folder, spec)
    begun(folder, spec, base)


@pytest.mark.parametrize(("path", "name"), [("decoder.embed", "table"), ("head", "table")])
def test_other_weights_of_embeddings_are_refused(adapter, path, name):
    """As after tokens were added. Without them the adapter is another function."""
    folder, spec, base = adapter
    node = base
    for part in path.split("."):
        node = node[part]
    node[name] = node[name] + 0.5
    with pytest.raises(ConfigError, match=f"other weights of {path}.{name} than config.actor.path"):
        begun(folder, spec, base)
