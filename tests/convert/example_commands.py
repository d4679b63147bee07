"""Command lines of verl's and TRL's examples.

verl: the folder examples; what bash passes on with DEVICE=gpu. TRL: the commands in the docstrings
of its scripts, version 1.10.0.dev0 at commit f2cd57710ae345ea6428ae95363267fcf38a3dc8.
"""

import json
from pathlib import Path

from jaxrl_llm.convert.command_words import command_words
from jaxrl_llm.convert.conversion import Conversion
from jaxrl_llm.convert.trl_command import convert_trl
from jaxrl_llm.convert.verl_command import convert_verl

VERSIONS = {
    "1dda039b9c6311889a9c9a26040677e1254814f9": "0.10",
    "b178a3cd56f58b2d502255daba591e92833930a7": "0.8",
}


def _examples(library: str) -> list[dict[str, str]]:
    file = Path(__file__).with_name(f"{library}_examples.jsonl")
    return [json.loads(line) for line in file.read_text().splitlines()]


VERL, TRL = _examples("verl"), _examples("trl")


def words_of(example: dict[str, str]) -> list[str]:
    return command_words(example["command"], {})


def from_verl(name: str, *, rows: int = 0) -> Conversion:
    (example,) = (e for e in VERL if e["name"] == name)
    return convert_verl(words_of(example), rows=rows)


def from_trl(name: str, *, rows: int = 0, devices: int = 0) -> Conversion:
    """The conversion of the first example of a script."""
    example = next(e for e in TRL if e["name"].endswith(name))
    return convert_trl(words_of(example), rows=rows, devices=devices)
