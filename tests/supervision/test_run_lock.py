"""The lock of a run folder: hosts, containers and clocks do not let two runs write one folder."""

import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from jaxrl_llm.config import Config, ConfigError
from jaxrl_llm.observability.timing import Timer
from jaxrl_llm.supervision import run_lock
from jaxrl_llm.supervision.run_folder import open_run_folder
from jaxrl_llm.supervision.run_lock import LOCK, LOST

HOLD = """
import os, sys, time
from jaxrl_llm.config import Config
from jaxrl_llm.supervision import run_lock
from jaxrl_llm.supervision.run_folder import open_run_folder
run_lock.HEARTBEAT_S = 0.05
with open_run_folder(Config(run_dir=sys.argv[1]), os._exit):
    print("open", flush=True)
    time.sleep(60)
"""
UNSHARED = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]


@contextmanager
def a_holder(folder: Path, *launcher: str) -> Iterator["subprocess.Popen[str]"]:
    command = [*launcher, sys.executable, "-c", HOLD, str(folder)]
    pipe, env = subprocess.PIPE, {**os.environ, "JAX_PLATFORMS": "cpu"}
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=env) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "open\n", process.stderr
        try:
            yield process
        finally:
            process.kill()


def refusal(folder: Path) -> str:
    with pytest.raises(ConfigError) as caught, open_run_folder(Config(run_dir=str(folder))):
        pass
    return str(caught.value)


def written(folder: Path) -> dict:
    return json.loads((folder / LOCK).read_text())


def lock_of(folder: Path, **values) -> None:
    folder.mkdir()
    (folder / LOCK).write_text(json.dumps({"host": "here", "pid": 7, "started": "then"} | values))


@pytest.fixture
def short_watch(monkeypatch) -> None:
    monkeypatch.setattr(run_lock, "WATCH_S", 1.0)
    monkeypatch.setattr(run_lock, "POLL_S", 0.05)


@pytest.fixture
def no_flock(monkeypatch) -> None:
    """As on a network file system whose locks do not reach other hosts."""

    def unsupported(*_):
        raise OSError("no locks available")

    monkeypatch.setattr(fcntl, "flock", unsupported)


def test_a_second_process_is_refused_until_the_first_is_gone(tmp_path):
    folder = tmp_path / "run"
    with a_holder(folder) as first:
        before = written(folder)
        message = refusal(folder)
        assert f"pid {first.pid} on host {socket.gethostname()}" in message
        assert f"--config.run_dir={folder}-2" in message
        assert written(folder) == before
        first.send_signal(signal.SIGKILL)
        first.wait(30)
    assert written(folder) == before  # kill -9 leaves it behind
    began = time.monotonic()
    with open_run_folder(Config(run_dir=str(folder))):
        assert written(folder)["pid"] == os.getpid()
    assert time.monotonic() - began < 10  # nothing is watched: one kernel, one mount
    assert not (folder / LOCK).exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_a_run_in_another_container_of_this_host_is_live(tmp_path):
    """Equal host names, other process ids: the holder is process 1 or 2 of its own space."""
    with a_holder(tmp_path / "run", *UNSHARED):
        assert written(tmp_path / "run")["pid"] < 10
        assert "another process uses the run folder" in refusal(tmp_path / "run")


@pytest.mark.parametrize("offset", [-3600, 3600])
def test_a_live_run_elsewhere_is_refused_whatever_its_clock_says(
    tmp_path, short_watch, no_flock, offset
):
    folder = tmp_path / "run"
    with a_holder(folder):
        then = time.time() + offset
        os.utime(folder / LOCK, (then, then))
        assert "another process uses the run folder" in refusal(folder)


@pytest.mark.parametrize("offset", [-3600, 0, 3600])
def test_a_lock_that_nobody_renews_is_taken_over(tmp_path, short_watch, capsys, offset):
    folder = tmp_path / "run"
    lock_of(folder, kernel="another", pid=os.getpid())
    then = time.time() + offset
    os.utime(folder / LOCK, (then, then))
    with open_run_folder(Config(run_dir=str(folder))):
        assert written(folder)["host"] == socket.gethostname()
    said = capsys.readouterr().out
    assert "waits 1 s to see whether that run goes on" in said and "is left over from pid" in said


def test_a_run_whose_folder_another_has_taken_ends_with_code_2(tmp_path):
    folder = tmp_path / "run"
    with a_holder(folder) as first:
        (folder / LOCK).write_text(json.dumps({"host": "elsewhere", "pid": 9, "started": "now"}))
        assert first.wait(30) == LOST == 2
        assert first.stderr is not None and "pid 9 on host elsewhere" in first.stderr.read()
    assert written(folder)["pid"] == 9  # the other's lock stays


def test_a_run_whose_lock_is_gone_ends_with_code_2(tmp_path):
    """Where it was suspended, another run may have taken the folder, and ended before it woke."""
    folder = tmp_path / "run"
    with a_holder(folder) as first:
        (folder / LOCK).unlink()
        assert first.wait(30) == LOST
        assert first.stderr is not None and "run.lock is gone" in first.stderr.read()


def test_a_program_of_the_library_raises_at_its_next_step(tmp_path, monkeypatch):
    monkeypatch.setattr(run_lock, "HEARTBEAT_S", 0.01)
    folder = tmp_path / "run"
    with open_run_folder(Config(run_dir=str(folder))) as opened:
        opened.lock.begin(1, Timer())
        (folder / LOCK).write_text(json.dumps({"pid": 9}))
        deadline = time.monotonic() + 30
        while not opened.lock.lost:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        with pytest.raises(ConfigError, match="another run has taken the run folder"):
            opened.lock.begin(2, Timer())
    assert (folder / LOCK).exists()


def test_a_lock_is_released_when_the_run_fails(tmp_path):
    folder = tmp_path / "run"
    with pytest.raises(RuntimeError), open_run_folder(Config(run_dir=str(folder))):
        raise RuntimeError
    assert not (folder / LOCK).exists()


def test_a_lock_cut_off_while_it_was_written_is_taken_over(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / LOCK).write_text('{"host": "x", ')
    with open_run_folder(Config(run_dir=str(folder))):
        assert written(folder)["pid"] == os.getpid()
    assert not (folder / LOCK).exists()
