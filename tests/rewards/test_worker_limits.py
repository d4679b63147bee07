"""What a reward worker may take, print and see, and that nothing it started outlives it."""

import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from jaxrl_llm import config as c
from jaxrl_llm.rewards.manager import RewardManager
from jaxrl_llm.rewards.workers.pool import WorkerLimits
from jaxrl_llm.types import Completion, Prompt

REWARDS = """
import os, subprocess, sys, time

def memory(solution_str):
    return float(len(bytearray(10**9)) > 0)

def children_memory(solution_str):
    for _ in range(4):
        if os.fork() == 0:
            kept = bytearray(b"x") * (60 * 10**6)
            time.sleep(60)
    time.sleep(60)

def write(solution_str, *, file):
    with open(file, "wb") as out:
        out.write(bytes(2 * 10**6))
    return 1.0

def processes(solution_str):
    for _ in range(12):
        subprocess.Popen(["sleep", "60"])
    time.sleep(60)

def shout(solution_str):
    os.write(1, b"first\\n")
    for _ in range(100):
        os.write(1, b"y" * 10**6)
    print("last", file=sys.stderr)
    return 1.0

def long_error(solution_str):
    raise ValueError("x" * 50_000_000)

def control_error(solution_str):
    raise ValueError("a\\x1b[2Jb")

class Nasty(Exception):
    def __str__(self):
        raise RuntimeError

def nasty_error(solution_str):
    raise Nasty

def environment(solution_str):
    return {"score": 1.0, "names": sorted(os.environ)}

def needs_key(solution_str):
    return float(os.environ["OPENAI_API_KEY"])

def real_time_signal(solution_str):
    import signal
    os.kill(os.getpid(), signal.SIGRTMIN + 2)

def double_fork(solution_str, *, file):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            with open(file + ".part", "w") as out:
                out.write(str(os.getpid()))
            os.rename(file + ".part", file)
            time.sleep(60)
        os._exit(0)
    while not os.path.exists(file):
        time.sleep(0.01)
    if solution_str == "hang":
        time.sleep(60)
    if solution_str == "lock":
        import re
        re.match("(a+)+b", "a" * 60)
    if solution_str == "exit":
        os._exit(4)
    if solution_str == "stop":
        import signal
        os.kill(os.getppid(), signal.SIGSTOP)
        time.sleep(60)
    return 1.0
"""


@pytest.fixture
def function(tmp_path):
    file = tmp_path / "limits.py"
    file.write_text(REWARDS)
    return lambda name, **settings: c.Custom(path=f"{file}:{name}", settings=settings)


def score(function, text="a", timeout=20.0, **limits):
    prompt = Prompt(token_ids=(1,), text="p", ground_truth="1")
    answer = Completion(tokens=(1,), text=text, logprobs=(0.0,), finished=True)
    limits = WorkerLimits(**limits)
    with RewardManager([function], timeout=timeout, num_workers=1, limits=limits) as manager:
        return manager.score([prompt], [answer], step=1)


def test_memory_of_a_worker(function):
    (failure,) = score(function("memory"), memory_gb=0.4).failures
    assert failure.kind == "exception" and "MemoryError" in failure.message


def test_memory_of_what_a_worker_started(function):
    (failure,) = score(function("children_memory"), memory_gb=0.15).failures
    assert "passed its limit of memory or processes" in failure.message


def test_size_of_a_file(function, tmp_path):
    file = tmp_path / "out"
    (failure,) = score(function("write", file=str(file)), file_gb=0.001).failures
    assert "File too large" in failure.message
    assert file.stat().st_size <= 10**6


def test_number_of_processes(function):
    (failure,) = score(function("processes"), processes=8).failures
    assert "passed its limit of memory or processes" in failure.message


def test_output_is_capped(function, capfd):
    assert score(function("shout"), output_bytes=1000).scores.tolist() == [1.0]
    out, err = capfd.readouterr()
    assert out.startswith("first\n") and "the rest is dropped" in out
    assert len(out) + len(err) < 1200


def test_texts_of_exceptions_are_capped_and_printable(function):
    (failure,) = score(function("long_error")).failures
    assert len(failure.message) < 2300 and "(50000000 characters)" in failure.message
    (failure,) = score(function("control_error")).failures
    assert "a\\x1b[2Jb" in failure.message
    (failure,) = score(function("nasty_error")).failures
    assert "Nasty: (without text)" in failure.message


SECRETS = (
    "HF_TOKEN", "OPENAI_API_KEY", "AWS_SESSION", "WANDB_API_KEY", "MY_SECRET", "db_password",
    "GITHUB_TOKEN", "GOOGLE_APPLICATION_CREDENTIALS", "APIKEY",
)  # fmt: skip


def test_secrets_are_withheld_unless_they_are_named(function, monkeypatch):
    for name in (*SECRETS, "KEYBOARD_LAYOUT", "MONKEYS"):
        monkeypatch.setenv(name, "1")
    seen = score(function("environment")).extras[0]["environment/names"]
    assert not set(SECRETS) & set(seen)
    assert {"PATH", "KEYBOARD_LAYOUT", "MONKEYS"} <= set(seen)
    seen = score(function("environment"), environment=("OPENAI_API_KEY",))
    assert set(SECRETS) & set(seen.extras[0]["environment/names"]) == {"OPENAI_API_KEY"}


def test_an_error_about_a_withheld_variable_says_how_to_pass_it(function, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "1")
    (failure,) = score(function("needs_key")).failures
    assert """reward.environment='["OPENAI_API_KEY"]'""" in failure.message
    assert not score(function("needs_key"), environment=("OPENAI_API_KEY",)).failures


def test_a_signal_without_a_name(function):
    (failure,) = score(function("real_time_signal")).failures
    assert "(signal 36)" in failure.message


@pytest.mark.parametrize("text", ["hang", "lock", "exit", "stop", "return"])
def test_a_double_forked_child_ends_with_the_worker(function, tmp_path, text):
    file = tmp_path / "pid"
    score(function("double_fork", file=str(file)), text, timeout=0.5 if text != "exit" else 9)
    assert not is_running(int(file.read_text()))


TRAINER = """
import sys
from types import SimpleNamespace
from jaxrl_llm.rewards.manager import RewardManager
reference = SimpleNamespace(path=sys.argv[1], settings={"file": sys.argv[2]})
prompt = SimpleNamespace(text="p", messages=None, columns={}, data_source="d", ground_truth=None)
completion = SimpleNamespace(text="lock", tokens=(1,))
RewardManager([reference], timeout=60.0).score([prompt], [completion], 1)
"""


def test_a_double_forked_child_ends_with_a_killed_trainer(function, tmp_path):
    file = tmp_path / "pid"
    path = function("double_fork").path
    trainer = subprocess.Popen([sys.executable, "-c", TRAINER, path, str(file)])
    try:
        wait_for(file.exists)
    finally:
        trainer.kill()
        trainer.wait()
    wait_for(lambda: not is_running(int(file.read_text())))


def is_running(pid):
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def wait_for(condition, seconds=20.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)
