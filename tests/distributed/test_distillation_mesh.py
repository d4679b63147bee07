"""A teacher's likeliest tokens, and learning from them, on eight devices and on one."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from tiny_iteration import (
    first_states,
    in_micro_batches,
    open_iteration,
    packed,
    run_step,
    tiny_config,
)

from jaxrl_llm.config import DistillationTopK, MeshConfig, SupervisedConfig, TeacherConfig
from jaxrl_llm.distributed.mesh import make_mesh
from jaxrl_llm.distributed.multihost import fetch


def step(sizes: dict[str, int], row_tokens: int = 0):
    mesh = MeshConfig(**sizes)
    config = in_micro_batches(tiny_config(model_reward=False), 8 // mesh.num_replicas)
    if row_tokens:
        config = packed(config, row_tokens)
    config = replace(
        config,
        mesh=mesh,
        algorithm=DistillationTopK(),
        teacher=TeacherConfig(training=SupervisedConfig(), top_k=4),
    )
    iteration = open_iteration(config, make_mesh(**sizes))
    states, batch, metrics = run_step(iteration, first_states(iteration), 1)
    return batch, metrics, fetch(states["actor"].params)


@pytest.mark.slow
def test_a_step_equals_that_of_one_device():
    expected_batch, expected_metrics, expected = step({})
    sizes = {"data": 2, "fsdp": 2, "tensor": 2}
    for row_tokens in (0, 24):
        batch, metrics, params = step(sizes, row_tokens)
        mask = np.asarray(batch.mask)[..., None]
        for name in ("teacher_top_ids", "teacher_top_logprobs"):
            found = np.asarray(getattr(batch, name)) * mask
            wanted = np.asarray(getattr(expected_batch, name)) * mask
            np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4, err_msg=name)
        for name in ("actor/pg_loss", "actor/grad_norm", "distillation/teacher_mass"):
            np.testing.assert_allclose(metrics[name], expected_metrics[name], rtol=1e-3)
        for one, other in zip(*map(jax.tree.leaves, (params, expected)), strict=True):
            assert np.linalg.norm(one - other) <= 1e-4 * np.linalg.norm(other)
