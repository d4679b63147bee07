"""The doctor: its table, its JSON, what it calls slow, and that it leaves no file behind."""

import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from in_process import launch_here
from tiny_run import TinyRun, assert_same_bits

from jaxrl_llm.config import Config, ConfigError, MeshConfig
from jaxrl_llm.distributed import measuring
from jaxrl_llm.distributed.hardware import HARDWARE, Hardware, hardware_of
from jaxrl_llm.launch import commands, doctor, runtime

ROOT = Path(__file__).parents[2]
SCRIPT = str(ROOT / "scripts" / "doctor.py")


def test_two_processes_see_each_other_and_each_measures_its_devices(tmp_path):
    folder, output = tmp_path / "runs", tmp_path / "report.json"
    words = ["--processes=2", "--", SCRIPT, f"--folder={folder}", f"--json={output}"]
    result = launch_here(*words)
    assert result.returncode == 0, result.stderr
    report = json.loads(output.read_text())
    found = {(row["process"], row["what"]): row for row in report["findings"]}
    for process in (0, 1):
        for what in ("matmul", "device memory", "host to device", "disk write", "file locks"):
            assert found[process, what]["value"] > 0
    assert found[0, "collective bandwidth"]["where"] == "between rank 0 and 1"
    assert found[0, "collective bandwidth"]["value"] > 0
    assert (1, "collective bandwidth") not in found
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


def test_an_exchange_counts_what_a_device_sends(one_second):
    groups = np.asarray(jax.devices()[:8]).reshape(4, 2)
    assert measuring.exchange_bandwidth(groups, [(0, 2), (1, 3)]) == 2 * measuring.CPU.array_bytes


def test_a_slow_link_is_not_measured_for_long():
    seconds = 0.03, 0.3, 30.0  # of a repetition
    assert [measuring.repetitions(measuring.GPU, s) for s in seconds] == [20, 6, 1]
    assert [measuring.repetitions(measuring.QUICK_GPU, s) for s in seconds] == [3, 1, 1]


@pytest.mark.parametrize("processes", [2, 3, 4, 5, 8])
def test_every_pair_of_processes_is_measured_once(processes):
    found = doctor.rounds(processes, ring=False)
    for pairs in found:
        assert len({process for pair in pairs for process in pair}) == 2 * len(pairs)
    everyone = list(itertools.combinations(range(processes), 2))
    assert sorted(pair for pairs in found for pair in pairs) == everyone


@pytest.mark.parametrize("processes", [2, 3, 4, 5, 9, 64])
def test_a_ring_measures_every_neighbour_in_three_rounds(processes):
    found = doctor.rounds(processes, ring=True)
    assert len(found) <= 3
    for pairs in found:
        assert len({process for pair in pairs for process in pair}) == 2 * len(pairs)
    ring = {tuple(sorted((n, (n + 1) % processes))) for n in range(processes)}
    measured = [pair for pairs in found for pair in pairs]
    assert len(measured) == len(ring) and set(measured) == ring


# ------------------------------------------------------------------------- start of a run


def test_slow_links_of_a_run_are_named_with_the_remedy(monkeypatch):
    devices = jax.devices()[:2]
    monkeypatch.setattr(doctor, "hardware_of", lambda kind: HARDWARE["H200"])
    *copies, link = doctor.slow_links(devices)
    pattern = (
        r"collective bandwidth between the 2 devices of rank 0: \S+ GB/s, expected 450; set NCCL"
    )
    assert re.match(pattern, link), link
    assert all(re.match("(host to device|device to host) device [01]: ", line) for line in copies)


def test_healthy_links_of_a_run_are_not_named(monkeypatch):
    slow = Hardware(flops=1, memory_bandwidth=1, host_bandwidth=1, link_bandwidth=1)
    for sheet in (slow, None):
        monkeypatch.setattr(doctor, "hardware_of", lambda kind, sheet=sheet: sheet)
        assert doctor.slow_links(jax.devices()[:2]) == []


PROGRAM = """
import dataclasses, platform, sys
from jaxrl_llm.distributed.hardware import HARDWARE
from jaxrl_llm.launch import doctor, runtime

runtime.prepare()
runtime.join_processes()
import jax
platform.node = lambda: f"host{jax.process_index()}"
for name, network in (("healthy", 1.0), ("slow", 5e15)):
    sheet = dataclasses.replace(HARDWARE["H200"], host_bandwidth=1.0, network_bandwidth=network)
    doctor.hardware_of = lambda kind: sheet
    print(name, "network", file=sys.stderr, flush=True)
    runtime._say_slow_links(range(2))
"""


def test_a_slow_network_between_two_processes_is_named_by_one(tmp_path):
    """And a network that is as fast as its data sheet says is not."""
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    result = launch_here("--processes=2", "--", str(script))
    assert result.returncode == 0, result.stderr
    first, second = result.stderr.split("[0] slow network\n")
    assert "[0] healthy network\n" in first and "expected" not in first
    found = [line for line in second.splitlines() if "expected" in line]
    assert len(found) == 1, result.stderr
    start = r"\[0\] collective bandwidth between rank 0 and 1: \S+ GB/s, expected 5e\+06; set NCCL"
    assert re.match(start, found[0])


@pytest.mark.slow
def test_a_run_that_measures_its_links_computes_the_same(tmp_path, monkeypatch):
    """The same bits, from programs that the other run has compiled."""
    cache, runs, kept = tmp_path / "cache", [], []
    for value in ("0", "1"):
        monkeypatch.setenv(runtime.CHECK_LINKS, value)
        run = TinyRun(tmp_path / value, "--devices=2", "--config.mesh.data=2")
        flags = ("--config.total_steps=2", "--config.validation.every=2")
        run.finish(*flags, f"--config.compile_cache={cache}")
        runs.append(run)
        kept.append({path.name for path in cache.glob("*-cache")})
    without, measured = runs
    assert measured.metrics() == without.metrics()
    assert_same_bits(measured.weights(2), without.weights(2))
    # Programs that surely take longer to compile than the least time that is kept.
    long = ("jit_iteration-", "jit_supervised-")
    assert sum(name.startswith(long) for name in kept[0]) >= 2
    assert not any(name.startswith(long) for name in kept[1] - kept[0])


@pytest.mark.parametrize(
    ("value", "backend", "measured"),
    [("", "gpu", 1), ("", "cpu", 0), ("0", "gpu", 0), ("1", "cpu", 1)],
)
def test_a_run_measures_its_links_on_gpus(tmp_path, monkeypatch, value, backend, measured):
    asked: list[object] = []
    monkeypatch.setenv(runtime.CHECK_LINKS, value)
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    monkeypatch.setattr(runtime, "enable_compile_cache", lambda folder: None)
    monkeypatch.setattr(doctor, "slow_links", lambda devices: asked.append(devices) or [])
    runtime.start(Config(run_dir=str(tmp_path), mesh=MeshConfig(fsdp=2)))
    assert asked == [jax.devices()[:2]] * measured


def test_a_wrong_value_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv(runtime.CHECK_LINKS, "yes")
    with pytest.raises(ConfigError, match="JAXRL_CHECK_LINKS=yes: must be 0"):
        runtime.start(Config(run_dir=str(tmp_path)))


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
