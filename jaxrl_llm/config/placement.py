"""Which devices run which role: what a config's `placement` says, without jax.

A device is a number, counted over all nodes, or a pair (node, number on it). A node is a process.
"""

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from jaxrl_llm.config.messages import ConfigError
from jaxrl_llm.config.schema import AUTO, Config, MeshConfig
from jaxrl_llm.references import nearest

ACTOR = "actor"
ROLLOUT = "rollout"  # generation of the actor's samples
NODES = "node0:0-7;node1:0-7"
_RANGE = r"\s*\d+(?:-\d+)?\s*"
_ADDRESS = re.compile(rf"(?:node(\d+):)?({_RANGE}(?:,{_RANGE})*)")  # 0-3,6 or node1:0-3,6
Device = int | tuple[int, int]
Devices = tuple[Device, ...]


def devices_of_roles(config: Config) -> dict[str, Devices]:
    """The devices of the actor, and of each role that does not share them.

    Raises: ConfigError for an unknown role, group or node, devices that cannot be read, an overlap.
    """
    known, size = _roles(config), config.mesh.num_devices
    given = {} if config.placement == AUTO else _given(config, known)  # auto: not chosen yet
    found = {ACTOR: _devices(config, ACTOR, given[ACTOR]) if ACTOR in given else tuple(range(size))}
    if (number := len(found[ACTOR])) != size:
        fsdp, odd = divmod(number, size // config.mesh.fsdp)
        works = f"--config.mesh={{fsdp: {number}}}" if odd else f"--config.mesh.fsdp={fsdp}"
        raise ConfigError(
            f"config.placement.actor={given[ACTOR]} has {number} devices, and config.mesh has "
            f"{size}; {works} has as many"
        )
    for role, text in given.items():
        owner = text if text in known else role  # "reference": "critic"
        if owner == ACTOR:
            continue
        if text in known and given.get(owner, ACTOR) in known:
            raise ConfigError(
                f"config.placement.{role}={owner}: config.placement.{owner} gives no device "
                "numbers; name them there"
            )
        devices = _devices(config, owner, given[owner])
        if set(devices) != set(found[ACTOR]):
            found[role] = devices
    _check_together(config, given, found)
    return found


def numbers_of_roles(config: Config, nodes: Sequence[Sequence[int]]) -> dict[str, tuple[int, ...]]:
    """`devices_of_roles` as numbers counted over all nodes; `nodes` has the numbers of each.

    Raises: ConfigError for a node or device that is not there, groups that are no nodes of this
        launch, or a node that no role uses.
    """
    if config.placement and len(nodes) > 1:
        _check_ahead(config, len(nodes))
    _check_launch(config, [len(own) for own in nodes])
    found = {
        role: tuple(_number(role, device, nodes) for device in devices)
        for role, devices in devices_of_roles(config).items()
    }
    used = {number for numbers in found.values() for number in numbers}
    for node, own in enumerate(nodes):
        if config.placement and len(nodes) > 1 and not used & set(own):
            raise ConfigError(
                f"config.placement: no role uses node{node}, process {node} of {len(nodes)}; give "
                "a role its devices, or start fewer processes"
            )
    return found


def sizes_of_nodes(config: Config) -> list[int]:
    """The devices of each node, as far as the placement says; empty where it names no nodes.

    Without groups a node has as many devices as the largest that a role names.
    """
    found = devices_of_roles(config).values()
    named = [d for devices in found for d in devices if isinstance(d, tuple)]
    if config.node_groups or not named:
        return [size for _, size in _nodes(config)]
    last, most = (max(each) for each in zip(*named, strict=True))
    return [most + 1] * (last + 1)


def mesh_of_role(config: Config, role: str) -> MeshConfig:
    """The mesh of a role: the config's, or one axis fsdp over the devices of its own.

    Generation on devices of its own makes groups of `mesh.generation.tensor` of them.
    """
    found = devices_of_roles(config)
    if role == ACTOR or role not in found:
        return config.mesh
    mesh = MeshConfig(fsdp=len(found[role]))
    return replace(mesh, generation=config.mesh.generation) if role == ROLLOUT else mesh


def on_one_group(config: Config, mesh: MeshConfig) -> Config:
    """`config` with all roles on `mesh`, in turn: nothing is generated ahead."""
    return replace(
        config, mesh=mesh, placement={}, node_groups={}, max_staleness=0, partial_rollouts=0
    )


# ------------------------------------------------------------------------- what is written


def _roles(config: Config) -> list[str]:
    optional = {"reward": config.reward.model, "teacher": config.teacher}
    given = [name for name, model in optional.items() if model is not None]
    return [ACTOR, ROLLOUT, "critic", "reference", *given, *(model.name for model in config.models)]


def _nodes(config: Config) -> list[tuple[str, int]]:
    """(group, devices) of each node. Groups take the nodes in the order in which they stand."""
    groups = config.node_groups.items()
    return [(name, group.gpus_per_node) for name, group in groups for _ in range(group.count)]


def _given(config: Config, known: Sequence[str]) -> dict[str, str]:
    """The placement as text. With node groups the actor has the first one, if nothing is said."""
    placement: Any = config.placement
    groups, given = list(config.node_groups), {}
    for role, value in placement.items():
        values = value if isinstance(value, list | tuple) else (value,)  # 4,5 was read as a list
        given[role] = ",".join(str(each).strip() for each in values)
        if role not in known:
            hint = nearest(role, known) or f"; this run has {', '.join(known)}"
            raise ConfigError(f"config.placement.{role}: no role has that name{hint}")
    for name in groups:
        if name in known or re.fullmatch(r"node\d+", name):
            why = "that is the name of a role or of a node; another works, for example train"
            raise ConfigError(f"config.node_groups.{name}: {why}")
    if groups and not given:
        works = f"--config.placement.rollout={groups[-1]}"
        raise ConfigError(f"config.node_groups: no role is placed on a group; set {works}")
    return {**given, ACTOR: given.get(ACTOR, groups[0])} if groups else given


def _devices(config: Config, role: str, text: str) -> Devices:
    """The devices of a group, of "node0:0-3;node1:0-3" or of "0-3,6". Each stands once."""
    nodes, on_nodes, found = _nodes(config), text.startswith("node"), []
    if text in config.node_groups:
        own = [(node, size) for node, (name, size) in enumerate(nodes) if name == text]
        return tuple((node, number) for node, size in own for number in range(size))
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
            found += [(int(address[1]), each) for each in numbers] if on_nodes else numbers
    for node, number in found if on_nodes and nodes else ():
        if node >= len(nodes) or number >= nodes[node][1]:
            sizes = sorted({size for _, size in nodes})
            raise ConfigError(
                f"config.placement.{role} names device {number} of node{node}, and "
                f"config.node_groups has {len(nodes)} nodes of {sizes} devices, numbered from 0; "
                "name one of these"
            )
    if len(set(found)) < len(found):
        raise ConfigError(f"config.placement.{role}={text} names a device twice; name it once")
    return tuple(found)


def _check_together(config: Config, given: dict[str, str], found: dict[str, Devices]) -> None:
    """All roles name nodes or none does; no group is idle; roles share all devices or none."""
    plain = [role for role, devices in found.items() if isinstance(devices[0], int)]
    if 0 < len(plain) < len(found):
        role = plain[0]
        raise ConfigError(
            f"config.placement.{role}={given.get(role, 'the first devices')} has no nodes, and "
            f"others have; name them, for example --config.placement.{role}={NODES}"
        )
    for name in config.node_groups:
        own = [f"node{node}:" for node, (group, _) in enumerate(_nodes(config)) if group == name]
        by_number = any(node in text for text in given.values() for node in own)
        if name not in given.values() and not by_number:
            works = f"place one there, for example --config.placement.critic={name}"
            raise ConfigError(f"config.node_groups.{name}: no role uses it; {works}")
    # The actor is the first: it is the other one, whose devices may be taken by its name.
    for role, devices in reversed(found.items()):
        for other, theirs in found.items():
            both = sorted(set(devices) & set(theirs))
            if both and set(devices) != set(theirs):
                first = both[0] if isinstance(both[0], int) else f"{both[0][1]} of node{both[0][0]}"
                why = f"{role} and {other} share device {first} and not all others"
                works = f"--config.placement.{role}={other} shares all"
                raise ConfigError(f"config.placement: {why}; {works}")


# ------------------------------------------------------------------------- what was started


def _check_ahead(config: Config, processes: int) -> None:
    """What is ahead of time can be exchanged in one order."""
    parts, filtered = config.partial_rollouts, config.rollout.filter_groups.enable
    if parts or (config.max_staleness and filtered):
        key = f"partial_rollouts={parts}" if parts else "rollout.filter_groups.enable"
        raise ConfigError(
            f"config.{key} does not work with config.max_staleness and roles placed on {processes} "
            "processes; leave it out"
        )


def _check_launch(config: Config, started: Sequence[int]) -> None:
    """The groups are the nodes of this launch, with `started` devices each."""
    sizes = [size for _, size in _nodes(config)]
    if sizes and len(sizes) != len(started):
        counts = " + ".join(f"{name} {g.count}" for name, g in config.node_groups.items())
        raise ConfigError(
            f"config.node_groups has {len(sizes)} nodes ({counts}), and {len(started)} processes "
            "were started; start one a node, or change the counts"
        )
    for node, size in enumerate(sizes):
        if size != started[node]:
            raise ConfigError(
                f"config.node_groups: node{node} has {started[node]} devices and "
                f"gpus_per_node={size}; start one process a node, or change gpus_per_node"
            )


def _number(role: str, device: Device, nodes: Sequence[Sequence[int]]) -> int:
    """The number of a device over all nodes."""
    key, count = f"config.placement.{role} names", sum(map(len, nodes))
    if isinstance(device, int):
        if device >= count:
            why = f"device {device}, but {count} devices are available"
            raise ConfigError(f"{key} {why}, numbered from 0 to {count - 1}")
        return device
    node, number = device
    if node >= len(nodes):
        why = f"node{node}, and there are {len(nodes)} processes"
        raise ConfigError(f"{key} {why}, numbered from 0; start one a node")
    if number >= len(nodes[node]):
        why = f"device {number} of node{node}, which has {len(nodes[node])}"
        raise ConfigError(f"{key} {why}, numbered from 0; start one process a node")
    return nodes[node][number]
