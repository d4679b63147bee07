"""The model families, by the names in a config or a config.json."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from jaxrl_llm import references
from jaxrl_llm.models import (
    deepseek_v3,
    gemma,
    gemma2,
    gemma3,
    glm4,
    glm4_moe_lite,
    gpt_oss,
    granite,
    image_files,
    llama,
    mistral,
    mixtral,
    olmo2,
    olmoe,
    phi3,
    qwen2,
    qwen3,
    qwen3_5,
    qwen3_5_moe,
    qwen3_moe,
    qwen3_next,
    smollm3,
)
from jaxrl_llm.models.config import Kind, ModelConfig
from jaxrl_llm.models.hf import Names
from jaxrl_llm.models.hf import hf_names as common_names
from jaxrl_llm.models.image_models import (
    IMAGE_MODELS,
    find_image_model,
    image_model_of,
    language_config,
)


class Family(Protocol):
    """The functions of a family's module."""

    @property
    def ARCHITECTURES(self) -> Mapping[Kind, str]: ...  # noqa: N802
    def config_from_hf(self, hf: Mapping[str, Any]) -> ModelConfig: ...
    def to_hf_config(self, config: ModelConfig, kind: Kind = "causal_lm") -> dict[str, Any]: ...
    def hf_names(self, config: ModelConfig, kind: Kind) -> Names: ...


# By the `model_type` of config.json.
FAMILIES: dict[str, Family] = {
    "deepseek_v3": deepseek_v3,
    "gemma": gemma,
    "gemma2": gemma2,
    "gemma3_text": gemma3,
    "glm4": glm4,
    "glm4_moe_lite": glm4_moe_lite,
    "gpt_oss": gpt_oss,
    "granite": granite,
    "llama": llama,
    "mistral": mistral,
    "mixtral": mixtral,
    "olmo2": olmo2,
    "olmoe": olmoe,
    "phi3": phi3,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "qwen3_5_text": qwen3_5,
    "qwen3_5_moe_text": qwen3_5_moe,
    "qwen3_moe": qwen3_moe,
    "qwen3_next": qwen3_next,
    "smollm3": smollm3,
}
# "LlamaForCausalLM" -> ("llama", "causal_lm")
ARCHITECTURES: dict[str, tuple[str, Kind]] = {
    architecture: (name, kind)
    for name, family in FAMILIES.items()
    for kind, architecture in family.ARCHITECTURES.items()
}


@dataclass(frozen=True, kw_only=True)
class OwnFamily:
    """A family of a user's file: docs/add-a-model.md."""

    model_type: str  # its name in config.json
    architectures: Mapping[Kind, str]  # names in config.json by kind of model
    read: Callable[[Mapping[str, Any]], ModelConfig]  # config.json -> sizes and features
    write: Callable[[ModelConfig], dict[str, Any]]  # the keys of config.json that `read` needs
    names: Callable[[ModelConfig, Kind], Names] = common_names  # tensors of the parameters

    @property
    def ARCHITECTURES(self) -> Mapping[Kind, str]:  # noqa: N802, as a module of ours has it
        return self.architectures

    def config_from_hf(self, hf: Mapping[str, Any]) -> ModelConfig:
        return replace(self.read(hf), family=self.model_type)

    def to_hf_config(self, config: ModelConfig, kind: Kind = "causal_lm") -> dict[str, Any]:
        named = {"model_type": self.model_type, "architectures": [self.architectures[kind]]}
        return self.write(config) | named

    def hf_names(self, config: ModelConfig, kind: Kind) -> Names:
        return self.names(config, kind)


def use_family(path: str) -> OwnFamily:
    """Add the family at `path`, my_file.py:name, to the families of this process.

    The path comes from a config or a flag, never from a file next to weights: its code runs.

    Raises: ValueError where there is none, or where it has the name of one of ours.
    """
    family = references.load(path)
    if not isinstance(family, OwnFamily):
        raise ValueError(f"{path} is a {type(family).__name__}, not an OwnFamily")
    own = {family.model_type, *family.architectures.values()}
    known = {name for name, one in FAMILIES.items() if not isinstance(one, OwnFamily)}
    known |= {a for a, (name, _) in ARCHITECTURES.items() if name in known}
    if taken := own & known:
        raise ValueError(f"{path}: {', '.join(sorted(taken))} is a family of ours; rename yours")
    FAMILIES[family.model_type] = family
    for kind, architecture in family.architectures.items():
        ARCHITECTURES[architecture] = family.model_type, kind
    return family


