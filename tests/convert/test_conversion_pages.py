"""docs/from-verl.md and docs/from-trl.md show what the converter does."""

from collections import Counter
from pathlib import Path

import pytest
from example_commands import TRL, VERL, VERSIONS, words_of

from jaxrl_llm.convert.command_words import command_words
from jaxrl_llm.convert.conversion import Conversion
from jaxrl_llm.convert.rules import NoCounterpart, NotNeeded, Ours
from jaxrl_llm.convert.trl_command import convert_trl
from jaxrl_llm.convert.verl_command import convert_verl
from jaxrl_llm.convert.writing import python_file

DOCS = Path(__file__).parents[2] / "docs"


def row(name: str, found: Conversion) -> str:
    cells = [name, *(str(len(found.of_kind(kind))) for kind in (Ours, NotNeeded, NoCounterpart))]
    return f"| {' | '.join(cells)} |"


def rows_of_verl() -> list[str]:
    return [
        row(
            f"`{example['name']}` | {VERSIONS[example['commit']]}",
            convert_verl(words_of(example), rows=7473),
        )
        for example in VERL
    ]


def rows_of_trl() -> list[str]:
    seen: Counter[str] = Counter()
    found = []
    for example in TRL:
        seen[example["name"]] += 1
        again = f" ({seen[example['name']]})" if seen[example["name"]] > 1 else ""
        conversion = convert_trl(words_of(example), rows=10_000, devices=8)
        found.append(row(f"`{example['name']}`{again}", conversion))
    return found


@pytest.mark.parametrize(("page", "rows"), [("from-verl", rows_of_verl), ("from-trl", rows_of_trl)])
def test_the_table_of_examples_is_current(page, rows):
    table = (DOCS / f"{page}.md").read_text().split("## Examples that were tried")[1]
    shown = [line for line in table.splitlines() if line.startswith("| `")]
    assert shown == rows(), "\n".join(rows())


@pytest.mark.parametrize(
    ("page", "convert"), [("from-verl", convert_verl), ("from-trl", convert_trl)]
)
def test_the_config_of_the_page_is_that_of_its_command(page, convert):
    text = (DOCS / f"{page}.md").read_text().split("## The same run there and here")[1]
    command, python = text.split("```")[1], text.split("```python\n")[1].split("```")[0]
    words = command_words(command, {"HOME": "/home/user"})
    made = python_file(convert(words, rows=7473).config, "")
    assert python == made[made.index("def get_config") :]
