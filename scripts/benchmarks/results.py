"""The stored results, docs/results.jsonl: every dated row with its command. No jax.

A row is a JSON object a line, oldest first within an `id`: id, what, date, ours, unit, better
(higher or lower), baseline, baseline_value, ratio, compared ("same run", "same machine", "same
session", "separate run", "published"), command, hardware, versions; `note` where there is one.
Rows of one id measure the same question, so the last one is the current figure. `ratio` is above 1
where ours is better.
Rows whose id begins with "ratio/" are those of docs/benchmarks.json: ours over the peer.
"""

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "docs" / "results.jsonl"

Row = dict[str, Any]


def read_results(file: Path = FILE) -> dict[str, list[Row]]:
    """The rows of each id, oldest first.

    ValueError for a current row that is worse than an earlier one and does not say why (`worse`).
    """
    found: dict[str, list[Row]] = {}
    for line in file.read_text().splitlines():
        row = json.loads(line)
        found.setdefault(row["id"], []).append(row)
    for name, rows in found.items():
        if rows[-1] is not best(rows) and "worse" not in rows[-1]:
            raise ValueError(f"{file}: the last row of {name} is not its best; add `worse`: why")
    return found


def ratio(row: Row) -> float:
    """Above 1 where ours is better: of the stored figures, as `ratio` was rounded before."""
    ours, theirs = row["ours"], row["baseline_value"]
    if not ours or not theirs:
        return row["ratio"]
    return ours / theirs if row["better"] == "higher" else theirs / ours


def best(rows: list[Row]) -> Row:
    """The row with the best figure; the last one of equals."""
    sign = 1 if rows[-1]["better"] == "higher" else -1
    return max(reversed(rows), key=lambda row: sign * (row["ours"] or 0))
