"""The metric names that docs/metrics.md documents."""

import re
from pathlib import Path


def documented() -> re.Pattern[str]:
    """The metric names of docs/metrics.md: {a,b} is a choice, <x> stands for any word."""
    return re.compile("|".join(map(as_pattern, documented_names())))


def documented_names() -> list[str]:
    """The metric names as docs/metrics.md writes them."""
    page = (Path(__file__).parents[1] / "docs" / "metrics.md").read_text()
    cells = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    return [name for cell in cells for name in re.findall("`([^`]+)`", cell)]


def as_pattern(name: str) -> str:
    escaped = re.escape(name).replace(",", "|").replace(r"\{", "(").replace(r"\}", ")")
    return re.sub("<[a-z]+>", "[^/]+", escaped)
