"""The first parameters of a role: from a program, a folder, a checkpoint, or a seed."""

import logging
from pathlib import Path

import jax
import jax.numpy as jnp

from jaxrl_llm.checkpoint import digests
from jaxrl_llm.checkpoint.huggingface import check_weights, placed_params
from jaxrl_llm.checkpoint.peft import (
    BASE_BITS,
    BASE_FORM,
    base_embeddings,
    base_of_adapter,
    check_adapter,
    import_adapter,
    mark_of,
)
from jaxrl_llm.checkpoint.soundness import check_loaded
from jaxrl_llm.checkpoint.stored_models import Record
from jaxrl_llm.checkpoint.weights import base_record, check_base, load_weights
from jaxrl_llm.config import AdaptedSettings, Config, ConfigError
from jaxrl_llm.distributed.multihost import fetch, is_main
from jaxrl_llm.learner.train_state import Params
from jaxrl_llm.plan.models import ModelSource
from jaxrl_llm.plan.roles import Role

_log = logging.getLogger(__name__)


def load_params(role: Role, source: ModelSource, seed: int) -> Params:
    """First parameters of a role, laid out for training. A pure function of files and seed.

    Raises: ValueError when weights are NaN, infinite or beyond use; it names the parameter.
    """
    if source.params is not None:
        params = placed_params(source.params, role.spec, role.param_shardings)
        check_loaded(params, "config.actor.params")
        return params
    checkpoint, folder = source.checkpoint, source.directory
    return load_weights(role.spec, role.layout, checkpoint=checkpoint, folder=folder, seed=seed)


def check_stored(role: Role, source: ModelSource | None, config: Config) -> None:
    """ValueError where the files of a role have other weights or adapters. Reads headers only."""
    if source is not None and source.folder is not None:
        check_weights(source.folder, role.spec)
    settings = config.critic if role.name == "critic" else config.actor
    if role.base and settings.lora.path:
        check_adapter(settings.lora.path, role.spec)


def first_adapters(role: Role, base: Params, settings: AdaptedSettings, seed: int) -> Params:
    """The adapters that a training begins with: new ones, or a PEFT folder's."""
    if not settings.lora.path:
        return role.first_adapters(base, seed)
    _check_adapted_base(role, base, settings)
    _check_embeddings(role, base, settings)
    adapters = import_adapter(settings.lora.path, role.spec, role.kept_shardings)
    check_loaded(adapters, settings.lora.path)
    return adapters


def _check_adapted_base(role: Role, base: Params, settings: AdaptedSettings) -> None:
    """ConfigError where the adapters were trained on other frozen weights of these shapes.

    Without digests of these, a log line where the base has another name.
    """
    folder = settings.lora.path
    name, mark = base_of_adapter(folder)
    # For a whole base this takes seconds, so it is left out where the adapter has no digests.
    now = mark_of(digests.array_digests({role.name: base})[role.name]) if mark else {}
    if mark and mark[BASE_FORM] == now[BASE_FORM]:
        if mark[BASE_BITS] != now[BASE_BITS]:
            raise ConfigError(
                f"the adapter in {folder} was trained on other frozen weights than "
                f"config.{role.name}.path={settings.path}: on {name or 'the ones of its own run'}. "
                f"Give that base, or begin with new adapters: --config.{role.name}.lora.path= "
                f"--config.{role.name}.lora.rank=16"
            )
    elif is_main() and name and Path(name).name != Path(settings.path).name:
        _log.warning(
            "the adapter in %s names the base %s, and config.%s.path is %s: its outputs are right "
            "only if the two are one model",
            folder,
            name,
            role.name,
            settings.path or "empty",
        )


def _check_embeddings(role: Role, base: Params, settings: AdaptedSettings) -> None:
    """ConfigError where the adapter brings other embeddings than the base has."""
    for path, theirs in base_embeddings(settings.lora.path, role.spec).items():
        ours = base
        for part in path:
            ours = ours[part]
        placed = jax.device_put(theirs, ours.sharding) if theirs.shape == ours.shape else None
        # Either may have been cast from the other.
        if placed is None or not fetch(
            jnp.array_equal(placed.astype(ours.dtype), ours)
            | jnp.array_equal(ours.astype(placed.dtype), placed)
        ):
            raise ConfigError(
                f"the adapter in {settings.lora.path} has other weights of {'.'.join(path)} than "
                f"config.{role.name}.path={settings.path}: its vocabulary was changed, or its base "
                "is another. Give that base, or merge the adapter with PEFT first"
            )


# ------------------------------------------------------------------------- bases of a run


def record_of_base(role: Role, source: ModelSource, seed: int, params: Params) -> Record:
    """Where frozen weights came from, and the digest of each array. Every process calls it."""
    where = source.checkpoint or source.directory
    return base_record(role.name, "" if where is None else str(where), seed, params)


def read_base(role: Role, record: Record, source: ModelSource) -> Params:
    """The frozen weights that a run's adapters belong to. ConfigError when they have changed."""
    params = load_params(role, source, record["seed"])
    check_base(role.name, record, record_of_base(role, source, record["seed"], params))
    return params
