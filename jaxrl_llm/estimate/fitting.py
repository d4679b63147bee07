"""The memory that generation may take in a run: what its models leave free on its devices."""

import json
import math
from dataclasses import replace

import jax

from jaxrl_llm.config import Config, run_folder, to_json
from jaxrl_llm.distributed.device_memory import known_kind, memory_limit
from jaxrl_llm.distributed.hardware import MEMORY
from jaxrl_llm.distributed.multihost import gather_objects
from jaxrl_llm.estimate.devices import Devices
from jaxrl_llm.estimate.estimate import Estimate, placed
from jaxrl_llm.estimate.memory import validation_gb
from jaxrl_llm.estimate.rates import Rates, rates_of
from jaxrl_llm.estimate.work import work_of
from jaxrl_llm.supervision.run_folder import CONFIG
from jaxrl_llm.trainer.output import ABOUT

UNKNOWN = "h200"  # whose rates stand for a device without a data sheet
# Keys that say what a device keeps, and that a run which goes on may have changed.
DECIDING = ("mesh", "placement", "node_groups", "actor", "critic", "reward", "teacher", "models")


def with_memory(config: Config) -> Config:
    """`config` with `memory_gb` of the rollout and of validation, where they are 0.

    A run that goes on takes the memory in its folder, unless its devices changed. On a CPU, and
    where slots and cache tokens are both given, nothing changes. Every process calls it.
    """
    rollout, validation = config.rollout, config.validation
    if rollout.num_slots and rollout.cache_tokens or not memory_limit():
        return config
    stored = gather_objects(_stored(config), "the memory of generation")[0]
    if stored is None or rollout.memory_gb or validation.memory_gb:
        planned = planned_here(config)
        actor = planned.devices
        held = sum(n for role, n in planned.kept.items() if planned.devices_of(role).meets(actor))
        own = planned.generating.config.rollout.memory_gb
        stored = own, validation_gb(planned.work, actor, held)
    own, held_out = stored
    return replace(
        config,
        rollout=replace(rollout, memory_gb=own),
        validation=replace(validation, memory_gb=held_out),
    )


def planned_here(config: Config) -> Estimate:
    """The estimate of a run on the devices of this process and the others.

    Where jax knows no limit of their memory, slots and cache are not limited either.
    """
    rates, _ = rates_here()
    if not memory_limit():
        rates = replace(rates, capacity=math.inf)
    hosts = jax.process_count()
    each = jax.device_count() // hosts
    devices = Devices(mesh=config.mesh, hosts=hosts, rates=rates, host_devices=each)
    return placed(work_of(config), config, devices)


def rates_here() -> tuple[Rates, bool]:
    """The rates of the devices of a run with the memory that they have, and whether known.

    The least device of all processes decides, so all choose the same. Every process calls it.
    """
    everyone = gather_objects((known_kind(), memory_limit()), "rates of a layout")
    names = [name or UNKNOWN for name, _ in everyone]
    rates = rates_of(min(names, key=lambda name: MEMORY[name]))
    limits = [float(limit) for _, limit in everyone if limit]
    known = all(name for name, _ in everyone)
    return replace(rates, capacity=min(limits)) if limits else rates, known


def _stored(config: Config) -> tuple[float, float] | None:
    """The memory of the run in the folder; None without one, or where its devices are others."""
    folder, kind = run_folder(config), jax.local_devices()[0].device_kind
    try:
        stored = json.loads((folder / CONFIG).read_text())
        devices = json.loads((folder / ABOUT).read_text())["devices"]
        own, held_out = (stored[name]["memory_gb"] for name in ("rollout", "validation"))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    now = json.loads(to_json(config))
    same = all(stored.get(key) == now[key] for key in DECIDING)
    return (own, held_out) if same and own and f" x {kind}" in devices else None
