"""The first parameters of a role: of a directory, a checkpoint, or a seed.

A checkpoint of adapters names their base, the frozen weights below them. It is read again, and
compared by the digests of its arrays.
"""

import logging
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_llm.checkpoint import digests, identity, layout, manager
from jaxrl_llm.checkpoint.huggingface import check_weights, import_params, model_directory
from jaxrl_llm.checkpoint.peft import (
    BASE_BITS,
    BASE_FORM,
    base_of_adapter,
    check_adapter,
    import_adapter,
    mark_of,
)
from jaxrl_llm.checkpoint.soundness import check_loaded
from jaxrl_llm.config import AdaptedSettings, Config, ConfigError
from jaxrl_llm.distributed.multihost import is_main
from jaxrl_llm.distributed.sharding import shardings
from jaxrl_llm.distributed.transfer import call
from jaxrl_llm.learner.train_state import Params, cast
from jaxrl_llm.models.base import (
    ModelSpec,
    dense_spec,
    frozen_spec,
    init_sharded,
    merge_adapters,
)
from jaxrl_llm.models.frozen import KERNEL, SCALE, freeze, inputs_of, is_frozen
from jaxrl_llm.models.lora import Lora
from jaxrl_llm.plan.models import ModelSource
from jaxrl_llm.plan.roles import BASE, CRITIC_BASE, Role

_log = logging.getLogger(__name__)

BASES = "bases"  # entry of the loop state: a record of each base that is read again

Record = dict[str, Any]  # in JSON's types


def load_params(role: Role, source: ModelSource, seed: int) -> Params:
    """First parameters of a role, laid out for training. A pure function of files and seed.

    Raises: ValueError when weights are NaN, infinite or beyond use; it names the parameter.
    """
    if source.directory is None:
        return init_sharded(role.spec, jax.random.key(seed), role.param_shardings)
    if source.checkpoint is not None:
        params = _from_checkpoint(_with_spec(role, dense_spec(role.spec)), source.checkpoint)
        params = _frozen(role.spec.params, params, role.param_shardings)
    else:
        params = import_params(source.directory, role.spec, role.param_shardings)
    check_loaded(params, source.checkpoint or source.directory)
    return params


def check_stored(role: Role, source: ModelSource | None, config: Config) -> None:
    """ValueError where the files of a role have other weights or adapters. Reads headers only."""
    if source is not None and source.directory is not None and source.checkpoint is None:
        check_weights(source.directory, role.spec)
    settings = config.critic if role.name == "critic" else config.actor
    if role.base and settings.lora.path:
        check_adapter(settings.lora.path, role.spec)


def _with_spec(role: Role, spec: ModelSpec) -> Role:
    """The role with its model in another form, where `role` is."""
    places = shardings(spec.axes, spec.params, role.mesh, role.layout.rules)
    return replace(role, spec=spec, param_shardings=places)


def _frozen(abstract: Params, params: Params, places: Params) -> Params:
    """Parameters with projections in float8 where `abstract` has them so; takes them in turn."""
    if is_frozen(abstract):
        at = (inputs_of(abstract), places[KERNEL], places[SCALE])
        kernel = freeze(params.pop(KERNEL), *at)
        return params | {KERNEL: kernel.values, SCALE: kernel.scale}
    if not isinstance(params, dict):
        return params
    return {name: _frozen(abstract[name], x, places[name]) for name, x in params.items()}


def first_adapters(role: Role, base: Params, settings: AdaptedSettings, seed: int) -> Params:
    """The adapters that a training begins with: new ones, or those of a PEFT folder."""
    if not settings.lora.path:
        return role.first_adapters(base, seed)
    _check_base(role, base, settings)
    found = import_adapter(settings.lora.path, role.spec, role.own_shardings)
    check_loaded(found, settings.lora.path)
    return found


def _check_base(role: Role, base: Params, settings: AdaptedSettings) -> None:
    """ConfigError where the adapters were trained on other frozen weights of these shapes.

    Without digests of these, a log line where the base has another name.
    """
    folder = settings.lora.path
    name, mark = base_of_adapter(folder)
    # Of a whole base this takes seconds, which other files of adapters need not wait for.
    now = mark_of(digests.array_digests({role.name: base})[role.name]) if mark else {}
    if mark and mark[BASE_FORM] == now[BASE_FORM]:
        if mark[BASE_BITS] != now[BASE_BITS]:
            raise ConfigError(
                f"the adapter in {folder} was trained on other frozen weights than those of "
                f"config.{role.name}.path={settings.path}: on {name or 'those of its own run'}. "
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


def _from_checkpoint(role: Role, checkpoint: Path) -> Params:
    """A language model takes the checkpoint's actor. A scalar model takes its reward model, or else
    the actor's decoder with a head of zeros."""
    abstract = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
        role.spec.params,
        role.param_shardings,
    )
    stored = manager.stored_roles(checkpoint)
    wanted = "reward" if role.spec.kind == "scalar" and "reward" in stored else "actor"
    if wanted not in stored:
        raise ValueError(
            f"{checkpoint} holds {', '.join(stored)} and no language model to begin from; name "
            "the checkpoint of another run"
        )
    if not (role.spec.kind == "scalar" and wanted == "actor"):
        return restored(role, checkpoint, wanted, abstract)
    make = jax.jit(
        partial(jax.tree.map, lambda x: jnp.zeros(x.shape, x.dtype), abstract["score"]),
        out_shardings=role.param_shardings["score"],
    )
    zeros = call(make, (), role.mesh)
    found = restored(role, checkpoint, wanted, {"decoder": abstract["decoder"]})
    return found | {"score": zeros}


