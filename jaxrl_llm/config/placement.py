"""The devices of each role, as a config's `placement` gives them. Imports no jax.

A device is a number, counted over all nodes, or a pair (node, number on it). A node is a process.
"""

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from jaxrl_llm.config.schema import AUTO, Config, MeshConfig
from jaxrl_llm.references import nearest
from jaxrl_llm.typed_records.messages import ConfigError

ACTOR = "actor"
ROLLOUT = "rollout"  # role of generation
NODES = "node0:0-7;node1:0-7"
_RANGE = r"\s*\d+(?:-\d+)?\s*"
_ADDRESS = re.compile(rf"(?:node(\d+):)?({_RANGE}(?:,{_RANGE})*)")  # 0-3,6 or node1:0-3,6
Device = int | tuple[int, int]
Devices = tuple[Device, ...]


def devices_of_roles(config: Config) -> dict[str, Devices]:
    """The devices of the actor, and of each role that does not share them.

    Two roles may share some of their devices. Raises: ConfigError for an unknown role, group or
    node, and for devices that cannot be read.
    """
    known, size = _roles(config), config.mesh.num_devices
    texts = {} if config.placement == AUTO else _texts(config, known)  # auto: not chosen yet
    roles = {ACTOR: _devices(config, ACTOR, texts[ACTOR]) if ACTOR in texts else tuple(range(size))}
    if (number := len(roles[ACTOR])) != size:
        raise ConfigError(
            f"config.placement.actor={texts[ACTOR]} has {number} devices, and config.mesh has "
            f"{size}; both have the same number"
        )
    for role, text in texts.items():
        owner = text if text in known else role  # "reference": "critic"
        if owner == ACTOR:
            continue
        if text in known and texts.get(owner, ACTOR) in known:
            raise ConfigError(
                f"config.placement.{role}={owner}: config.placement.{owner} gives no device "
                "numbers; name them there"
            )
        devices = _devices(config, owner, texts[owner])
        if set(devices) != set(roles[ACTOR]):
            roles[role] = devices
    _check_together(config, texts, roles)
    return roles


def nodes_of(config: Config) -> list[tuple[str, int]]:
    """(group, devices) of each node of `node_groups`; groups take the nodes in their order."""
    groups = config.node_groups.items()
    return [(name, group.gpus_per_node) for name, group in groups for _ in range(group.count)]


def mesh_of_role(config: Config, role: str) -> MeshConfig:
    """The mesh of a role: the config's, or one axis fsdp over the devices of its own.

    Generation on devices of its own makes groups of `mesh.generation.tensor` of them.
    """
    devices = devices_of_roles(config)
    if role == ACTOR or role not in devices:
        return config.mesh
    mesh = MeshConfig(fsdp=len(devices[role]))
    return replace(mesh, generation=config.mesh.generation) if role == ROLLOUT else mesh


def on_one_group(config: Config, mesh: MeshConfig) -> Config:
    """`config` with all roles on `mesh`, in turn: nothing is generated ahead."""
    return replace(
        config, mesh=mesh, placement={}, node_groups={}, max_staleness=0, partial_rollouts=0
    )


# ------------------------------------------------------------------------- texts


def _roles(config: Config) -> list[str]:
    optional = {"reward": config.reward.model, "teacher": config.teacher}
    names = [name for name, model in optional.items() if model is not None]
    return [ACTOR, ROLLOUT, "critic", "reference", *names, *(model.name for model in config.models)]


