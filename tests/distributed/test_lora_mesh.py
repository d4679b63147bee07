"""An iteration with adapters of actor and critic on eight devices equals that on one."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from tiny import MODEL
from tiny_iteration import first_states, in_micro_batches, open_iteration, run_step, tiny_config

from jaxrl_llm.config import LoraConfig, MeshConfig
from jaxrl_llm.distributed.layout import mesh_of
from jaxrl_llm.distributed.multihost import fetch

LORA = LoraConfig(rank=2, alpha=1.0)


def iterate(sizes, lora):
    """The batch, and what actor and critic learned, after one iteration."""
    mesh = MeshConfig(**sizes)
    config = in_micro_batches(tiny_config(), 8 // mesh.num_replicas)
    config = replace(
        config,
        mesh=mesh,
        actor=replace(config.actor, lora=lora),
        critic=replace(config.critic, lora=lora),
    )
    iteration = open_iteration(config, mesh_of(mesh, [MODEL["num_key_value_heads"]]))
    states, batch, _ = run_step(iteration, first_states(iteration), 1)
    assert set(states) == {"actor", "base", "critic", "reward", "kl_controller"}
    return batch, {name: fetch(states[name].params) for name in ("actor", "critic")}


@pytest.mark.parametrize(
    ("sizes", "lora"),
    [
        ({"fsdp": 4, "tensor": 2}, LORA),
        pytest.param({"data": 2, "fsdp": 2, "tensor": 2}, replace(LORA, dora=True), id="dora"),
    ],
)
def test_iteration(sizes, lora):
    batch, learned = iterate(sizes, lora)
    expected, alone = iterate({}, lora)
    np.testing.assert_array_equal(batch.responses, expected.responses)
    for name in ("rollout_logprobs", "old_logprobs", "reference_logprobs", "values"):
        found, one = (getattr(each, name) * each.mask for each in (batch, expected))
        np.testing.assert_allclose(found, one, rtol=1e-4, atol=1e-4, err_msg=name)
    # The reference is the base, so it is far from the adapted actor.
    assert np.abs(expected.reference_logprobs - expected.old_logprobs).max() > 0.01
    for one, other in zip(*map(jax.tree.leaves, (learned, alone)), strict=True):
        assert np.linalg.norm(one - other) <= 1e-4 * np.linalg.norm(other)
