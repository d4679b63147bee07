"""A trained model outside of its run: evaluated, exported.

A model is a Hugging Face directory or one of our checkpoints.
"""

import logging
import math
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxrl_llm.checkpoint import identity, layout, manager, peft
from jaxrl_llm.checkpoint.huggingface import (
    CARD_MARK,
    MAX_SHARD_BYTES,
    TOKENIZER_FILES,
    export,
    load_model_config,
    model_directory,
)
from jaxrl_llm.checkpoint.stored_models import StoredModel, stored_model
from jaxrl_llm.checkpoint.weights import base_digests, restored
from jaxrl_llm.config import Config, ConfigError, ModelSettings, from_json
from jaxrl_llm.distributed.device_memory import free_memory
from jaxrl_llm.distributed.mesh import make_mesh
from jaxrl_llm.distributed.multihost import gather_objects
from jaxrl_llm.evaluation.evaluate import Validation, open_validator
from jaxrl_llm.evaluation.model_card import RunFacts, model_card
from jaxrl_llm.generation.memory import GB
from jaxrl_llm.images import see_images
from jaxrl_llm.learner.train_state import Params
from jaxrl_llm.models.base import FLOAT8_BASE, model_spec
from jaxrl_llm.models.config import Kind, ModelConfig
from jaxrl_llm.observability.jsonl import GLOBAL_STEP, read_jsonl
from jaxrl_llm.plan.conversing import Conversations, open_conversations
from jaxrl_llm.plan.in_graph import open_token_turns
from jaxrl_llm.plan.models import (
    find_model,
    find_tokenizer,
    image_input,
    image_model_of_checkpoint,
    open_meshes,
    spec_of,
)
from jaxrl_llm.plan.roles import CRITIC_BASE, Role, make_role
from jaxrl_llm.plan.weights import load_params
from jaxrl_llm.references import exists
from jaxrl_llm.supervision.signals import host_work
from jaxrl_llm.tokenizer import check_vocabulary, load_tokenizer, set_chat_variables

_log = logging.getLogger(__name__)

# ------------------------------------------------------------------------- evaluate


def evaluate(config: Config) -> Validation:
    """Answer and grade the config's held-out data with `actor.path`, as its validation would."""
    if config.actor.lora.path:
        raise ConfigError(
            f"config.actor.lora.path={config.actor.lora.path}: an adapter alone is not evaluated; "
            "give a run with it as the model, or a folder in which PEFT merged it"
        )
    tokenizer = find_tokenizer("", config.actor)
    set_chat_variables(tokenizer, config.data.chat_template_kwargs)
    mesh = open_meshes(config, tokenizer)["actor"]
    images = config.data.max_images
    source = find_model(config.actor, context=config.data.max_row_length, images=images)
    check_vocabulary(tokenizer, source.config.vocab_size)
    see_images(tokenizer, image_input(source.config.vision, config.data))
    spec = spec_of(source, "causal_lm", config.actor)
    role = make_role("actor", spec, config.actor, mesh, phases=config.mesh)
    config = _with_memory(config, role)
    with ExitStack() as stack:
        turns = open_token_turns(config, tokenizer)
        turns = turns or open_conversations(config, tokenizer, host_work)
        if isinstance(turns, Conversations):
            stack.callback(turns.driver.close)
        validator = open_validator(config, role, tokenizer, None, stack, turns)
        return validator.run(load_params(role, source, config.seed), 0)


def _with_memory(config: Config, role: Role) -> Config:
    """`config` with the memory of a device that the model leaves free for slots and cache."""
    validation, itemsize = config.validation, np.dtype(config.rollout.dtype or role.forward.dtype)
    copy = role.spec.num_params * itemsize.itemsize / role.generation.size("mlp")
    kept = sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(role.abstract())
    )
    free = min(gather_objects(free_memory(kept + copy), "free memory")) / GB
    memory_gb = min(validation.memory_gb or free, free)  # a run on another device may have set it
    return replace(config, validation=replace(validation, memory_gb=memory_gb))


# ------------------------------------------------------------------------- export


