"""The doctor: its table, its JSON, what it calls slow, and that it leaves no file behind."""

import json
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxrl_llm.distributed import rates
from jaxrl_llm.distributed.hardware import HARDWARE, hardware_of
from jaxrl_llm.launch import doctor
from jaxrl_llm.models.flops import PEAK_FLOPS

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
    assert found[0, "shared folder"]["value"] == 2
    assert report["ok"] and len(report["devices"]) == 2
    assert list(folder.iterdir()) == []


def test_a_wrong_folder_is_refused_before_jax_is_imported(tmp_path):
    file = tmp_path / "file"
    file.touch()
    command = [sys.executable, "-X", "importtime", SCRIPT, f"--folder={file}"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert result.returncode == 2
    assert f"--folder={file} is a file; give a folder" in result.stderr
    assert "| jax\n" not in result.stderr


def test_a_slow_device_is_named_with_the_remedy(tmp_path, monkeypatch):
    """The data sheet of an H200 makes this CPU slow."""
    monkeypatch.setattr(doctor, "hardware_of", lambda kind: HARDWARE["H200"])
    monkeypatch.setattr(doctor, "peak_flops", lambda kind: PEAK_FLOPS["H200"])
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


@pytest.mark.parametrize("name", ["NVIDIA H200", "NVIDIA H100 80GB HBM3", "NVIDIA GH200 480GB"])
def test_data_sheets_are_found_by_the_name_that_jax_gives(name):
    found = hardware_of(name)
    assert found is not None and found.name in name.split()


def test_an_unknown_device_has_no_data_sheet():
    assert hardware_of("cpu") is None
