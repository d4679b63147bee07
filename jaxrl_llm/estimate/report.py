"""`jaxrl plan`: what a config needs and how long a step takes, as a table and as JSON."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jaxrl_llm.config import AUTO, Config, ConfigError
from jaxrl_llm.config.placement import ROLLOUT, devices_of_roles
from jaxrl_llm.distributed.placement import sizes_of_nodes
from jaxrl_llm.estimate.compiled import (
    CompiledStage,
    compile_work,
    compiler_options,
    with_compiled,
)
from jaxrl_llm.estimate.devices import Devices
from jaxrl_llm.estimate.estimate import Estimate, placed
from jaxrl_llm.estimate.rates import CPU, GB, Rates, rates_of
from jaxrl_llm.estimate.search import LayoutChoice, best_layouts, smallest_count
from jaxrl_llm.estimate.work import Work, work_of
from jaxrl_llm.generation.memory import words_of
from jaxrl_llm.observability.console import number

PER_HOST = 8  # GPUs, where nothing is said
SHOWN = 3  # other layouts
BETTER = 0.97  # share of a step's seconds below which another layout is worth a line


@dataclass(frozen=True, kw_only=True)
class Request:
    """The question; 0 and empty take the config's own."""

    devices: int = 0
    hosts: int = 0
    hardware: str = "h200"
    quick: bool = False
    prompt_tokens: int = 0
    response_tokens: int = 0
    lengths: tuple[tuple[int, int], ...] = ()

    def count(self, config: Config) -> int:
        return self.devices or devices_in(config)

    def num_hosts(self, config: Config) -> int:
        """ConfigError unless the devices are spread evenly over the hosts."""
        count = self.count(config)
        nodes, used = sizes_of_nodes(config), devices_in(config)
        if nodes and (sum(nodes) != used or len(set(nodes)) > 1):
            raise ConfigError(
                f"config.placement: nodes of {min(nodes)} to {max(nodes)} devices, of which roles "
                f"use {used} in all; the planner takes equal nodes that are used as a whole"
            )
        if nodes and self.hosts not in (0, len(nodes)):
            raise ConfigError(
                f"--hosts={self.hosts}: config.placement names {len(nodes)} nodes; leave it out"
            )
        hosts = len(nodes) or self.hosts or math.ceil(count / PER_HOST)
        if count % hosts:
            raise ConfigError(
                f"--devices={count} cannot be spread evenly over --hosts={hosts}; give a number "
                "of hosts that divides the devices"
            )
        return hosts


def devices_in(config: Config) -> int:
    """The devices of all groups of a config."""
    return len({number for group in devices_of_roles(config).values() for number in group})


@dataclass(frozen=True, kw_only=True)
class Report:
    """The answer to a request."""

    planned: Estimate
    chosen: bool  # the mesh was searched for, as the config's has another number of devices
    better: tuple[LayoutChoice, ...]
    small: LayoutChoice | None  # on the fewest devices, for the scaling
    compiled: tuple[CompiledStage, ...]
    timed: bool  # the hardware has rates
    search_seconds: float

    @property
    def scaling(self) -> float | None:
        """Tokens a second and device, relative to the smallest number of devices that fits."""
        if self.small is None or not self.timed:
            return None
        return self.planned.tokens_per_second / self.small.estimate.tokens_per_second

    def to_json(self) -> dict[str, Any]:
        planned, devices = self.planned, self.planned.devices
        seconds = planned.seconds if self.timed else None
        return {
            "name": planned.work.name,
            "devices": planned.count,
            "placement": dict(planned.placement),
            "groups": {role: group.count for role, group in planned.groups.items()},
            "hosts": planned.hosts,
            "hardware": devices.rates.name if self.timed else CPU,
            "mesh": devices.mesh.sizes | {"generation.tensor": devices.tensor("generate")},
            "mesh_was_searched": self.chosen,
            "compiled": bool(self.compiled),
            "fits": planned.fits if self.timed else None,
            "memory_gb_per_device": {
                "peak": planned.peak / GB,
                "usable": devices.rates.capacity / GB if self.timed else None,
                "kept": {role: size / GB for role, size in planned.kept.items()},
                "temporary": {name: size / GB for name, size in planned.temporaries.items()},
            },
            "generation": _generation(planned),
            "stages": [
                {
                    "stage": stage.stage,
                    "role": stage.role,
                    "seconds": stage.seconds if self.timed else None,
                    "exchange_seconds": stage.exchange if self.timed else None,
                    "bubble": stage.bubble,
                    "tflop_per_device": stage.flops / 1e12,
                    "received_gb": {
                        axes: size / GB for axes, size in stage.traffic.received.items()
                    },
                }
                for stage in planned.stages
            ],
            "step_seconds": seconds,
            "tokens_per_step": planned.work.samples.tokens,
            "tokens_per_second_per_device": planned.tokens_per_second if self.timed else None,
            "scaling_efficiency": self.scaling,
            "scaling_devices": self.small.estimate.devices.count if self.small else None,
            "better": [
                {
                    "flags": list(choice.flags),
                    "step_seconds": choice.estimate.seconds,
                    "peak_gb": choice.estimate.peak / GB,
                }
                for choice in self.better
            ],
            "search_seconds": self.search_seconds,
        }