def _texts(config: Config, known: Sequence[str]) -> dict[str, str]:
    """The placement as text. With node groups the actor has the first one by default."""
    placement: Any = config.placement
    groups, texts = list(config.node_groups), {}
    for role, value in placement.items():
        values = value if isinstance(value, list | tuple) else (value,)  # 4,5 was read as a list
        texts[role] = ",".join(str(each).strip() for each in values)
        if role not in known:
            hint = nearest(role, known) or f"; this run has {', '.join(known)}"
            raise ConfigError(f"config.placement.{role}: no role has that name{hint}")
    for name in groups:
        if name in known or re.fullmatch(r"node\d+", name):
            why = "that is the name of a role or of a node; another works, for example train"
            raise ConfigError(f"config.node_groups.{name}: {why}")
    if groups and not texts:
        works = f"--config.placement.rollout={groups[-1]}"
        raise ConfigError(f"config.node_groups: no role is placed on a group; set {works}")
    return {**texts, ACTOR: texts.get(ACTOR, groups[0])} if groups else texts


def _devices(config: Config, role: str, text: str) -> Devices:
    """The devices of a group, of "node0:0-3;node1:0-3" or of "0-3,6". Each stands once."""
    nodes, on_nodes, devices = nodes_of(config), text.startswith("node"), []
    if text in config.node_groups:
        group = [(node, size) for node, (name, size) in enumerate(nodes) if name == text]
        return tuple((node, number) for node, size in group for number in range(size))
    for part in text.split(";") if on_nodes else [text]:
        address = _ADDRESS.fullmatch(part.strip())
        if address is None or bool(address[1]) != on_nodes:
            groups = f", a group of config.node_groups ({', '.join(config.node_groups)})"
            others = ", ".join(name for name in _roles(config) if name != role)
            raise ConfigError(
                f"config.placement.{role}={text}: expected numbers of devices, for example 4-5 or "
                f"4,6 or {NODES}{groups if config.node_groups else ''}, or the name of the role "
                f"that it shares devices with: {others}"
            )
        for first, last in re.findall(r"(\d+)(?:-(\d+))?", address[2]):
            numbers = range(int(first), int(last or first) + 1)
            if not numbers:
                why = f"{first}-{last} names no device; the smaller number comes first"
                raise ConfigError(f"config.placement.{role}={text}: {why}")
            devices += [(int(address[1]), each) for each in numbers] if on_nodes else numbers
    for node, number in devices if on_nodes and nodes else ():
        if node >= len(nodes) or number >= nodes[node][1]:
            sizes = sorted({size for _, size in nodes})
            raise ConfigError(
                f"config.placement.{role} names device {number} of node{node}, and "
                f"config.node_groups has {len(nodes)} nodes of {sizes} devices, numbered from 0"
            )
    if len(set(devices)) < len(devices):
        raise ConfigError(f"config.placement.{role}={text} names a device twice")
    return tuple(devices)


def _check_together(config: Config, texts: dict[str, str], roles: dict[str, Devices]) -> None:
    """All roles name nodes or none does; no group is idle; none meets generation ahead."""
    plain = [role for role, devices in roles.items() if isinstance(devices[0], int)]
    if 0 < len(plain) < len(roles):
        role = plain[0]
        raise ConfigError(
            f"config.placement.{role}={texts.get(role, 'the first devices')} has no nodes, and "
            f"others have; name them, for example --config.placement.{role}={NODES}"
        )
    for name in config.node_groups:
        nodes = [f"node{node}:" for node, (own, _) in enumerate(nodes_of(config)) if own == name]
        by_number = any(node in text for text in texts.values() for node in nodes)
        if name not in texts.values() and not by_number:
            works = f"place one there, for example --config.placement.critic={name}"
            raise ConfigError(f"config.node_groups.{name}: no role uses it; {works}")
    # Two threads would begin programs on the shared devices, each in its own order.
    ahead = config.max_staleness and roles.get(ROLLOUT, ())
    for role, devices in roles.items() if ahead else ():
        both = sorted(set(devices) & set(roles[ROLLOUT]))
        if both and set(devices) != set(roles[ROLLOUT]):
            raise ConfigError(
                f"config.placement: {role} has some devices of {ROLLOUT}, which generates ahead "
                f"(config.max_staleness={config.max_staleness}); give {ROLLOUT} devices of its own"
            )
