"""The first parameters of a role: from a directory, a checkpoint, or a seed.

A checkpoint of adapters names their base, the frozen weights below them. It is read again, and
compared by the digests of its arrays.
"""

import logging
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp

from jaxrl_llm.checkpoint import digests
from jaxrl_llm.checkpoint.huggingface import check_weights, import_params, placed_params
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
from jaxrl_llm.checkpoint.stored_models import Record, StoredModel, model_to_begin_from
from jaxrl_llm.config import AdaptedSettings, Config, ConfigError
from jaxrl_llm.distributed.multihost import fetch, is_main
from jaxrl_llm.distributed.sharding import shardings
from jaxrl_llm.distributed.transfer import call
from jaxrl_llm.learner.train_state import Params, cast
from jaxrl_llm.models.base import ModelSpec, dense_spec, init_sharded, merge_adapters
from jaxrl_llm.models.frozen import KERNEL, SCALE, freeze, inputs_of, is_frozen
from jaxrl_llm.plan.models import ModelSource, source_at
from jaxrl_llm.plan.roles import BASE, Role

_log = logging.getLogger(__name__)


def load_params(role: Role, source: ModelSource, seed: int) -> Params:
    """First parameters of a role, laid out for training. A pure function of files and seed.

    Raises: ValueError when weights are NaN, infinite or beyond use; it names the parameter.
    """
    spec, places = role.spec, role.param_shardings
    if source.params is not None:
        params, where = placed_params(source.params, spec, places), "config.actor.params"
    elif source.checkpoint is not None:
        params, where = _from_checkpoint(role, source.checkpoint), source.checkpoint
    elif source.directory is not None:
        params, where = import_params(source.directory, spec, places), source.directory
    else:
        return init_sharded(spec, jax.random.key(seed), places)
    check_loaded(params, where)
    return params


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


# ------------------------------------------------------------------------- checkpoints


def _from_checkpoint(role: Role, checkpoint: Path) -> Params:
    """A model of a checkpoint. A scalar model may begin with an actor and a head of zeros."""
    stored = model_to_begin_from(checkpoint, role.spec.kind)
    dense = _keeping(role, dense_spec(role.spec))
    abstract, head = dense.abstract(), {}
    if role.spec.kind == "scalar" and stored.role == "actor":
        abstract, score = {"decoder": abstract["decoder"]}, abstract["score"]
        zeros = partial(jax.tree.map, lambda x: jnp.zeros(x.shape, x.dtype), score)
        make = jax.jit(zeros, out_shardings=dense.param_shardings["score"])
        head = {"score": call(make, (), role.mesh)}
    params = restored(stored, dense, abstract) | head
    return _frozen(role.spec.params, params, role.param_shardings)


def _keeping(role: Role, spec: ModelSpec, *, name: str = "", base: str = "") -> Role:
    """A role that never learns and keeps `spec`, on the devices of `role`."""
    places = shardings(spec.axes, spec.params, role.mesh, role.layout.rules)
    name = name or role.name
    return replace(role, name=name, spec=spec, param_shardings=places, optimizer=None, base=base)


def _frozen(abstract: Params, params: Params, places: Params) -> Params:
    """Parameters with projections in float8 where `abstract` has them so; takes them in turn."""
    if is_frozen(abstract):
        at = (inputs_of(abstract), places[KERNEL], places[SCALE])
        kernel = freeze(params.pop(KERNEL), *at)
        return params | {KERNEL: kernel.values, SCALE: kernel.scale}
    if not isinstance(params, dict):
        return params
    return {name: _frozen(abstract[name], x, places[name]) for name, x in params.items()}


def restored(stored: StoredModel, role: Role, abstract: Params) -> Params:
    """The stored weights that `abstract` names, as `role` keeps them.

    Adapters are merged with their base, which is read again.
    """
    if stored.base is None:
        return stored.restore(abstract)
    adapted = adapted_role(stored, role)
    base = _read_stored_base(stored.base, role)
    own = stored.restore(adapted.abstract())

    def merge(own: Params, base: Params) -> Params:
        dtype = role.spec.dtype
        dense = merge_adapters(adapted.spec, adapted.with_base(own, base).joined, dtype)[1]
        return cast({name: dense[name] for name in abstract}, dtype, role.spec.float32_head)

    places = {name: role.param_shardings[name] for name in abstract}
    return call(jax.jit(merge, out_shardings=places), (own, base), role.mesh)


def adapted_role(stored: StoredModel, role: Role) -> Role:
    """A role that keeps stored adapters, where `role` is."""
    return _keeping(role, stored.spec(role.spec.config), base=BASE)


def _read_stored_base(base: StoredModel, role: Role) -> Params:
    """The frozen weights below stored adapters, where `role` is."""
    kept = _keeping(role, base.spec(role.spec.config), name=base.role)
    if base.source is None:
        return base.restore(kept.abstract())
    return read_base(kept, base.source)


def base_digests(base: StoredModel, role: Role) -> dict[str, str]:
    """The digest of each array below stored adapters, where `role` is."""
    if base.source is not None:
        return base.source["arrays"]
    return digests.array_digests({base.role: _read_stored_base(base, role)})[base.role]


def base_record(role: Role, source: ModelSource, seed: int, params: Params) -> Record:
    """Where frozen weights came from, and the digest of each array. Every process calls it."""
    where = source.checkpoint or source.directory
    arrays = digests.array_digests({role.name: params})[role.name]
    return {"path": "" if where is None else str(where), "seed": seed, "arrays": arrays}


def read_base(role: Role, record: Record, source: ModelSource | None = None) -> Params:
    """The frozen weights that a checkpoint's adapters belong to, from `source` or as it says.

    Raises: ConfigError when they are not what they were; it names both places and a parameter.
    """
    if source is None:
        path, config = record["path"], role.spec.config
        source = source_at(path, config) if path else ModelSource(config=config)
    params = load_params(role, source, record["seed"])
    now = base_record(role, source, record["seed"], params)
    was, here = record["arrays"], now["arrays"]
    wrong = [path for path in {**was, **here} if was.get(path) != here.get(path)]
    if wrong:
        raise ConfigError(
            f"the frozen weights {role.name!r} are not those that the adapters were trained on: "
            f"{_place(now)} now, {_place(record)} then, and {digests.listed(wrong)} differ. Put "
            "the weights back"
        )
    return params


def _place(record: Record) -> str:
    return record["path"] or f"drawn from seed {record['seed']}"
