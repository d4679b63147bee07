"""Which devices run which role: what a config's `placement` says, without jax.

A device is a number, counted over all nodes, or a pair (node, number on it). A node is a process.
"""

import difflib
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from jaxrl_llm.config.records import ConfigError
from jaxrl_llm.config.schema import AUTO, Config, MeshConfig

ACTOR = "actor"
ROLLOUT = "rollout"  # generation of the actor's samples
EXAMPLE = "--config.placement.critic=4-5"
NODES = "node0:0-7;node1:0-7"
ONE_NODE = re.compile(r"node(\d+):(.*)")
Device = int | tuple[int, int]


def devices_of_roles(config: Config) -> dict[str, tuple[Device, ...]]:
    """The devices of the actor, and of each role that does not share them.

    Raises: ConfigError for an unknown role, group or node, devices that cannot be read, an overlap.
    """
    known = _roles(config)
    if config.placement == AUTO and config.node_groups:
        raise ConfigError(
            "config.placement=auto chooses the devices of every role, and config.node_groups names "
            "groups of nodes; leave one of them out"
        )
    if config.placement == AUTO:  # not chosen yet
        return {ACTOR: tuple(range(config.mesh.num_devices))}
    given = _given(config, known)
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
    _check_one_form(config, found, given)
    _check_groups_used(config, given)
    _check_overlap(found)
    return found


def numbers_of_roles(config: Config, nodes: Sequence[Sequence[int]]) -> dict[str, tuple[int, ...]]:
    """`devices_of_roles` as numbers counted over all nodes; `nodes` has the numbers of each.

    Raises: ConfigError for a node or device that is not there, groups that are no nodes of this
        launch, or a node that no role uses.
    """
    _check_launch(config, nodes)
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


def mesh_of_role(config: Config, role: str) -> MeshConfig:
    """The mesh of a role: the config's, or one axis fsdp over the devices of its own.

    Generation on devices of its own makes groups of `mesh.generation.tensor` of them.
    """
    found = devices_of_roles(config)
    if role == ACTOR or role not in found:
        return config.mesh
    if role == ROLLOUT:
        return MeshConfig(fsdp=len(found[role]), generation=config.mesh.generation)
    return MeshConfig(fsdp=len(found[role]))


def on_one_group(config: Config, mesh: MeshConfig) -> Config:
    """`config` with all roles on `mesh`, in turn: nothing is generated ahead."""
    return replace(
        config, mesh=mesh, placement={}, node_groups={}, max_staleness=0, partial_rollouts=0
    )


def _roles(config: Config) -> list[str]:
    optional = {"reward": config.reward.model, "teacher": config.teacher}
    given = [name for name, model in optional.items() if model is not None]
    return [ACTOR, ROLLOUT, "critic", "reference", *given, *(model.name for model in config.models)]


