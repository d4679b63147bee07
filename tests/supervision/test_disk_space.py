"""A full disk: refused at the start, waited for before a save, and nothing is lost."""

import os
import signal
import subprocess
from functools import partial
from pathlib import Path

import jax.numpy as jnp
import pytest
from in_process import run_here
from tiny_run import TinyRun

from jaxrl_llm.config import ConfigError
from jaxrl_llm.launch.main import run as run_command
from jaxrl_llm.supervision import disk_space
from jaxrl_llm.supervision.signals import EndedAtOnce, stop_requests

FILLER = "filler"


def test_bytes_of_arrays():
    tree = {"a": jnp.zeros((3, 4), jnp.float32), "b": [jnp.zeros(5, jnp.bfloat16)]}
    assert disk_space.bytes_of(tree) == 48 + 10


def test_a_run_that_cannot_save_does_not_begin(tmp_path):
    with pytest.raises(ConfigError, match=r"takes up to 1e\+09 GB, .* --config.run_dir on another"):
        disk_space.check_space(tmp_path, 10**18)
    disk_space.check_space(tmp_path, 1)


def test_a_save_waits_for_room(tmp_path, monkeypatch):
    monkeypatch.setattr(disk_space, "POLL_S", 0.0)
    found = iter([1, 1, 1, 8])
    monkeypatch.setattr(disk_space, "_free", lambda folder: next(found) * 10**9)
    said: list[str] = []
    disk_space.wait_for_space(tmp_path, 2 * 10**9, said.append)
    assert said == [
        f"the disk of {tmp_path} has 1 GB free, and a checkpoint takes up to 2 GB; the run waits "
        "10 minutes for room",
        "8 GB are free; the run goes on",
    ]


def test_a_save_that_gets_no_room_names_it(tmp_path, monkeypatch):
    monkeypatch.setattr(disk_space, "POLL_S", 0.0)
    monkeypatch.setattr(disk_space, "WAIT_S", 0.01)
    monkeypatch.setattr(disk_space, "_free", lambda folder: 1)
    with pytest.raises(ValueError, match=r"Make room; the same command then goes on"):
        disk_space.wait_for_space(tmp_path, 2, print)


def test_a_request_to_end_does_not_wait_ten_minutes_for_room(tmp_path, monkeypatch):
    monkeypatch.setattr(disk_space, "POLL_S", 0.01)
    monkeypatch.setattr(disk_space, "WAIT_S", 20.0)
    monkeypatch.setattr(disk_space, "_free", lambda folder: 1)
    with stop_requests(wait_s=0.05) as asked:
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(EndedAtOnce, match=r"after SIGTERM .* waited for room on the disk"):
            disk_space.wait_for_space(tmp_path, 2, print)
        assert asked()


@pytest.fixture
def small_disk(tmp_path: Path):
    """A file system of 64 MB, where the system lets us mount one."""
    folder = tmp_path / "small"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(folder)]
    if os.getuid() != 0 or subprocess.run(command, capture_output=True).returncode != 0:
        pytest.skip("no file system can be mounted here")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(file: Path, left: int) -> None:
    """Write a file that leaves `left` bytes of its disk free."""
    found = os.statvfs(file.parent)
    file.write_bytes(bytes(found.f_bavail * found.f_frsize - left))


@pytest.mark.ci
def test_a_run_on_a_full_disk_is_refused_and_one_that_fills_it_waits(small_disk, tmp_path):
    small = "--config.algorithm=grpo", "--config.warmup=null", "--config.data.val_tasks=[]"
    run = TinyRun(tmp_path / "run", *small, "--config.reward.timeout_s=60")
    flags = (f"--config.run_dir={small_disk}/run", "--config.total_steps=6")
    filler = small_disk / FILLER
    fill(filler, 10**5)
    output = run.finish_here(*flags, code=2)
    assert "error: a checkpoint of this run takes up to" in output
    assert not (small_disk / "run" / "checkpoints" / "frozen").exists()
    filler.unlink()
    run.pause_at(5)
    last_file = small_disk / "run" / "checkpoints" / "global_step_4" / "digests.json"
    with run.process(*flags) as process:
        run.wait_for(lambda: run.paused() and last_file.exists(), process)
        fill(filler, 10**5)
        run.unpause()
        log = run.folder / "log.txt"
        run.wait_for(lambda: "minutes for room" in log.read_text(), process)
        filler.unlink()
        assert process.wait(120) == 0, log.read_text()
    assert "the run goes on" in log.read_text()
    words = [str(small_disk / "run")]
    assert run_here(partial(run_command, "verify", words), words).returncode == 0
