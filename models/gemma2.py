"""Gemma 2: soft caps of attention scores and logits, every other layer a window.

The model is described in arXiv:2408.00118.
"""

from collections.abc import Mapping
from typing import Any

from jaxrl_llm.models import gemma3
from jaxrl_llm.models import hf as common
from jaxrl_llm.models.config import Kind, ModelConfig
from jaxrl_llm.models.gemma import features
from jaxrl_llm.models.gemma3 import hf_names
from jaxrl_llm.models.hf import FULL, LOCAL

__all__ = ["ARCHITECTURES", "config_from_hf", "hf_names", "to_hf_config"]

ARCHITECTURES: dict[Kind, str] = {
    "causal_lm": "Gemma2ForCausalLM",
    "scalar": "Gemma2ForSequenceClassification",
}
NAME = "gemma2"
# Field of the config, key of config.json, and transformers' value of a missing key. Null is no cap.
CAPS = (
    ("attention_softcap", "attn_logit_softcapping", 50.0),
    ("logits_softcap", "final_logit_softcapping", 30.0),
)


def config_from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """The config from config.json's keys. Raises: ValueError for an unsupported feature."""
    common.refuse_unless(hf, NAME, use_bidirectional_attention=False, **gemma3.PLAIN)
    fields = gemma3.fields_from_hf(hf, NAME, max_position_embeddings=8192)
    layers = range(fields["num_layers"])
    keys = {
        "use_sliding_window": True,
        "sliding_window": hf.get("sliding_window", 4096),
        "layer_types": hf.get("layer_types") or [(LOCAL, FULL)[i % 2] for i in layers],
    }
    scale = common.positive(hf, "query_pre_attn_scalar", 256) ** -0.5
    own: dict[str, Any] = {"attention_multiplier": scale, "norms": "both"}
    own |= {field: hf.get(key, default) for field, key, default in CAPS}
    own |= features(hf["hidden_size"])
    windows = common.windows_from_hf(keys, len(layers))
    return ModelConfig(**fields, **own, sliding_window=windows)


def to_hf_config(config: ModelConfig, kind: Kind = "causal_lm") -> dict[str, Any]:
    """The keys of config.json, without the tokenizer's."""
    hf = common.common_to_hf(config, kind, ARCHITECTURES)
    return {
        **{key: value for key, value in hf.items() if key != "hidden_act"},
        **{key: getattr(config, field) for field, key, _ in CAPS},
        "query_pre_attn_scalar": gemma3.scalar_of(config),
        **common.layer_types_to_hf(config),
        **gemma3.PLAIN,
    }