def export_checkpoint(
    checkpoint: Path,
    output: str | Path,
    *,
    role: str = "actor",
    dtype: str | None = None,
    adapter: bool = False,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> Path:
    """Write one role of a checkpoint as a Hugging Face directory; returns its path.

    Adapters are merged with their base, or with `adapter` written alone, in PEFT's files.

    Every array goes through the first device, however many the run had. By default `dtype` is the
    dtype of the stored weights.

    Raises: ValueError when the checkpoint has no such role, or when its files describe another
        model or tokenizer than it was saved with. ConfigError where `output` holds a run, or a
        model that jaxrl_llm did not export.
    """
    _refuse_mixture(Path(output), adapter)
    facts = run_facts(checkpoint)
    _refuse_others(Path(output), facts.config, adapter)
    roles = manager.stored_roles(checkpoint)
    if role not in roles:
        known = f"it has {', '.join(roles)}, so --role={next(iter(roles))} works"
        raise ConfigError(f"{checkpoint} has no role {role!r}; {known}")
    abstract, saved = roles[role], stored_model(checkpoint, role)
    if adapter and saved.base is None:
        raise ConfigError(
            f"--adapter: all weights of {role!r} learned in {checkpoint}, so it has no adapter; "
            "leave the flag out"
        )
    kind: Kind = "scalar" if "score" in abstract else "causal_lm"
    stored = str(jax.tree.leaves(abstract)[0].dtype)
    if saved.base is not None:
        stored = dtype if dtype == "float32" else _base_dtype(saved)
    config = _model_config(checkpoint, role, facts.config)
    files = checkpoint.parent / layout.HUGGINGFACE
    identity.check_model(checkpoint, config, files / "config.json", role)
    identity.check_tokenizer(checkpoint, load_tokenizer(files).digest(), files)
    spec = model_spec(config, kind, stored)
    dense = make_role(role, spec, ModelSettings(), make_mesh(devices=jax.local_devices()[:1]))
    kept = spec if saved.base is None else saved.spec(config)
    _check_shapes(kept.learned, abstract, role)
    if adapter and saved.base is not None:
        own = saved.restore(abstract)
        return peft.export_adapter(
            output,
            kept,
            own,
            base=_base_path(saved.base, facts),
            base_digests=base_digests(saved.base, config, dense.layout),
            dtype=dtype,
        )
    names = abstract if saved.base is None else spec.params
    params = restored(saved, spec, dense.layout, names)
    return export(
        output,
        spec,
        params,
        tokenizer_files_from=files,
        model_card=model_card(spec, facts, role),
        dtype=dtype,
        max_shard_bytes=max_shard_bytes,
        image_model=_image_model(files, role) if kind == "causal_lm" else None,
    )


def _image_model(files: Path, role: str) -> Path | None:
    """The folder with the image encoder of the model that the run learned."""
    image_model = image_model_of_checkpoint(files)
    if not image_model or role != "actor":
        return None
    try:
        return model_directory(image_model)
    except ValueError as error:
        _log.warning("the language model is exported alone, without its image encoder: %s", error)
        return None


def base_note(checkpoint: Path, role: str, *, adapter: bool) -> str:
    """A note on an export whose base is in float8; empty for other exports."""
    base = stored_model(checkpoint, role).base
    if base is None or base.model["param_dtype"] != FLOAT8_BASE:
        return ""
    if adapter:
        return (
            "note: the adapter was trained on a base in float8; on the base that is not quantised "
            "its outputs differ a little"
        )
    return "note: the base was in float8; its dequantised weights and the adapter were merged"


# Besides a tokenizer's files and config.json.
_WRITTEN = ("README.md", "generation_config.json", "model*.safetensors", "model*.index.json")


def _refuse_mixture(output: Path, adapter: bool) -> None:
    """transformers opens only the adapter of a folder that also holds a model."""
    other = output / ("config.json" if adapter else peft.CONFIG)
    if other.exists():
        raise ConfigError(
            f"--output={output} holds {other.name} of an earlier export, and transformers would "
            "mix the two; give another directory"
        )


def _refuse_others(output: Path, config: Config | None, adapter: bool) -> None:
    """Refuse to write over a run, files of others, or what the run began with."""
    steps = (*output.glob(f"{layout.STEP_PREFIX}_*"), output, *output.parents)
    content = ""
    if any((output / name).exists() for name in (layout.CHECKPOINTS, "metrics.jsonl")):
        content = "a run"
    elif any(layout.step_of(folder) is not None for folder in steps):
        content = "checkpoints"
    card = output / "README.md"
    ours = card.is_file() and CARD_MARK in card.read_text(errors="replace")
    if not content and (output / "config.json").exists() and not ours:
        content = "a model that jaxrl_llm did not export"
    written = () if ours else (*_WRITTEN, *TOKENIZER_FILES)
    if adapter:
        written = () if peft.is_ours(output) else (peft.CONFIG, peft.WEIGHTS)
    if not content and (others := sorted(x.name for name in written for x in output.glob(name))):
        content = f"{others[0]}, which jaxrl_llm did not write"
    if not content and config is not None and output.exists():
        began = (config.actor.path, config.actor.lora.path, config.critic.path)
        same = [path for path in began if path and exists(path) and output.samefile(path)]
        content = "the model that the run began with" if same else ""
    if content:
        raise ConfigError(
            f"--output={output} holds {content}, which the export would overwrite; give another "
            "directory"
        )


def _base_path(base: StoredModel, facts: RunFacts) -> str:
    """The base of an adapter as the config names it; empty where no files hold it alone."""
    if facts.config is None or base.source is None or not base.source["path"]:
        return ""
    return (facts.config.critic if base.role == CRITIC_BASE else facts.config.actor).path


def run_facts(checkpoint: Path) -> RunFacts:
    """The config of the run, the step of the checkpoint, and its last validation."""
    run_dir = layout.run_directory_of(checkpoint)
    step = manager.restore(checkpoint, {})[1]["step"]
    config_file, metrics_file = run_dir / "config.json", run_dir / "metrics.jsonl"
    config = from_json(config_file.read_text()) if config_file.is_file() else None
    validation: dict[str, float] = {}
    files = [metrics_file] if metrics_file.is_file() else []
    lines = read_jsonl(files, key=GLOBAL_STEP)  # the run may go on
    rows = [row for row in lines if row[GLOBAL_STEP] <= step]
    for row in rows:
        metrics = {
            name: x
            for name, x in row.items()
            if name.startswith(manager.VALIDATION) and x is not None
        }
        validation = metrics or validation
    return RunFacts(config=config, step=step, validation=validation, history=rows)


def _model_config(checkpoint: Path, role: str, config: Config | None) -> ModelConfig:
    """A role may be of another model than the actor; the run's config says which."""
    settings: dict[str, ModelSettings | None] = {}
    if config is not None:
        settings = {"critic": config.critic, "reward": config.reward.model}
        settings["teacher"] = config.teacher
        settings["reference"] = ModelSettings(path=config.reference.path)
        settings |= {model.name: model for model in config.models}
    own = settings.get(role)
    if config and own is not None and (own.path or own.hf_config):
        # A config without vocab_size took the tokenizer's.
        tokenizer = load_tokenizer(checkpoint.parent / layout.HUGGINGFACE)
        length, images = config.data.max_row_length, config.data.max_images
        model = find_model(own, tokenizer, context=length, images=images).config
    else:
        images = config is not None and config.data.max_images > 0
        model = load_model_config(checkpoint.parent / layout.HUGGINGFACE, images=images)
    if config is None or model.vision is None:
        return model
    return replace(model, vision=replace(model.vision, train=config.actor.vision.train))


def _base_dtype(adapters: StoredModel) -> str:
    """The dtype of the base below the adapters of a role."""
    model = adapters.model
    # Frozen projections in float8 are exact in the dtype of computation, which the rest has.
    return model["dtype" if model["param_dtype"] == FLOAT8_BASE else "param_dtype"]


def _check_shapes(params: Params, abstract: Any, role: str) -> None:
    def shapes(tree: Any) -> dict[str, tuple[int, ...]]:
        leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
        return {jax.tree_util.keystr(path): leaf.shape for path, leaf in leaves}

    if shapes(params) != shapes(abstract):
        raise ValueError(
            f"the weights of role {role!r} are not of the model that its run describes; keep "
            "config.json of the run next to its folder of checkpoints"
        )


def validation_report(config: Config, model: str, validation: Validation) -> dict[str, Any]:
    """The file of `jaxrl evaluate`: the metrics and what they were measured on."""
    return {
        "model": model,
        "config": config.name,
        "metrics": validation.metrics,
        "num_samples": validation.num_samples,
        "samples_per_prompt": config.validation.n,
        "temperature": config.validation.temperature,
    }
