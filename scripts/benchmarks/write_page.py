"""Write docs/benchmarks.md from docs/results.jsonl: the current figure for each question.

python scripts/benchmarks/write_page.py          writes the page
python scripts/benchmarks/write_page.py ID       prints every stored row of ID with its command
"""

import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

# This file is a script of its own, so its folder is on the path, and not the folder above.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.results import ROOT, Row, best, ratio, read_results  # noqa: E402

PAGE = ROOT / "docs" / "benchmarks.md"
TOP = """# Measured figures

Written by `python scripts/benchmarks/write_page.py` from [results.jsonl](results.jsonl); do not edit this page by hand.
`python scripts/benchmarks/write_page.py ID` prints the command, hardware, versions and history of a row.

**Hardware**: NVIDIA H200 (141 GB), one unless the row says otherwise. Learning runs name their machine.
**Method**: random weights of the named shape in bf16 over float32 master weights; jax 0.11.2. Learning runs use real training.
Each case is checked against an independent reference, warmed up, and timed; the figure is the median of the repeats.
A *ratio* above 1 means that ours is better. *Compared* says how: in the same run, in a separate run on the same kind of GPU,
or with a published figure, which often has other lengths and settings. Machines of one kind differ by up to 5 %.
Our GRPO steps have one update and no reference model; verl's and NeMo-RL's published recipes have a reference model.
Commands are stored as they were run; `config.algorithm.settings.X` of that time is `config.algorithm.X` today. All measurements: [history/benchmarks-2026-11.md](history/benchmarks-2026-11.md).
"""  # noqa: E501
SECTIONS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (
        "How fast does it generate?",
        (
            "gen-1.5b-mix",
            "gen-7b-mix",
            "gen-1.5b-1",
            "gen-1.5b-64",
            "gen-1.5b-256",
            "gen-1.5b-1024",
            "gen-7b-1",
            "gen-7b-64",
            "gen-7b-256",
            "gen-7b-4096",
            "prefill-7b",
            "gen-lora-float8-16layers-70b",
            "gen-hybrid-2b",
            "gen-30b-a3b",
        ),
    ),
    (
        "How fast does it train?",
        (
            "update-0.5b",
            "update-1.5b",
            "update-1.5b-long",
            "update-1.5b-32k",
            "update-1.5b-mix",
            "update-7b",
            "update-7b-a1b",
            "logprob-1.5b",
            "logprob-7b",
            "logprob-7b-a1b",
            "logprob-30b-a3b",
        ),
    ),
    (
        "How fast is a whole RL step?",
        (
            "grpo-0.5b",
            "grpo-1.5b",
            "grpo-7b",
            "grpo-7b-lora",
            "grpo-7b-lora-128x8",
            "grpo-32b-lora-128x8",
            "grpo-30b-a3b-lora",
            "grpo-1.5b-strict",
            "first-step-1.5b",
            "start-1.5b-cached",
            "grpo-8b-4096",
            "ppo-0.5b",
            "ppo-1.5b",
            "ppo-7b",
            "grpo-1.5b-2gpu",
            "grpo-7b-4gpu",
            "ppo-7b-4gpu",
            "grpo-8b-4gpu",
            "switch-8b-4h100-fsdp4-to4",
            "update-7b-128k-4h100",
            "grpo-0.5b-2h200-strong",
            "grpo-70b-lora-2h200",
            "grpo-hybrid-2b",
        ),
    ),
)
LEARNING = (
    "learn-default",
    "learn-reward-model",
    "learn-smollm2",
    "learn-smollm2-lora-64",
    "learn-smollm2-lora",
    "learn-smollm2-grpo",
    "learn-smollm2-grpo-lora",
    "learn-smollm2-moe",
    "learn-rm-smollm2",
    "learn-trl",
    "learn-trl-time",
)
ATTENTION = ("16x1024", "8x2048", "4x4096", "2x8192", "1x16384", "1x32768")
OTHER_ATTENTION = (
    ("packed row of 16,384, head dim 128, against cuDNN with lengths", "packed-d128"),
    ("the same with shared prompts", "packed-shared-d128"),
    ("packed row of 16,384, head dim 64, against cuDNN with lengths", "packed-d64"),
    ("head dim 96, 16 x 1,024", "d96-16x1024"),
    ("head dim 96, 4 x 4,096", "d96-4x4096"),
    ("head dim 96, 1 x 16,384", "d96-1x16384"),
    ("head dim 256, 16 x 1,024", "d256-16x1024"),
    ("head dim 256, 4 x 4,096", "d256-4x4096"),
    ("head dim 256, 1 x 16,384", "d256-1x16384"),
    ("head dim 128, window of 1,024, 4 x 4,096", "window-4x4096"),
    ("head dim 128, window of 1,024, 1 x 16,384", "window-1x16384"),
)
DECODE = ("0.5b", "1.5b", "7b", "8b")


