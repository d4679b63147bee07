"""A trained model outside of its run: opened to generate, evaluated, exported.

A model is a Hugging Face directory or one of our checkpoints.
"""

import json
import re
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxrl_llm.checkpoint import identity, layout, manager
from jaxrl_llm.checkpoint.huggingface import (
    MAX_SHARD_BYTES,
    default_model_card,
    export,
    load_model_config,
)
from jaxrl_llm.checkpoint.layout import ModelPath
from jaxrl_llm.checkpoint.peft import export_adapter
from jaxrl_llm.config import Config, ConfigError, DType, ModelSettings, from_json
from jaxrl_llm.data.formats import prompt_of
from jaxrl_llm.distributed.mesh import make_mesh
from jaxrl_llm.generation.engine import generate
from jaxrl_llm.generation.sampler import SamplingParams
from jaxrl_llm.generation.settings import GenerationSettings
from jaxrl_llm.learner.train_state import Params
from jaxrl_llm.models.base import ModelSpec, model_spec
from jaxrl_llm.models.config import Kind, ModelConfig
from jaxrl_llm.plan.models import find_model, find_tokenizer, open_meshes, spec_of
from jaxrl_llm.plan.roles import make_role
from jaxrl_llm.plan.weights import adapted_role, adapters_in, load_params, restored
from jaxrl_llm.tokenizer import Tokenizer, load_tokenizer
from jaxrl_llm.trainer.data import completions_of
from jaxrl_llm.trainer.evaluate import Validation, open_validator
from jaxrl_llm.types import Completion, Prompt

# ------------------------------------------------------------------------- generate


@dataclass(frozen=True, kw_only=True)
class OpenModel:
    """A language model on the first device, with its tokenizer."""

    spec: ModelSpec
    params: Params
    tokenizer: Tokenizer


def open_model(model: ModelPath, *, dtype: DType = "float32") -> OpenModel:
    """Load a language model to be computed in `dtype`. ValueError when it cannot be opened."""
    settings = ModelSettings(path=model.path, dtype=dtype, param_dtype=dtype)
    source = find_model(settings, context=1)  # `complete` knows the length
    mesh = make_mesh(devices=jax.local_devices()[:1])
    role = make_role("actor", spec_of(source, "causal_lm", settings), settings, mesh)
    return OpenModel(
        spec=role.spec,
        params=load_params(role, source, seed=0),
        tokenizer=find_tokenizer("", settings),
    )


def read_prompt(text: str, tokenizer: Tokenizer, *, chat: bool | None = None) -> Prompt:
    """`text` as a plain string or as a user's message; None asks the tokenizer for a template."""
    if chat is None:
        chat = tokenizer.has_chat_template
    row = {"prompt": [{"role": "user", "content": text}] if chat else text}
    return prompt_of(row, "prompt", tokenizer, data_source="prompt", index=0)


def complete(
    model: OpenModel, prompt: Prompt, sampling: SamplingParams, *, n: int = 1, seed: int = 0
) -> list[Completion]:
    """`n` completions of one prompt; sample i is the same whatever `n` is.

    `sampling` gets the tokenizer's stop ids, and no more tokens than the model has positions for.
    ValueError for a prompt that leaves no position.
    """
    left = model.spec.config.max_position_embeddings - len(prompt.token_ids)
    if left < 1:
        raise ValueError(
            f"the prompt has {len(prompt.token_ids)} tokens and the model "
            f"{model.spec.config.max_position_embeddings} positions; give a shorter prompt"
        )
    stop_ids = model.tokenizer.stop_ids
    sampling = replace(
        sampling, stop_token_ids=stop_ids, max_new_tokens=min(sampling.max_new_tokens, left)
    )
    longest = len(prompt.token_ids) + sampling.max_new_tokens
    spec = model_spec(model.spec.config.for_context(longest), dtype=model.spec.dtype)

    @jax.jit
    def answer(params: Params, prompts: jax.Array, lengths: jax.Array, samples: jax.Array) -> Any:
        return generate(
            spec,
            params,
            prompts,
            lengths,
            samples,
            jax.random.key(seed),
            GenerationSettings(sampling=sampling, group=n, pad_id=model.tokenizer.pad_id),
        )

    rows = np.tile(np.array(prompt.token_ids, np.int32), (n, 1))
    lengths = np.full(n, len(prompt.token_ids), np.int32)
    out = jax.device_get(answer(model.params, rows, lengths, np.arange(n, dtype=np.uint32)))
    return completions_of(model.tokenizer, stop_ids, out.tokens, out.mask, out.logprobs)


# ------------------------------------------------------------------------- evaluate


def evaluate(config: Config) -> Validation:
    """Answer and grade the config's held-out data with `actor.path`, as its validation would."""
    tokenizer = find_tokenizer("", config.actor)
    mesh = open_meshes(config, tokenizer)["actor"]
    source = find_model(config.actor, context=config.data.max_row_length)
    spec = spec_of(source, "causal_lm", config.actor)
    role = make_role("actor", spec, config.actor, mesh, phases=config.mesh)
    with ExitStack() as stack:
        validator = open_validator(config, role, tokenizer, None, stack)
        return validator.run(load_params(role, source, config.seed), 0)


