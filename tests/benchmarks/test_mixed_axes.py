"""The comparison of meshes on the devices of a machine: its configs, and what it finds."""

import json

import pytest

from benchmarks import mixed_axes
from jaxrl_llm.config import load_config


@pytest.mark.parametrize(
    ("kind", "mesh"),
    [(kind, mesh) for kind, meshes in mixed_axes.MESHES.items() for mesh in meshes],
)
def test_each_mesh_has_four_devices_and_is_valid(kind, mesh):
    sizes = [tuple(size.split("=")) for size in mesh.split()]
    config = load_config(
        mixed_axes.config_of(kind, 3), [(f"mesh.{name}", size) for name, size in sizes]
    )
    assert config.mesh.num_devices == 4


@pytest.mark.parametrize(
    ("found", "expected"),
    [({"actor/pg_loss": 0.11}, 0.1), ({"actor/pg_loss": float("nan")}, float("inf"))],
)
def test_the_largest_difference_is_found(tmp_path, found, expected):
    row = {"actor/pg_loss": 0.1, "actor/grad_norm": 2.0, "perf/time": 1.0, "actor/micro_batches": 3}
    for name, changes in (("one", {}), ("mesh", found | {"perf/time": 9.0})):
        (tmp_path / name).mkdir()
        rows = [{"training/global_step": 0}, {"training/global_step": 1} | row | changes]
        lines = "".join(json.dumps(each) + "\n" for each in rows)
        (tmp_path / name / "metrics.jsonl").write_text(lines)
    gap, name = max(mixed_axes.differences(tmp_path / "mesh", tmp_path / "one"))
    assert name == "actor/pg_loss" and gap == pytest.approx(expected)
