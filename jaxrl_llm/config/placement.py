"""Which devices run which role: what a config's `placement` says, without jax."""

import difflib
from typing import Any

from jaxrl_llm.config.records import ConfigError
from jaxrl_llm.config.schema import AUTO, Config, MeshConfig

ACTOR = "actor"
ROLLOUT = "rollout"  # generation of the actor's samples
EXAMPLE = "--config.placement.critic=4-5"


def devices_of_roles(config: Config) -> dict[str, tuple[int, ...]]:
    """The devices of the actor, and of each role that does not share them.

    Raises: ConfigError for an unknown role, devices that cannot be read, or an overlap.
    """
    known = _roles(config)
    if config.placement == AUTO:  # not chosen yet
        return {ACTOR: tuple(range(config.mesh.num_devices))}
    given = {role: _text(value) for role, value in config.placement.items()}
    for role in given:
        if role not in known:
            near = difflib.get_close_matches(role, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"this run has {', '.join(known)}"
            raise ConfigError(f"config.placement.{role}: no role has that name; {hint}")
    size = config.mesh.num_devices
    found = {ACTOR: _devices(config, given, ACTOR) if ACTOR in given else tuple(range(size))}
    if len(found[ACTOR]) != size:
        raise ConfigError(
            f"config.placement.actor={given[ACTOR]} has {len(found[ACTOR])} devices, and "
            f"config.mesh has {size}: make their numbers the same, for example with "
            f"--config.mesh.fsdp={len(found[ACTOR])}"
        )
    for role in given:
        shared = given[role] in known  # "reference": "critic"
        owner = given[role] if shared else role
        if owner == ACTOR:
            continue
        if shared and (owner not in given or given[owner] in known):
            raise ConfigError(
                f"config.placement.{role}={owner}: config.placement.{owner} gives no device "
                f"numbers; name them there, or write --config.placement.{role}=actor"
            )
        devices = _devices(config, given, owner)
        if set(devices) != set(found[ACTOR]):
            found[role] = devices
    _check_overlap(found)
    return found


def mesh_of_role(config: Config, role: str) -> MeshConfig:
    """The mesh of a role: the config's, or one axis fsdp over the devices of its own.

    Generation on devices of its own makes groups of `mesh.generation.tensor` of them.
    """
    found = devices_of_roles(config)
    if role == ACTOR or role not in found:
        return config.mesh
    return MeshConfig(fsdp=len(found[role]))


def _roles(config: Config) -> list[str]:
    optional = {"reward": config.reward.model, "teacher": config.teacher}
    given = [name for name, model in optional.items() if model is not None]
    return [ACTOR, ROLLOUT, "critic", "reference", *given, *(model.name for model in config.models)]


def _text(value: Any) -> str:
    """A value as a string: the command line reads 4,5 as a list."""
    values = value if isinstance(value, list | tuple) else (value,)
    return ",".join(str(each).strip() for each in values)


def _devices(config: Config, given: dict[str, str], role: str) -> tuple[int, ...]:
    """The numbers in "0-3,6". Each stands once."""
    text, found = given[role], []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise ConfigError(
                f"config.placement.{role}={text}: expected numbers of devices, for example 4-5 or "
                f"4,6, or the name of the role that it shares devices with: "
                f"{', '.join(name for name in _roles(config) if name != role)}"
            )
        numbers = range(int(first), int(last or first) + 1)
        if not numbers:
            raise ConfigError(f"config.placement.{role}={text}: {part} names no device")
        found += numbers
    if len(set(found)) < len(found):
        raise ConfigError(f"config.placement.{role}={text} names a device twice")
    return tuple(found)


def _check_overlap(found: dict[str, tuple[int, ...]]) -> None:
    # The actor is the first: it is the other one, whose devices may be taken by its name.
    for role, devices in reversed(found.items()):
        for other, theirs in found.items():
            both = sorted(set(devices) & set(theirs))
            if both and set(devices) != set(theirs):
                raise ConfigError(
                    f"config.placement: {role} and {other} share device {both[0]} and not all "
                    f"others; give them other devices, or the same with "
                    f"--config.placement.{role}={other}"
                )