# ------------------------------------------------------------------------- export


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """What a checkpoint's run says of itself; empty where its files were not copied along."""

    config: Config | None
    step: int
    validation: dict[str, float]  # the last one up to `step`


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

    Every array goes through the first device, however many the run had. `dtype` is that of the
    stored weights unless given. ValueError when the checkpoint has no such role, or when its files
    describe another model or tokenizer than it was saved with.
    """
    facts = run_facts(checkpoint)
    roles = manager.stored_roles(checkpoint)
    if role not in roles:
        raise ConfigError(f"{checkpoint} has no role {role!r}; it has {', '.join(roles)}")
    abstract, lora = roles[role], adapters_in(checkpoint, role)
    if adapter and lora is None:
        raise ConfigError(
            f"--adapter: all weights of {role!r} learned in {checkpoint}, so it has no adapter; "
            "leave the flag out"
        )
    kind: Kind = "scalar" if "score" in abstract else "causal_lm"
    stored = str(jax.tree.leaves(abstract)[0].dtype)
    if lora is not None:
        stored = dtype if dtype == "float32" else _base_dtype(checkpoint, role)
    config = _model_config(checkpoint, role, facts.config)
    files = checkpoint.parent / layout.HUGGINGFACE
    identity.check_model(checkpoint, config, files / "config.json", role)
    identity.check_tokenizer(checkpoint, load_tokenizer(files).digest(), files)
    spec = model_spec(config, kind, stored)
    dense = make_role(role, spec, ModelSettings(), make_mesh(devices=jax.local_devices()[:1]))
    kept = dense if lora is None else adapted_role(dense, checkpoint, role)
    _check_shapes(kept.spec.learned, abstract, role)
    if adapter:
        path = "" if facts.config is None else facts.config.actor.path
        own = manager.restore_role(checkpoint, role, abstract)
        return export_adapter(output, kept.spec, own, base=path, dtype=dtype)
    if lora is not None:
        params = restored(dense, checkpoint, role, dense.spec.params)
    else:
        params = manager.restore_role(checkpoint, role, abstract)
    return export(
        output,
        spec,
        params,
        tokenizer_files_from=files,
        model_card=_model_card(spec, facts, role),
        dtype=dtype,
        max_shard_bytes=max_shard_bytes,
    )


def run_facts(checkpoint: Path) -> RunFacts:
    """The config of the run, the step of the checkpoint, and its last validation."""
    run_dir = layout.run_directory_of(checkpoint)
    step = manager.restore(checkpoint, {})[1]["step"]
    config_file, metrics_file = run_dir / "config.json", run_dir / "metrics.jsonl"
    config = from_json(config_file.read_text()) if config_file.is_file() else None
    validation: dict[str, float] = {}
    rows = metrics_file.read_text().splitlines() if metrics_file.is_file() else []
    for row in map(json.loads, rows):
        found = {
            name: x
            for name, x in row.items()
            if name.startswith(manager.VALIDATION) and x is not None
        }
        if found and row["training/global_step"] <= step:
            validation = found
    return RunFacts(config=config, step=step, validation=validation)


def _model_config(checkpoint: Path, role: str, config: Config | None) -> ModelConfig:
    """A role may be of another model than the actor; the run's config says which."""
    settings: dict[str, ModelSettings | None] = {}
    if config is not None:
        settings = {"critic": config.critic, "reward": config.reward.model}
        settings["teacher"] = config.teacher
        settings |= {model.name: model for model in config.models}
    own = settings.get(role)
    if config and own is not None and (own.path or own.hf_config):
        return find_model(own, context=config.data.max_row_length).config
    return load_model_config(checkpoint.parent / layout.HUGGINGFACE)


def _base_dtype(checkpoint: Path, role: str) -> str:
    """The dtype of the base below the adapters of a role."""
    saved = identity.read_identity(checkpoint)
    assert saved is not None
    return saved[identity.MODELS][role]["param_dtype"]


def _check_shapes(params: Params, abstract: Any, role: str) -> None:
    def shapes(tree: Any) -> dict[str, tuple[int, ...]]:
        leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
        return {jax.tree_util.keystr(path): leaf.shape for path, leaf in leaves}

    if shapes(params) != shapes(abstract):
        raise ValueError(
            f"the weights of role {role!r} are not of the model that its run describes; keep "
            "config.json of the run next to its folder of checkpoints"
        )


def _model_card(spec: ModelSpec, facts: RunFacts, role: str) -> str:
    rows: dict[str, object] = {"role": role, "step": facts.step}
    base_model = None
    if facts.config is not None:
        path = facts.config.actor.path
        rows = {"run": facts.config.name, "algorithm": facts.config.algorithm.label} | rows
        rows["seed"] = facts.config.seed
        if re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", path) and not Path(path).exists():
            base_model = path
        elif path:
            rows["trained from"] = Path(path).name
    if role == "actor":
        rows |= {f"`{name}`": f"{value:.4g}" for name, value in facts.validation.items()}
    return default_model_card(spec, base_model=base_model, facts=rows)


def validation_report(config: Config, model: str, found: Validation) -> dict[str, Any]:
    """What scripts/evaluate.py writes: the metrics and what they were measured on."""
    return {
        "model": model,
        "config": config.name,
        "metrics": found.metrics,
        "num_samples": found.num_samples,
        "samples_per_prompt": config.validation.n,
        "temperature": config.validation.temperature,
    }
