"""The stored results: docs/results.jsonl, and docs/history/figures.jsonl. No jax.

python scripts/benchmarks/ledger.py           writes docs/benchmarks.md and the figures of README
python scripts/benchmarks/ledger.py ID        prints every row of results.jsonl with this id
python scripts/benchmarks/ledger.py history WORD   prints the sections of figures.jsonl with WORD

A row of results.jsonl is a JSON object, oldest first within an `id`: id, what, date, ours, unit,
better (higher or lower), baseline, baseline_value, ratio, compared ("same run", "same machine",
"same session", "separate run", "published"), command, hardware, versions; `note` where there is
one, and `worse`, the reason why an earlier figure was better. Rows of one id measure the same
question, so the last one is the current figure. `ratio` is above 1 where ours is better. Rows whose
id begins with "ratio/" are ours over a peer, of the same run.
"""

import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if not __package__:  # started as a script: its own folder is on the path, not scripts/
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks.figures import bars, learning  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "results.jsonl"
HISTORY = ROOT / "docs" / "history" / "figures.jsonl"
PAGE = ROOT / "docs" / "benchmarks.md"
FIGURES = ROOT / "docs" / "figures"

Row = dict[str, Any]
Results = dict[str, list[Row]]

TOP = """# Measured figures

Written by `python scripts/benchmarks/ledger.py` from [results.jsonl](results.jsonl); do not edit this page by hand.
`python scripts/benchmarks/ledger.py ID` prints the command, hardware, versions and history of a row.

**Hardware**: NVIDIA H200 (141 GB), one unless the row says otherwise. Learning runs name their machine.
**Method**: random weights of the named shape in bf16 over float32 master weights; jax 0.11.2. Learning runs use real training.
Each case is checked against an independent reference, warmed up, and timed; the figure is the median of the repeats.
A *ratio* above 1 means that ours is better. *Compared* says how: in the same run, in a separate run on the same kind of GPU,
or with a published figure, which often has other lengths and settings. Machines of one kind differ by up to 5 %.
Our GRPO steps have one update and no reference model; verl's and NeMo-RL's published recipes have a reference model.
Commands are stored as they were run; `config.algorithm.settings.X` of that time is `config.algorithm.X` today. All measurements: [history](history/README.md).
"""  # noqa: E501
SECTIONS = {
    "How fast does it generate?": """gen-1.5b-mix gen-7b-mix gen-1.5b-1 gen-1.5b-64 gen-1.5b-256
        gen-7b-1 gen-7b-64 gen-7b-256 gen-7b-4096 prefill-7b
        gen-hybrid-2b gen-30b-a3b gen-qwen3-14b-groups""",
    "How fast does it train?": """update-0.5b update-1.5b update-1.5b-long update-1.5b-32k
        update-1.5b-mix update-7b update-7b-a1b logprob-1.5b logprob-7b logprob-7b-a1b
        logprob-30b-a3b""",
    "How fast is a whole RL step?": """grpo-0.5b grpo-1.5b grpo-7b grpo-7b-lora grpo-7b-lora-128x8
        grpo-32b-lora-128x8 grpo-30b-a3b-lora grpo-1.5b-strict first-step-1.5b start-1.5b-cached
        grpo-8b-4096 ppo-0.5b ppo-1.5b ppo-7b grpo-1.5b-2gpu grpo-7b-4gpu ppo-7b-4gpu grpo-8b-4gpu
        switch-8b-4h100-fsdp4-to4 update-7b-128k-4h100 grpo-0.5b-2h200-strong grpo-70b-lora-2h200
        grpo-hybrid-2b""",
}
LEARNING = """learn-default learn-reward-model learn-smollm2 learn-smollm2-lora-64
    learn-smollm2-lora learn-smollm2-grpo learn-smollm2-grpo-lora learn-smollm2-moe
    learn-rm-smollm2 learn-trl learn-trl-time"""
ATTENTION = ("16x1024", "8x2048", "4x4096", "2x8192", "1x16384", "1x32768")
OTHER_ATTENTION = {
    "packed-d128": "packed row of 16,384, head dim 128, against cuDNN with lengths",
    "packed-shared-d128": "the same with shared prompts",
    "packed-d64": "packed row of 16,384, head dim 64, against cuDNN with lengths",
    **{f"d{dim}-{size}": f"head dim {dim}, " for dim in (96, 256) for size in ATTENTION[::2]},
    **{f"window-{size}": "head dim 128, window of 1,024, " for size in ATTENTION[2::2]},
}
# Bars of the figure.
SPEED = {
    "update-7b": "update of all weights, 7B",
    "packed-d128-fwdbwd": "attention on packed rows, with gradient",
    "attention-d128-16x1024-fwdbwd": "attention, 16 × 1,024, with gradient",
    "attention-d128-1x32768-fwdbwd": "attention, 1 × 32,768, with gradient",
    "decode-1.5b-256": "decode attention, 256 slots",
    "grouped-30b-dx": "experts of 30B-A3B, gradient of inputs",
}


