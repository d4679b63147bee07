"""The devices of a launch that each role of a config has. Imports no jax.

`config.placement` says which devices are meant; a launch has so many processes and devices.
"""

from collections.abc import Sequence

from jaxrl_llm.config import Config, ConfigError
from jaxrl_llm.config.placement import ROLLOUT, Device, devices_of_roles, nodes_of


def numbers_of_roles(config: Config, nodes: Sequence[Sequence[int]]) -> dict[str, tuple[int, ...]]:
    """`devices_of_roles` as numbers counted over all nodes; `nodes` has the numbers of each.

    Raises: ConfigError for a node or device that does not exist, groups that do not match the
        nodes of this launch, or a node that no role uses.
    """
    if config.placement and len(nodes) > 1:
        _check_sessions(config, len(nodes))
    _check_launch(config, [len(own) for own in nodes])
    numbers_of = {
        role: tuple(_number(role, device, nodes) for device in devices)
        for role, devices in devices_of_roles(config).items()
    }
    used = {number for numbers in numbers_of.values() for number in numbers}
    for node, own in enumerate(nodes):
        if config.placement and len(nodes) > 1 and not used & set(own):
            raise ConfigError(
                f"config.placement: no role uses node{node}, process {node} of {len(nodes)}; give "
                "a role its devices, or start fewer processes"
            )
    return numbers_of


def sizes_of_nodes(config: Config) -> list[int]:
    """The devices of each node, as far as the placement says; empty where it names no nodes.

    Without groups a node has as many devices as the largest that a role names.
    """
    groups = devices_of_roles(config).values()
    named = [d for devices in groups for d in devices if isinstance(d, tuple)]
    if config.node_groups or not named:
        return [size for _, size in nodes_of(config)]
    last, most = (max(each) for each in zip(*named, strict=True))
    return [most + 1] * (last + 1)


def _check_sessions(config: Config, processes: int) -> None:
    """Each process drives engines on its own devices, for samples of the actor's devices there."""
    rollout = config.rollout
    turns = rollout.tools or rollout.environment or rollout.program
    apart = ROLLOUT in devices_of_roles(config)
    for key, is_set in {
        "partial_rollouts": config.partial_rollouts,
        "rollout.tools, environment and program": apart and turns,
    }.items():
        if is_set:
            raise ConfigError(
                f"config.{key}: roles placed on {processes} processes do not work with it yet; "
                "leave it out, or place roles within one process"
            )


def _check_launch(config: Config, started: Sequence[int]) -> None:
    """The groups are the nodes of this launch, with `started` devices each."""
    sizes = [size for _, size in nodes_of(config)]
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
