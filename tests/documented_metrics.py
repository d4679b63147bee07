"""The metric names that docs/metrics.md documents."""

import json
import re
from pathlib import Path

from jaxrl_llm.report.explanations import pattern

TEXTS = Path(__file__).parents[1] / "jaxrl_llm" / "report" / "page" / "metrics.json"


def documented() -> re.Pattern[str]:
    """The metric names of docs/metrics.md: {a,b} is a choice, <x> stands for any word."""
    return re.compile("|".join(pattern(name).pattern for name in documented_names()))


def documented_names() -> list[str]:
    """The metric names as docs/metrics.md writes them; a test holds the file to the page."""
    return list(json.loads(TEXTS.read_text()))
