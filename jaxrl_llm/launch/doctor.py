"""`jaxrl doctor`: measured rates of this machine and its links, with the data sheet.

Every process measures its own devices, folder and memory. Process 0 prints the table of all.
"""

import fcntl
import importlib.metadata
import os
import platform
import shutil
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import jax

from jaxrl_llm.distributed import measuring
from jaxrl_llm.distributed.hardware import hardware_of
from jaxrl_llm.distributed.measuring import Device
from jaxrl_llm.distributed.multihost import barrier, gather_objects, value_of_main
from jaxrl_llm.launch.host_memory import host_memory

PACKAGES = ("jax", "jaxlib", "jax-cuda13-plugin", "flax", "optax", "orbax-checkpoint")
DRIVER_S = 30.0  # until nvidia-smi answers
FILE_BYTES = 2**27  # size of the file that tests a disk
LEAST_FREE_BYTES = 10e9  # two checkpoints of a 0.1B model, with room for traces
LEAST_MEMORY_BYTES = 8e9
LINK_SHARE = 0.4  # fraction of the data sheet that a healthy link reaches
_TRANSPORT = (
    "set NCCL_DEBUG=INFO and look which transport NCCL takes: NET/IB or NVLS are fast, NET/Socket "
    "and SHM are slow"
)


@dataclass(frozen=True)
class Finding:
    """One measurement, what it should be, and what to do if it is too low."""

    what: str
    where: str
    value: float
    unit: str
    expected: float | None  # rate of the data sheet; None without one
    least: float | None  # a lower value is slow
    remedy: str

    @property
    def slow(self) -> bool:
        return self.least is not None and self.value < self.least


def examine(folder: Path) -> dict[str, Any]:
    """Measure everything; the result has JSON types and is the same in every process.

    Keys: `versions`, `devices`, `findings` (each with the fields of `Finding`, `process` and
    `slow`), and `ok`. `folder` is where a run would write; the folder's test files are deleted.

    Requires: all processes of the job call this, and each can write to `folder`.
    """
    measured = _findings_of_process(folder)
    findings = [asdict(finding) | {"slow": finding.slow} for finding in measured]
    answer = {"host": platform.node(), "versions": versions(), "findings": findings}
    gathered = gather_objects(answer, "doctor")
    findings = [
        {"process": process, **finding}
        for process, answer in enumerate(gathered)
        for finding in answer["findings"]
    ]
    findings += _findings_of_all(folder, gathered)
    return {
        "versions": gathered[0]["versions"],
        "devices": [f"{device.id} {device.device_kind}" for device in jax.devices()],
        "findings": findings,
        "ok": not any(finding["slow"] for finding in findings),
    }


def versions() -> dict[str, str]:
    """Versions of Python, of the packages that matter, and of the GPU driver if there is one."""
    installed = {item.name.lower(): item.version for item in importlib.metadata.distributions()}
    packages = {"python": platform.python_version()}
    packages |= {name: installed[name] for name in PACKAGES if name in installed}
    if shutil.which("nvidia-smi"):
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=DRIVER_S, check=False
            )
            packages["driver"] = (done.stdout.splitlines() or ["unknown"])[0]
        except subprocess.TimeoutExpired:
            packages["driver"] = f"(nvidia-smi gives no answer in {DRIVER_S:g} s)"
    return packages


# ------------------------------------------------------------------------- measurements


def _findings_of_process(folder: Path) -> Iterator[Finding]:
    """Measure this process's host and devices, one after the other."""
    yield from _host(folder)
    devices = jax.local_devices()
    for device in devices:
        yield from _device(device)
    for source, target in zip(devices, devices[1:], strict=False):
        expected = _sheet(source, "link_bandwidth")
        yield Finding(
            "copy between devices",
            f"devices {source.id} to {target.id}",
            measuring.copy_bandwidth(source, target) / 1e9,
            "GB/s",
            expected,
            _share(LINK_SHARE, expected),
            "look at `nvidia-smi topo -m`: the devices should be linked by NVLink (NV18)",
        )


def _host(folder: Path) -> Iterator[Finding]:
    written, read = disk_rates(folder)
    slow_disk = f"checkpoints in {folder} take long; set --config.run_dir to a faster disk"
    place = str(folder)
    yield Finding("disk write", place, written / 1e9, "GB/s", None, 0.1, slow_disk)
    yield Finding("disk read", place, read / 1e9, "GB/s", None, 0.1, slow_disk)
    free, least = shutil.disk_usage(folder).free / 1e9, LEAST_FREE_BYTES / 1e9
    yield Finding("disk free", place, free, "GB", None, least, "delete old runs")
    yield Finding(
        "file locks",
        place,
        float(locks_work(folder)),
        "(1 = yes)",
        1.0,
        1.0,
        "mount the file system with locks; without, two runs may take one run folder",
    )
    memory, least = host_memory() / 1e9, LEAST_MEMORY_BYTES / 1e9
    remedy = "give the job more memory, for example by Slurm's --mem"
    yield Finding("host memory", platform.node(), memory, "GB", None, least, remedy)


# What is measured on each device: name, function, unit and scale, the data sheet's key, the share
# of it that a healthy device reaches, and the remedy.
_DEVICE: tuple[tuple[str, Callable[[Device], float], str, float, str, float, str], ...] = (
    (
        "matmul",
        measuring.matmul_flops,
        "TFLOP/s",
        1e12,
        "flops",
        0.6,
        "look at `nvidia-smi -q -d PERFORMANCE,CLOCK` for a limit of power or heat",
    ),
    (
        "device memory",
        measuring.memory_bandwidth,
        "GB/s",
        1e9,
        "memory_bandwidth",
        0.7,
        "look with `nvidia-smi` for another program on the device",
    ),
)
# Copies: name, function and share. To and from host memory that is not pinned, a healthy machine of
# two H100 reached 3 to 13 % of a PCIe link.
_COPIES = (
    ("host to device", measuring.to_device_bandwidth, 0.05),
    ("device to host", measuring.to_host_bandwidth, 0.01),
)


