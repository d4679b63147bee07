"""Draw README's figures from stored results: python scripts/benchmarks/draw_figures.py

docs/figures/learning.svg: held-out accuracy of each file of docs/curves/, a panel a file. A file
holds a JSON object a line: seed, step, accuracy. Each seed is a thin line; from three seeds on the
median is a thick one.
docs/figures/speed.svg: the current ratios to others of docs/results.jsonl.
docs/figures/trl.svg: reward curves of docs/trl_curves.jsonl, mean and range over seeds.
"""

import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

# This file is a script of its own, so its folder is on the path, and not the folder above.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.results import ROOT, ratio, read_results  # noqa: E402

FIGURES, CURVES = ROOT / "docs" / "figures", ROOT / "docs" / "curves"
TITLES = {
    "ppo": "PPO, 1M parameters, three-term sums, 2 CPU cores",
    "ppo_smollm2": "PPO, SmolLM2-135M-Instruct, three-term sums, one H200",
}
# Ids of docs/results.jsonl, and what a reader sees.
SPEED = {
    "gen-1.5b-mix": "generation, 1.5B, RL length mix",
    "gen-7b-mix": "generation, 7B, RL length mix",
    "update-1.5b": "training update, 1.5B",
    "update-7b": "training update, 7B",
    "grpo-1.5b": "GRPO step, 1.5B",
}
BLUE, ORANGE = "#1f77b4", "#d95f02"
WINDOW = 5  # iterations that a point of trl.svg averages

Point = tuple[float, float]


class Panel:
    """Axes of one plot, in pixels, with the shapes that were drawn in them."""

    def __init__(self, left: int, title: str, x_label: str, x_most: float, y_most: float) -> None:
        self.left, self.top, self.width, self.height = left, 40, 400, 220
        self.x_most, self.y_most = x_most, y_most
        right, bottom = left + self.width, self.top + self.height
        self.shapes = [text(left + self.width / 2, 24, title, anchor="middle", size=13)]
        for i in range(6):
            y, x = self.at(0, y_most * i / 5)[1], self.at(x_most * i / 5, 0)[0]
            self.shapes.append(line([(left, y), (right, y)], "#e5e5e5"))
            self.shapes.append(text(left - 6, y + 4, f"{y_most * i / 5:g}", anchor="end"))
            self.shapes.append(text(x, bottom + 16, f"{x_most * i / 5:g}", anchor="middle"))
        self.shapes.append(text(left + self.width / 2, bottom + 34, x_label, anchor="middle"))

    def at(self, x: float, y: float) -> Point:
        """Pixels of a point."""
        down = self.top + self.height * (1 - y / self.y_most)
        return self.left + self.width * x / self.x_most, down

    def curve(self, points: Sequence[Point], colour: str, width: float) -> None:
        """Draw a line through the points."""
        self.shapes.append(line([self.at(*point) for point in points], colour, width))

    def band(self, low: Sequence[Point], high: Sequence[Point], colour: str) -> None:
        """Fill what lies between two curves."""
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in (self.at(*p) for p in [*low, *high[::-1]]))
        self.shapes.append(f'<polygon points="{points}" fill="{colour}" fill-opacity="0.15"/>')

    def label(self, x: float, y: float, words: str, colour: str) -> None:
        """Write words at a point."""
        self.shapes.append(text(*self.at(x, y), words, colour=colour))


def text(
    x: float, y: float, words: str, *, anchor: str = "start", size: int = 12, colour: str = "#222"
) -> str:
    """An SVG text."""
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text {place} font-size="{size}" fill="{colour}">{words}</text>'


def line(points: Sequence[Point], colour: str, width: float = 1.0) -> str:
    """An SVG line through pixels."""
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width:g}"/>'


def svg(width: float, height: float, shapes: Sequence[str]) -> str:
    """A whole file, on white so that it can be read on a dark page."""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}"'
    lines = [f'{head} width="{width:g}" font-family="sans-serif">']
    lines += ['<rect width="100%" height="100%" fill="white"/>', *shapes, "</svg>"]
    return "\n".join(lines) + "\n"


