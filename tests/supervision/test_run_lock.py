"""The lock of a run folder: no two runs write one folder."""

import fcntl
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from jaxrl_llm.config import Config, ConfigError
from jaxrl_llm.supervision.run_folder import open_run_folder
from jaxrl_llm.supervision.run_lock import LOCK

HOLD = """
import sys, time
from jaxrl_llm.config import Config
from jaxrl_llm.supervision.run_folder import open_run_folder
with open_run_folder(Config(run_dir=sys.argv[1])):
    print("open", flush=True)
    time.sleep(60)
"""
UNSHARED = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]


@contextmanager
def a_holder(folder: Path, *launcher: str) -> Iterator["subprocess.Popen[str]"]:
    command = [*launcher, sys.executable, "-c", HOLD, str(folder)]
    env = {**os.environ, "JAX_PLATFORMS": "cpu"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "open\n"
        try:
            yield process
        finally:
            process.kill()


def refusal(folder: Path) -> str:
    with pytest.raises(ConfigError) as caught, open_run_folder(Config(run_dir=str(folder))):
        pass
    return str(caught.value)


def written(folder: Path) -> str:
    return (folder / LOCK).read_text()


def test_a_second_process_is_refused_until_the_first_is_killed(tmp_path):
    folder = tmp_path / "run"
    with a_holder(folder) as first:
        before = written(folder)
        message = refusal(folder)
        assert f"pid {first.pid} on host {socket.gethostname()}" in message
        assert f"--config.run_dir={folder}-2" in message
        assert written(folder) == before
        first.send_signal(signal.SIGKILL)
        first.wait(30)
    with pytest.raises(RuntimeError), open_run_folder(Config(run_dir=str(folder))):
        assert written(folder).startswith(f"pid {os.getpid()} ")
        raise RuntimeError
    assert not (folder / LOCK).exists()


@pytest.mark.nightly
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_a_run_in_another_container_of_this_host_is_live(tmp_path):
    """Equal host names, other process ids: the holder is process 1 or 2 of its own space."""
    with a_holder(tmp_path / "run", *UNSHARED):
        assert "another process uses the run folder" in refusal(tmp_path / "run")


def test_a_file_system_without_locks_gives_none(tmp_path, monkeypatch):
    def unsupported(*_):
        raise OSError("no locks available")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    with open_run_folder(Config(run_dir=str(tmp_path / "run"))):
        assert written(tmp_path / "run")
