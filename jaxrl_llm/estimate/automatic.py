"""`placement="auto"`: the layout that the planner expects to be fastest on the devices of a run."""

import math
import platform
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import jax

from jaxrl_llm.config import Config, ConfigError, check
from jaxrl_llm.config.placement import ROLLOUT
from jaxrl_llm.distributed.mesh import devices_of_nodes
from jaxrl_llm.distributed.multihost import gather_objects
from jaxrl_llm.estimate.devices import Devices
from jaxrl_llm.estimate.estimate import Estimate, placed
from jaxrl_llm.estimate.fitting import rates_here
from jaxrl_llm.estimate.rates import GB, Rates
from jaxrl_llm.estimate.search import best_layouts, few_settings, with_settings
from jaxrl_llm.estimate.work import Work, work_of
from jaxrl_llm.observability.console import number

SPLITS = (1 / 8, 1 / 4, 1 / 2, 3 / 4)  # shares of the devices for roles of their own
NEXT = 3  # layouts in the report after the chosen one
CLOSE = 0.02  # share of a step; smaller differences are none


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A config that a run may take, its estimate, and the flags that ask for it."""

    config: Config
    planned: Estimate
    flags: tuple[str, ...]


def automatic(config: Config) -> tuple[Config, list[str]]:
    """`config` with the mesh, the placement, the remat and the rows that were chosen, and why.

    The choice depends on the config, the devices of all processes and this version only, so every
    process makes the same one.

    Raises: ConfigError when nothing fits.
    """
    names = gather_objects(platform.node(), "hosts of a layout")
    hosts, nodes = len(set(names)), devices_of_nodes()
    own, refused = _own_devices(hosts, [len(node) for node in nodes], in_order(nodes))
    rates, known = rates_here()
    work = work_of(replace(config, placement={}))
    choices = best_placements(work, jax.device_count(), hosts, rates, own=own)
    kept = _best_of_each_form(config, choices)
    if not kept:
        raise ConfigError(
            f"config.placement=auto: no layout of {jax.device_count()} devices holds this run, by "
            "the planner. `jaxrl plan --quick` shows what each stage needs; more devices "
            "need less each"
        )
    return kept[0].config, _lines(kept, rates, known, refused)


def shares(count: int, unit: int = 1) -> tuple[int, ...]:
    """Numbers of `count` devices for roles of their own, in whole units of `unit`."""
    units = count // unit
    return tuple(unit * n for n in sorted({round(units * share) for share in SPLITS} - {0, units}))


def in_order(nodes: Sequence[Sequence[int]]) -> bool:
    """True if the devices of each node follow the node before it."""
    return [number for node in nodes for number in node] == list(range(sum(map(len, nodes))))


def _own_devices(hosts: int, sizes: Sequence[int], ordered: bool) -> tuple[tuple[int, ...], str]:
    """The numbers of devices for roles of their own, and why there are none, if so.

    Over several processes, which are `sizes` of devices, each role has whole hosts.
    """
    count = sum(sizes)
    if len(sizes) == 1:
        return shares(count), ""
    if hosts != len(sizes):
        return (), (
            f"{len(sizes)} processes run on {hosts} hosts; start one process a host, with all of "
            "its devices"
        )
    if len(set(sizes)) > 1:
        return (), (
            f"the hosts have {', '.join(map(str, sizes))} devices; start hosts with equal numbers, "
            "or name the devices with --config.placement"
        )
    if not ordered:
        return (), (
            "jax.devices() is not in the order of the processes; name the nodes of each role, for "
            "example --config.placement.rollout=node1:0-7"
        )
    return shares(count, sizes[0]), ""


def best_placements(
    work: Work,
    count: int,
    hosts: int,
    rates: Rates,
    *,
    own: Sequence[int] = (),
    keep_settings: bool = False,
) -> list[tuple[Estimate, tuple[str, ...]]]:
    """Layouts of one group, and of roles with `own` devices, or another of these numbers.

    The fastest first, each with its flags. With `keep_settings` remat and packed rows stay as in
    the config.
    """
    one = best_layouts(work, count, hosts, rates, settings=[work] if keep_settings else None)
    settings = [work] if keep_settings else few_settings(work, one)
    layouts = [(choice.estimate, choice.flags) for choice in one]
    layouts += _apart(work, count, hosts, rates, own, settings)
    return sorted(layouts, key=lambda each: (_judged(each[0]), each[0].peak))


def _judged(planned: Estimate) -> float:
    """The seconds by which a layout is judged: a role apart must be faster by more than CLOSE."""
    return planned.seconds * (1 + CLOSE) if planned.placement else planned.seconds


def _apart(
    work: Work,
    count: int,
    hosts: int,
    rates: Rates,
    sizes: Sequence[int],
    settings: Sequence[Work],
) -> Iterator[tuple[Estimate, tuple[str, ...]]]:
    per_host = count // hosts
    for own in sizes:
        left = math.ceil((count - own) / per_host)
        choices = best_layouts(work, count - own, left, rates, settings=settings)
        names = f"{count - own}-{count - 1}" if own > 1 else str(count - 1)
        for placement in _placements(work, names):
            for choice in choices:
                mesh = choice.estimate.devices.mesh
                config = replace(work.config, mesh=mesh, placement=placement)
                whole = Devices(mesh=mesh, hosts=hosts, rates=rates, host_devices=per_host)
                try:
                    check(config)
                    planned = placed(choice.estimate.work, config, whole)
                except ConfigError:
                    continue
                flags = [f"--config.placement.{role}={name}" for role, name in placement.items()]
                if planned.fits:
                    yield planned, (*choice.flags, *flags)
                    break  # slower meshes of the actor are no better with the same others


def _placements(work: Work, names: str) -> Iterator[dict[str, str]]:
    """Which roles may have devices of their own."""
    if work.config.max_staleness:
        yield {ROLLOUT: names}
    elif "critic" in work.models:
        yield {"critic": names}
        if "reference" in work.models:
            yield {"critic": names, "reference": "critic"}


def _best_of_each_form(
    config: Config, choices: Sequence[tuple[Estimate, tuple[str, ...]]]
) -> list[Candidate]:
    """The fastest choices that a run of `config` may have, and the fastest of each other form."""
    kept: list[Candidate] = []
    for planned, flags in choices:
        if len(kept) > NEXT and _form(planned) in {_form(each.planned) for each in kept}:
            continue
        settled = _settled(config, planned)
        if settled is not None:
            kept.append(Candidate(config=settled, planned=planned, flags=flags))
    return kept


def _settled(config: Config, planned: Estimate) -> Config | None:
    """`config` with this layout; None where a rule refuses it."""
    mesh, placement = planned.devices.mesh, planned.placement
    settled = replace(with_settings(config, planned.work), mesh=mesh, placement=placement)
    try:
        check(settled)
    except ConfigError:
        return None
    return settled


def _lines(kept: Sequence[Candidate], rates: Rates, known: bool, refused: str) -> list[str]:
    """The choice, the next best, why no role is apart where none may be, and the reasons."""
    whose = rates.name if known else f"{rates.name}, as this device has no data sheet here"
    lines = [f"placement=auto, by the planner with the rates of {whose}:"]
    for i, each in enumerate(kept):
        word = "chosen" if i == 0 else "next  "
        lines.append(
            f"  {word} {number(each.planned.seconds)} s per step, {number(each.planned.peak / GB)} "
            f"GB per device: {' '.join(each.flags) or 'one device'}"
        )
    if refused:
        lines.append(f"  no role with devices of its own was considered: {refused}")
    best, forms = kept[0].planned, {_form(kept[0].planned)}
    lines.append(f"  {_why(best)}")
    for each in kept[1:]:
        if _form(each.planned) not in forms:
            forms.add(_form(each.planned))
            lines.append(f"  {_why_not(each.planned, best)}")
    return lines


def _form(planned: Estimate) -> str:
    """One group, or which roles have devices of their own."""
    if not planned.placement:
        return "one group"
    return f"{' and '.join(planned.placement)} apart"


def _why(planned: Estimate) -> str:
    """The parts of a step in the chosen layout."""
    stages = ", ".join(f"{s.stage} {number(s.seconds)}" for s in planned.stages)
    return f"why: the stages take {stages} s, and it is the fastest of those that fit"


def _why_not(planned: Estimate, best: Estimate) -> str:
    """The loss of the fastest layout of another form against the chosen one."""
    here = {s.stage: s.seconds for s in planned.stages}
    there = {s.stage: s.seconds for s in best.stages}
    differ = [name for name in here if abs(here[name] - there[name]) > CLOSE * best.seconds]
    parts = [
        f"{name} takes {number(here[name])} instead of {number(there[name])} s" for name in differ
    ]
    if planned.generates_ahead:
        parts.append("generation runs while the step learns")
    elif best.generates_ahead:
        parts.append("generation and learning take turns")
    reasons = f": {', '.join(parts)}" if parts else ""
    return f"why not {_form(planned)}: {number(planned.seconds)} s per step{reasons}"
