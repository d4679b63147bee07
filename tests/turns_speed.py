"""CPU seconds of a step with turns: driven by the host, and in one program.

python tests/turns_speed.py

The config `agent` plays mazes with random weights, about three turns a sample. Both ways run in
this process, one after the other. The first steps compile, and are left out.
"""

import tempfile
import time
from statistics import median
from typing import Any

import jaxrl_llm as rl

FIRST = 3
SETTINGS: dict[str, Any] = {
    "total_steps": FIRST + 6,
    "save_every": 0,
    "validation.every": 0,
    "warmup": None,
    "log.trace": False,
    "rollout.environment": "maze",
    "rollout.max_turn_tokens": 0,
    "data.train_tasks": ["maze_games"],
    "data.max_prompt_length": 20,
    "data.max_response_length": 96,
    "actor.hf_config.max_position_embeddings": 128,
}


def measured(in_graph: bool) -> tuple[float, float, float]:
    """Median CPU and wall seconds of a step, and mean tokens of a sample."""
    cpu, lengths, wall = [], [], []

    def watch(report: Any) -> None:
        cpu.append(time.process_time())
        wall.append(time.perf_counter())
        lengths.append(report.metrics.get("response_length/mean", 0.0))

    with tempfile.TemporaryDirectory() as folder:
        changes = SETTINGS | {"run_dir": folder, "rollout.in_graph": in_graph}
        rl.train(rl.load_config("agent", changes), callbacks=[watch])
    steps = [b - a for a, b in zip(cpu[FIRST:], cpu[FIRST + 1 :], strict=False)]
    walls = [b - a for a, b in zip(wall[FIRST:], wall[FIRST + 1 :], strict=False)]
    return median(steps), median(walls), sum(lengths[FIRST:]) / len(lengths[FIRST:])


if __name__ == "__main__":
    for in_graph in (False, True):
        cpu, wall, length = measured(in_graph)
        print(f"in_graph={in_graph}: {cpu:.3f} CPU s, {wall:.3f} s a step, {length:.1f} tokens")
