"""True if a run of configs/ppo.py learned, read in its folder; `.ci/run` asks it of a shorter one.

python tests/ninety_percent.py RUN_DIR
"""

import json
import sys
from pathlib import Path

TIMED = {"step_time", "host_memory", "device_memory"}  # alarms of the machine
ACCURACY = "val-core/chain_sum_3x1/acc/mean@1"


def read(file: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def check(run_dir: Path) -> None:
    """AssertionError where the run did not reach 90 % of held-out sums from half of them."""
    rows = read(run_dir / "metrics.jsonl")
    before, after = rows[0][ACCURACY], rows[-1][ACCURACY]
    assert 0.35 <= before <= 0.57, f"the warm-up must leave PPO its share: {before}"
    assert after >= 0.90, f"{after} of the held-out sums are right"
    assert TIMED.issuperset(event["name"] for event in read(run_dir / "events.jsonl"))
    assert rows[-1]["critic/score/mean"] > rows[1]["critic/score/mean"] + 0.3


if __name__ == "__main__":
    check(Path(sys.argv[1]))
