"""The weights of a model from a folder, a checkpoint or a seed, placed by a layout.

A checkpoint of adapters names their base, the frozen weights below them. The base is read again
and compared by the digests of its arrays. Then the adapters are merged into it.
"""

from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_llm.checkpoint import digests
from jaxrl_llm.checkpoint.huggingface import import_params, model_directory
from jaxrl_llm.checkpoint.layout import find_model_path
from jaxrl_llm.checkpoint.soundness import check_loaded
from jaxrl_llm.checkpoint.stored_models import Record, StoredModel, model_to_begin_from
from jaxrl_llm.config import ConfigError
from jaxrl_llm.distributed.layout import Layout
from jaxrl_llm.distributed.sharding import shardings
from jaxrl_llm.distributed.transfer import call
from jaxrl_llm.models.base import ModelSpec, Params, dense_spec, init_sharded, merge_adapters
from jaxrl_llm.models.casting import cast
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.frozen import KERNEL, SCALE, freeze, inputs_of, is_frozen
from jaxrl_llm.models.lora import join, split


def load_weights(
    spec: ModelSpec,
    layout: Layout,
    *,
    checkpoint: Path | None = None,
    folder: Path | None = None,
    seed: int = 0,
) -> Params:
    """All parameters of `spec`; without a checkpoint and a folder they are drawn.

    Raises: ValueError when weights are NaN, infinite or beyond use; it names the parameter.
    """
    places = _places(spec, layout)
    if checkpoint is not None:
        params, where = _from_checkpoint(checkpoint, spec, layout), checkpoint
    elif folder is not None:
        params, where = import_params(folder, spec, places), folder
    else:
        return init_sharded(spec, jax.random.key(seed), places)
    check_loaded(params, where)
    return params


def _places(spec: ModelSpec, layout: Layout) -> Params:
    """The sharding of each parameter."""
    return shardings(spec.axes, spec.params, layout.mesh, layout.rules)


def _abstract(spec: ModelSpec, layout: Layout) -> Params:
    """The shape, dtype and sharding of each parameter."""
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
        spec.params,
        _places(spec, layout),
    )


def _from_checkpoint(checkpoint: Path, spec: ModelSpec, layout: Layout) -> Params:
    """A model of a checkpoint. A scalar model may begin with an actor and a head of zeros."""
    stored, dense = model_to_begin_from(checkpoint, spec.kind), dense_spec(spec)
    abstract, head = _abstract(dense, layout), {}
    if spec.kind == "scalar" and stored.role == "actor":
        abstract, score = {"decoder": abstract["decoder"]}, abstract["score"]
        zeros = partial(jax.tree.map, lambda x: jnp.zeros(x.shape, x.dtype), score)
        make = jax.jit(zeros, out_shardings=jax.tree.map(lambda x: x.sharding, score))
        head = {"score": call(make, (), layout.mesh)}
    params = restored(stored, dense, layout, abstract) | head
    return _frozen(spec.params, params, _places(spec, layout))


def restored(stored: StoredModel, spec: ModelSpec, layout: Layout, abstract: Params) -> Params:
    """The stored weights that `abstract` names, as `spec` has them without adapters.

    Adapters are merged with their base, which is read again.
    """
    if stored.base is None:
        return stored.restore(abstract)
    adapted = stored.spec(spec.config)
    base = _stored_base(stored.base, spec.config, layout)
    own = stored.restore(split(_abstract(adapted, layout))[1])

    def merge(own: Params, base: Params) -> Params:
        wanted = split(adapted.params)[0]  # the base may have another head
        whole = join({name: base[name] for name in wanted}, own)
        dense = merge_adapters(adapted, whole, spec.dtype)[1]
        return cast({name: dense[name] for name in abstract}, spec.dtype, spec.float32_head)

    places = _places(spec, layout)
    run = jax.jit(merge, out_shardings={name: places[name] for name in abstract})
    return call(run, (own, base), layout.mesh)


def _frozen(abstract: Params, params: Params, places: Params) -> Params:
    """Parameters with projections in float8 where `abstract` has them so; takes them in turn."""
    if is_frozen(abstract):
        at = (inputs_of(abstract), places[KERNEL], places[SCALE])
        kernel = freeze(params.pop(KERNEL), *at)
        return params | {KERNEL: kernel.values, SCALE: kernel.scale}
    if not isinstance(params, dict):
        return params
    return {name: _frozen(abstract[name], x, places[name]) for name, x in params.items()}


# ------------------------------------------------------------------------- bases


def base_digests(base: StoredModel, config: ModelConfig, layout: Layout) -> dict[str, str]:
    """The digest of each array below stored adapters."""
    if base.source is not None:
        return base.source["arrays"]
    return _digests(base.role, _stored_base(base, config, layout))


def _stored_base(base: StoredModel, config: ModelConfig, layout: Layout) -> Params:
    """The frozen weights below stored adapters."""
    spec, record = base.spec(config), base.source
    if record is None:
        return base.restore(_abstract(spec, layout))
    path = record["path"]
    place = find_model_path(path) if path else None
    if place is None:
        params = load_weights(spec, layout, seed=record["seed"])
    elif place.checkpoint is not None:
        params = load_weights(spec, layout, checkpoint=place.checkpoint)
    else:
        params = load_weights(spec, layout, folder=model_directory(place.path))
    check_base(base.role, record, base_record(base.role, path, record["seed"], params))
    return params


def base_record(role: str, path: str, seed: int, params: Params) -> Record:
    """Where frozen weights came from, and the digest of each array. Every process calls it."""
    return {"path": path, "seed": seed, "arrays": _digests(role, params)}


def check_base(role: str, then: Record, now: Record) -> None:
    """ConfigError for other frozen weights than `then`; it names both places and a parameter."""
    was, here = then["arrays"], now["arrays"]
    if wrong := [path for path in {**was, **here} if was.get(path) != here.get(path)]:
        raise ConfigError(
            f"the frozen weights {role!r} are not those that the adapters were trained on: "
            f"{_place(now)} now, {_place(then)} then, and {digests.listed(wrong)} differ. Put "
            "the weights back"
        )


def _place(record: Record) -> str:
    return record["path"] or f"drawn from seed {record['seed']}"


def _digests(role: str, params: Any) -> dict[str, str]:
    return digests.array_digests({role: params})[role]
