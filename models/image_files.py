"""config.json and tensor names of image models that are read whole.

Idefics3 and SmolVLM are here, Qwen-VL is in `qwen_vision_files.py`. `image_models.py` reads the
language half alone, of more architectures. Imports no jax.

Shape letters: W hidden size of the encoder, F feed-forward, D the decoder's hidden size, L patches.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxrl_llm.models import hf as common
from jaxrl_llm.models import qwen_vision_files as qwen
from jaxrl_llm.models.config import Kind, ModelConfig, QwenVision, Vision
from jaxrl_llm.models.hf import HFTensor, Names, Path
from jaxrl_llm.models.image_models import architecture_of, image_model_of, with_prefix

SIGLIP = ("idefics3", "smolvlm")
READ_WHOLE = (*SIGLIP, *qwen.QWEN)
TEXT, ENCODER = "model.text_model.", "model.vision_model"
PROJECTOR = "model.connector.modality_projection.proj"


def vision_from_hf(hf: Mapping[str, Any]) -> Vision | QwenVision:
    """The image encoder of a config.json. Raises: ValueError where none is read."""
    name = image_model_of(hf)
    if name not in READ_WHOLE:
        raise ValueError(
            f"config.data.max_images: a {name} model is not read with its image encoder; "
            f"{', '.join(READ_WHOLE)} are (docs/vision.md); with 0 its language half is used"
        )
    if name in qwen.QWEN:
        return qwen.vision_from_hf(hf, name)
    seen = common.entries(hf, "vision_config", dict, {})
    common.refuse_unless(seen, name, hidden_act="gelu_pytorch_tanh", num_channels=3)
    sizes = {
        "image_size": 224,
        "patch_size": 32,
        "hidden_size": 1152,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 16,
    } | {key: value for key, value in seen.items() if value is not None}
    return Vision(
        model_type=name,
        image_size=_side(sizes["image_size"]),
        patch_size=_side(sizes["patch_size"]),
        hidden_size=sizes["hidden_size"],
        intermediate_size=sizes["intermediate_size"],
        num_layers=sizes["num_hidden_layers"],
        num_heads=sizes["num_attention_heads"],
        scale=common.value_of(hf, "scale_factor", 2),
        image_token_id=common.value_of(hf, "image_token_id", 128257),
        norm_eps=float(common.value_of(sizes, "layer_norm_eps", 1e-6)),
    )


def with_processor(
    vision: Vision | QwenVision, processor: Mapping[str, Any]
) -> Vision | QwenVision:
    """The encoder with the settings of an image processor, a preprocessor_config.json.

    Raises: ValueError for a setting that is not implemented, or of another encoder.
    """
    name, size = vision.model_type, common.entries(processor, "size", dict, {})
    common.refuse_unless(
        processor, name, do_rescale=True, do_normalize=True, do_convert_rgb=True,
        rescale_factor=1 / 255,
    )  # fmt: skip
    colours = {
        ours: tuple(processor[theirs])
        for ours, theirs in (("mean", "image_mean"), ("std", "image_std"))
        if processor.get(theirs) is not None
    }
    seen = replace(vision, resample=processor.get("resample", vision.resample), **colours)
    if isinstance(seen, QwenVision):
        common.refuse_unless(
            processor, name, do_resize=True, patch_size=seen.patch_size, merge_size=seen.scale,
            temporal_patch_size=qwen.FRAMES,
        )  # fmt: skip
        bounds = {
            ours: processor.get(ours) or size.get(theirs) or size.get(ours) or getattr(seen, ours)
            for ours, theirs in (("min_pixels", "shortest_edge"), ("max_pixels", "longest_edge"))
        }
        return replace(seen, **bounds)
    view = common.entries(processor, "max_image_size", dict, {})
    common.refuse_unless(view, f"{name}: max_image_size", longest_edge=seen.image_size)
    if processor.get("do_resize") is False:
        return seen
    return replace(seen, longest_side=size.get("longest_edge"))


def to_processor(vision: Vision | QwenVision) -> dict[str, Any]:
    """The keys of preprocessor_config.json; `with_processor` reads them."""
    own: dict[str, Any]
    if isinstance(vision, QwenVision):
        own = {
            "image_processor_type": "Qwen2VLImageProcessor",
            "size": {"shortest_edge": vision.min_pixels, "longest_edge": vision.max_pixels},
            "patch_size": vision.patch_size,
            "merge_size": vision.scale,
            "temporal_patch_size": qwen.FRAMES,
        }
    else:
        kind = {"smolvlm": "SmolVLM", "idefics3": "Idefics3"}[vision.model_type]
        first = vision.longest_side
        own = {
            "image_processor_type": f"{kind}ImageProcessor",
            "do_resize": first is not None,
            "size": {"longest_edge": first or vision.image_size},
            "max_image_size": {"longest_edge": vision.image_size},
            "do_image_splitting": False,
        }
    return own | {
        "resample": vision.resample,
        "image_mean": list(vision.mean),
        "image_std": list(vision.std),
    }


def _side(size: Any) -> int:
    """A side of a square, which newer files may give twice."""
    return size if isinstance(size, int) else size[0]


def to_hf_config(text: Mapping[str, Any], config: ModelConfig, kind: Kind) -> dict[str, Any]:
    """The keys of config.json of the whole model; `text` has the language half's."""
    vision = config.vision
    if isinstance(vision, QwenVision):
        return qwen.to_hf_config(text, config, kind)
    assert vision is not None
    return {
        "architectures": [architecture_of(vision.model_type, kind)],
        "model_type": vision.model_type,
        "image_token_id": vision.image_token_id,
        "scale_factor": vision.scale,
        "tie_word_embeddings": config.tie_word_embeddings,
        "text_config": {key: value for key, value in text.items() if key != "architectures"},
        "vision_config": {
            "model_type": f"{vision.model_type}_vision",
            "image_size": vision.image_size,
            "patch_size": vision.patch_size,
            "hidden_size": vision.hidden_size,
            "intermediate_size": vision.intermediate_size,
            "num_hidden_layers": vision.num_layers,
            "num_attention_heads": vision.num_heads,
            "layer_norm_eps": vision.norm_eps,
            "hidden_act": "gelu_pytorch_tanh",
            "num_channels": 3,
        },
    }


