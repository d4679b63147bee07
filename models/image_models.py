"""Image models, of which the language half is read: its config, and its tensors' names.

The other tensors of such a folder, the image encoder's among them, are not read. An export copies
them. Imports no jax.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, get_args

from jaxrl_llm.models.config import Kind
from jaxrl_llm.models.hf import HFStack, HFTensor, Names

TABLE, HEAD = "embed_tokens.weight", "lm_head.weight"
_PREFIX = "model."  # prefix of the tensors of a language model, but for its head


@dataclass(frozen=True)
class ImageModel:
    """An architecture of transformers with an image encoder."""

    architecture: str
    language: Mapping[str, str]  # family of the language half by `model_type` of its config
    tied: bool = False  # whether the head is the table where no key says so
    # Values of the language half's absent keys, where they are not its family's own.
    defaults: Mapping[str, Any] = field(default_factory=dict)


_GEMMA3 = {
    "vocab_size": 262208,
    "num_attention_heads": 8,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
}
_MISTRAL3 = {"head_dim": 128, "rms_norm_eps": 1e-5, "sliding_window": None, "rope_theta": 1e9}
# By the `model_type` of config.json.
IMAGE_MODELS: dict[str, ImageModel] = {
    "gemma3": ImageModel(
        "Gemma3ForConditionalGeneration", {"gemma3_text": "gemma3_text"}, True, _GEMMA3
    ),
    "idefics3": ImageModel("Idefics3ForConditionalGeneration", {"llama": "llama"}),
    "mistral3": ImageModel(
        "Mistral3ForConditionalGeneration", {"mistral": "mistral"}, False, _MISTRAL3
    ),
    "qwen2_5_vl": ImageModel(
        "Qwen2_5_VLForConditionalGeneration",
        {"qwen2_5_vl_text": "qwen2", "qwen2_5_vl": "qwen2"},
        False,
        {"rms_norm_eps": 1e-5, "rope_theta": 1e6},
    ),
    "qwen3_5": ImageModel("Qwen3_5ForConditionalGeneration", {"qwen3_5_text": "qwen3_5_text"}),
    "qwen3_vl": ImageModel(
        "Qwen3VLForConditionalGeneration",
        {"qwen3_vl_text": "qwen3"},
        False,
        {"rope_theta": 5e5, "max_position_embeddings": 128000},
    ),
    "smolvlm": ImageModel("SmolVLMForConditionalGeneration", {"llama": "llama"}),
}
_ENDS = {"causal_lm": "ForConditionalGeneration", "scalar": "ForSequenceClassification"}


def architecture_of(name: str, kind: Kind) -> str:
    """The architecture of an image model in config.json.

    transformers has the scalar one of Gemma 3 alone; the others are named as it would name them.
    """
    return IMAGE_MODELS[name].architecture.removesuffix(_ENDS["causal_lm"]) + _ENDS[kind]


_BY_ARCHITECTURE: dict[str, tuple[str, Kind]] = {
    architecture_of(name, kind): (name, kind) for name in IMAGE_MODELS for kind in get_args(Kind)
}


def find_image_model(hf: Mapping[str, Any]) -> tuple[str, Kind] | None:
    """The key in `IMAGE_MODELS` of a config.json, and its kind; None for any other model."""
    named = hf.get("architectures") or []
    if named:
        return next((_BY_ARCHITECTURE[name] for name in named if name in _BY_ARCHITECTURE), None)
    return (hf["model_type"], "causal_lm") if hf.get("model_type") in IMAGE_MODELS else None


def image_model_of(hf: Mapping[str, Any]) -> str | None:
    """The key in `IMAGE_MODELS` of a config.json; None for any other model."""
    image_model = find_image_model(hf)
    return image_model[0] if image_model else None


def language_config(hf: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json of the language half alone, with `model_type` as its family.

    Older files of Qwen2.5-VL have the language half's keys outside, without a `text_config`.

    Raises: ValueError for a language half of a family that is not read.
    """
    name = image_model_of(hf)
    assert name is not None
    model = IMAGE_MODELS[name]
    text = hf.get("text_config")
    if not isinstance(text, Mapping):
        text = {key: value for key, value in hf.items() if key != "vision_config"}
    kind = text.get("model_type") or next(iter(model.language))
    if kind not in model.language:
        raise ValueError(
            f"the language half of this {name} model is a {kind!r}, which is not supported: "
            f"{' and '.join(model.language)} is"
        )
    given = {key: value for key, value in text.items() if value is not None or key in _NULLS}
    ties = [part.get("tie_word_embeddings") for part in (hf, text)]
    tied = {"tie_word_embeddings": next((tie for tie in ties if tie is not None), model.tied)}
    own = {"model_type": model.language[kind], "architectures": None} | tied
    return {**_without_rope_of(given, model.defaults), **given, **own, **_one_axis(given)}


_NULLS = ("sliding_window",)  # null is a value of its own


def _without_rope_of(given: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The defaults, without theta where the rope settings have it."""
    rope = given.get("rope_parameters") or given.get("rope_scaling") or {}
    has_theta = "rope_theta" in rope
    return {key: value for key, value in defaults.items() if key != "rope_theta" or not has_theta}


def _one_axis(given: Mapping[str, Any]) -> dict[str, Any]:
    """Rope settings for text, whose positions are equal on all axes."""
    settings = {}
    for key in ("rope_parameters", "rope_scaling"):
        rope = given.get(key)
        if isinstance(rope, Mapping) and "mrope_section" in rope:
            kept = {
                k: v for k, v in rope.items() if k not in ("mrope_section", "mrope_interleaved")
            }
            for name in ("rope_type", "type"):
                if kept.get(name) == "mrope":
                    kept[name] = "default"
            settings[key] = kept
    return settings


def stored_names(names: Names, stored: Iterable[str], prefix: str = _PREFIX) -> Names:
    """`names`, which begin with `prefix`, as the folder of an image model has them.

    Its tensors are `stored`. Releases have other prefixes, which the table of tokens shows.

    Raises: ValueError without a table.
    """
    stored = list(stored)
    table = next((name for name in stored if name.endswith(f".{TABLE}")), None)
    if table is None:
        raise ValueError(
            f"no tensor ends in {TABLE}: the folder lacks the language model's weights"
        )
    head = next((name for name in stored if name.endswith(HEAD)), HEAD)
    return with_prefix(names, table.removesuffix(TABLE), head, prefix)


def with_prefix(names: Names, prefix: str, head: str = HEAD, before: str = _PREFIX) -> Names:
    """`names` with another prefix than `before`; `head` is the name of the head."""

    def renamed(tensor: HFTensor) -> HFTensor:
        own = tensor.name
        if own == HEAD:
            return replace(tensor, name=head)
        is_inside = own.startswith(before)  # the head of a scalar model is not
        return replace(tensor, name=prefix + own.removeprefix(before)) if is_inside else tensor

    return {
        path: HFStack(tuple(renamed(part) for part in tensor.parts))
        if isinstance(tensor, HFStack)
        else renamed(tensor)
        for path, tensor in names.items()
    }
