"""config.json and tensor names of Qwen2.5-VL and Qwen3-VL with their image encoders.

Imports no jax.

Shape letters: W hidden size of the encoder, F its inner size, D the decoder's hidden size, J joined
size of a token's patches.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from jaxrl_llm.models import hf as common
from jaxrl_llm.models.config import FEWEST_IMAGE_TOKENS, Kind, ModelConfig, QwenVision
from jaxrl_llm.models.hf import HFTensor, Names, Path
from jaxrl_llm.models.image_models import architecture_of, stored_names, with_prefix

QWEN = ("qwen2_5_vl", "qwen3_vl")
FRAMES = 2  # frames of a video; both are the image
_PATCH = "patch_embed.proj.weight"
# Prefixes of tensors as transformers 5 has them in memory. Qwen2.5-VL's folders have others.
_TEXT, _ENCODER = "model.language_model.", "model.visual."
# Mean and standard deviation of colours without a preprocessor_config.json.
_CLIP = ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))
_MOST_TOKENS = 16384
_OTHER_IDS = ("video_token_id", "vision_start_token_id", "vision_end_token_id")


def vision_from_hf(hf: Mapping[str, Any], name: str) -> QwenVision:
    """The image encoder of a config.json. Raises: ValueError for an unsupported feature."""
    seen, old = common.entries(hf, "vision_config", dict, {}), name == "qwen2_5_vl"
    value = common.value_of
    common.refuse_unless(
        {"in_channels": seen.get("in_chans")} | dict(seen),
        name,
        hidden_act="silu" if old else "gelu_pytorch_tanh",
        in_channels=3,
        temporal_patch_size=FRAMES,
    )
    common.refuse_unless(seen.get("rope_parameters") or {}, name, rope_theta=10000.0)
    text = hf.get("text_config") or hf
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    common.refuse_unless(rope, name, mrope_interleaved=not old)
    side = 0 if old else int(value(seen, "num_position_embeddings", 2304) ** 0.5)
    mean, std = _CLIP if old else ((0.5,) * 3, (0.5,) * 3)
    patch, scale = (
        value(seen, "patch_size", 14 if old else 16),
        value(seen, "spatial_merge_size", 2),
    )
    area = (patch * scale) ** 2
    deep = () if old else tuple(value(seen, "deepstack_visual_indexes", (8, 16, 24)))
    vision = QwenVision(
        model_type=name,
        mean=mean,
        std=std,
        min_pixels=(FEWEST_IMAGE_TOKENS if old else 64) * area,
        max_pixels=_MOST_TOKENS * area,
        patch_size=patch,
        hidden_size=value(seen, "hidden_size", 3584 if old else 1152),
        intermediate_size=value(seen, "intermediate_size", 3420 if old else 4304),
        num_layers=value(seen, "depth", 32 if old else 27),
        num_heads=value(seen, "num_heads", 16),
        scale=scale,
        image_token_id=value(hf, "image_token_id", 151655),
        other_token_ids=tuple(
            value(hf, key, usual)
            for key, usual in zip(_OTHER_IDS, (151656, 151652, 151653), strict=True)
        ),
        rope_sections=tuple(value(rope, "mrope_section", (16, 24, 24) if old else (24, 20, 20))),
        sections_in_turns=not old,
        window_size=value(seen, "window_size", 112) if old else None,
        whole_layers=tuple(value(seen, "fullatt_block_indexes", (7, 15, 23, 31))) if old else (),
        deep_layers=deep,
        table_side=side,
        tokens_per_second=value(seen, "tokens_per_second", 4),
    )
    outputs = value(seen, "out_hidden_size", 3584)
    if outputs != text.get("hidden_size", outputs):
        raise ValueError(
            f"config.json has out_hidden_size {outputs} and hidden_size {text['hidden_size']}: the "
            "features must have the decoder's size"
        )
    return vision


def to_hf_config(text: Mapping[str, Any], config: ModelConfig, kind: Kind) -> dict[str, Any]:
    """The keys of config.json of the whole model; `text` has the language half's."""
    vision = config.vision
    assert isinstance(vision, QwenVision)
    name = vision.model_type
    rope = {**text["rope_parameters"], "mrope_section": list(vision.rope_sections)}
    if vision.sections_in_turns:
        rope["mrope_interleaved"] = True
    text = {k: v for k, v in text.items() if k not in ("architectures", "rope_scaling")}
    own = {
        "window_size": vision.window_size,
        "fullatt_block_indexes": list(vision.whole_layers),
        "tokens_per_second": vision.tokens_per_second,
    }
    if vision.table_side:
        own = {
            "num_position_embeddings": vision.table_side**2,
            "deepstack_visual_indexes": list(vision.deep_layers),
        }
    return {
        "architectures": [architecture_of(name, kind)],
        "model_type": name,
        "image_token_id": vision.image_token_id,
        **dict(zip(_OTHER_IDS, vision.other_token_ids, strict=True)),
        "tie_word_embeddings": config.tie_word_embeddings,
        # transformers' defaults of the two ids need the published vocabulary.
        "text_config": text
        | {"model_type": f"{name}_text", "rope_parameters": rope}
        | {"bos_token_id": None, "eos_token_id": None},
        "vision_config": own
        | {
            "model_type": f"{name}_vision",
            "depth": vision.num_layers,
            "hidden_act": "gelu_pytorch_tanh" if vision.table_side else "silu",
            "hidden_size": vision.hidden_size,
            "in_channels": 3,
            "intermediate_size": vision.intermediate_size,
            "num_heads": vision.num_heads,
            "out_hidden_size": config.hidden_size,
            "patch_size": vision.patch_size,
            "spatial_merge_size": vision.scale,
            "temporal_patch_size": FRAMES,
        },
    }


