"""Mixes of axes: losses, gradient norms and updated weights equal one device's.

All are slow. `.ci/run` has PPO on the last mix.
"""

from typing import Any

import pytest
from test_offline_mesh import assert_same as assert_same_step
from test_offline_mesh import step as offline_step
from test_pipeline_mesh import check_bfloat16, check_iteration

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
FEWER_AXES = {
    "fsdp": {"fsdp": 8},
    "sequence": {"sequence": 8},
    "data-sequence": {"data": 2, "sequence": 4},
}


@pytest.mark.parametrize("name", [*FEWER_AXES, *MIXES])
def test_ppo(name):
    check_iteration("ppo", 2, (FEWER_AXES | MIXES)[name])


@pytest.mark.parametrize("name", MIXES)
def test_packed_grpo(name):
    check_iteration("grpo", 2, MIXES[name])


@pytest.mark.parametrize("name", MIXES)
def test_dpo(name):
    expected = offline_step("dpo", MeshConfig(), 2)
    step = offline_step("dpo", MeshConfig(**MIXES[name]), 2, micro_batch_size=2)
    assert_same_step(step, expected)


@pytest.mark.parametrize("name", MIXES)
def test_gradients_in_bfloat16(name):
    check_bfloat16(MIXES[name])