def read_results(file: Path = RESULTS) -> Results:
    """The rows of each id, oldest first.

    ValueError for a current row that is worse than an earlier one and does not say why (`worse`).
    """
    results: Results = {}
    for line in file.read_text().splitlines():
        row = json.loads(line)
        results.setdefault(row["id"], []).append(row)
    for name, rows in results.items():
        if rows[-1] is not best(rows) and "worse" not in rows[-1]:
            raise ValueError(f"{file}: the last row of {name} is not its best; add `worse`: why")
    return results


def ratio(row: Row) -> float:
    """Ours against the baseline, above 1 where ours is better; not rounded as `ratio` is."""
    ours, theirs = row["ours"], row["baseline_value"]
    if not ours or not theirs:
        return row["ratio"]
    return ours / theirs if row["better"] == "higher" else theirs / ours


def best(rows: list[Row]) -> Row:
    """The row with the best figure; the last one of equals."""
    sign = 1 if rows[-1]["better"] == "higher" else -1
    return max(reversed(rows), key=lambda row: sign * (row["ours"] or 0))


# ------------------------------------------------------------------------- docs/benchmarks.md


def page(results: Results) -> str:
    """The whole page."""
    lines = [TOP]
    for title, ids in SECTIONS.items():
        head = "question | ours | baseline | ratio | compared | date | id"
        lines += [f"## {title}", *table(head, [_speed(results[name][-1]) for name in ids.split()])]
    lines += _attention(results) + _decode(results) + _learning(results) + _worse(results)
    return "\n".join(lines).rstrip() + "\n"


def table(head: str, rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table, and an empty one."""
    rule = "|" + "---|" * (head.count("|") + 1)
    return [f"| {head} |", rule, *(f"| {' | '.join(row)} |" for row in rows), ""]


def _speed(row: Row) -> list[str]:
    ours = f"{_number(row['ours'])} {row['unit']}"
    cells = [row["what"].replace(" x ", " × "), ours, "", "", "", row["date"], row["id"]]
    if row["baseline"]:
        cells[2] = f"{row['baseline']}: {_number(row['baseline_value'])}"
        cells[3:5] = f"{ratio(row):.2f}", row["compared"]
    return cells


def _attention(results: Results) -> list[str]:
    """cuDNN's time over ours: whole rows, then other layouts."""

    def pair(name: str) -> str:
        return " / ".join(f"{ratio(results[f'{name}-{p}'][-1]):.2f}" for p in ("fwd", "fwdbwd"))

    def size(name: str) -> str:
        rows, x, tokens = name.rpartition("-")[2].partition("x")
        return f"{rows} × {int(tokens):,}" if x else ""

    def date(name: str) -> str:
        return results[f"{name}-fwd"][-1]["date"]

    names = {each: [f"attention-d{dim}-{each}" for dim in (128, 64)] for each in ATTENTION}
    rows = [[size(s), *map(pair, both), date(both[0])] for s, both in names.items()]
    others = [[what + size(name), pair(name), date(name)] for name, what in OTHER_ATTENTION.items()]
    return [
        "## How fast is attention?",
        "cuDNN's time over ours, in the same run; forward / forward and backward.",
        "Ids: `attention-d128-16x1024-fwd`, `packed-d128-fwdbwd`, and so on.",
        "",
        *table("rows × tokens | head dim 128 (32/8 heads) | head dim 64 (14/2 heads) | date", rows),
        *table("other layouts | cuDNN over ours | date", others),
    ]


def _decode(results: Results) -> list[str]:
    rows = []
    for shape in ("0.5b", "1.5b", "7b", "8b"):
        for slots in (64, 256, 1024):
            own, shared = (results[f"decode-{shape}-{slots}{kind}"][-1] for kind in ("", "-shared"))
            cells = [f"{shape.upper()}, {slots:,}", f"{own['ours']} us", f"{ratio(own):.1f}"]
            rows.append([*cells, own["note"], f"{shared['ours']} us", f"{ratio(shared):.1f}"])
    head = "shape, slots | own prompts | over XLA | bandwidth | 8 slots a prompt | over XLA"
    return [
        "## How fast is decode attention?",
        "One call in bf16, uneven lengths, XLA in the same run. Ids: `decode-1.5b-64`, "
        "`decode-1.5b-64-shared`, and so on.",
        "",
        *table(head, rows),
    ]


def _learning(results: Results) -> list[str]:
    cells = [_learned(_last_of_each_seed(results[name])) for name in LEARNING.split()]
    return [
        "## What does it learn?",
        "A row of several seeds has the range of their starts, and the median and range of their "
        "ends. Every run is stored under its id.",
        "",
        *table("run | start → end | seconds | seeds | machine | date | id", cells),
    ]


def _learned(rows: Sequence[Row]) -> list[str]:
    """The cells of runs that differ in their seed."""
    row, ours = rows[-1], [row["ours"] for row in rows]
    starts = [row["start"] for row in rows if row.get("start") is not None]
    first = " to ".join(dict.fromkeys(f"{f(starts):.3f}" for f in (min, max) if starts))
    figure = f"{first} → " if starts else ""
    figure += _number(round(statistics.median(ours), 3))
    if len(rows) > 1:
        figure += f" ({_number(min(ours))} to {_number(max(ours))})"
    if row["unit"] != "held-out accuracy":
        figure += f" {row['unit']}"
    if row["baseline"]:
        figure += f" ({row['baseline']}: {_number(row['baseline_value'])})"
    seconds = sorted(row["seconds"] for row in rows if "seconds" in row)
    took = " to ".join(map(str, dict.fromkeys([*seconds[:1], *seconds[-1:]])))
    seeds = ", ".join(str(row["seed"]) for row in rows if "seed" in row)
    machines = ", ".join(dict.fromkeys(row["hardware"] for row in rows))
    seeds = seeds or row.get("note", "").split(";")[0]
    return [row["what"], figure, took, seeds, machines, row["date"], row["id"]]


def _last_of_each_seed(rows: Sequence[Row]) -> list[Row]:
    return list({row.get("seed"): row for row in rows}.values())


def _worse(results: Results) -> list[str]:
    """Every current figure that is below an earlier one, and why; a line for each reason."""
    by_reason: dict[str, list[str]] = {}
    for name, rows in results.items():
        now, top = rows[-1], best(rows)
        if top is now or "worse" not in now or name.startswith("attention-"):
            continue
        if "seed" in now and top in _last_of_each_seed(rows):
            continue  # the range of its seeds is in the table of learning
        figures = f"{_number(now['ours'])} now, {_number(top['ours'])} on {top['date']}"
        by_reason.setdefault(now["worse"], []).append(f"`{name}`: {figures}")
    lines = [f"- {'; '.join(each)}. {reason}" for reason, each in by_reason.items()]
    attention = [rows[-1] for name, rows in results.items() if name.startswith("attention-")]
    slower = f"{sum('worse' in row for row in attention)} of {4 * len(ATTENTION)} attention times"
    heading = "## Figures that were better before"
    return [heading, *lines, f"- {slower} were shorter a day before, on another machine."]


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:g}"


