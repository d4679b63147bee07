"""The processes of the tests: how many there are, and what each finds when it imports jax."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

TESTS = Path(__file__).parents[1]


def test_the_environment_is_set_before_jax_reads_it():
    """Else one process keeps no compiled program, and takes the GPU of a machine that has one."""
    code = "import sys, conftest; print('jax' in sys.modules)"
    environment = os.environ | {"PYTHONPATH": f"{TESTS}{os.pathsep}{TESTS.parent}"}
    found = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert found.stdout == "False\n"


@pytest.mark.parametrize(
    ("cores", "gigabytes", "workers"), [(2, 24, 3), (1, 8, 2), (8, 16, 4), (64, 512, 8), (4, 2, 1)]
)
def test_workers_fit_cores_and_memory(request, monkeypatch, cores, gigabytes, workers):
    conftest = request.config.pluginmanager.get_plugin(str(TESTS / "conftest.py"))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)), raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    sizes = {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": gigabytes * 2**30 // 4096}
    monkeypatch.setattr(os, "sysconf", sizes.get)
    monkeypatch.delenv("PYTEST_XDIST_AUTO_NUM_WORKERS", raising=False)

    def found(path, marks):
        config = SimpleNamespace(args=[path], option=SimpleNamespace(markexpr=marks))
        return conftest.pytest_xdist_auto_num_workers(config)

    assert found(str(TESTS / "project"), "not slow and not torch and not h200") == workers
    assert found(str(TESTS / "project"), "slow") == 0
    assert found(f"{__file__}::test_workers_fit_cores_and_memory", "not slow") == 0
    monkeypatch.setenv("PYTEST_XDIST_AUTO_NUM_WORKERS", "5")
    assert found(str(TESTS / "project"), "not slow") == 5
