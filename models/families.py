"""The families by the names that a config or a config.json gives."""

from collections.abc import Mapping
from typing import Any, Protocol

from jaxrl_llm.models import llama, mistral, qwen2, qwen3
from jaxrl_llm.models.config import Kind, ModelConfig
from jaxrl_llm.models.hf import HFTensor, Path


class Family(Protocol):
    """What the file of a family defines."""

    ARCHITECTURES: dict[Kind, str]

    def config_from_hf(self, hf: Mapping[str, Any]) -> ModelConfig: ...
    def to_hf_config(self, config: ModelConfig, kind: Kind = "causal_lm") -> dict[str, Any]: ...
    def hf_names(self, config: ModelConfig, kind: Kind) -> dict[Path, HFTensor]: ...
    def check(self, config: ModelConfig) -> None: ...


FAMILIES: dict[str, Family] = {"llama": llama, "mistral": mistral, "qwen2": qwen2, "qwen3": qwen3}
# "LlamaForCausalLM" -> ("llama", "causal_lm")
ARCHITECTURES: dict[str, tuple[str, Kind]] = {
    architecture: (name, kind)
    for name, family in FAMILIES.items()
    for kind, architecture in family.ARCHITECTURES.items()
}


def find_architecture(hf: Mapping[str, Any]) -> tuple[str, Kind]:
    """Family and kind that a config.json names; raises ValueError for one that is not supported.

    `architectures` decides; a config without it is the language model of its `model_type`.
    """
    named = hf.get("architectures") or []
    for architecture in named:
        if architecture in ARCHITECTURES:
            return ARCHITECTURES[architecture]
    if not named and hf.get("model_type") in FAMILIES:
        return hf["model_type"], "causal_lm"
    what = ", ".join(named) or f"model_type {hf.get('model_type')!r}"
    raise ValueError(
        f"architecture {what} is not supported: supported are {', '.join(ARCHITECTURES)}"
    )


def config_from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """The ModelConfig of any supported config.json."""
    name, _ = find_architecture(hf)
    config = FAMILIES[name].config_from_hf(hf)
    check_family(config)
    return config


def to_hf_config(config: ModelConfig, kind: Kind = "causal_lm") -> dict[str, Any]:
    """The keys of config.json that describe this model."""
    check_family(config)
    return FAMILIES[config.family].to_hf_config(config, kind)


def hf_names(config: ModelConfig, kind: Kind) -> dict[Path, HFTensor]:
    """Each parameter's path (e.g. ("decoder", "embed", "table")) and its Hugging Face tensor."""
    check_family(config)
    return FAMILIES[config.family].hf_names(config, kind)


def ignored_tensor(config: ModelConfig, kind: Kind, name: str) -> bool:
    """Whether a tensor that `hf_names` does not list may be left out of an import.

    Old files store rope's frequencies; some tied models store the head a second time; and a
    scalar model taken from a language model has no use for the head.
    """
    if name.endswith("rotary_emb.inv_freq"):
        return True
    return name == "lm_head.weight" and (config.tie_word_embeddings or kind == "scalar")


def check_family(config: ModelConfig) -> None:
    """Raises ValueError for an unknown family, or a feature that the family does not have."""
    if config.family not in FAMILIES:
        raise ValueError(
            f"model family {config.family!r} is unknown: use one of {', '.join(FAMILIES)}"
        )
    FAMILIES[config.family].check(config)
