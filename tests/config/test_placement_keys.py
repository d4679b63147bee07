"""Placement on nodes: what addresses and named groups mean, and what is refused."""

import re
from dataclasses import replace
from typing import Any

import pytest

from jaxrl_llm.config import Config, ConfigError, MeshConfig, NodeGroup, load_config
from jaxrl_llm.config.loading import from_json, to_json
from jaxrl_llm.config.placement import devices_of_roles
from jaxrl_llm.distributed.placement import numbers_of_roles, sizes_of_nodes
from jaxrl_llm.typed_records.overrides import apply_override

TWO_OF_TWO = ((0, 1), (2, 3))  # the numbers of the devices of each node
GROUPS = {"train": NodeGroup(count=2, gpus_per_node=2), "inference": NodeGroup(gpus_per_node=2)}
THREE_OF_TWO = (*TWO_OF_TWO, (4, 5))


def placed(placement: dict[str, Any], *, fsdp: int = 2, groups: Any = None) -> Config:
    return Config(mesh=MeshConfig(fsdp=fsdp), placement=placement, node_groups=groups or {})


def test_addresses_over_nodes():
    config = placed({"actor": "node0:0-1", "critic": "node1:0; node1:1", "reference": "critic"})
    assert devices_of_roles(config)["critic"] == ((1, 0), (1, 1))
    # The numbers need not be in the order of the nodes.
    assert numbers_of_roles(config, ((2, 3), (0, 1))) == {
        "actor": (2, 3),
        "critic": (0, 1),
        "reference": (0, 1),
    }
    assert sizes_of_nodes(config) == [2, 2]
    across = placed({"actor": "node0:0;node1:0", "critic": "node0:1;node1:1"})
    assert numbers_of_roles(across, TWO_OF_TWO) == {"actor": (0, 2), "critic": (1, 3)}


def test_plain_numbers_count_over_all_nodes():
    found = numbers_of_roles(placed({"critic": "2-3"}), TWO_OF_TWO)
    assert found == {"actor": (0, 1), "critic": (2, 3)}


def test_groups_take_the_nodes_in_order_and_the_actor_the_first():
    config = placed({"rollout": "inference"}, fsdp=4, groups=GROUPS)
    assert numbers_of_roles(config, THREE_OF_TWO) == {"actor": (0, 1, 2, 3), "rollout": (4, 5)}
    named = placed({"actor": "inference", "critic": "train"}, fsdp=2, groups=GROUPS)
    assert numbers_of_roles(named, THREE_OF_TWO) == {"actor": (4, 5), "critic": (0, 1, 2, 3)}
    # A part of a group, by its node.
    part = placed({"critic": "node2:1", "rollout": "node2:0"}, fsdp=4, groups=GROUPS)
    assert numbers_of_roles(part, THREE_OF_TWO)["critic"] == (5,)
    assert sizes_of_nodes(config) == [2, 2, 2]


def test_groups_are_written_on_a_command_line():
    given = Config()
    for key, text in (
        ("node_groups.train.count", "2"),
        ("node_groups.train.gpus_per_node", "4"),
        ("node_groups.inference", "{count: 3}"),
        ("placement.rollout", "inference"),
        ("placement.critic", "node0:0-7;node1:0-7"),
    ):
        given = apply_override(given, key, text)
    assert given.node_groups == {
        "train": NodeGroup(count=2, gpus_per_node=4),
        "inference": NodeGroup(count=3, gpus_per_node=8),
    }
    assert given.placement == {"rollout": "inference", "critic": "node0:0-7;node1:0-7"}
    assert from_json(to_json(given)) == given
    as_dicts: Any = {"train": {"count": 2, "gpus_per_node": 4}, "inference": {"count": 3}}
    assert replace(given, node_groups=as_dicts) == given


