"""Heads of a gated delta rule split over devices: an iteration equals that of one device."""

import functools
from dataclasses import replace

import jax
import numpy as np
import pytest
from test_offline_mesh import OPTIMIZER
from tiny import HYBRID, MODEL
from tiny_iteration import first_states, open_iteration, packed, run_step, tiny_config

from jaxrl_llm import config as c
from jaxrl_llm.config import MeshConfig
from jaxrl_llm.distributed.mesh import make_mesh
from jaxrl_llm.distributed.multihost import fetch

# Of random weights. With 0.3 the last bits of the weights move the gradient's norm by 2e-5, and the
# KL loss by 4e-5; so by 4e-6.
SCALE = 0.05


@functools.cache
def iterate(**sizes):
    """Batch, metrics and weights after an iteration of GRPO on a mesh of these sizes."""
    mesh, config = MeshConfig(**sizes), tiny_config(model_reward=False)
    actor = replace(config.actor, hf_config=MODEL | HYBRID, ppo_epochs=1, optimizer=OPTIMIZER)
    config = replace(config, actor=actor, algorithm=c.GRPO(use_kl_loss=True), mesh=mesh)
    config = packed(config, 32)
    iteration = open_iteration(config, make_mesh(**mesh.sizes))
    states, batch, metrics = run_step(iteration, first_states(iteration, SCALE), 1)
    return batch, metrics, fetch(states["actor"].params)


@pytest.mark.slow
def test_an_iteration_equals_one_device():
    """Rollout, packed log-probs with shared prompts, and updates."""
    batch, metrics, params = iterate(data=2, fsdp=2, tensor=2)
    expected_batch, expected_metrics, expected_params = iterate()
    np.testing.assert_array_equal(batch.responses, expected_batch.responses)
    names = [n for n in expected_metrics if n.endswith(("_loss", "grad_norm"))]
    assert {"actor/pg_loss", "actor/kl_loss", "actor/grad_norm"} <= set(names)
    for name in names:
        np.testing.assert_allclose(
            metrics[name], expected_metrics[name], rtol=1e-5, atol=1e-6, err_msg=name
        )
    for one, other in zip(*map(jax.tree.leaves, (params, expected_params)), strict=True):
        assert np.linalg.norm(one - other) <= 1e-5 * np.linalg.norm(other)
