"""A run of 2,000 steps keeps its host memory and its open files."""

import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
from tiny_run import TinyRun

STEPS, SETTLED = 2000, 500  # caches of compiled programs fill in the first steps
MOST_MB = 1.0  # in 100 steps with two saves
MOST_S = 1200
FLAGS = (
    f"--config.total_steps={STEPS}",
    "--config.save_every=50",
    "--config.validation.every=100",
    "--config.actor.optimizer.total_steps=0",  # it learns to the end
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2 * MOST_S)]


def resident_mb(pid: int) -> float:
    """Memory of a process and of its children that is its own: without shared file pages."""
    found = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True)
    total = 0.0
    for each in (pid, *map(int, found.stdout.split())):
        try:
            fields = Path(f"/proc/{each}/status").read_text().splitlines()
        except FileNotFoundError:
            continue
        total += sum(int(line.split()[1]) / 1024 for line in fields if line.startswith("RssAnon"))
    return total


def last_step(metrics: Path) -> int:
    return len(metrics.read_text().splitlines()) - 1 if metrics.exists() else 0


def test_memory_and_files_stay_the_same(tmp_path: Path) -> None:
    run, rows = TinyRun(tmp_path, *FLAGS), []
    deadline = time.monotonic() + MOST_S
    with run.process() as process:
        while process.poll() is None:
            assert time.monotonic() < deadline
            step = last_step(run.run_dir / "metrics.jsonl")
            if step > 0 and (not rows or step >= rows[-1][0] + 10):
                files = len(list(Path(f"/proc/{process.pid}/fd").iterdir()))
                rows.append((step, resident_mb(process.pid), files))
            time.sleep(0.1)
        assert process.returncode == 0
    steps, memory, files = np.array([row for row in rows if row[0] < STEPS - 10]).T
    late = steps >= SETTLED
    slope = 100 * np.polyfit(steps[late], memory[late], 1)[0]
    # The median: a save that is under way has files open.
    before, after = (np.median(files[part]) for part in (steps < STEPS / 2, steps >= STEPS / 2))
    print(
        f"\n{len(rows)} samples; {memory[late][0]:.0f} MB at step {steps[late][0]:.0f}, "
        f"{memory[-1]:.0f} MB at step {steps[-1]:.0f}, {slope:.2f} MB in 100 steps; "
        f"{before:.0f} open files in the first half, {after:.0f} in the second"
    )
    for row in rows[:: max(1, len(rows) // 20)]:
        print(f"step {row[0]}: {row[1]:.1f} MB, {row[2]} files")
    assert slope <= MOST_MB
    assert after <= before