def hf_names(text: Names, config: ModelConfig) -> Names:
    """The tensor of each parameter of the whole model; `text` has the language half's."""
    vision, D = config.vision, config.hidden_size
    if isinstance(vision, QwenVision):
        return qwen.hf_names(text, config)
    assert vision is not None
    W, F, N = vision.hidden_size, vision.intermediate_size, vision.num_heads
    _, cells, values = vision.image_shape
    L, p = vision.num_patches, vision.patch_size
    patch = f"{ENCODER}.embeddings.patch_embedding"
    positions = f"{ENCODER}.embeddings.position_embedding.weight"
    names: Names = {
        ("vision", "patch", "kernel"): HFTensor(f"{patch}.weight", (W, 3, p, p), (values, W), True),
        ("vision", "patch", "bias"): HFTensor(f"{patch}.bias", (W,), (W,)),
        ("vision", "positions"): HFTensor(positions, (L, W), (L, W)),
        **_norm(("vision", "norm"), f"{ENCODER}.post_layernorm", W),
        ("vision", "projector", "kernel"): HFTensor(
            f"{PROJECTOR}.weight", (D, cells * W), (cells * W, D), True
        ),
    }
    for i in range(vision.num_layers):
        path, layer = ("vision", "layers", str(i)), f"{ENCODER}.encoder.layers.{i}"
        names |= _norm((*path, "attention_norm"), f"{layer}.layer_norm1", W)
        names |= _norm((*path, "mlp_norm"), f"{layer}.layer_norm2", W)
        heads = (N, W // N)
        for name in ("q", "k", "v"):
            names |= common.linear_names(
                (*path, name), f"{layer}.self_attn.{name}_proj", (W,), heads
            )
        names |= common.linear_names((*path, "o"), f"{layer}.self_attn.out_proj", heads, (W,))
        names |= common.linear_names((*path, "up"), f"{layer}.mlp.fc1", (W,), (F,))
        names |= common.linear_names((*path, "down"), f"{layer}.mlp.fc2", (F,), (W,))
    return with_prefix(text, TEXT) | names


def _norm(path: Path, name: str, size: int) -> Names:
    return {
        (*path, "scale"): HFTensor(f"{name}.weight", (size,), (size,)),
        (*path, "bias"): HFTensor(f"{name}.bias", (size,), (size,)),
    }