def _given(config: Config, known: Sequence[str]) -> dict[str, str]:
    """The placement as text. With node groups the actor has the first one, if nothing is said."""
    placement: Any = config.placement
    given = {role: _text(value) for role, value in placement.items()}
    for role in given:
        if role not in known:
            near = difflib.get_close_matches(role, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"this run has {', '.join(known)}"
            raise ConfigError(f"config.placement.{role}: no role has that name; {hint}")
    for name in config.node_groups:
        if name in known or ONE_NODE.fullmatch(f"{name}:"):
            raise ConfigError(
                f"config.node_groups.{name}: that is the name of a role or of a node; call the "
                "group otherwise, for example train"
            )
    if config.node_groups and not given:
        raise ConfigError(
            f"config.node_groups: no role is placed on a group; say which, for example "
            f"--config.placement.rollout={list(config.node_groups)[-1]}"
        )
    if config.node_groups:
        given.setdefault(ACTOR, next(iter(config.node_groups)))
    return given


def _text(value: Any) -> str:
    """A value as a string: the command line reads 4,5 as a list."""
    values = value if isinstance(value, list | tuple) else (value,)
    return ",".join(str(each).strip() for each in values)


def _devices(config: Config, given: dict[str, str], role: str) -> tuple[Device, ...]:
    """The devices of a group, of "node0:0-3;node1:0-3" or of "0-3,6". Each stands once."""
    text, found = given[role], []
    if text in config.node_groups:
        return _group(config, text)
    if text.startswith("node"):
        for part in text.split(";"):
            named = ONE_NODE.fullmatch(part.strip())
            if named is None:
                raise _unreadable(config, given, role)
            node = int(named[1])
            found += [(node, number) for number in _numbers(config, given, role, named[2])]
        for node, number in found:
            _check_in_groups(config, role, node, number)
    else:
        found += _numbers(config, given, role, text)
    if len(set(found)) < len(found):
        raise ConfigError(f"config.placement.{role}={text} names a device twice")
    return tuple(found)


def _numbers(config: Config, given: dict[str, str], role: str, text: str) -> list[int]:
    """The numbers in "0-3,6"."""
    found = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise _unreadable(config, given, role)
        numbers = range(int(first), int(last or first) + 1)
        if not numbers:
            raise ConfigError(
                f"config.placement.{role}={given[role]}: {part} names no device; the smaller "
                "number comes first"
            )
        found += numbers
    return found


def _unreadable(config: Config, given: dict[str, str], role: str) -> ConfigError:
    others = [name for name in _roles(config) if name != role]
    groups = f", a group of config.node_groups ({', '.join(config.node_groups)})"
    return ConfigError(
        f"config.placement.{role}={given[role]}: expected numbers of devices, for example 4-5 or "
        f"4,6 or {NODES}{groups if config.node_groups else ''}, or the name of the role that it "
        f"shares devices with: {', '.join(others)}"
    )


# ------------------------------------------------------------------------- nodes


def sizes_of_nodes(config: Config) -> list[int]:
    """The devices of each node, as far as the placement says; empty where it names no nodes.

    Without groups a node has as many devices as the largest that a role names.
    """
    named = [
        d for group in devices_of_roles(config).values() for d in group if isinstance(d, tuple)
    ]
    if config.node_groups or not named:
        return _sizes(config)
    last, most = (max(each) for each in zip(*named, strict=True))
    return [most + 1] * (last + 1)


def _group(config: Config, name: str) -> tuple[Device, ...]:
    """The devices of a named group. Groups take the nodes in the order in which they stand."""
    first = 0
    for other, group in config.node_groups.items():
        if other == name:
            nodes = range(first, first + group.count)
            return tuple((node, number) for node in nodes for number in range(group.gpus_per_node))
        first += group.count
    raise KeyError(name)


def _sizes(config: Config) -> list[int]:
    """The devices of each node, by the config's groups."""
    return [g.gpus_per_node for g in config.node_groups.values() for _ in range(g.count)]


def _check_in_groups(config: Config, role: str, node: int, number: int) -> None:
    sizes = _sizes(config)
    if sizes and (node >= len(sizes) or number >= sizes[node]):
        raise ConfigError(
            f"config.placement.{role} names device {number} of node{node}, and config.node_groups "
            f"has {len(sizes)} nodes, numbered from 0, of {sorted(set(sizes))} devices; name one "
            "of these, or make a group larger"
        )


def _check_one_form(
    config: Config, found: dict[str, tuple[Device, ...]], given: dict[str, str]
) -> None:
    """Numbers over all nodes and numbers on a node cannot be compared."""
    plain = [role for role, devices in found.items() if isinstance(devices[0], int)]
    if 0 < len(plain) < len(found):
        role = plain[0]
        raise ConfigError(
            f"config.placement.{role}={given.get(role, 'the first devices')} has no nodes, and "
            f"others have: name the nodes of all, for example --config.placement.{role}={NODES}"
        )


def _check_groups_used(config: Config, given: dict[str, str]) -> None:
    for name in config.node_groups:
        nodes = {node for node, _ in _group(config, name)}  # pyright: ignore
        by_number = any(f"node{node}:" in text for text in given.values() for node in nodes)
        if name not in given.values() and not by_number:
            raise ConfigError(
                f"config.node_groups.{name}: no role uses it, and its devices would be idle; place "
                f"one there, for example --config.placement.critic={name}, or leave it out"
            )


def _check_launch(config: Config, nodes: Sequence[Sequence[int]]) -> None:
    """The groups are the nodes of this launch, and what is ahead can be exchanged in one order."""
    if len(nodes) > 1 and config.placement:
        ahead = {
            f"partial_rollouts={config.partial_rollouts}": bool(config.partial_rollouts),
            "rollout.filter_groups.enable": bool(
                config.max_staleness and config.rollout.filter_groups.enable
            ),
        }
        name = next((name for name, given in ahead.items() if given), None)
        if name is not None:
            raise ConfigError(
                f"config.{name} does not work with config.max_staleness and roles placed on "
                f"{len(nodes)} processes; leave it out, or start one process"
            )
    sizes, started = _sizes(config), [len(own) for own in nodes]
    if not sizes or sizes == started:
        return
    counts = " + ".join(f"{name} {g.count}" for name, g in config.node_groups.items())
    if len(sizes) != len(started):
        raise ConfigError(
            f"config.node_groups has {len(sizes)} nodes ({counts}), and {len(started)} processes "
            "were started; a node is a process: start one a node, or change the counts"
        )
    node = next(i for i, (a, b) in enumerate(zip(sizes, started, strict=True)) if a != b)
    raise ConfigError(
        f"config.node_groups: node{node} has {started[node]} devices and gpus_per_node="
        f"{sizes[node]}; start one process a node with all of its devices, or change gpus_per_node"
    )


def _number(role: str, device: Device, nodes: Sequence[Sequence[int]]) -> int:
    count = sum(map(len, nodes))
    if isinstance(device, int):
        if device >= count:
            raise ConfigError(
                f"config.placement.{role} names device {device}, but {count} devices are "
                f"available, numbered from 0 to {count - 1}."
            )
        return device
    node, number = device
    if node >= len(nodes):
        raise ConfigError(
            f"config.placement.{role} names node{node}, and there are {len(nodes)} processes, "
            "numbered from 0; a node is a process: start one a node, or name one of these"
        )
    if number >= len(nodes[node]):
        raise ConfigError(
            f"config.placement.{role} names device {number} of node{node}, which has "
            f"{len(nodes[node])}, numbered from 0; start one process a node with all of its "
            "devices, or name one of these"
        )
    return nodes[node][number]


def _shown(device: Device) -> str:
    return str(device) if isinstance(device, int) else f"{device[1]} of node{device[0]}"


def _check_overlap(found: dict[str, tuple[Device, ...]]) -> None:
    # The actor is the first: it is the other one, whose devices may be taken by its name.
    for role, devices in reversed(found.items()):
        for other, theirs in found.items():
            both = sorted(set(devices) & set(theirs))
            if both and set(devices) != set(theirs):
                raise ConfigError(
                    f"config.placement: {role} and {other} share device {_shown(both[0])} and "
                    f"not all others; give them other devices, or the same with "
                    f"--config.placement.{role}={other}"
                )
