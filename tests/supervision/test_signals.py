"""Signals that end a run, in real processes: saved at the boundary, never in the way for long."""

import os
import pty
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from jaxrl_llm.supervision.signals import stop_requests

# A run of steps that "save" after each; `hung` is a reward function that never answers.
PROGRAM = """
import hashlib, os, sys, threading, time
from pathlib import Path
from jaxrl_llm.launch.main import run
from jaxrl_llm.supervision.signals import host_work, stop_requests

folder, kind = Path(sys.argv[1]), sys.argv[2]

def main(argv):
    compiles = kind.startswith("compiles")
    end = os._exit if kind == "compiles in XLA" else None
    with stop_requests(0.5, loses_nothing=lambda: compiles, end_process=end) as stop_requested:
        for step in range(1, 10_000):
            (folder / "started").write_text(str(step))
            if kind == "compiles in XLA":  # Python's handlers of signals do not run meanwhile
                hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)
            if kind == "hung":
                with host_work():
                    threading.Event().wait()
            time.sleep(1.0 if kind == "slow device" else 0.05)
            print("step", step, flush=True)
            if stop_requested():
                (folder / "saved").write_text(str(step))
                return 130

run(main)
"""


def started(
    folder: Path, kind: str = "quick", prefix: Sequence[str] = (), **settings
) -> subprocess.Popen:
    (folder / "program.py").write_text(PROGRAM)
    process = subprocess.Popen(
        [*prefix, sys.executable, str(folder / "program.py"), str(folder), kind],
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        **{"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True} | settings,
    )
    deadline = time.monotonic() + 60
    while not (folder / "started").exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    return process


@pytest.fixture(autouse=True)
def without_nohup():
    """A process inherits what is ignored, also where `nohup` runs the tests."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1"])
def test_a_signal_saves_and_ends(tmp_path, name):
    process = started(tmp_path)
    process.send_signal(getattr(signal, name))
    assert process.wait(10) == 130
    assert (tmp_path / "saved").exists()


def test_a_device_step_is_waited_for_longer_than_host_work(tmp_path):
    process = started(tmp_path, "slow device")  # 1 s; the limit of host work is 0.5 s
    process.terminate()
    assert process.wait(10) == 130
    assert (tmp_path / "saved").read_text() == (tmp_path / "started").read_text()


def test_a_hung_reward_function_does_not_hold_up_the_end(tmp_path):
    process = started(tmp_path, "hung")
    process.terminate()
    _, error = process.communicate(timeout=10)
    assert process.returncode == 130
    assert "0.5 s after SIGTERM a reward function or a tool was still running" in error
    assert "Traceback" not in error and not (tmp_path / "saved").exists()


@pytest.mark.parametrize("kind", ["compiles", "compiles in XLA"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_programs_compile_ends_at_once(tmp_path, kind, number):
    """Up to 442 s were seen. No step was done that is not saved."""
    process = started(tmp_path, kind)
    process.send_signal(number)
    _, error = process.communicate(timeout=10)
    assert process.returncode == 130
    assert f"ended by {number.name} before a step was done that is not saved" in error
    assert not (tmp_path / "saved").exists()


def test_a_second_signal_ends_at_once(tmp_path):
    process = started(tmp_path, "slow device")
    process.send_signal(signal.SIGUSR1)
    time.sleep(0.2)
    process.terminate()
    _, error = process.communicate(timeout=10)
    assert process.returncode == 130 and "second signal (SIGTERM)" in error
    assert not (tmp_path / "saved").exists()


def test_a_closed_terminal_saves_and_ends(tmp_path):
    """As when an ssh connection breaks: SIGHUP, and every write to the terminal fails."""
    ours, theirs = pty.openpty()
    process = started(tmp_path, stdout=theirs, stderr=theirs)
    os.close(theirs)
    os.close(ours)
    process.send_signal(signal.SIGHUP)
    assert process.wait(10) == 130
    assert (tmp_path / "saved").exists()


def test_nohup_is_respected(tmp_path):
    process = started(tmp_path, prefix=["nohup"])
    process.send_signal(signal.SIGHUP)
    time.sleep(0.5)
    assert process.poll() is None and not (tmp_path / "saved").exists()
    process.terminate()
    assert process.wait(10) == 130


def test_another_thread_handles_no_signals():
    found = []

    def inside() -> None:
        before = signal.getsignal(signal.SIGTERM)
        with stop_requests() as asked:
            found.append((asked(), signal.getsignal(signal.SIGTERM) is before))

    thread = threading.Thread(target=inside)
    thread.start()
    thread.join()
    assert found == [(False, True)]