def hf_names(text: Names, config: ModelConfig) -> Names:
    """The tensor of each parameter of the whole model; `text` has the language half's."""
    vision, D = config.vision, config.hidden_size
    assert isinstance(vision, QwenVision)
    W, F, N, p = vision.hidden_size, vision.intermediate_size, vision.num_heads, vision.patch_size
    old, J, encoder = vision.model_type == "qwen2_5_vl", vision.scale**2 * W, _ENCODER
    values = FRAMES * 3 * p * p
    names: Names = {
        ("vision", "patch", "kernel"): HFTensor(
            f"{encoder}{_PATCH}", (W, 3, FRAMES, p, p), (values, W), True
        )
    }
    if not old:
        shape = (vision.table_side**2, W)
        names |= {
            ("vision", "patch", "bias"): HFTensor(f"{encoder}patch_embed.proj.bias", (W,), (W,)),
            ("vision", "positions"): HFTensor(f"{encoder}pos_embed.weight", shape, shape),
        }
    norm_q, first, last = ("ln_q", "mlp.0", "mlp.2") if old else (
        "norm", "linear_fc1", "linear_fc2"
    )  # fmt: skip
    projectors = {("vision", "projector"): ("merger", W)} | {
        ("vision", "deep_projectors", str(i)): (f"deepstack_merger_list.{i}", J)
        for i in range(len(vision.deep_layers))
    }
    for path, (name, size) in projectors.items():
        names |= _norm((*path, "norm"), f"{encoder}{name}.{norm_q}", size, biased=not old)
        names |= common.linear_names((*path, "up"), f"{encoder}{name}.{first}", (J,), (J,))
        names |= common.linear_names((*path, "down"), f"{encoder}{name}.{last}", (J,), (D,))
    for i in range(vision.num_layers):
        path, layer = ("vision", "layers", str(i)), f"{encoder}blocks.{i}"
        names |= _norm((*path, "attention_norm"), f"{layer}.norm1", W, biased=not old)
        names |= _norm((*path, "mlp_norm"), f"{layer}.norm2", W, biased=not old)
        heads = (N, W // N)
        names |= common.linear_names((*path, "qkv"), f"{layer}.attn.qkv", (W,), (3, *heads))
        names |= common.linear_names((*path, "o"), f"{layer}.attn.proj", heads, (W,))
        up, down = ("up_proj", "down_proj") if old else ("linear_fc1", "linear_fc2")
        if old:
            names |= common.linear_names((*path, "gate"), f"{layer}.mlp.gate_proj", (W,), (F,))
        names |= common.linear_names((*path, "up"), f"{layer}.mlp.{up}", (W,), (F,))
        names |= common.linear_names((*path, "down"), f"{layer}.mlp.{down}", (F,), (W,))
    return with_prefix(text, _TEXT) | names


def as_stored(names: Names, stored: Iterable[str]) -> Names:
    """`names` with the prefixes of a folder, whose tensors are `stored`: releases differ."""
    stored = list(stored)
    there = next((x.removesuffix(_PATCH) for x in stored if x.endswith(_PATCH)), _ENCODER)
    text = {path: tensor for path, tensor in names.items() if path[0] != "vision"}
    text = stored_names(text, stored, _TEXT)
    seen = {
        path: replace(tensor, name=there + tensor.name.removeprefix(_ENCODER))
        for path, tensor in names.items()
        if path[0] == "vision" and isinstance(tensor, HFTensor)
    }
    return text | seen


def _norm(path: Path, name: str, size: int, *, biased: bool) -> Names:
    scale: Names = {(*path, "scale"): HFTensor(f"{name}.weight", (size,), (size,))}
    return scale | ({(*path, "bias"): HFTensor(f"{name}.bias", (size,), (size,))} if biased else {})
