"""The config `agent`, small, is killed 20 times at random moments, and ends with the same bits."""

import json
import os
import random
import signal
import subprocess
import time
from collections import Counter
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from tiny_run import REPOSITORY, TRAIN, TinyRun, assert_same_bits

STEPS, KILLS, SEED = 25, 20, 7
FLAGS = [
    "--config=configs/agent.py", f"--config.total_steps={STEPS}", "--config.save_every=1",
    "--config.data.train_batch_size=8", "--config.actor.ppo_mini_batch_size=8",
    "--config.rollout.n=4", "--config.rollout.num_slots=16",
    "--config.actor.hf_config.num_hidden_layers=1", "--config.warmup.steps=60",
    "--config.warmup.stop_at=1.0", "--config.validation.every=20",
]  # fmt: skip
MOST_S = 3000

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2 * MOST_S)]


def begin(folder: Path) -> subprocess.Popen[bytes]:
    """Begin the run, or let it go on."""
    folder.mkdir(exist_ok=True)
    with open(folder / "log.txt", "ab") as log:
        return subprocess.Popen(
            [*TRAIN, *FLAGS, f"--config.run_dir={folder / 'run'}"],
            cwd=REPOSITORY,
            env={**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"},
            stdout=log,
            stderr=log,
        )


def observed(folder: Path) -> dict[str, int]:
    """Sizes of the files in which a run writes each observation before it uses it."""
    files = (folder / "run" / "observations").rglob("*.jsonl")
    return {file.name: file.stat().st_size for file in files if file.exists()}


def in_a_step(folder: Path) -> bool:
    """Whether a step has observations and no metrics: it was killed after its first turns."""
    begun = [int(name.rpartition("_")[2].partition(".")[0]) for name in observed(folder)]
    metrics = folder / "run" / "metrics.jsonl"
    lines = metrics.read_bytes().splitlines() if metrics.exists() else []
    whole = [json.loads(line)["training/global_step"] for line in lines if line.endswith(b"}")]
    return max(begun, default=0) > max(whole, default=0)


def read(folder: Path) -> tuple[dict[int, dict[str, float]], dict[tuple[int, int], Any]]:
    """Metrics of steps and samples of the trace, without what a clock or a replay changes."""
    run = TinyRun(folder)
    timed = ("env_s/", "rollout/decode_steps")
    metrics = {
        step: {name: value for name, value in row.items() if not name.startswith(timed)}
        for step, row in run.metrics().items()
    }
    samples = run.samples("train")
    for sample in samples.values():
        for part in (sample["extras"], *sample["extras"]["turns"]):
            del part["tool_s"]
    return metrics, samples


def wait(folder: Path, process: subprocess.Popen[bytes], chance: random.Random, s: float) -> str:
    """Wait for a random moment: of the start, or of the steps behind it. Returns which."""
    before, until = observed(folder), time.monotonic() + 300
    if (folder / "run" / "checkpoints").exists() and chance.random() < 0.25:
        time.sleep(chance.uniform(0, 10))
        return "in the start"
    while observed(folder) == before and process.poll() is None and time.monotonic() < until:
        time.sleep(0.002)
    time.sleep(chance.uniform(0, 3 * s))
    return "between two steps"


def test_twenty_kills_change_no_bit(tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert begin(whole).wait(MOST_S) == 0, (whole / "log.txt").read_text()[-3000:]
    lines = (whole / "run" / "metrics.jsonl").read_text().splitlines()
    steps = [row for row in map(json.loads, lines) if "perf/time_per_step" in row]
    step = median(row["perf/time_per_step"] for row in steps)

    chance, where = random.Random(SEED), Counter[str]()
    until = time.monotonic() + MOST_S
    while where.total() < KILLS and time.monotonic() < until:
        process = begin(killed)
        kind = wait(killed, process, chance, step)
        assert process.poll() is None, "it ended before its kill: give it more steps"
        process.send_signal(signal.SIGKILL)
        process.wait()
        where["in a step" if in_a_step(killed) else kind] += 1
    assert begin(killed).wait(MOST_S) == 0, (killed / "log.txt").read_text()[-3000:]

    (expected, samples), (found, own_samples) = read(whole), read(killed)
    assert found == expected and len(expected) >= STEPS
    assert own_samples == samples
    own, other = (TinyRun(folder).weights(STEPS) for folder in (killed, whole))
    assert_same_bits(own, other)
    turns = [row["num_turns/mean"] for row in expected.values() if "num_turns/mean" in row]
    print(f"\n{dict(where)}, turns a sample {min(turns):.2f} to {max(turns):.2f}")
    assert where.total() == KILLS and where["in a step"] and max(turns) > 1
