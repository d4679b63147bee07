"""Curves of metrics.jsonl: read as the file grows, and thinned to a bounded number of points."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from jaxrl_llm.observability.jsonl import GLOBAL_STEP, object_of

MOST_POINTS = 600  # points of a curve in the page
DIGITS = 6  # significant digits of a number in the page


@dataclass(kw_only=True)
class Curve:
    """The values of one metric, by step."""

    steps: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    def add(self, step: int, value: float) -> None:
        """A further point. Requires: steps increase."""
        self.steps.append(step)
        self.values.append(value)

    def thinned(self, most: int = MOST_POINTS) -> "Curve":
        """At most `most` points: the ends, and the lowest and highest of each of equal stretches.

        Spikes stay visible. A curve with fewer points is kept as it is.
        """
        number = len(self.steps)
        if number <= most:
            return self
        stretches = (most - 2) // 2
        kept = {0, number - 1}
        for i in range(stretches):
            stretch = range(i * number // stretches, (i + 1) * number // stretches)
            low = min(stretch, key=self.values.__getitem__)
            high = max(stretch, key=self.values.__getitem__)
            kept |= {low, high}
        places = sorted(kept)
        return Curve(steps=[self.steps[i] for i in places], values=[self.values[i] for i in places])

    def to_json(self, *, with_totals: bool = False) -> dict[str, Any]:
        """Keys: steps, values and `of`, the number of points before thinning.

        With totals, also the `median` and the `sum` of all points.
        """
        few = self.thinned()
        found = {"steps": few.steps, "values": [*map(_short, few.values)], "of": len(self.steps)}
        if with_totals:
            found |= {"median": _short(median(self.values)), "sum": _short(sum(self.values))}
        return found


def _short(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")


class MetricsFile:
    """The curves of one metrics.jsonl. `read` takes in the lines that were added since."""

    def __init__(self, path: Path):
        self._path = path
        self._offset = 0
        self._last = b""  # the line before the offset
        self.curves: dict[str, Curve] = {}

    def read(self) -> bool:
        """Take in whole new lines; whether it began again.

        It does where the last line that it read is no longer in its place. A run that resumes cuts
        the file back, and the file may have grown beyond that place since.
        """
        if not self._path.exists():
            return False
        with open(self._path, "rb") as file:
            file.seek(self._offset - len(self._last))
            begins_again = file.read(len(self._last)) != self._last
            if begins_again:
                self._offset, self._last, self.curves = 0, b"", {}
                file.seek(0)
            for line in file:
                if not line.endswith(b"\n"):
                    break  # it is being written
                self._offset, self._last = self._offset + len(line), line
                if entry := object_of(line, GLOBAL_STEP, self._path):
                    self._take(entry)
        return begins_again

    def _take(self, entry: Mapping[str, Any]) -> None:
        step = int(entry[GLOBAL_STEP])
        for name, value in entry.items():
            number = isinstance(value, int | float) and math.isfinite(value)
            if name != GLOBAL_STEP and number:
                self.curves.setdefault(name, Curve()).add(step, float(value))
