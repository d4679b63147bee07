"""A run of two processes that is killed again and again comes to its end by itself, exactly."""

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
FLAGS = (f"--config.total_steps={STEPS}", "--config.validation.every=50")
MOST_S = 1500

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2 * MOST_S)]


def ranks(launcher: int) -> list[int]:
    """The processes of a launcher, without the reward workers, which are theirs."""
    found = subprocess.run(["pgrep", "-P", str(launcher)], capture_output=True, text=True)
    return sorted(map(int, found.stdout.split()))


def test_thirty_kills_change_no_bit(tmp_path: Path) -> None:
    whole = TinyRun(tmp_path / "whole", *FLAGS)
    whole.finish(launcher=[*LAUNCH, "--", TRAIN])

    run, chance = TinyRun(tmp_path / "killed", *FLAGS), random.Random(SEED)
    log, kills = run.folder / "log.txt", 0
    deadline = time.monotonic() + MOST_S
    with run.process(launcher=[*LAUNCH, "--restarts=1000", "--", TRAIN]) as launcher:
        while launcher.poll() is None:
            assert time.monotonic() < deadline, log.read_text()[-3000:]
            # In one of the next steps, or while it starts, which no line tells.
            wanted, begun = chance.randrange(-1, 4), log.stat().st_size
            until = time.monotonic() + chance.uniform(2, 60)
            while kills < KILLS and launcher.poll() is None and time.monotonic() < until:
                with open(log, "rb") as stream:
                    stream.seek(begun)
                    if len(re.findall(rb"step \d+/", stream.read())) > wanted >= 0:
                        break
                time.sleep(0.02)
            time.sleep(chance.uniform(0, 0.05))
            alive = ranks(launcher.pid)
            if kills < KILLS and alive:
                subprocess.run(["kill", f"-{signal.SIGKILL}", str(chance.choice(alive))])
                kills += 1
            time.sleep(0.5)
    assert launcher.returncode == 0, log.read_text()[-3000:]
    assert kills == KILLS
    assert run.metrics() == whole.metrics()
    assert run.samples("train") == whole.samples("train")
    assert_same_bits(run.weights(STEPS), whole.weights(STEPS))