BY_ITSELF: dict[str, tuple[dict[str, Any], dict[str, NodeGroup], str]] = {
    "unknown group": ({"critic": "trian"}, {}, "or node0:0-7;node1:0-7, or the name of the role"),
    "misspelt group": (
        {"actor": "inference", "critic": "trian"},
        GROUPS,
        r"a group of config.node_groups \(train, inf",
    ),
    "no devices of a node": ({"critic": "node1"}, {}, "expected numbers of devices"),
    "empty": ({"actor": "node0:0-1", "critic": "node1:1-0"}, {}, "1-0 names no device"),
    "twice": ({"actor": "node0:0-1", "critic": "node1:0;node1:0"}, {}, "names a device twice"),
    "actor without nodes": ({"critic": "node1:0"}, {}, "--config.placement.actor=node0:0-7"),
    "sizes of the actor": (
        {"rollout": "inference"},
        GROUPS,
        "has 4 devices, and config.mesh has 2",
    ),
    "a group that nobody uses": (
        {"actor": "inference", "critic": "inference"},
        GROUPS,
        "node_groups.train: no role uses it.*--config.placement.critic=train",
    ),
    "no role on a group": ({}, GROUPS, "--config.placement.rollout=inference"),
    "node outside of the groups": (
        {"actor": "inference", "critic": "node3:0"},
        GROUPS,
        "device 0 of node3, and config.node_groups has 3 nodes",
    ),
    "device outside of the groups": (
        {"actor": "inference", "critic": "node1:2"},
        GROUPS,
        "device 2 of node1",
    ),
    "name of a role": ({"rollout": "critic"}, {"critic": NodeGroup()}, "name of a role"),
    "name of a node": ({"rollout": "node1"}, {"node1": NodeGroup()}, "name of a role or of a node"),
}


@pytest.mark.parametrize("name", BY_ITSELF)
def test_a_placement_on_nodes_that_cannot_work_is_refused(name):
    placement, groups, message = BY_ITSELF[name]
    with pytest.raises(ConfigError, match=message):
        devices_of_roles(placed(placement, groups=groups))


def test_groups_and_an_automatic_placement_exclude_each_other():
    with pytest.raises(ConfigError, match="placement=auto does not work with config.node_groups"):
        load_config("grpo", {"placement": "auto", "node_groups": GROUPS})


AT_LAUNCH: dict[str, tuple[dict[str, Any], dict[str, NodeGroup], str]] = {
    "no such node": (
        {"actor": "node0:0-1", "critic": "node2:0"},
        {},
        "names node2, and there are 2 processes.*start one a node",
    ),
    "no such device": (
        {"actor": "node0:0-1", "critic": "node1:7"},
        {},
        "device 7 of node1, which has 2.*start one process a node",
    ),
    "no such number": ({"critic": 4}, {}, "device 4, but 4 devices are available"),
    "a node without a role": ({"actor": "node0:0-1"}, {}, "no role uses node1.*fewer processes"),
    "a number of nodes": (
        {"actor": "inference", "critic": "train"},
        GROUPS,
        r"3 nodes \(train 2 \+ inference 1\), and 2 processes were started",
    ),
    "devices of a node": (
        {"actor": "inference", "critic": "train"},
        {"train": NodeGroup(), "inference": NodeGroup(gpus_per_node=2)},
        "node0 has 2 devices and gpus_per_node=8",
    ),
}


@pytest.mark.parametrize("name", AT_LAUNCH)
def test_a_placement_that_is_not_this_launch_is_refused(name):
    placement, groups, message = AT_LAUNCH[name]
    config = placed(placement, groups=groups)
    devices_of_roles(config)  # nothing is wrong with it by itself
    with pytest.raises(ConfigError, match=message):
        numbers_of_roles(config, TWO_OF_TWO)


@pytest.mark.parametrize(
    ("given", "said"),
    [("autoo", "or {role: devices, …}; did you mean 'auto'?"), ("3", "expected colocated, auto")],
)
def test_a_word_that_is_no_placement(given, said):
    with pytest.raises(ConfigError, match=re.escape(said)) as refused:
        apply_override(Config(), "placement", given)
    assert str(refused.value).startswith(f"config.placement={given}: ")