def learning() -> str:
    """A panel for each file of docs/curves/."""
    shapes: list[str] = []
    files = sorted(CURVES.glob("*.jsonl"))
    for i, file in enumerate(files):
        rows = [json.loads(row) for row in file.read_text().splitlines()]
        seeds: dict[int, list[Point]] = {}
        for row in rows:
            seeds.setdefault(row["seed"], []).append((row["step"], row["accuracy"]))
        title, most = TITLES.get(file.stem, file.stem), max(row["step"] for row in rows)
        panel = Panel(50 + 470 * i, title, "step", most, 1.0)
        several = len(seeds) >= 3
        for points in seeds.values():
            panel.curve(points, BLUE, 1.0 if several else 2.5)
        if several:
            by_step: dict[float, list[float]] = {}
            for points in seeds.values():
                for step, accuracy in points:
                    by_step.setdefault(step, []).append(accuracy)
            median = [(step, statistics.median(values)) for step, values in sorted(by_step.items())]
            panel.curve(median, BLUE, 3.0)
        names = ", ".join(map(str, sorted(seeds)))
        words = f"median and single seeds ({names})" if several else f"seed {names}"
        panel.label(most * 0.35, 0.08, f"held-out accuracy, greedy: {words}", BLUE)
        shapes += panel.shapes
    return svg(470 * len(files) + 10, 310, shapes)


def speed() -> str:
    """A bar for each ratio; the baseline is 1."""
    results = read_results()
    shapes = [text(10, 22, "Speed on one H200, baseline = 1", size=14)]
    scale, left, step = 90.0, 240, 34
    for i, (name, words) in enumerate(SPEED.items()):
        row, y = results[name][-1], 38 + step * i
        width = scale * ratio(row)
        bar = f'<rect x="{left}" y="{y}" width="{width:.1f}" height="20" fill="{BLUE}"/>'
        shapes += [text(left - 8, y + 15, words, anchor="end"), bar]
        against = f"{row['baseline']} ({row['compared']})"
        shapes.append(text(left + width + 6, y + 15, f"{ratio(row):.2f} × {against}"))
    bottom = 38 + step * len(SPEED)
    shapes.append(line([(left + scale, 32), (left + scale, bottom - 8)], "#222"))
    return svg(960, bottom + 4, shapes)


def trl() -> str:
    """Mean reward of ours and of TRL, and the range over seeds, in windows of iterations."""
    sides: dict[str, list[list[float]]] = {}
    for row in (ROOT / "docs" / "trl_curves.jsonl").read_text().splitlines():
        record = json.loads(row)
        sides.setdefault(record["side"], []).append(record["rewards"])
    panel = Panel(50, "GRPO, SmolLM2-135M: mean reward, range over seeds", "step", 100, 1)
    for side, colour, y in (("ours", BLUE, 0.9), ("trl", ORANGE, 0.82)):
        curves = [curve for curve in sides[side] if len(curve) == 100]
        windows = [
            [statistics.fmean(curve[i : i + WINDOW]) for curve in curves]
            for i in range(0, 100, WINDOW)
        ]
        steps = [i * WINDOW + WINDOW / 2 for i in range(len(windows))]
        low = [(step, min(values)) for step, values in zip(steps, windows, strict=True)]
        high = [(step, max(values)) for step, values in zip(steps, windows, strict=True)]
        mean = [(s, statistics.fmean(v)) for s, v in zip(steps, windows, strict=True)]
        panel.band(low, high, colour)
        panel.curve(mean, colour, 2.5)
        name = {"ours": "ours", "trl": "TRL 1.16"}[side]
        panel.label(5, y, f"{name}, {len(curves)} seeds", colour)
    return svg(480, 310, panel.shapes)


DRAWN = {"learning": learning, "speed": speed, "trl": trl}


def main() -> None:
    """Write every figure."""
    FIGURES.mkdir(exist_ok=True)
    for name, draw in DRAWN.items():
        (FIGURES / f"{name}.svg").write_text(draw())


if __name__ == "__main__":
    main()