def page(results: dict[str, list[Row]]) -> str:
    """The whole page."""
    lines = [TOP]
    for title, ids in SECTIONS:
        lines += [f"## {title}", "| question | ours | baseline | ratio | compared | date | id |"]
        lines.append("|---|---|---|---|---|---|---|")
        lines += [_row(results[name][-1]) for name in ids] + [""]
    lines += _attention(results) + _decode(results) + _learning(results) + _worse(results)
    return "\n".join(lines).rstrip() + "\n"


def _row(row: Row) -> str:
    ours = f"{_number(row['ours'])} {row['unit']}"
    cells = [row["what"].replace(" x ", " × "), ours, "", "", "", row["date"], row["id"]]
    if row["baseline"]:
        cells[2] = f"{row['baseline']}: {_number(row['baseline_value'])}"
        cells[3:5] = f"{ratio(row):.2f}", row["compared"]
    return f"| {' | '.join(cells)} |"


def _attention(results: dict[str, list[Row]]) -> list[str]:
    """cuDNN's time over ours, of whole rows and of other layouts."""
    lines = [
        "## How fast is attention?",
        "cuDNN's time over ours, in the same run; forward / forward and backward.",
        "Ids: `attention-d128-16x1024-fwd`, `packed-d128-fwdbwd`, and so on.",
        "",
        "| rows × tokens | head dim 128 (32/8 heads) | head dim 64 (14/2 heads) | date |",
        "|---|---|---|---|",
    ]
    for size in ATTENTION:
        pairs = [_pair(results, f"attention-d{dim}-{size}") for dim in (128, 64)]
        date = results[f"attention-d128-{size}-fwd"][-1]["date"]
        lines.append(f"| {_size(size)} | {' | '.join(pairs)} | {date} |")
    lines += ["", "| other layouts | cuDNN over ours | date |", "|---|---|---|"]
    for what, name in OTHER_ATTENTION:
        date = results[f"{name}-fwd"][-1]["date"]
        lines.append(f"| {what.replace(' x ', ' × ')} | {_pair(results, name)} | {date} |")
    return [*lines, ""]


def _pair(results: dict[str, list[Row]], name: str) -> str:
    return " / ".join(f"{ratio(results[f'{name}-{p}'][-1]):.2f}" for p in ("fwd", "fwdbwd"))


def _decode(results: dict[str, list[Row]]) -> list[str]:
    lines = [
        "## How fast is decode attention?",
        "One call in bf16, uneven lengths, XLA in the same run. Ids: `decode-1.5b-64`, "
        "`decode-1.5b-64-shared`, and so on.",
        "",
        "| shape, slots | own prompts | over XLA | bandwidth | 8 slots a prompt | over XLA |",
        "|---|---|---|---|---|---|",
    ]
    for shape in DECODE:
        for slots in (64, 256, 1024):
            own, shared = (results[f"decode-{shape}-{slots}{kind}"][-1] for kind in ("", "-shared"))
            cells = [f"{shape.upper()}, {slots:,}", f"{own['ours']} us", f"{ratio(own):.1f}"]
            cells += [own["note"], f"{shared['ours']} us", f"{ratio(shared):.1f}"]
            lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""]


def _learning(results: dict[str, list[Row]]) -> list[str]:
    lines = [
        "## What does it learn?",
        "A row of several seeds has the range of their starts, and the median and range of their "
        "ends. Every run is stored under its id.",
        "",
        "| run | start → end | seconds | seeds | machine | date | id |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in LEARNING:
        rows = _last_of_each_seed(results[name])
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
        cells = [row["what"], figure, took, seeds or row.get("note", "").split(";")[0]]
        machines = ", ".join(dict.fromkeys(row["hardware"] for row in rows))
        cells += [machines, row["date"], row["id"]]
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""]


def _last_of_each_seed(rows: Sequence[Row]) -> list[Row]:
    return list({row.get("seed"): row for row in rows}.values())


def _worse(results: dict[str, list[Row]]) -> list[str]:
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
    slower = [name for name, rows in results.items() if name.startswith("attention-")]
    slower = [name for name in slower if "worse" in results[name][-1]]
    count = f"{len(slower)} of {4 * len(ATTENTION)} attention times"
    heading = "## Figures that were better before"
    return [heading, *lines, f"- {count} were shorter a day before, on another machine."]


def _size(text: str) -> str:
    rows, tokens = text.split("x")
    return f"{rows} × {int(tokens):,}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:g}"


def main(argv: Sequence[str]) -> int:
    """Write the page, or print the rows of the ids that are given."""
    results = read_results()
    for name in argv:
        if name not in results:
            print(f"no row has the id {name}; {PAGE} lists them", file=sys.stderr)
            return 2
        for row in results[name]:
            about = f"{row['hardware']}; {row['versions']}"
            print(f"{row['date']}  {row['ours'] or row['ratio']} {row['unit']}  ({about})")
            print(f"  {row['command']}")
            print(*(f"  {row[key]}\n" for key in ("note", "worse") if key in row), sep="", end="")
    if not argv:
        PAGE.write_text(page(results))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
