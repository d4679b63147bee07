"""A full disk: refused at the start, waited for before a save, and nothing is lost."""

import errno
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from in_process import run_here
from tiny_run import TinyRun

from jaxrl_llm.checkpoint import digests
from jaxrl_llm.checkpoint.manager import CheckpointManager
from jaxrl_llm.checkpoint.save_failures import SaveFailed, save_failed
from jaxrl_llm.config import ConfigError
from jaxrl_llm.launch import exits
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


TENSORSTORE = (
    'RESOURCE_EXHAUSTED: Error writing "w/0" in OCDBT database at local file "/r/step/": Failed '
    "writing: \"/r/step/d/42\": Failed to write 9 bytes: Disk quota exceeded [os_error_code='122']"
)


@pytest.mark.parametrize(
    ("error", "words", "full"),
    [
        (ValueError(TENSORSTORE), "Disk quota exceeded (EDQUOT) at /r/step/d/42", True),
        (OSError(errno.ENOSPC, "no room", "/r/a"), "left on device (ENOSPC) at /r/a", True),
        (OSError(errno.EIO, "bad disk"), "Input/output error (EIO) at /run/checkpoints", False),
    ],
)
def test_an_error_of_a_disk_is_two_lines(error, words, full, capsys, monkeypatch):
    outer = RuntimeError("a save failed")
    outer.__cause__ = error
    failed = save_failed(outer, Path("/run/checkpoints"))
    assert failed is not None and failed.is_full == full and words in str(failed)
    monkeypatch.setattr(exits, "leave", sys.exit)
    with pytest.raises(SystemExit) as caught:  # code 1: a launcher starts it again
        exits.exit_with(failed, [])
    assert caught.value.code == 1 and capsys.readouterr().err.count("\n") == 2


def test_another_error_of_a_save_is_none_of_a_disk():
    assert save_failed(ValueError("of the wrong shape"), Path("/run")) is None


def test_a_save_into_a_full_quota_is_made_again(monkeypatch):
    monkeypatch.setattr(disk_space, "POLL_S", 0.0)
    tries, said = iter([errno.EDQUOT, errno.EDQUOT, 0]), list[str]()

    def save() -> None:
        if number := next(tries):
            raise SaveFailed(number, "no room")

    disk_space.until_there_is_room(save, said.append)
    assert said == ["no room; the run waits 10 minutes for room", "there is room; the run goes on"]
    monkeypatch.setattr(disk_space, "WAIT_S", 0.0)
    tries = iter([errno.ENOSPC] * 9)
    with pytest.raises(ValueError, match="no room; waited 0 minutes"):
        disk_space.until_there_is_room(save, said.append)
    tries = iter([errno.EIO])
    with pytest.raises(SaveFailed):
        disk_space.until_there_is_room(save, said.append)


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_disk_that_fills_during_a_save(small_disk, asynchronous, capfd):
    """The same save is made again, once there is room. Before, it was 400 lines of traceback."""
    settings = {"keep_latest": 2, "keep_best": 0, "best_metric": ""}
    manager = CheckpointManager(small_disk, asynchronous=asynchronous, **settings)
    arrays = {"actor": {"w": jax.random.normal(jax.random.key(0), (500_000,))}}
    fill(small_disk / FILLER, 10**6)
    said: list[str] = []

    def say(text: str) -> None:
        said.append(text)
        (small_disk / FILLER).unlink(missing_ok=True)

    def save() -> None:
        manager.save(1, arrays, {}, {})
        manager.wait()

    disk_space.until_there_is_room(save, say)
    manager.close()
    assert "No space left on device (ENOSPC) at " in said[0] and len(said) == 2
    assert "Traceback" not in capfd.readouterr().err
    assert manager.latest() == 1 and not list(digests.damaged_files(manager.path(1)) or [])


def test_a_folder_that_takes_no_file_is_refused_at_the_start(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="the run cannot write to .*checkpoints: Not a directory"):
        disk_space.check_writable(tmp_path / "file" / "checkpoints")


def fill(file: Path, left: int) -> None:
    """Write a file that leaves `left` bytes of its disk free."""
    found = os.statvfs(file.parent)
    file.write_bytes(bytes(found.f_bavail * found.f_frsize - left))


@pytest.mark.nightly
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
