"""What a reward worker may take, what crosses its pipe, and that what it started ends with it."""

import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from jaxrl_llm import config as c
from jaxrl_llm.rewards.manager import RewardManager
from jaxrl_llm.rewards.workers.process import WorkerLimits
from jaxrl_llm.types import Completion, Prompt

REWARDS = """
import os, subprocess, time

def memory(solution_str):
    return float(len(bytearray(10**9)) > 0)

def write(solution_str, *, file):
    with open(file, "wb") as out:
        out.write(bytes(2 * 10**6))
    return 1.0

def long_error(solution_str):
    raise ValueError("x" * 50_000_000)

def control_error(solution_str):
    raise ValueError("a\\x1b[2Jb")

def real_time_signal(solution_str):
    import signal
    os.kill(os.getpid(), signal.SIGRTMIN + 2)

def start_another(solution_str, *, file):
    process = subprocess.Popen(["sleep", "60"])
    with open(file, "w") as out:
        out.write(str(process.pid))
    if solution_str == "hang":
        time.sleep(60)
    return 1.0

def show(solution_str, extra_info):
    return {"score": 1.0, "seen": repr(extra_info)}

def ignores(solution_str):
    return 1.0

def odd(solution_str):
    return {"score": 1.0, "deep": deep(2000), "huge": 10**5000, "text": "\\ud800"}

def deep(levels):
    value = []
    for _ in range(levels):
        value = [value]
    return value
"""


@pytest.fixture
def score(tmp_path):
    """Grade one text with a function of REWARDS."""
    file = tmp_path / "limits.py"
    file.write_text(REWARDS)

    def run(name, text="a", extra_info=None, timeout=20.0, limits=None, **settings):
        prompt = Prompt(token_ids=(1,), text="p", columns={"extra_info": extra_info})
        answer = Completion(tokens=(1,), text=text, logprobs=(0.0,), finished=True)
        function = c.Custom(path=f"{file}:{name}", settings=settings)
        with RewardManager([function], timeout=timeout, num_workers=1, limits=limits) as manager:
            return manager.score([prompt], [answer], step=1)

    return run


def test_memory_of_a_worker(score):
    (failure,) = score("memory", limits=WorkerLimits(memory_gb=0.4)).failures
    assert failure.kind == "exception" and "MemoryError" in failure.message


def test_size_of_a_file(score, tmp_path):
    file = tmp_path / "out"
    (failure,) = score("write", file=str(file), limits=WorkerLimits(file_gb=0.001)).failures
    assert "File too large" in failure.message
    assert file.stat().st_size <= 10**6


def test_texts_of_exceptions_are_short_and_printable(score):
    (failure,) = score("long_error").failures
    assert len(failure.message) < 2300 and "(50000000 characters)" in failure.message
    (failure,) = score("control_error").failures
    assert "a\\x1b[2Jb" in failure.message


def test_a_signal_without_a_name(score):
    (failure,) = score("real_time_signal").failures
    assert "(signal 36)" in failure.message


@pytest.mark.parametrize("text", ["hang", "return"])
def test_a_process_that_a_function_started_ends_with_the_worker(score, tmp_path, text):
    file = tmp_path / "pid"
    score("start_another", text, file=str(file), timeout=0.5)
    stat, deadline = Path(f"/proc/{file.read_text()}/stat"), time.monotonic() + 10
    with suppress(FileNotFoundError):
        while stat.read_text().rpartition(")")[2].split()[0] != "Z":  # a signal takes a moment
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_a_function_sees_what_the_row_has(score):
    extra_info = {"a": (1, 2), "b": [1.5, None], 3: b"x", "c": np.float32(2)}
    assert score("show", extra_info=extra_info).extras[0]["show/seen"] == repr(extra_info)


def test_only_what_the_function_takes_is_sent(score):
    not_sendable = {"x": lambda: None}
    assert score("ignores", extra_info=not_sendable).scores.tolist() == [1.0]
    with pytest.raises(Exception, match="pickle"):
        score("show", extra_info=not_sendable)


def test_odd_extras_become_text(score):
    (extras,) = score("odd").extras
    assert extras["odd/huge"] == "an integer of many digits" and extras["odd/text"] == "\ud800"
