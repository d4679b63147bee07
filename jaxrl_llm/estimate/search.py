"""The layouts that a config can have on some devices, and the fastest that fit."""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jaxrl_llm.config import Config, ExtraModelConfig, MeshConfig, PhaseMeshConfig
from jaxrl_llm.estimate.devices import Devices
from jaxrl_llm.estimate.estimate import Estimate, estimate
from jaxrl_llm.estimate.rates import Rates
from jaxrl_llm.estimate.work import Model, Work

PIPELINES = SEQUENCES = (1, 2, 4, 8)
WIDE = 8  # hosts of a group that generates, where the weights fit on no single host
REMATS = ("none", "projections", "full")
ROLES = {"actor", "critic"}  # whose settings are searched
ROW_TOKENS = (4096, 8192, 16384)  # sizes of packed rows, where a sample fits


@dataclass(frozen=True, kw_only=True)
class LayoutChoice:
    """A layout with its estimate, and the flags that ask for it."""

    estimate: Estimate
    flags: tuple[str, ...]


def best_layouts(
    work: Work,
    count: int,
    hosts: int,
    rates: Rates,
    *,
    settings: Sequence[Work] | None = None,
) -> list[LayoutChoice]:
    """All layouts that fit on `count` devices, the fastest first.

    Remat and the rows of packed passes vary with the mesh, unless `settings` has `work` in the
    forms that are compared.
    """
    forms = list(_settings(work)) if settings is None else settings
    per_host = max(1, count // hosts)
    meshes = list(_meshes(work, count, per_host))
    narrow = [own for mesh in meshes for own in _generating(work, mesh, 1, per_host)]
    layouts = _fitting(work, [*meshes, *narrow], forms, hosts, rates)
    if not layouts and hosts > 1:  # the weights of generation may need several hosts
        most = min(count, WIDE * per_host)
        wide = [own for mesh in meshes for own in _generating(work, mesh, 2 * per_host, most)]
        layouts = _fitting(work, wide, forms, hosts, rates)
    return _distinct(layouts)


def _fitting(
    work: Work, meshes: Sequence[MeshConfig], forms: Sequence[Work], hosts: int, rates: Rates
) -> list[LayoutChoice]:
    """Those of the meshes and forms that fit."""
    fitting = []
    for mesh in meshes:
        devices = Devices(mesh=mesh, hosts=hosts, rates=rates)
        for each in forms:
            planned = estimate(each, devices)
            if planned.fits:
                fitting.append(LayoutChoice(estimate=planned, flags=_flags(work, planned)))
    return fitting


def _distinct(choices: list[LayoutChoice]) -> list[LayoutChoice]:
    """The fastest first; of those as fast to a thousandth, the one that needs least memory."""
    best: dict[str, LayoutChoice] = {}
    for choice in choices:
        key = f"{choice.estimate.seconds:.3g}"
        if key not in best or choice.estimate.peak < best[key].estimate.peak:
            best[key] = choice
    return sorted(best.values(), key=lambda choice: choice.estimate.seconds)


def smallest_count(work: Work, most: int, per_host: int, rates: Rates) -> LayoutChoice | None:
    """The best layout on the fewest devices, from 8 on, with as many prompts a device as on `most`.

    None where even `most` devices do not hold the work.
    """
    count = min(8, most)
    while count <= most:
        part = work.scaled(count / most)
        hosts = max(1, count // per_host)
        if choices := best_layouts(part, count, hosts, rates, settings=[part]):
            return choices[0]
        count *= 2
    return None


def _meshes(work: Work, count: int, per_host: int) -> Iterator[MeshConfig]:
    """Every mesh of `count` devices that the config's sizes allow, generation laid out alike."""
    sizes = itertools.product(_powers(per_host), PIPELINES, SEQUENCES, _expert_sizes(work, count))
    for tensor, pipeline, sequence, expert in sizes:
        rest, left = divmod(count, tensor * pipeline * sequence * expert)
        if left or not rest:
            continue
        for fsdp in _powers(rest):
            mesh = MeshConfig(
                data=rest // fsdp,
                fsdp=fsdp,
                expert=expert,
                sequence=sequence,
                tensor=tensor,
                pipeline=pipeline,
            )
            if rest % fsdp == 0 and _allowed(work, mesh, per_host):
                yield mesh


def _expert_sizes(work: Work, count: int) -> list[int]:
    """Sizes of the axis `expert`: those that divide the experts of every mixture."""
    mixtures = [model.config.mixture for model in work.models.values() if model.config.mixture]
    experts = math.gcd(*(mixture.num_experts for mixture in mixtures)) if mixtures else 1
    return [size for size in _powers(min(experts, count)) if experts % size == 0]


def _generating(work: Work, mesh: MeshConfig, least: int, most: int) -> Iterator[MeshConfig]:
    """`mesh` with each larger `tensor` size of generation, from `least` to `most`."""
    for own in _powers(most):
        if work.online and own >= max(least, mesh.tensor + 1) and _divides(work.actor, own):
            yield replace(mesh, generation=PhaseMeshConfig(tensor=own))


def _powers(most: int) -> Iterator[int]:
    size = 1
    while size <= most:
        yield size
        size *= 2


def _allowed(work: Work, mesh: MeshConfig, per_host: int) -> bool:
    """True if the heads, the layers and the batch divide, and neighbours share a host."""
    if mesh.sequence * mesh.tensor > per_host:
        return False
    for model in work.models.values():
        if not _divides(model, mesh.tensor) or not model.config.splits_alike(mesh.pipeline):
            return False
        if _stored_size(model) % (mesh.pipeline * mesh.fsdp * mesh.expert * mesh.sequence):
            return False
    rows = work.samples.count
    mini = min((rows // job.mini_batches for job in work.jobs), default=rows)
    return mini % mesh.num_replicas == 0


def _stored_size(model: Model) -> int:
    """The sizes that the shards of stored weights must divide."""
    config = model.config
    latent = config.latent
    ranks = [] if latent is None else [latent.query_rank, latent.kv_rank]
    return math.gcd(config.hidden_size, *(rank for rank in ranks if rank))


def _divides(model: Model, tensor: int) -> bool:
    config = model.config
    inner = config.mixture.expert_size if config.mixture else config.intermediate_size
    heads = math.gcd(config.num_heads, config.delta.key_heads if config.delta else 0)
    return heads % tensor == 0 and inner % tensor == 0


def few_settings(work: Work, choices: Sequence[LayoutChoice]) -> list[Work]:
    """`work` as it is, as the fastest of `choices` has it, and with least memory; each once."""
    forms = [work, _with(work, REMATS[-1], work.actor.rows.micro_batch_tokens)]
    forms += [choice.estimate.work for choice in choices[:1]]
    return [form for i, form in enumerate(forms) if all(_differ(form, f) for f in forms[:i])]


def with_settings(config: Config, work: Work) -> Config:
    """`config` with the remat and the packed rows of `work`, as `flags` name them."""
    changes: dict[str, Any] = {}
    for name in ROLES.intersection(work.models):
        model, own = work.models[name], getattr(config, name)
        rows = model.rows.micro_batch_tokens
        changes[name] = replace(own, remat=model.settings.remat, micro_batch_tokens=rows)
    return replace(config, **changes)


def _differ(work: Work, other: Work) -> bool:
    return work.models != other.models


def _settings(work: Work) -> Iterator[Work]:
    """The work, then it with other activation checkpointing and other packed rows.

    These are one setting for all models; a model whose rows are not packed keeps its rows.
    """
    longest = work.samples.longest_prompt + work.samples.longest_response
    rows = [work.actor.rows.micro_batch_tokens]
    if rows[0]:
        rows += [size for size in ROW_TOKENS if size >= longest and size not in rows]
    forms = [work]
    for remat, row in itertools.product((work.actor.settings.remat, *REMATS), rows):
        other = _with(work, remat, row)
        if all(_differ(other, one) for one in forms):
            forms.append(other)
    yield from forms


def _with(work: Work, remat: str, row: int) -> Work:
    models = {}
    for name, model in work.models.items():
        settings: Any = model.settings
        if model.learns and not isinstance(settings, ExtraModelConfig):  # these keep their own
            settings = replace(settings, remat=remat)
        packs = row and model.rows.micro_batch_tokens
        rows = replace(model.rows, micro_batch_tokens=row) if packs else model.rows
        models[name] = replace(model, settings=settings, rows=rows)
    return replace(work, models=models)


def _flags(work: Work, planned: Estimate) -> tuple[str, ...]:
    """The flags of a command for this layout, without settings that do not change."""
    mesh = planned.devices.mesh
    flags = [f"--config.mesh.{axis}={size}" for axis, size in mesh.sizes.items() if size > 1]
    if mesh.generation.tensor:
        flags.append(f"--config.mesh.generation.tensor={mesh.generation.tensor}")
    for name, model in planned.work.models.items():
        was = work.models[name]
        if name not in ROLES:
            continue
        if model.settings.remat != was.settings.remat:
            flags.append(f"--config.{name}.remat={model.settings.remat}")
        if model.rows.micro_batch_tokens != was.rows.micro_batch_tokens:
            flags.append(f"--config.{name}.micro_batch_tokens={model.rows.micro_batch_tokens}")
    return tuple(flags)
