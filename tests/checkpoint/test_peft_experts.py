"""Adapters that PEFT could not read are not written, and those read in part are refused."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tiny import model_config
from tiny_models import HYBRID_EXPERTS

from jaxrl_llm.checkpoint.peft import WEIGHTS, export_adapter, import_adapter
from jaxrl_llm.config import ConfigError
from jaxrl_llm.models.base import model_spec
from jaxrl_llm.models.config import Mixture
from jaxrl_llm.models.families import hf_names
from jaxrl_llm.models.lora import Lora
from jaxrl_llm.models.lora_targets import chosen_modules

MIXTURE = Mixture(num_experts=4, experts_per_token=2, expert_size=8, normalized=True)


@pytest.mark.parametrize(
    ("targets", "named"), [(["gate_proj"], "gate_proj"), (["q_proj", "up_proj"], "up_proj")]
)
def test_gate_or_up_alone_is_refused(tmp_path, targets, named):
    """PEFT 0.21.2 joins the two, and does not open a folder with one of them."""
    config = replace(
        model_config(), family="qwen3_moe", mixture=MIXTURE, qk_norm=True, attention_bias=False
    )
    names = [tensor.name for tensor in hf_names(config, "causal_lm").values()]
    lora = Lora(rank=2, alpha=4.0, modules=chosen_modules(targets, names))
    with pytest.raises(ConfigError, match=f"{named} has an adapter without the other.*merged"):
        export_adapter(tmp_path / "adapter", model_spec(config, lora=lora), {}, base="base")
    assert not (tmp_path / "adapter").exists()


def test_experts_that_peft_does_not_join_are_refused(tmp_path):
    config = replace(HYBRID_EXPERTS, family="qwen3_5_moe_text")
    names = [tensor.name for tensor in hf_names(config, "causal_lm").values()]
    modules = chosen_modules([r".*\.experts\..*"], names)
    lora = Lora(rank=2, alpha=4.0, modules=modules)
    with pytest.raises(ConfigError, match="loses adapters of experts of qwen3_5_moe_text"):
        export_adapter(tmp_path / "adapter", model_spec(config, lora=lora), {}, base="base")
    assert not (tmp_path / "adapter").exists()


def test_a_tensor_that_would_not_be_read_is_refused(tmp_path):
    """Magnitudes of DoRA, whose adapter_config.json does not say so, are half of the function."""
    config = model_config()
    names = [tensor.name for tensor in hf_names(config, "causal_lm").values()]
    lora = Lora(rank=2, alpha=4.0, modules=chosen_modules(["q_proj"], names))
    spec = model_spec(config, lora=lora)
    own = jax.tree.map(lambda x: np.ones(x.shape, x.dtype), spec.learned)
    export_adapter(tmp_path, spec, own, base="base")
    assert jax.tree.structure(import_adapter(tmp_path, spec)) == jax.tree.structure(own)
    tensors = load_file(tmp_path / WEIGHTS)
    (first, *_) = (name for name in tensors if name.endswith(".lora_A.weight"))
    magnitude = first.replace(".lora_A.weight", ".lora_magnitude_vector")
    save_file(tensors | {magnitude: np.ones(4, np.float32)}, tmp_path / WEIGHTS)
    with pytest.raises(
        ConfigError, match="q_proj.lora_magnitude_vector, which .*use_dora is False"
    ):
        import_adapter(tmp_path, spec)