def _device(device: Device) -> Iterator[Finding]:
    for what, rate, unit, scale, key, share, remedy in _DEVICE:
        expected = _sheet(device, key, scale)
        value = rate(device) / scale
        where = f"device {device.id}"
        yield Finding(what, where, value, unit, expected, _share(share, expected), remedy)
    yield from _copies(device)


def _copies(device: Device) -> Iterator[Finding]:
    """Copies between the host's memory and a device."""
    remedy = "look at `nvidia-smi topo -m`: start the process on the device's own CPU socket"
    expected = _sheet(device, "host_bandwidth")
    for what, rate, share in _COPIES:
        value, where = rate(device) / 1e9, f"device {device.id}"
        yield Finding(what, where, value, "GB/s", expected, _share(share, expected), remedy)


def _findings_of_all(folder: Path, answers: list[Any]) -> list[dict[str, Any]]:
    """Measure with all processes together: an all-reduce over every device, the shared folder."""
    rows: list[Finding] = []
    devices = jax.devices()
    if len(devices) > 1:
        hosts = {answer["host"] for answer in answers}
        link = "network_bandwidth" if len(hosts) > 1 else "link_bandwidth"
        expected = _sheet(devices[0], link)
        value = measuring.all_reduce_bandwidth([devices]) / 1e9
        everywhere = f"{len(devices)} devices, {len(answers)} processes"
        least = _share(LINK_SHARE, expected)
        rows.append(Finding("all-reduce", everywhere, value, "GB/s", expected, least, _TRANSPORT))
    if len(answers) > 1:
        seen, locked = _processes_that_share(folder)
        place, count = str(folder), float(len(answers))
        remedy = "give a folder that all hosts have mounted"
        rows.append(Finding("shared folder", place, seen, "processes", count, count, remedy))
        remedy = "mount the file system with locks that reach all hosts"
        rows.append(Finding("locks are shared", place, locked, "processes", count, count, remedy))
    return [{"process": 0, **asdict(finding), "slow": finding.slow} for finding in rows]


def _processes_that_share(folder: Path) -> tuple[float, float]:
    """Count the processes that see all files in `folder`, and those that see process 0's lock.

    The same in each process. The holder of the lock counts as one that sees it.
    """
    token, process = value_of_main(uuid.uuid4().hex, "doctor token"), jax.process_index()
    paths = [folder / f".doctor-{token}-{index}" for index in range(jax.process_count())]
    try:
        with paths[process].open("w") as token_file:
            if process == 0:
                _lock(token_file)
            barrier("doctor wrote")
            seen = all(path.exists() for path in paths)
            locked = process == 0
            if paths[0].exists() and process != 0:
                with paths[0].open("r+") as first:
                    locked = not _lock(first)
            answers = gather_objects([seen, locked], "doctor saw")
    finally:
        paths[process].unlink(missing_ok=True)
    return float(sum(seen for seen, _ in answers)), float(sum(locked for _, locked in answers))


def disk_rates(folder: Path) -> tuple[float, float]:
    """Bytes a second that a file in `folder` is written and read with, past the host's cache."""
    block = os.urandom(2**20)
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        start = time.perf_counter()
        for _ in range(FILE_BYTES // len(block)):
            file.write(block)
        os.fsync(file.fileno())
        written = time.perf_counter() - start
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(0)
        start = time.perf_counter()
        while file.read(len(block)):
            pass
        read = time.perf_counter() - start
    return FILE_BYTES / written, FILE_BYTES / read


def locks_work(folder: Path) -> bool:
    """True if a second lock of a locked file in `folder` is refused."""
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".doctor-") as file:
        with open(file.name, "r+") as second:
            return _lock(file) and not _lock(second)


def _lock(file: IO[Any]) -> bool:
    """Lock a file if no other has it locked; False also where the file system has no locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _sheet(device: Device, key: str, scale: float = 1e9) -> float | None:
    """A rate of the device's data sheet, in units of `scale`; None where it has none."""
    hardware = hardware_of(device.device_kind)
    value = None if hardware is None else getattr(hardware, key)
    return None if value is None else value / scale


def _share(share: float, expected: float | None) -> float | None:
    return None if expected is None else share * expected


# ------------------------------------------------------------------------- the table


def table(report: dict[str, Any]) -> str:
    """The report as lines of text, with the remedy below each row that is slow."""
    lines = ["  ".join(f"{name} {version}" for name, version in report["versions"].items())]
    lines += [f"{len(report['devices'])} devices: {', '.join(report['devices'])}", ""]
    lines.append(
        f"{'process':>7}  {'what':<22}{'where':<28}{'measured':>10}  {'expected':>9}  unit"
    )
    for finding in report["findings"]:
        expected = "" if finding["expected"] is None else f"{finding['expected']:.1f}"
        lines.append(
            f"{finding['process']:>7}  {finding['what']:<22}{finding['where']:<28}"
            f"{finding['value']:>10.2f}  {expected:>9}  {finding['unit']}"
        )
        if finding["slow"]:
            lines.append(f"         SLOW, at least {finding['least']:.1f}: {finding['remedy']}")
    slow = sum(finding["slow"] for finding in report["findings"])
    lines += ["", f"{slow} slow" if slow else "nothing is slow"]
    return "\n".join(lines)
