"""The meaning of each metric. scripts/write_pages.py takes the texts from docs/metrics.md."""

import json
import re
from collections.abc import Iterable
from functools import cache
from importlib import resources

HELD_OUT = "eval_"  # prefix of a metric of held-out records


def explanations(names: Iterable[str]) -> dict[str, str]:
    """The text of each metric that has one. A name may begin with a training: `warmup: loss`."""
    found = {name: _text(name.split(": ")[-1]) for name in names}
    return {name: text for name, text in found.items() if text}


def pattern(name: str) -> re.Pattern[str]:
    """A name of docs/metrics.md as an expression: {a,b} is a choice, <x> stands for any word."""
    escaped = re.escape(name).replace(",", "|").replace(r"\{", "(").replace(r"\}", ")")
    return re.compile(re.sub("<[a-z]+>", "[^/]+", escaped))


@cache
def _text(name: str) -> str:
    for expression, text in _texts():
        if expression.fullmatch(name):
            return text
    held_out = name.startswith(HELD_OUT) and _text(name.removeprefix(HELD_OUT))
    return f"held out: {held_out}" if held_out else ""


@cache
def _texts() -> list[tuple[re.Pattern[str], str]]:
    """Names without a word of any kind come first: they say more."""
    file = resources.files("jaxrl_llm.report") / "page" / "metrics.json"
    texts: dict[str, str] = json.loads(file.read_text(encoding="utf-8"))
    return [(pattern(name), texts[name]) for name in sorted(texts, key=lambda n: n.count("<"))]
