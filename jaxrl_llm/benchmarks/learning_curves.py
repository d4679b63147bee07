"""Reward curves of two trainers over several seeds: their records, and how far they are apart.

A record is a JSON object a line. Of each iteration: side, seed, step, reward (the mean over its
samples), seconds. Of each finished process: side, seed, wall_seconds (start to end, with imports,
loading and compilation), exit_code.
"""

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SIDES = ("ours", "trl")


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One run, as far as it came."""

    side: str
    seed: int
    rewards: tuple[float, ...]  # an iteration
    seconds: tuple[float, ...]
    wall_seconds: float | None  # None: cut before its end


def read_curves(file: Path) -> list[Curve]:
    """The curves of a file of records, in the order of their first records.

    ValueError when steps are missing or come twice: two runs of a side and seed in one file.
    """
    steps: dict[tuple[str, int], list[dict[str, Any]]] = {}
    walls: dict[tuple[str, int], float] = {}
    for line in file.read_text().splitlines():
        record = json.loads(line)
        key = (record["side"], record["seed"])
        if "step" in record:
            steps.setdefault(key, []).append(record)
        elif record.get("exit_code") == 0:
            walls[key] = record["wall_seconds"]
    curves = []
    for (side, seed), records in steps.items():
        if [record["step"] for record in records] != list(range(1, len(records) + 1)):
            raise ValueError(
                f"{file}: the steps of {side} with seed {seed} are not 1 to {len(records)}, so two "
                "runs are in one file; give another --output"
            )
        curves.append(
            Curve(
                side=side,
                seed=seed,
                rewards=tuple(record["reward"] for record in records),
                seconds=tuple(record["seconds"] for record in records),
                wall_seconds=walls.get((side, seed)),
            )
        )
    return curves


def smoothed(curve: Curve, window: int) -> list[float]:
    """Means over consecutive windows of iterations; what is left at the end is dropped."""
    starts = range(0, len(curve.rewards) - window + 1, window)
    return [statistics.fmean(curve.rewards[start : start + window]) for start in starts]


def reward_table(curves: Sequence[Curve], window: int) -> list[str]:
    """Lines: the mean and the range over seeds of each side, and whether the ranges overlap.

    The last column is the difference of the means over its standard error by the spread of the
    seeds (Welch): within two, the seeds explain it.
    """
    lines = [
        "| steps | ours: mean (range) | TRL: mean (range) | ranges overlap | difference / error |"
    ]
    lines.append("|---|---|---|---|---|")
    sides = {
        side: [smoothed(curve, window) for curve in curves if curve.side == side] for side in SIDES
    }
    if not all(sides.values()):
        return ["one of the two sides has no curve yet"]
    for i in range(min(len(curve) for side in sides.values() for curve in side)):
        ours, trl = ([curve[i] for curve in sides[side]] for side in SIDES)
        overlap = "yes" if min(ours) <= max(trl) and min(trl) <= max(ours) else "no"
        cells = [f"{i * window + 1} to {(i + 1) * window}", _spread(ours), _spread(trl), overlap]
        lines.append(f"| {' | '.join([*cells, _welch(ours, trl)])} |")
    return lines


def time_table(curves: Sequence[Curve]) -> list[str]:
    """Lines: seconds of each run, with and without what happens once."""
    lines = [
        "| side | seed | steps | process, s | first step, s | other steps, s | median step, s |",
        "|---|---|---|---|---|---|---|",
    ]
    for curve in sorted(curves, key=lambda curve: (curve.side, curve.seed)):
        wall = "cut" if curve.wall_seconds is None else f"{curve.wall_seconds:.1f}"
        rest = curve.seconds[1:]
        median = f"{statistics.median(rest):.3f}" if rest else "-"
        times = f"{curve.seconds[0]:.1f} | {sum(rest):.1f} | {median}"
        lines.append(f"| {curve.side} | {curve.seed} | {len(curve.rewards)} | {wall} | {times} |")
    return lines


def _spread(values: Sequence[float]) -> str:
    return f"{statistics.fmean(values):.3f} ({min(values):.3f} to {max(values):.3f})"


def _welch(ours: Sequence[float], trl: Sequence[float]) -> str:
    if min(len(ours), len(trl)) < 2:
        return "-"
    variance = sum(statistics.variance(side) / len(side) for side in (ours, trl))
    difference = statistics.fmean(ours) - statistics.fmean(trl)
    return f"{difference / variance**0.5:+.1f}" if variance else "-"