# ------------------------------------------------------------------------- docs/figures/speed.svg


def speed(results: Results) -> str:
    """A bar for each current ratio of SPEED, where one run measured both sides."""
    rows = []
    for name, words in SPEED.items():
        row = results[name][-1]
        assert row["compared"] == "same run", f"{name} compares a {row['compared']}"
        rows.append((f"{words}, {row['hardware'][4:].split()[0]}", ratio(row), row["baseline"]))
    return bars("Speed on one GPU, both sides measured in the same run; the baseline is 1", rows)


# ------------------------------------------------------------------------- what was stored


def stored_rows(rows: Sequence[Row]) -> list[str]:
    """The rows of one id as lines to read."""
    lines = []
    for row in rows:
        about = f"{row['hardware']}; {row['versions']}"
        lines.append(f"{row['date']}  {row['ours'] or row['ratio']} {row['unit']}  ({about})")
        lines += [f"  {row[key]}" for key in ("command", "note", "worse") if key in row]
    return lines


def history(word: str) -> list[str]:
    """The sections of earlier measurements whose page, heading or text has `word`, as Markdown."""
    lines = []
    for line in HISTORY.read_text().splitlines():
        if word.lower() not in line.lower():
            continue
        section = json.loads(line)
        lines += [f"## {section['page']}: {section['section']}", ""]
        for item in section["items"]:
            tables = isinstance(item, dict)
            lines += table(" | ".join(item["columns"]), item["rows"]) if tables else [item, ""]
    return lines


def pages(results: Results) -> dict[Path, str]:
    """The text of each file that is made of stored results."""
    return {
        PAGE: page(results),
        FIGURES / "speed.svg": speed(results),
        FIGURES / "learning.svg": learning(),
    }


def main(argv: Sequence[str]) -> int:
    """Write the page and the figure, or print what is stored."""
    results = read_results()
    if argv[:1] == ["history"]:
        print("\n".join(history(argv[1])))
    elif argv:
        print("\n".join(stored_rows(results[argv[0]])))
    else:
        for file, made in pages(results).items():
            file.write_text(made)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
