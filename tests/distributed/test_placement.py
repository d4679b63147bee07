"""Roles on devices of their own: the metrics of one group, at the same time, and clear errors."""

import functools
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
from tiny_iteration import (
    OF_THE_DECODE_LOOP,
    first_states,
    open_iteration,
    prompts,
    tiny_config,
)

from jaxrl_llm import config as c
from jaxrl_llm.config import Config, ConfigError, MeshConfig, PhaseMeshConfig, check
from jaxrl_llm.config.placement import devices_of_roles
from jaxrl_llm.distributed.mesh import make_mesh
from jaxrl_llm.distributed.multihost import fetch, make_global
from jaxrl_llm.distributed.sharding import batch_sharding
from jaxrl_llm.observability.timing import Timer
from jaxrl_llm.plan.models import open_meshes
from jaxrl_llm.plan.online import plan_online
from jaxrl_llm.tokenizer import load_tokenizer

APART = {"actor": "0-3", "critic": "4-5", "reference": "critic", "reward": "6,7"}


class Spans(Timer):
    """When each stage began and ended."""

    def __init__(self) -> None:
        super().__init__()
        self.began: dict[str, float] = {}
        self.ended: dict[str, float] = {}

    def start(self, name: str) -> None:
        super().start(name)
        self.began[name] = self._clock()

    def stop(self, name: str) -> float:
        self.ended[name] = self._clock()
        return super().stop(name)

    def overlap(self, one: str, other: str) -> bool:
        begin = max(self.began[one], self.began[other])
        return begin < min(self.ended[one], self.ended[other])


def config_with(placement: dict[str, Any]) -> Config:
    """PPO with a reference and a model reward, on four devices of the actor."""
    config = tiny_config(algorithm={"use_kl_loss": True})
    reward = c.RewardConfig(model=c.RewardModelConfig(training=c.SupervisedConfig()))
    data = replace(config.data, train_tasks=(c.ChainSum(num_terms=2),), max_response_length=8)
    config = replace(config, mesh=MeshConfig(fsdp=4), placement=placement, reward=reward)
    check(replace(config, data=data))
    return config


def steps(config: Config, number: int) -> Any:
    """States, metrics and spans of each step, and where each role lies."""
    meshes = open_meshes(config, load_tokenizer("char"))
    iteration = open_iteration(config, meshes.pop("actor"), role_meshes=meshes)
    states, metrics, spans = first_states(iteration), [], [Spans() for _ in range(number)]
    for step in range(1, number + 1):
        batch = make_global(prompts(config), batch_sharding(iteration.mesh))
        states, batch, found = iteration.program.run(states, batch, step, None, spans[step - 1])
        metrics.append(fetch(found))
    devices = {}
    for name in iteration.roles:
        found = jax.tree.leaves(states[name])[0].sharding.device_set
        devices[name] = sorted(device.id for device in found)
    return fetch(states), metrics, spans, devices


@functools.cache
def one_group() -> Any:
    """What four steps with all roles on the same devices give. Tests must not change it."""
    return steps(config_with({}), 4)


