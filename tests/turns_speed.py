"""CPU seconds of a step with turns: driven by the host, and in one program.

python tests/turns_speed.py --config=configs/maze.py

Both run in this process, one after the other, twice. A step is measured after the first three, as
these compile. Further flags are as for scripts/train.py.
"""

import sys
import tempfile
import time
from statistics import median
from typing import Any

import jaxrl_llm as rl

STEPS, FIRST = 13, 3


def measured(name: str, changes: dict[str, Any]) -> tuple[float, float, float]:
    """CPU seconds of a step, wall seconds of a step, and tokens of a sample."""
    cpu, lengths, wall = [], [], []

    def watch(report: Any) -> None:
        cpu.append(time.process_time())
        wall.append(time.perf_counter())
        lengths.append(report.metrics.get("response_length/mean", 0.0))

    with tempfile.TemporaryDirectory() as folder:
        rl.train(rl.load_config(name, {"run_dir": folder} | changes), callbacks=[watch])
    steps = [b - a for a, b in zip(cpu[FIRST:], cpu[FIRST + 1 :], strict=False)]
    walls = [b - a for a, b in zip(wall[FIRST:], wall[FIRST + 1 :], strict=False)]
    return median(steps), median(walls), sum(lengths[FIRST:]) / len(lengths[FIRST:])


if __name__ == "__main__":
    flags = dict(flag[2:].split("=", 1) for flag in sys.argv[1:])
    name = flags.pop("config")
    own = {key.removeprefix("config."): value for key, value in flags.items()}
    base: dict[str, Any] = {"total_steps": STEPS, "save_every": 0, "validation.every": 0}
    base |= {"warmup.steps": 0, "log.trace": False}
    for in_graph in (False, True, False, True):
        cpu, wall, length = measured(name, base | {"rollout.in_graph": in_graph} | own)
        print(f"in_graph={in_graph}: {cpu:.3f} CPU s, {wall:.3f} s, {length:.1f} tokens")
