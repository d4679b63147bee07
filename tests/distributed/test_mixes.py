"""Mixes of three axes: losses, gradient norms and updated weights equal those of one device.

All are slow. `.ci/run` has PPO on the last mix.
"""

from typing import Any

import jax
import numpy as np
import pytest
from test_offline_mesh import assert_same as assert_same_step
from test_offline_mesh import step as offline_step
from test_pipeline_mesh import check_bfloat16, iterate, one_device

from jaxrl_llm.config import MeshConfig

pytestmark = pytest.mark.slow

MIXES: dict[str, dict[str, Any]] = {
    "data-fsdp-tensor": {"data": 2, "fsdp": 2, "tensor": 2},
    "data-fsdp-sequence": {"data": 2, "fsdp": 2, "sequence": 2},
    "data-pipeline-sequence": {"data": 2, "pipeline": 2, "sequence": 2},
    "fsdp-sequence-tensor": {"fsdp": 2, "sequence": 2, "tensor": 2},
    "pipeline-fsdp-tensor": {"pipeline": 2, "fsdp": 2, "tensor": 2},
    "pipeline-sequence-tensor": {"pipeline": 2, "sequence": 2, "tensor": 2},
}


def check(kind: str, name: str) -> None:
    batch, metrics, params = iterate(kind, 2, MIXES[name])
    expected_batch, expected_metrics, expected_params = one_device(kind, 2)
    np.testing.assert_array_equal(batch.responses, expected_batch.responses)
    losses = [n for n in expected_metrics if n.endswith(("_loss", "grad_norm"))]
    assert {"actor/pg_loss", "actor/kl_loss", "actor/grad_norm"} <= set(losses)
    for loss in losses:
        expected = expected_metrics[loss]
        np.testing.assert_allclose(metrics[loss], expected, rtol=1e-5, atol=1e-6, err_msg=loss)
    for one, other in zip(*map(jax.tree.leaves, (params, expected_params)), strict=True):
        assert np.linalg.norm(one - other) <= 1e-5 * np.linalg.norm(other)


@pytest.mark.parametrize("name", MIXES)
def test_ppo(name):
    check("ppo", name)


@pytest.mark.parametrize("name", MIXES)
def test_packed_grpo(name):
    check("grpo", name)


@pytest.mark.parametrize("name", MIXES)
def test_dpo(name):
    expected = offline_step("dpo", MeshConfig(), 2)
    found = offline_step("dpo", MeshConfig(**MIXES[name]), 2, micro_batch_size=2)
    assert_same_step(found, expected)


@pytest.mark.parametrize("name", MIXES)
def test_gradients_in_bfloat16(name):
    check_bfloat16(MIXES[name])
