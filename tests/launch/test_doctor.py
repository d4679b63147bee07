"""The doctor: its table, its JSON, what it calls slow, and that it leaves no file behind."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from in_process import launch_here

from jaxrl_llm.distributed import measuring
from jaxrl_llm.distributed.hardware import HARDWARE, hardware_of
from jaxrl_llm.launch import doctor

ROOT = Path(__file__).parents[2]


@pytest.mark.nightly
def test_two_processes_see_each_other_and_each_measures_its_devices(tmp_path):
    folder, output = tmp_path / "runs", tmp_path / "report.json"
    words = [
        "--processes=2",
        "--",
        "-m",
        "jaxrl_llm",
        "doctor",
        f"--folder={folder}",
        f"--json={output}",
    ]
    result = launch_here(*words)
    report = json.loads(output.read_text())
    disk_is_slow = any(row["slow"] for row in report["findings"] if row["what"].startswith("disk"))
    assert result.returncode == disk_is_slow, result.stderr
    found = {(row["process"], row["what"]): row for row in report["findings"]}
    for process in (0, 1):
        for what in ("matmul", "device memory", "host to device", "disk write", "file locks"):
            assert found[process, what]["value"] > 0
    assert found[0, "all-reduce"]["where"] == "2 devices, 2 processes"
    assert found[0, "shared folder"]["value"] == found[0, "locks are shared"]["value"] == 2
    assert report["ok"] != disk_is_slow and len(report["devices"]) == 2
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("flag", ["--folder={}", "--folder={}/below", "--json={}/report.json"])
def test_a_folder_that_cannot_be_written_is_refused_before_jax_is_imported(tmp_path, flag):
    file = tmp_path / "file"
    file.touch()
    flags = [flag.format(file), *([] if "folder" in flag else [f"--folder={tmp_path}"])]
    command = [sys.executable, "-X", "importtime", "-m", "jaxrl_llm", "doctor", *flags]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert result.returncode == 2
    assert f"files cannot be made in {file}" in result.stderr
    assert re.search(r"\|\s+json$", result.stderr, re.MULTILINE)  # how an import is printed
    assert not re.search(r"\|\s+jax$", result.stderr, re.MULTILINE)


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


def test_a_driver_that_does_not_answer_is_named(tmp_path, monkeypatch):
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\nexec sleep 9\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(doctor, "DRIVER_S", 0.2)
    assert doctor.versions()["driver"] == "(nvidia-smi gives no answer in 0.2 s)"


def test_a_failing_lock_is_found(tmp_path, monkeypatch):
    assert doctor.locks_work(tmp_path)
    monkeypatch.setattr("fcntl.flock", lambda file, mode: None)  # as on a mount without locks
    assert not doctor.locks_work(tmp_path)


def test_a_rate_is_work_over_the_fastest_time(monkeypatch):
    clock = iter(np.cumsum([0, 5.0, 0, 2.0, 0, 3.0]))
    monkeypatch.setattr(measuring.time, "perf_counter", lambda: next(clock))
    assert measuring.fastest(lambda: None, 3) == 2.0


@pytest.fixture
def one_second(monkeypatch):
    """Every program takes a second, so that there is time for two repetitions."""
    taken = lambda run, repeats: (jax.block_until_ready(run()), 1.0)[1]  # noqa: E731
    monkeypatch.setattr(measuring, "fastest", taken)


def test_an_all_reduce_counts_what_a_ring_sends(one_second):
    groups = np.asarray(jax.devices()[:8]).reshape(2, 4)
    assert measuring.all_reduce_bandwidth(groups) == 2 * (2 * 3 / 4 * measuring.CPU.array_bytes)


def test_a_slow_link_is_not_measured_for_long():
    seconds = 0.03, 0.3, 30.0  # of a repetition
    assert [measuring.repetitions(measuring.GPU, s) for s in seconds] == [20, 6, 1]


def test_data_sheets_are_found_by_the_name_that_jax_gives():
    names = {
        "NVIDIA H200": "H200",
        "NVIDIA H200 NVL": "H200 NVL",
        "NVIDIA H100 80GB HBM3": "H100",
        "NVIDIA H100 PCIe": "H100 PCIE",
        "NVIDIA GH200 480GB": "GH200",
        "NVIDIA A100-SXM4-40GB": "A100",
        "NVIDIA A100-PCIE-40GB": "A100 PCIE",
        "NVIDIA L40S": "L40S",
    }
    assert {name: hardware_of(name) for name in names} == {n: HARDWARE[k] for n, k in names.items()}
    assert hardware_of("cpu") is None