# ------------------------------------------------------------------------- adapters


def restored(role: Role, checkpoint: Path, stored: str, abstract: Params) -> Params:
    """The weights of the stored role that `abstract` names, as `role` keeps them.

    Adapters are merged with their base, which is read again.
    """
    if adapters_in(checkpoint, stored) is None:
        return manager.restore_role(checkpoint, stored, abstract)
    adapted = adapted_role(role, checkpoint, stored)
    own = manager.restore_role(checkpoint, stored, adapted.abstract())
    base = _stored_base(role, checkpoint, stored)

    def merge(own: Params, base: Params) -> Params:
        dtype = role.spec.dtype
        dense = merge_adapters(adapted.spec, adapted.with_base(own, base).joined, dtype)[1]
        return cast({name: dense[name] for name in abstract}, dtype)

    places = {name: role.param_shardings[name] for name in abstract}
    return call(jax.jit(merge, out_shardings=places), (own, base), role.mesh)


def adapters_in(checkpoint: Path, stored: str) -> Lora | None:
    """The adapters of a role in a checkpoint; None where all of its weights learned."""
    model = identity.read_identity(checkpoint)[identity.MODELS].get(stored)
    return None if model is None else identity.lora_of(model)


def adapted_role(role: Role, checkpoint: Path, stored: str) -> Role:
    """A role that keeps the adapters of a checkpoint's role, where `role` is."""
    model = identity.read_identity(checkpoint)[identity.MODELS][stored]
    lora = identity.lora_of(model)
    stored, dtype = model["param_dtype"], model["dtype"]
    spec = frozen_spec(role.spec.config, model["kind"], stored, dtype, lora)
    return replace(_with_spec(role, spec), optimizer=None, base=BASE)


def _stored_base(role: Role, checkpoint: Path, stored: str) -> Params:
    """The frozen weights below the adapters of a checkpoint's role."""
    name, model = base_of(checkpoint, stored)
    spec = frozen_spec(role.spec.config, model["kind"], model["param_dtype"], model["dtype"])
    kept = replace(_with_spec(role, spec), name=name, optimizer=None, base="")
    record = base_recorded(checkpoint, name)
    if record is None:
        return manager.restore_role(checkpoint, name, kept.abstract())
    return read_base(kept, record)


def base_of(checkpoint: Path, stored: str) -> tuple[str, Record]:
    """The name of the base below the adapters of a checkpoint's role, and its identity."""
    models = identity.read_identity(checkpoint)[identity.MODELS]
    name = CRITIC_BASE if stored == "critic" and CRITIC_BASE in models else BASE
    return name, models[name]


def base_recorded(checkpoint: Path, name: str) -> Record | None:
    """Where a base came from; None where the checkpoint's folder keeps it, after a warm-up."""
    return manager.loop_state(checkpoint).get(BASES, {}).get(name)


def base_digests(role: Role, checkpoint: Path, stored: str) -> dict[str, str]:
    """The digest of each array below the adapters of a checkpoint's role, where `role` is."""
    name, _ = base_of(checkpoint, stored)
    record = base_recorded(checkpoint, name)
    if record is not None:
        return record["arrays"]
    return digests.array_digests({name: _stored_base(role, checkpoint, stored)})[name]


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
        source = ModelSource(config=role.spec.config)
        if record["path"]:
            found = layout.find_model_path(record["path"])
            directory = model_directory(found.files)
            source = replace(source, directory=directory, checkpoint=found.checkpoint)
    params = load_params(role, source, record["seed"])
    now = base_record(role, source, record["seed"], params)
    was, found = record["arrays"], now["arrays"]
    wrong = [path for path in {**was, **found} if was.get(path) != found.get(path)]
    if wrong:
        raise ConfigError(
            f"the frozen weights {role.name!r} are not those that the adapters were trained on: "
            f"{_place(now)} now, {_place(record)} then, and {digests.listed(wrong)} differ. Put "
            "the weights back"
        )
    return params


def _place(record: Record) -> str:
    return record["path"] or f"drawn from seed {record['seed']}"
