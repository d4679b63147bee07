"""Write the files that are made of others: python scripts/write_pages.py

| file | made of |
|---|---|
| jaxrl_llm/report/page/metrics.json | the tables of docs/metrics.md |
"""

import json
import re
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SAME = "as for the actor"  # the text of a metric that the actor has too


def metric_texts() -> str:
    """The names of docs/metrics.md with their texts, as JSON for the report."""
    texts: dict[str, str] = {}
    for line in (ROOT / "docs" / "metrics.md").read_text().splitlines():
        if line.startswith("| `"):
            names, text = (cell.strip() for cell in line.strip("|").split("|"))
            texts |= dict.fromkeys(re.findall("`([^`]+)`", names), plain(text))
    for name in [name for name, text in texts.items() if text == SAME]:
        del texts[name]
        for one in expanded(name):
            own = one.split("/")[-1].replace("learning_rate", "lr")
            texts[one] = texts[f"actor/{own}"]
    return json.dumps(texts, ensure_ascii=False, indent=0) + "\n"


def expanded(name: str) -> list[str]:
    """The names that a choice stands for: a/{b,c} is a/b and a/c."""
    before, _, rest = name.partition("{")
    if not rest:
        return [name]
    inside, _, after = rest.partition("}")
    return [f"{before}{one}{after}" for one in inside.split(",")]


def plain(text: str) -> str:
    """A cell of a table without links, code marks and footnotes."""
    text = re.sub(r" \(\[[^\]]*\]\([^)]*\)\)", "", text)  # a link in brackets is only a pointer
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text).replace("`", "")
    return re.sub(r"\s*[¹²³⁴-⁹]+", "", text)


FILES: dict[str, Callable[[], str]] = {
    "jaxrl_llm/report/page/metrics.json": metric_texts,
}


def main() -> None:
    """Write every file that has changed."""
    for name, make in FILES.items():
        file, text = ROOT / name, make()
        if not file.exists() or file.read_text() != text:
            file.write_text(text)
            print(f"wrote {name}")


if __name__ == "__main__":
    main()
