"""The model of a role, its tokenizer and what ends a response; no weights.

A model is described by a directory, a checkpoint or a config.
"""

import functools
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxrl_llm.checkpoint import identity, layout
from jaxrl_llm.checkpoint.huggingface import (
    PROCESSOR,
    image_model_in,
    load_model_config,
    model_directory,
)
from jaxrl_llm.checkpoint.peft import read_lora
from jaxrl_llm.config import (
    ActorConfig,
    AdaptedSettings,
    Config,
    ConfigError,
    DataConfig,
    ModelSettings,
)
from jaxrl_llm.config.placement import ACTOR, ROLLOUT, mesh_of_role
from jaxrl_llm.distributed.layout import mesh_of
from jaxrl_llm.distributed.mesh import devices_of_nodes
from jaxrl_llm.distributed.multihost import is_main
from jaxrl_llm.distributed.placement import numbers_of_roles
from jaxrl_llm.generation.stop_strings import Stops, stop_strings
from jaxrl_llm.images import PIXELS, ImageInput
from jaxrl_llm.models.base import FLOAT8_BASE, ModelConfig, ModelSpec, frozen_spec, model_spec
from jaxrl_llm.models.config import Kind, QwenVision, Vision
from jaxrl_llm.models.config_json import check_hf_config
from jaxrl_llm.models.families import config_from_hf, hf_names, to_hf_config, use_family
from jaxrl_llm.models.image_files import to_processor
from jaxrl_llm.models.lora import Lora
from jaxrl_llm.models.lora_targets import chosen_modules
from jaxrl_llm.models.media import media_fields
from jaxrl_llm.tokenizer import Tokenizer, load_tokenizer

_log = logging.getLogger(__name__)

CHAR = "char"  # name of the built-in character tokenizer
IMAGE_MODEL = "image_model"  # key in config.json of checkpoints: the model with the image encoder


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """A model's description and where its weights are; `directory` is None for random ones."""

    config: ModelConfig
    directory: Path | None = None  # folder of Hugging Face files, or `huggingface` of checkpoints
    checkpoint: Path | None = None  # a global_step_N folder of ours
    params: Any = None  # weights of a Python program, in place of the folder's
    image_model: str = ""  # the image model whose language half it is: a folder, or a name on a hub

    @property
    def folder(self) -> Path | None:
        """The folder whose Hugging Face weights are read; None for weights from elsewhere."""
        return None if self.checkpoint or self.params is not None else self.directory


def find_model(
    settings: ModelSettings,
    tokenizer: Tokenizer | None = None,
    *,
    context: int,
    images: int = 0,
) -> ModelSource:
    """The model that `path` or `hf_config` describes, for rows of up to `context` tokens.

    Some rope frequencies depend on that length (`ModelConfig.for_context`). A config without
    vocab_size takes the tokenizer's. ValueError when nothing can be found there, or when it is a
    checkpoint of another model than its files describe. With `images` it has its image encoder.
    """
    source = _described_model(settings, tokenizer, context=context, images=bool(images))
    if source.config.vision is not None:
        train = settings.vision.train if isinstance(settings, ActorConfig) else "none"
        vision = replace(source.config.vision, train=train)
        source = replace(source, config=replace(source.config, vision=vision))
    params = getattr(settings, "params", None)
    if params is not None:
        source = replace(source, params=params.tree)
    if getattr(settings, "head_dtype", "") != "float32":
        return source
    return replace(source, config=replace(source.config, float32_head=True))


def _described_model(
    settings: ModelSettings, tokenizer: Tokenizer | None, *, context: int, images: bool
) -> ModelSource:
    own = use_family(settings.family) if settings.family else None
    if not settings.path:
        hf = dict(settings.hf_config)
        if own is None:
            check_hf_config(hf)
        else:
            hf.setdefault("model_type", own.model_type)
        if tokenizer is not None and not isinstance(hf.get("text_config"), dict):
            hf.setdefault("vocab_size", tokenizer.vocab_size)
        return ModelSource(config=config_from_hf(hf, images=images).for_context(context))
    source = source_at(settings.path, images=images)
    if source.checkpoint is not None:
        assert source.directory is not None
        identity.check_model(source.checkpoint, source.config, source.directory / "config.json")
    return replace(source, config=source.config.for_context(context))


