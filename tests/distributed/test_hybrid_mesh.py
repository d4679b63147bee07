"""Gated delta rules on a mesh: an iteration of PPO or packed GRPO equals that of one device.

The GRPO packs rows with shared prompts.
"""

import functools
from dataclasses import replace

import jax
import numpy as np
import pytest
from test_offline_mesh import OPTIMIZER
from tiny import HYBRID, MODEL
from tiny_iteration import (
    first_states,
    in_micro_batches,
    open_iteration,
    packed,
    run_step,
    tiny_config,
)

from jaxrl_llm import config as c
from jaxrl_llm.config import MeshConfig
from jaxrl_llm.distributed.mesh import make_mesh
from jaxrl_llm.distributed.multihost import fetch

# Of random weights. With 0.3 the last bits of the weights move the gradient's norm by 2e-5, and the
# KL loss by 4e-5; so by 4e-6.
SCALE = 0.05
FEATURES = HYBRID | {"rms_norm_eps": 0.1}  # see test_hybrid_mixes.py
ALGORITHMS = {
    "grpo": c.GRPO(use_kl_loss=True),
    "ppo": c.PPO(use_kl_in_reward=True, kl_coef=0.05, use_kl_loss=True, kl_loss_coef=0.1),
}


def iterate(kind, sizes, layers):
    """Batch, metrics and weights after an iteration on a mesh of these sizes."""
    mesh, config = MeshConfig(**sizes), tiny_config(model_reward=False)
    model = MODEL | FEATURES | {"num_hidden_layers": layers}
    actor = replace(config.actor, hf_config=model, ppo_epochs=1, optimizer=OPTIMIZER)
    critic = replace(config.critic, ppo_epochs=1, optimizer=OPTIMIZER)
    algorithm = ALGORITHMS[kind]
    config = replace(config, actor=actor, critic=critic, algorithm=algorithm, mesh=mesh)
    config = in_micro_batches(config, 8 // mesh.num_replicas)
    if kind == "grpo":
        config = packed(config, 32)
    iteration = open_iteration(config, make_mesh(**mesh.sizes))
    states, batch, metrics = run_step(iteration, first_states(iteration, SCALE), 1)
    learned = {name: fetch(states[name].params) for name in ("actor", "critic") if name in states}
    return batch, metrics, learned


one_device = functools.cache(lambda kind, layers: iterate(kind, {}, layers))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "sizes", "layers"),
    [
        ("grpo", {"data": 2, "fsdp": 2, "tensor": 2}, 2),
        ("grpo", {"pipeline": 2, "data": 2, "pipeline_micro_batches": 2}, 4),
        ("ppo", {"pipeline": 2, "fsdp": 2, "tensor": 2}, 4),
        ("grpo", {"data": 2, "sequence": 4}, 2),
        ("ppo", {"fsdp": 2, "sequence": 2, "tensor": 2}, 2),
        ("grpo", {"pipeline": 2, "sequence": 2, "tensor": 2}, 4),
    ],
    ids=str,
)
def test_an_iteration_equals_one_device(kind, sizes, layers):
    """Rollout, log-probs, values and updates."""
    batch, metrics, params = iterate(kind, sizes, layers)
    expected_batch, expected_metrics, expected_params = one_device(kind, layers)
    np.testing.assert_array_equal(batch.responses, expected_batch.responses)
    names = [n for n in expected_metrics if n.endswith(("_loss", "grad_norm"))]
    assert {"actor/pg_loss", "actor/kl_loss", "actor/grad_norm"} <= set(names)
    for name in names:
        np.testing.assert_allclose(
            metrics[name], expected_metrics[name], rtol=1e-5, atol=1e-6, err_msg=name
        )
    for one, other in zip(*map(jax.tree.leaves, (params, expected_params)), strict=True):
        assert np.linalg.norm(one - other) <= 1e-5 * np.linalg.norm(other)