def find_architecture(hf: Mapping[str, Any]) -> tuple[str, Kind]:
    """The family and kind that a config.json names.

    `architectures` decides. Without it, the config is the language model of its `model_type`. An
    image model counts as its language half.

    Raises: ValueError for an architecture that is not supported.
    """
    if image_model := find_image_model(hf):
        return language_config(hf)["model_type"], image_model[1]
    named = hf.get("architectures") or []
    for architecture in named:
        if architecture in ARCHITECTURES:
            return ARCHITECTURES[architecture]
    if not named and hf.get("model_type") in FAMILIES:
        return hf["model_type"], "causal_lm"
    what = ", ".join(named) or f"model_type {hf.get('model_type')!r}"
    raise ValueError(f"architecture {what} is not supported: {_reason(hf)} (docs/models.md)")


def _reason(hf: Mapping[str, Any]) -> str:
    """Why no family reads this config.json, and which ones there are."""
    text, kind = hf.get("text_config"), hf.get("model_type")
    families = f"the families are {', '.join(FAMILIES)}"
    if "vision_config" in hf or "audio_config" in hf or isinstance(text, Mapping):
        encoder = (
            "it has an encoder of images or sound, and image models open as language models for "
            f"{', '.join(IMAGE_MODELS)}"
        )
        half = text.get("model_type") if isinstance(text, Mapping) else None
        if half in FAMILIES:
            return f"{encoder}; its language model is a {half}, which opens if it is saved alone"
        return f"{encoder}; {families}"
    if hf.get("is_encoder_decoder"):
        return f"it has an encoder and a decoder, and only decoders are read; {families}"
    if kind in FAMILIES:
        return f"of {kind}, {' and '.join(FAMILIES[kind].ARCHITECTURES.values())} are read"
    own = "a family of yours is family=my_file.py:family (docs/add-a-model.md)"
    return f"no file of models/ describes its layers; {families}; {own}"


def config_from_hf(hf: Mapping[str, Any], *, images: bool = False) -> ModelConfig:
    """The ModelConfig of any supported config.json; with `images`, of a whole image model."""
    name, _ = find_architecture(hf)
    if image_model_of(hf) is None:
        return FAMILIES[name].config_from_hf(hf)
    config = FAMILIES[name].config_from_hf(language_config(hf))
    return replace(config, vision=image_files.vision_from_hf(hf)) if images else config


def to_hf_config(config: ModelConfig, kind: Kind = "causal_lm") -> dict[str, Any]:
    """The keys of config.json that describe this model."""
    text = FAMILIES[config.family].to_hf_config(config, kind)
    return text if config.vision is None else image_files.to_hf_config(text, config, kind)


def hf_names(config: ModelConfig, kind: Kind) -> Names:
    """The Hugging Face tensor of each parameter path, such as ("decoder", "embed", "table")."""
    text = FAMILIES[config.family].hf_names(config, kind)
    return text if config.vision is None else image_files.hf_names(text, config)


def ignored_tensor(config: ModelConfig, kind: Kind, name: str) -> bool:
    """True if an import may ignore this tensor, which `hf_names` does not list.

    Files of DeepSeek-V3 and of hybrid families have multi-token prediction layers.
    Old files store the rope frequencies. Some tied models store the head a second time. A scalar
    model that is made from a language model does not use the head.
    """
    if name.endswith("rotary_emb.inv_freq"):
        return True
    if config.delta is not None and name.startswith("mtp."):
        return True
    if config.latent is not None and deepseek_v3.predicts_further(config, name):
        return True
    return name == "lm_head.weight" and (config.tie_word_embeddings or kind == "scalar")


def check_kind(config: ModelConfig, kind: Kind) -> None:
    """Raises: ValueError for a kind of model that transformers cannot read of this family."""
    if kind not in FAMILIES[config.family].ARCHITECTURES:
        raise ValueError(
            f"{config.family} has no scalar model in transformers: give the critic or reward model "
            "another family, or take an algorithm without one"
        )
