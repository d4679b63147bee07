"""Pictures of README, as SVG without any package: curves of runs, and bars of ratios."""

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

CURVES = Path(__file__).resolve().parents[2] / "docs" / "curves"
INK, SOFT, LINE, OURS, OTHER = "#1b1f24", "#66707c", "#e3e7eb", "#0072b2", "#b8c0c8"

Points = Sequence[tuple[float, float]]


def text(
    x: float,
    y: float,
    words: str,
    *,
    anchor: str = "start",
    size: int = 12,
    colour: str = INK,
    bold: bool = False,
) -> str:
    """A text; `anchor` says which end stands at x."""
    weight = ' font-weight="bold"' if bold else ""
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text {place} font-size="{size}" fill="{colour}"{weight}>{words}</text>'


def polyline(points: Points, colour: str, width: float) -> str:
    """A line through points."""
    found = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline points="{found}" fill="none" stroke="{colour}" stroke-width="{width:g}"/>'


def svg(width: int, height: int, shapes: Sequence[str]) -> str:
    """A picture on white, so that it can be read on a dark page."""
    size = f'viewBox="0 0 {width} {height}" width="{width}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" font-family="sans-serif" {size}>'
    white = '<rect width="100%" height="100%" rx="6" fill="white"/>'
    return "\n".join([head, white, *shapes, "</svg>"]) + "\n"


# ------------------------------------------------------------------------- curves

PANELS = (  # file of docs/curves, title, and what it learns
    ("ppo_smollm2", "PPO, SmolLM2-135M-Instruct, one H200", "sums of three terms"),
    ("agent", "an agent of 1M parameters, two CPU cores", "products, with a calculator as tool"),
)


def learning() -> str:
    """Held-out accuracy over steps of two configs: each seed, and their median."""
    shapes = []
    for i, (name, title, task) in enumerate(PANELS):
        shapes += panel(480 * i, title, task, curves(name))
    return svg(960, 316, shapes)


def curves(name: str) -> dict[int, dict[int, float]]:
    """Accuracy by step of each seed."""
    found: dict[int, dict[int, float]] = {}
    for line in (CURVES / f"{name}.jsonl").read_text().splitlines():
        row = json.loads(line)
        if "accuracy" in row:
            found.setdefault(row["seed"], {})[row["step"]] = row["accuracy"]
    return found


def panel(
    left: float, title: str, task: str, seeds: Mapping[int, Mapping[int, float]]
) -> Iterator[str]:
    """One set of axes, with a line for each seed and a thick one for the median."""
    wide, high, x0, y0 = 390.0, 206.0, left + 56, 54.0
    steps = sorted(set.intersection(*(set(one) for one in seeds.values())))
    end = steps[-1]

    def at(step: float, value: float) -> tuple[float, float]:
        return x0 + wide * step / end, y0 + high * (1 - value)

    yield text(x0, 24, title, size=14, bold=True)
    yield text(x0, 42, f"{task}: held-out accuracy, greedy", colour=SOFT)
    for tick in (0, 0.25, 0.5, 0.75, 1):
        yield polyline([at(0, tick), at(end, tick)], LINE, 1)
        yield text(x0 - 8, at(0, tick)[1] + 4, f"{tick:g}", anchor="end", colour=SOFT)
    for step in steps[:: max(1, len(steps) // 5)]:
        yield text(at(step, 0)[0], y0 + high + 18, str(step), anchor="middle", colour=SOFT)
    yield text(x0 + wide / 2, y0 + high + 38, "step", anchor="middle", colour=SOFT)
    for one in seeds.values():
        yield polyline([at(step, one[step]) for step in steps], OTHER, 1.5)
    median = [statistics.median(one[step] for one in seeds.values()) for step in steps]
    yield polyline([at(*point) for point in zip(steps, median, strict=True)], OURS, 3)
    names = ", ".join(map(str, sorted(seeds)))
    yield text(x0 + wide - 4, y0 + high - 28, "median", anchor="end", colour=OURS, bold=True)
    yield text(x0 + wide - 4, y0 + high - 12, f"single seeds {names}", anchor="end", colour=SOFT)


# ------------------------------------------------------------------------- bars


def bars(title: str, rows: Sequence[tuple[str, float, str]]) -> str:
    """A bar for each (words, ratio, against), above the baseline's of length 1."""
    scale, left, step = 125.0, 330.0, 44
    height = 52 + step * len(rows)
    shapes = [text(16, 26, title, size=14, bold=True)]
    for i, (words, ratio, against) in enumerate(rows):
        y = 48 + step * i
        shapes.append(text(left - 12, y + 18, words, anchor="end"))
        shapes.append(bar(left, y, scale * ratio, 13, OURS))
        shapes.append(bar(left, y + 16, scale, 10, OTHER))
        shapes.append(
            text(left + scale * ratio + 7, y + 11, f"{ratio:.2f}", colour=OURS, bold=True)
        )
        shapes.append(text(left + scale + 7, y + 25, against, size=11, colour=SOFT))
    return svg(960, height, shapes)


def bar(x: float, y: float, width: float, height: float, colour: str) -> str:
    """A filled rectangle."""
    place = f'x="{x:g}" y="{y:g}" width="{width:.1f}" height="{height:g}"'
    return f'<rect {place} fill="{colour}"/>'
