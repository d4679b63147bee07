"""What the planner says of generation in float8, against the arrays that it makes."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from test_estimate import H200, large
from tiny_models import HYBRID_EXPERTS

from jaxrl_llm import config as c
from jaxrl_llm.estimate.devices import Devices
from jaxrl_llm.estimate.estimate import estimate
from jaxrl_llm.estimate.memory import float8_bytes
from jaxrl_llm.estimate.seconds import DECODE_LAYER, ROUTING
from jaxrl_llm.estimate.work import work_of
from jaxrl_llm.kernels.float8 import FLOAT8
from jaxrl_llm.models.base import model_spec
from jaxrl_llm.models.families import to_hf_config
from jaxrl_llm.models.shapes import SHAPES


@pytest.mark.parametrize(
    "config",
    [
        replace(SHAPES["qwen3-30b-a3b"], num_layers=2, sliding_window=(None,) * 2),
        replace(SHAPES["deepseek-v3"], num_layers=4, sliding_window=(None,) * 4),
        replace(HYBRID_EXPERTS, hidden_size=512),
    ],
    ids=lambda config: config.family,
)
def test_a_float8_rollout_makes_a_byte_of_a_weight_that_has_such_a_form(config):
    spec = model_spec(config, dtype="bfloat16", form="float8")
    real = sum(
        kernel.size + 4 * scale.size
        for kernel, scale in _kernels_and_scales(spec.params["decoder"]["layers"])
        if kernel.dtype == FLOAT8
    )
    assert float8_bytes(config) == pytest.approx(real, rel=0.02)


def _kernels_and_scales(tree: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(tree, dict):
        if "kernel" in tree and "scale" in tree:
            yield tree["kernel"], tree["scale"]
        for value in tree.values():
            yield from _kernels_and_scales(value)


@pytest.mark.parametrize(
    ("name", "least", "most"), [("qwen3-30b-a3b", 0.7, 0.9), ("gpt-oss-20b", 2.0, 4.0)]
)
def test_experts_in_float8_save_time_where_they_are_read_as_they_are(name, least, most):
    """The weights of experts bound the steps. A byte at 0.65 of the rate takes less than two.

    A size of 2,880 is not whole tiles: each step reads a byte, writes two and reads them again.
    """
    shape = replace(SHAPES[name], num_layers=8, sliding_window=SHAPES[name].sliding_window[:8])
    config = large(rollout=c.RolloutConfig(n=4, num_slots=64))
    config = replace(config, actor=replace(config.actor, hf_config=to_hf_config(shape)))

    def found(quantization: str) -> float:
        rollout = replace(config.rollout, quantization=quantization)
        work = work_of(replace(config, rollout=rollout))
        gen = estimate(work, Devices(mesh=c.MeshConfig(), hosts=1, rates=H200)).stages[0]
        fixed = 1024 * 8 * (DECODE_LAYER + ROUTING)
        return gen.compute - fixed

    assert least < found("float8") / found("none") < most
