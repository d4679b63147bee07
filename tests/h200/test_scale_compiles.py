"""Updates of large models fit the memory of up to 1,024 H200s, and gather one layer at a time."""

import math
import re

import pytest
from scale import ALGORITHMS, MEMORY, SHAPES, Scaled, peak
from target import needs_compiler

from jaxrl_llm.distributed.communication import collectives
from jaxrl_llm.distributed.device_groups import MeshAxes

pytestmark = [*needs_compiler, pytest.mark.slow, pytest.mark.timeout(1800)]

THOUSAND = {"data": 4, "fsdp": 8, "tensor": 8, "pipeline": 4}


@pytest.mark.parametrize(
    ("shape", "algorithm", "mesh", "share"),  # the share is the one of the card's memory
    [
        ("7B", "PPO", {"fsdp": 8}, 0.25),
        ("32B", "PPO", {"fsdp": 8, "tensor": 4}, 0.25),
        ("72B", "PPO", THOUSAND, 0.1),
        ("70B", "DPO", THOUSAND, 0.1),
    ],
)
def test_an_update_fits(shape, algorithm, mesh, share):
    sizes = SHAPES[shape]
    scaled = Scaled(sizes, ALGORITHMS[algorithm], mesh, row=4096)
    compiled = scaled.compiled("update_actor")
    assert peak(compiled) < share * MEMORY
    axes = MeshAxes(names=scaled.program.mesh.axis_names, sizes=scaled.program.mesh.axis_sizes)
    found = collectives(compiled.as_text(), axes, ["update_actor"])
    gathers = [each for each in found if each.kind == "all-gather"]
    shapes = [re.findall(r"(\w+)\[([\d,]*)\]", each.shape) for each in gathers]
    assert gathers and {dtype for arrays in shapes for dtype, _ in arrays} <= {
        "bf16",
        "s32",
        "pred",
    }
    # One kernel of one layer, or the vocabulary table; over tensor activations only.
    largest = sizes.vocab * sizes.hidden // mesh.get("tensor", 1)
    for each, arrays in zip(gathers, shapes, strict=True):
        elements = max(math.prod(map(int, dims.split(","))) for _, dims in arrays if dims)
        assert elements <= largest, each
        if "tensor" in each.axis:
            assert elements <= 2 * 4096 * sizes.hidden, each
    used = {axis for each in found for axis in each.axis.split("+")}
    assert used == {axis for axis, size in mesh.items() if size > 1}
    if "pipeline" in mesh:
        assert any(x.kind == "collective-permute" and x.axis == "pipeline" for x in found)
