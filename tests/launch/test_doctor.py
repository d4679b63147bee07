"""The doctor: its table, its JSON, what it calls slow, and that it leaves no file behind."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxrl_llm.config import ConfigError
from jaxrl_llm.distributed import rates
from jaxrl_llm.distributed.hardware import HARDWARE, hardware_of
from jaxrl_llm.launch import commands, doctor

ROOT = Path(__file__).parents[2]
SCRIPT = str(ROOT / "scripts" / "doctor.py")


def test_two_processes_see_each_other_and_each_measures_its_devices(tmp_path):
    folder, output = tmp_path / "runs", tmp_path / "report.json"
    launcher = [sys.executable, "-m", "jaxrl_llm.launch.local", "--processes=2", "--"]
    command = [*launcher, SCRIPT, f"--folder={folder}", f"--json={output}"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    report = json.loads(output.read_text())
    found = {(row["process"], row["what"]): row for row in report["findings"]}
    for process in (0, 1):
        for what in ("matmul", "device memory", "host to device", "disk write", "file locks"):
            assert found[process, what]["value"] > 0
    assert found[0, "all-reduce"]["where"] == "2 devices, 2 processes"
    assert found[0, "shared folder"]["value"] == found[0, "locks are shared"]["value"] == 2
    assert report["ok"] and len(report["devices"]) == 2
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("flag", ["--folder={}", "--folder={}/below", "--json={}/report.json"])
def test_a_folder_that_cannot_be_written_is_refused_before_jax_is_imported(tmp_path, flag):
    file = tmp_path / "file"
    file.touch()
    flags = [flag.format(file), *([] if "folder" in flag else [f"--folder={tmp_path}"])]
    command = [sys.executable, "-X", "importtime", SCRIPT, *flags]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert result.returncode == 2
    assert f"{file}" in result.stderr and "Give another folder" in result.stderr
    assert re.search(r"\|\s+json$", result.stderr, re.MULTILINE)  # how an import is printed
    assert not re.search(r"\|\s+jax$", result.stderr, re.MULTILINE)


def test_a_full_disk_is_refused_with_what_is_free(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=300_000_000)
    monkeypatch.setattr("shutil.disk_usage", lambda folder: usage)
    with pytest.raises(ConfigError, match=r"has 0\.3 GB free, and the doctor asks for 1 GB"):
        commands.doctor([f"--folder={tmp_path}"])


def test_a_slow_device_is_named_with_the_remedy(tmp_path, monkeypatch):
    """The data sheet of an H200 makes this CPU slow."""
    monkeypatch.setattr(doctor, "hardware_of", lambda kind: HARDWARE["H200"])
    report = doctor.examine(tmp_path)
    slow = {row["what"]: row for row in report["findings"] if row["slow"]}
    assert not report["ok"]
    assert slow["matmul"]["expected"] == 989
    assert slow["device memory"]["least"] == pytest.approx(0.7 * 4800)
    text = doctor.table(report)
    assert "SLOW, at least 593.4: look at `nvidia-smi -q -d PERFORMANCE,CLOCK`" in text
    assert "disk write" not in slow


def test_a_failing_lock_is_found(tmp_path, monkeypatch):
    assert doctor.locks_work(tmp_path)
    monkeypatch.setattr("fcntl.flock", lambda file, mode: None)  # as on a mount without locks
    assert not doctor.locks_work(tmp_path)


def test_a_rate_is_work_over_the_fastest_time(monkeypatch):
    clock = iter(np.cumsum([0, 5.0, 0, 2.0, 0, 3.0]))
    monkeypatch.setattr(rates.time, "perf_counter", lambda: next(clock))
    assert rates.fastest(lambda: None) == 2.0


def test_an_all_reduce_counts_what_a_ring_sends(monkeypatch):
    monkeypatch.setattr(rates, "fastest", lambda run: (jax.block_until_ready(run()), 1.0)[1])
    devices = jax.devices()[:4]
    sizes = rates.sizes_for(devices[0])
    expected = 2 * 3 / 4 * sizes.array_bytes * sizes.loops
    assert rates.all_reduce_bandwidth(devices) == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("NVIDIA H200", "H200"),
        ("NVIDIA H200 NVL", "H200 NVL"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100 PCIE"),
        ("NVIDIA GH200 480GB", "GH200"),
        ("NVIDIA A100-SXM4-40GB", "A100"),
        ("NVIDIA A100-PCIE-40GB", "A100 PCIE"),
        ("NVIDIA L40S", "L40S"),
    ],
)
def test_data_sheets_are_found_by_the_name_that_jax_gives(name, expected):
    assert hardware_of(name) is HARDWARE[expected]


def test_an_unknown_device_has_no_data_sheet():
    assert hardware_of("cpu") is None
