"""A run of two processes that is killed again and again comes to its end by itself, exactly."""

import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tiny_run import REPOSITORY, TinyRun, assert_same_bits

STEPS, KILLS, SEED = 200, 30, 11
TRAIN = str(REPOSITORY / "scripts" / "train.py")
LAUNCH = [sys.executable, "-m", "jaxrl_llm.launch.local", "--processes=2"]
FLAGS = (
    f"--config.total_steps={STEPS}",
    "--config.validation.every=50",
    "--config.actor.optimizer.total_steps=0",  # it learns to the end
)
MOST_S = 1500

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2 * MOST_S)]


def ranks(launcher: int, chance: random.Random) -> list[int]:
    """One of the processes of a launcher, as soon as there are any."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        found = subprocess.run(["pgrep", "-P", str(launcher)], capture_output=True, text=True)
        if pids := sorted(map(int, found.stdout.split())):
            return [chance.choice(pids)]
        time.sleep(0.05)
    return []


def last_step(log: Path) -> int:
    """The last step that a process reported."""
    found = re.findall(r"step (\d+)/", log.read_text()) if log.exists() else []
    return int(found[-1]) if found else -1


def tail(log: Path) -> str:
    """The end of the output, for a message."""
    return log.read_text()[-3000:]


def test_thirty_kills_change_no_bit(tmp_path: Path) -> None:
    whole = TinyRun(tmp_path / "whole", *FLAGS)
    whole.finish(launcher=[*LAUNCH, "--", TRAIN])

    run, chance = TinyRun(tmp_path / "killed", *FLAGS), random.Random(SEED)
    log = run.folder / "log.txt"
    deadline = time.monotonic() + MOST_S
    with run.process(launcher=[*LAUNCH, "--restarts=1000", "--", TRAIN]) as launcher:
        for step in sorted(chance.sample(range(3, STEPS - 10), KILLS)):
            if last_step(log) >= step:  # the last kill came late: this one comes in the start
                time.sleep(chance.uniform(0, 8))
            while last_step(log) < step:
                assert launcher.poll() is None and time.monotonic() < deadline, tail(log)
                time.sleep(0.02)
            killed = [os.kill(pid, signal.SIGKILL) for pid in ranks(launcher.pid, chance)]
            assert killed, tail(log)
            time.sleep(0.5)
        assert launcher.wait(MOST_S) == 0, tail(log)
    assert log.read_text().count("; restart ") <= KILLS
    assert log.read_text().count("resumed from ") > KILLS // 2
    assert run.metrics() == whole.metrics()
    assert run.samples("train") == whole.samples("train")
    assert_same_bits(run.weights(STEPS), whole.weights(STEPS))