def make_report(config: Config, request: Request, say: Callable[[str], None]) -> Report:
    """Plan `config`; `say` is called before each program is compiled.

    Raises: ConfigError for devices that the config cannot use, or hardware that is not known.
    """
    if config.placement == AUTO:  # a layout is searched in any case
        config = replace(config, placement={})
    count, hosts = request.count(config), request.num_hosts(config)
    chosen = count != devices_in(config)
    if chosen and config.placement:
        raise ConfigError(
            f"--devices={count}: config.placement has {devices_in(config)} devices; leave one out"
        )
    if config.placement and not request.quick:
        raise ConfigError("config.placement: roles apart are planned with --quick only")
    timed = request.hardware != CPU
    rates = rates_of(request.hardware if timed else "h200")
    work = work_of(
        config,
        prompt_tokens=request.prompt_tokens,
        response_tokens=request.response_tokens,
        lengths=request.lengths,
    )
    start = time.monotonic()
    choices = best_layouts(work, count, hosts, rates)
    searched = time.monotonic() - start
    if chosen:
        mesh = _best_mesh(work, count, hosts, rates)
    else:
        mesh = config.mesh
    devices = Devices(mesh=mesh, hosts=hosts, rates=rates, host_devices=count // hosts)
    planned = placed(work, config, devices)
    compiled: list[CompiledStage] = []
    if not request.quick:
        programs, stages = compile_work(planned.generating, devices, request.hardware)
        for name in stages:
            say(f"compiling {name} for {count} devices")
            compiled.append(programs.stage(name, compiler_options(request.hardware)))
        planned = with_compiled(planned, programs.resident(), compiled)
    better = [c for c in choices if c.estimate.seconds < BETTER * planned.seconds]
    if not planned.fits:
        better = choices
    return Report(
        planned=planned,
        chosen=chosen,
        better=tuple(better[:SHOWN]) if timed else (),
        small=_small(work, count, hosts, rates) if timed else None,
        compiled=tuple(compiled),
        timed=timed,
        search_seconds=searched,
    )


def _best_mesh(work: Work, count: int, hosts: int, rates: Rates) -> Any:
    """The fastest mesh with the config's other settings; without one the one that needs least."""
    layouts = best_layouts(work, count, hosts, rates, settings=[work])
    if layouts:
        return layouts[0].estimate.devices.mesh
    unlimited = replace(rates, capacity=math.inf)
    anyway = best_layouts(work, count, hosts, unlimited, settings=[work])
    if not anyway:
        raise ConfigError(
            f"no mesh of {count} devices divides this config's batch of {work.samples.count} "
            "samples, heads and layers; change --devices, or --config.data.train_batch_size with "
            "--config.actor.ppo_mini_batch_size"
        )
    return min(anyway, key=lambda choice: choice.estimate.peak).estimate.devices.mesh


def _small(work: Work, count: int, hosts: int, rates: Rates) -> LayoutChoice | None:
    if count <= PER_HOST:
        return None
    return smallest_count(work, count, max(1, count // hosts), rates)


def _generation(planned: Estimate) -> dict[str, Any] | None:
    """Slots, cache tokens and memory of a replica; 0 slots are all of its samples."""
    settings = planned.generating.settings
    if settings is None:
        return None
    return {
        "num_slots": settings.num_slots,
        "cache_tokens": settings.cache_tokens,
        "memory_gb": planned.generating.config.rollout.memory_gb,
    }


# ------------------------------------------------------------------------- the table


def lines(report: Report) -> list[str]:
    """The report as lines of plain text."""
    planned, devices = report.planned, report.planned.devices
    sizes = " ".join(f"{axis}={size}" for axis, size in devices.mesh.sizes.items() if size > 1)
    how = "compiled" if report.compiled else "computed without compiling"
    hardware = devices.rates.name if report.timed else CPU
    lines = [
        f"{planned.work.name} on {planned.count} x {hardware}, {planned.hosts} "
        f"host{'s' * (planned.hosts > 1)}, mesh {sizes or 'of one device'}; {how}",
    ]
    if planned.apart:
        lines.append("groups: " + "; ".join(_group_line(*each) for each in planned.groups.items()))
    if report.chosen:
        lines.append("the config's mesh has another size, so the fastest one that fits was taken")
    lines += ["", "memory of a device, GB"]
    kept = {f"{role} keeps": size for role, size in planned.kept.items()}
    used = {f"{name}, while it runs": size for name, size in planned.temporaries.items()}
    rows = [(name, number(size / GB)) for name, size in (kept | used).items()]
    rows.append(("peak", number(planned.peak / GB)))
    if report.timed:
        rows.append((f"usable on {hardware}", number(devices.rates.capacity / GB)))
    lines += _table(rows)
    if report.timed:
        lines += ["", "it fits" if planned.fits else "IT DOES NOT FIT"]
    if generation := generation_line(planned):
        lines += ["", generation]
    lines += ["", *_stage_lines(report)]
    if report.timed:
        lines += ["", *_summary(report)]
    for choice in report.better:
        lines.append(
            f"  {number(choice.estimate.seconds)} s, {number(choice.estimate.peak / GB)} GB: "
            f"{' '.join(choice.flags) or 'one device'}"
        )
    return lines


def generation_line(planned: Estimate) -> str:
    """The slots and cache tokens of the rollout; empty without one."""
    work = planned.generating
    if work.settings is None:
        return ""
    group = planned.devices_of(ROLLOUT)
    samples = work.samples.share(group.replicas("generate")).count
    return f"generation: {words_of(work.settings, samples)}"


def _group_line(role: str, group: Devices) -> str:
    hosts = f"{group.hosts} host{'s' * (group.hosts > 1)}"
    return f"{role} {group.count} on {hosts}"


def _stage_lines(report: Report) -> list[str]:
    heads = ("stage", "TFLOP", "s", "of it waiting", "received, GB by axis")
    rows: list[tuple[str, ...]] = [heads]
    for stage in report.planned.stages:
        moved = " ".join(
            f"{axes}={number(size / GB)}" for axes, size in stage.traffic.received.items()
        )
        timed = (number(stage.seconds), number(stage.exchange)) if report.timed else ("", "")
        rows.append((stage.stage, number(stage.flops / 1e12), *timed, moved))
    return _table(rows)


def _summary(report: Report) -> list[str]:
    planned = report.planned
    lines = [
        f"a step: {number(planned.seconds)} s, {planned.work.samples.tokens:,} tokens, "
        f"{planned.tokens_per_second:,.0f} tokens/s per device",
    ]
    if report.scaling is not None:
        assert report.small is not None
        small = report.small.estimate.devices.count
        lines.append(f"{report.scaling:.0%} of {small} devices with the same prompts per device")
    if report.better:
        word = "faster" if planned.fits else "layouts that fit"
        group = ", as one group without placement and node_groups" if planned.apart else ""
        lines += ["", f"{word}{group}, by the model without compiling:"]
    return lines


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  " + "  ".join(_cells(row, widths)).rstrip() for row in rows]


def _cells(row: tuple[str, ...], widths: Sequence[int]) -> list[str]:
    first, *rest = row
    cells = [first.ljust(widths[0])]
    for i, (cell, width) in enumerate(zip(rest, widths[1:], strict=True), 1):
        cells.append(cell.ljust(width) if i == 4 else cell.rjust(width))
    return cells
