"""One self-contained HTML page of one or several runs, written in one atomic operation."""

import base64
import hashlib
import json
import time
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from jaxrl_llm.report.curves import MOST_POINTS
from jaxrl_llm.report.explanations import explanations
from jaxrl_llm.report.run_files import RunFiles
from jaxrl_llm.report.samples import A_STEP, MOST_STEPS, MOST_TEXT, MOST_TOKENS, TRAIN
from jaxrl_llm.whole_files import write_whole

REPORT = "report.html"
SCRIPTS = (
    "elements.js",
    "charts.js",
    "stages.js",
    "conversation.js",
    "sample.js",
    "samples.js",
    "tables.js",
    "runs.js",
    "main.js",
)


def page(runs: Sequence[RunFiles]) -> str:
    """The page. What it says of models and data stands in one block of JSON, never in markup."""
    script = "\n".join(_part(name) for name in SCRIPTS)
    filled = {
        "STYLE": _part("report.css"),
        "POLICY": f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; "
        f"script-src '{_digest(script)}'",
        "DATA": embedded(_payload(runs)),
        "SCRIPT": script,
    }
    text = _part("report.html")
    before, *parts = text.split("%%")  # literal, name, literal, name, ...
    return before + "".join(filled[part] if i % 2 == 0 else part for i, part in enumerate(parts))


def write_page(runs: Sequence[RunFiles], output: Path) -> Path:
    """Write the page to `output`. A reader sees the page before or this one, never a part."""
    write_whole(output, page(runs))
    return output


def embedded(value: Any) -> str:
    """JSON for a <script type="application/json">, in which nothing ends the block.

    `<` is escaped, so neither </script> nor <!-- can stand in it; a lone surrogate, which UTF-8
    lacks, is escaped too.
    """
    text = json.dumps(value, ensure_ascii=True, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _payload(runs: Sequence[RunFiles]) -> dict[str, Any]:
    found = [run.read() for run in runs]
    return {
        "written": time.strftime("%Y-%m-%d %H:%M:%S"),
        "limits": {
            "points": MOST_POINTS,
            "steps": MOST_STEPS[TRAIN],
            "a_step": A_STEP,
            "text": MOST_TEXT,
            "tokens": MOST_TOKENS,
        },
        "explained": explanations(name for run in found for name in run["curves"]),
        "runs": found,
    }


def _part(name: str) -> str:
    return (resources.files("jaxrl_llm.report") / "page" / name).read_text(encoding="utf-8")


def _digest(script: str) -> str:
    """The digest by which the page's policy allows its own script, and no other."""
    digest = hashlib.sha256(script.encode()).digest()
    return f"sha256-{base64.b64encode(digest).decode()}"