def source_at(path: str, *, images: bool = False) -> ModelSource:
    """The model at `path`, as its files describe it."""
    model = layout.find_model_path(path)
    directory = model_directory(model.files)
    # A run's own files describe the model that it trained.
    images = images or (model.checkpoint is not None and image_model_in(directory) is not None)
    config = load_model_config(directory, images=images)
    image_model = image_model_of_checkpoint(directory) if model.checkpoint else ""
    if not model.checkpoint and (kind := image_model_in(directory)) is not None:
        image_model = str(directory.absolute()) if Path(path).is_dir() else path
        if config.vision is None:
            _say_language_half(path, kind, config.family)
    return ModelSource(
        config=config, directory=directory, checkpoint=model.checkpoint, image_model=image_model
    )


def image_model_of_checkpoint(directory: Path) -> str:
    """The image model whose language half a run of ours trains; "" for other models."""
    return json.loads((directory / "config.json").read_text()).get(IMAGE_MODEL, "")


@functools.cache
def _say_language_half(path: str, kind: str, family: str) -> None:
    """A line, once for each model."""
    if is_main():
        _log.warning(
            "%s is an image model (%s): its language half is used, a %s, without images. An export "
            "has the image encoder as it is there",
            path,
            kind,
            family,
        )


def warn_of_positions(source: ModelSource, context: int) -> None:
    """A line where rows may be longer than the model was trained for. Its rope goes on there."""
    positions = source.config.max_position_embeddings
    if context > positions and is_main():
        _log.warning(
            "config.data.max_prompt_length and max_response_length allow %d tokens, and the model "
            "has %d positions: what lies beyond them is outside of its training, and generate "
            "does not go there",
            context,
            positions,
        )


def open_meshes(config: Config, tokenizer: Tokenizer | None = None) -> dict[str, Mesh]:
    """The mesh of the actor, and of each role on devices of its own (`config.placement`).

    A mesh has the parts that its models and phases need.

    Raises: ValueError for sizes that do not fit the devices or each other.
    """
    named = {"actor": config.actor, "critic": config.critic}
    named |= {"reward": config.reward.model, "teacher": config.teacher}
    named |= {model.name: model for model in config.models}
    if config.reference.path:
        named["reference"] = ModelSettings(path=config.reference.path, family=config.actor.family)
    models = {role: model for role, model in named.items() if model is not None}
    described = [model for model in models.values() if model.path or model.hf_config]
    sources = (find_model(m, tokenizer, context=config.data.max_row_length) for m in described)
    heads = sorted({source.config.num_kv_heads for source in sources})
    tensor_sizes = {role: model.tensor for role, model in models.items()}
    tensor_sizes[ROLLOUT] = config.mesh.generation.tensor
    placed, meshes = numbers_of_roles(config, devices_of_nodes()), {}
    for role, numbers in placed.items():
        together = [
            s for name, s in tensor_sizes.items() if placed.get(name, placed[ACTOR]) == numbers
        ]
        devices = [jax.devices()[number] for number in numbers] if config.placement else None
        meshes[role] = mesh_of(mesh_of_role(config, role), heads, together, devices)
    return meshes


def find_tokenizer(name: str, settings: ModelSettings) -> Tokenizer:
    """The named tokenizer, or the one in the folder of the model's weights.

    "char" is for models that are built from a config. Weights on disk bring the tokenizer that they
    were trained with; the ids of another one would mean something else.

    Raises: ValueError when it cannot be found, or is not the one of its checkpoint.
    """
    if name and not (name == CHAR and settings.path):
        return load_tokenizer(name)
    if not settings.path:
        raise ValueError(
            "data.tokenizer is empty and actor.path gives no directory to take it from; set "
            "data.tokenizer to 'char' or to a Hugging Face directory"
        )
    model = layout.find_model_path(settings.path)
    directory = model_directory(model.files)
    tokenizer = load_tokenizer(directory)
    if model.checkpoint is not None:
        identity.check_tokenizer(model.checkpoint, tokenizer.digest(), directory)
    return tokenizer


def spec_of(source: ModelSource, kind: Kind, settings: ModelSettings) -> ModelSpec:
    """The abstract model in the dtype in which it is stored."""
    return model_spec(source.config, kind, settings.param_dtype)


def learner_spec(source: ModelSource, kind: Kind, settings: ModelSettings) -> ModelSpec:
    """The abstract model of a role that may have adapters. ValueError for their targets."""
    lora = adapters_of(source, kind, settings)
    if lora is None:
        return spec_of(source, kind, settings)
    return frozen_spec(source.config, kind, base_dtype(settings), settings.dtype, lora)