@pytest.mark.slow
def test_roles_apart_give_the_metrics_of_one_group_and_overlap():
    expected_states, expected, _, _ = one_group()
    states, found, spans, devices = steps(config_with(APART), 4)
    apart = {"actor": [0, 1, 2, 3], "critic": [4, 5], "reference": [4, 5], "reward": [6, 7]}
    assert devices == apart
    for one, other in zip(found[:2], expected[:2], strict=True):  # later ones add up rounding
        assert one.pop("perf/moved_between_groups_gb") > 0
        assert one.keys() == other.keys()
        # Two of a model's scores that are equal on four devices may differ by rounding on two.
        for name in other.keys() - {"frac_reward_zero_std"}:
            np.testing.assert_allclose(one[name], other[name], rtol=1e-5, atol=1e-6, err_msg=name)
    for one, other in zip(*map(jax.tree.leaves, (states, expected_states)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
    # In a step that compiles nothing. A busy machine may hold up the one that dispatches.
    assert any(each.overlap("update_critic", "update_actor") for each in spans[1:])
    assert any(each.overlap("ref+values", "reward") for each in spans[1:])


@pytest.mark.nightly
def test_roles_that_share_some_devices_take_turns_there():
    """The reward model on the actor's first device, the critic on all, the reference across."""
    _, expected, _, _ = one_group()
    placement = {"reward": "0", "critic": "0-7", "reference": "2-5"}
    _, found, spans, devices = steps(config_with(placement), 2)
    across = {"critic": [*range(8)], "reference": [2, 3, 4, 5], "reward": [0]}
    assert devices == {"actor": [0, 1, 2, 3], **across}
    for one, other in zip(found, expected, strict=False):
        assert one.pop("perf/moved_between_groups_gb") > 0
        assert one.keys() == other.keys()
        for name in other.keys() - {"frac_reward_zero_std"}:
            np.testing.assert_allclose(one[name], other[name], rtol=1e-5, atol=1e-6, err_msg=name)
    for each in spans[1:]:  # in a step that compiles nothing
        assert not each.overlap("update_critic", "update_actor")
        assert not each.overlap("values", "ref") and not each.overlap("values", "reward")


@pytest.mark.nightly
@pytest.mark.parametrize("tensor", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_generation_apart_gives_the_same_samples(tensor):
    """The weights go to the devices of the rollout once a step, and nothing else changes."""
    config = config_with({"rollout": "4-7"})
    config = replace(config, mesh=replace(config.mesh, generation=PhaseMeshConfig(tensor=tensor)))
    _, expected, _, _ = one_group()
    states, found, spans, devices = steps(config, 2)
    assert "rollout" not in states and "rollout" not in devices
    assert {"sync_rollout", "gen"} <= spans[-1].ended.keys()
    for one, other in zip(found, expected[:2], strict=True):
        # Each of two replicas, or of four, has the whole model.
        model = sum(x.nbytes for x in jax.tree.leaves(states["actor"].params))
        assert one.pop("perf/rollout_weights_gb") == pytest.approx(
            4 / tensor * model / 1e9, rel=0.1
        )
        del one["perf/moved_between_groups_gb"]
        assert one.keys() == other.keys()
        for name in other.keys() - OF_THE_DECODE_LOOP:
            # The largest difference of log-probs that are equal but for rounding is rounding.
            rounding = 1e-5 if name.startswith("rollout_corr/") else 1e-6
            np.testing.assert_allclose(
                one[name], other[name], rtol=1e-5, atol=rounding, err_msg=name
            )


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "unknown role": ({"critik": "4"}, "did you mean 'critic'"),
    "no such model": ({"teacher": "4"}, "this run has actor, rollout, critic, reference, reward"),
    "no numbers": ({"critic": "four"}, "expected numbers of devices, for example 4-5"),
    "empty": ({"critic": "5-4"}, "5-4 names no device"),
    "twice": ({"critic": "4,4"}, "names a device twice"),
    "sizes of the actor": ({"actor": "0-2"}, "has 3 devices, and config.mesh has 4"),
    "samples": ({"critic": "4-6"}, "3 devices, which do not divide"),
    "without numbers": ({"critic": "reference"}, "config.placement.reference gives no device"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_placement_that_cannot_work_is_refused(name):
    placement, message = REFUSED[name]
    with pytest.raises(ConfigError, match=message):
        config_with(placement)


def test_generation_ahead_shares_no_part_of_a_group():
    config = replace(config_with({}), placement={"rollout": "2-5"}, max_staleness=1)
    with pytest.raises(ConfigError, match="actor has some devices of rollout, which generates"):
        check(config)


def test_devices_of_roles():
    config = config_with({"critic": 7, "reference": "critic", "reward": "actor", "rollout": [5, 6]})
    assert devices_of_roles(config) == {
        "actor": (0, 1, 2, 3),
        "critic": (7,),
        "reference": (7,),
        "rollout": (5, 6),
    }


def test_a_group_that_no_role_uses_is_refused():
    config = replace(tiny_config(), algorithm=c.GRPO(), mesh=MeshConfig(fsdp=4))
    config, tokenizer = replace(config, placement={"critic": "4"}), load_tokenizer("char")
    meshes = open_meshes(config, tokenizer)
    mesh = meshes.pop("actor")
    with pytest.raises(ConfigError, match="no use for that role"):
        plan_online(config, tokenizer, mesh, None, role_meshes=meshes)


def test_a_mesh_keeps_the_devices_of_its_role():
    meshes = open_meshes(config_with(APART), load_tokenizer("char"))
    assert meshes["critic"] == meshes["reference"] != meshes["reward"]
    assert meshes["critic"].shape["fsdp"] == 2
    assert make_mesh(fsdp=4, devices=jax.devices()[:4]) == meshes["actor"]