def adapters_of(source: ModelSource, kind: Kind, settings: ModelSettings) -> Lora | None:
    """The adapters that the settings ask for; None trains all weights. ValueError for a mix."""
    if not isinstance(settings, AdaptedSettings) or not settings.lora.enabled:
        return None
    chosen = settings.lora
    if chosen.path:
        lora = read_lora(
            chosen.path, source.config, kind, dtype=settings.param_dtype, dropout=chosen.dropout
        )
        lora = replace(lora, merge=chosen.merge)
        lora.check()
        return lora
    # Targets name modules of the decoder; the encoder has some of the same names.
    names = hf_names(source.config, kind)
    tensors = [tensor.name for path, tensor in names.items() if path[0] != "vision"]
    lora = Lora(
        rank=chosen.rank,
        alpha=chosen.alpha,
        modules=chosen_modules(chosen.targets, tensors),
        rslora=chosen.rslora,
        dora=chosen.dora,
        dropout=chosen.dropout,
        dtype=settings.param_dtype,
        merge=chosen.merge,
    )
    lora.check()
    return lora


def base_dtype(settings: ModelSettings) -> str:
    """The dtype of the frozen weights below adapters."""
    return getattr(settings, "base_dtype", "") or settings.dtype


def base_spec(source: ModelSource, kind: Kind, settings: ModelSettings) -> ModelSpec:
    """The abstract frozen weights below the adapters of a role."""
    return frozen_spec(source.config, kind, base_dtype(settings), settings.dtype)


def base_settings(settings: ModelSettings) -> ModelSettings:
    """Settings to store the frozen weights below adapters, and to compute without adapters.

    In float8 only the projections are: then `param_dtype` is the dtype of all others.
    """
    stored = base_dtype(settings)
    return ModelSettings(
        dtype=settings.dtype,
        param_dtype=settings.dtype if stored == FLOAT8_BASE else stored,  # pyright: ignore[reportArgumentType]
        attention=settings.attention,
        tensor=settings.tensor,
    )


def write_huggingface_files(
    directory: Path, spec: ModelSpec, tokenizer: Tokenizer, image_model: str = ""
) -> None:
    """Write config.json, the tokenizer and generation settings into the folder of checkpoints.

    With them a checkpoint is enough to generate, to evaluate and to export. The export of the
    language half of an `image_model` also needs that model.
    """
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(directory)
    ids = {
        "eos_token_id": list(tokenizer.stop_ids),
        "pad_token_id": tokenizer.pad_id,
        "bos_token_id": tokenizer.bos_id,
    }
    ids = {name: value for name, value in ids.items() if value is not None}
    config = to_hf_config(spec.config, spec.kind) | ids
    if image_model:
        config[IMAGE_MODEL] = image_model
    files = {"config.json": config, "generation_config.json": ids}
    if spec.config.vision is not None:
        files[PROCESSOR] = to_processor(spec.config.vision)
    for name, content in files.items():
        (directory / name).write_text(json.dumps(content, indent=2) + "\n")


def image_input(vision: Vision | QwenVision | None, data: DataConfig) -> ImageInput | None:
    """How rows take images for a model with this encoder."""
    if vision is None:
        return None
    if not data.max_images:
        raise ConfigError(
            "config.data.max_images=0: config.actor.path is a run of a model with its image "
            "encoder; set 1 or more, or export it, whose folder opens as a language model"
        )
    seen = ImageInput(
        token_id=vision.image_token_id,
        patch=vision.patch_size,
        scale=vision.scale,
        most=data.max_images,
        resample=vision.resample,
    )
    if isinstance(vision, Vision):
        return replace(seen, size=vision.image_size, longest_side=vision.longest_side)
    most = min(vision.max_pixels, data.max_image_tokens * vision.side**2)
    return replace(seen, max_pixels=most, min_pixels=min(vision.min_pixels, most))


def image_fields(
    config: Config,
    vision: Vision | QwenVision | None,
    length: int,
    array: Callable[..., Any],
) -> dict[str, Any]:
    """The shapes of the fields of images; `array` makes one from a dtype and dims."""
    seen = image_input(vision, config.data)
    if seen is None:
        return {}
    shapes = seen.shapes | seen.token_shapes(length)
    return {
        name: array(jnp.uint8 if name == PIXELS else jnp.int32, *shapes[name])
        for name in media_fields(vision)
    }


def stop_ids(config: Config, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Token ids that end a response: the tokenizer's and the config's own."""
    return tuple(dict.fromkeys((*tokenizer.stop_ids, *config.rollout.stop_token_ids)))


def stops_of(config: Config, tokenizer: Tokenizer) -> Stops:
    """The ends of a response. ConfigError for stop strings that the tokenizer cannot have."""
    try:
        strings = stop_strings(config.rollout.stop, tokenizer)
    except ValueError as error:
        raise ConfigError(f"config.rollout.stop: {error}") from error
    return Stops(stop_ids(config, tokenizer), strings)
