"""Command lines of verl's and TRL's examples, made of the keys and values in the JSON files."""

import json
from pathlib import Path
from typing import Any

from jaxrl_llm.convert.conversion import Conversion
from jaxrl_llm.convert.trl_command import convert_trl
from jaxrl_llm.convert.verl_command import convert_verl

FOLDER = Path(__file__).parent
VERL: list[dict[str, Any]] = json.loads((FOLDER / "verl_keys.json").read_text())["examples"]
TRL: list[dict[str, Any]] = json.loads((FOLDER / "trl_keys.json").read_text())["examples"]


def verl_words(example: dict[str, Any]) -> list[str]:
    words = [f"{key}={value}" for key, value in example["keys"].items()]
    launcher = ["torchrun", *example["launch"]] if example["launch"] else ["python3"]
    return [*launcher, "-m", example["module"], *words]


def trl_words(example: dict[str, Any]) -> list[str]:
    words = [word for key, *values in example["keys"] for word in (f"--{key}", *values)]
    return [*example["launch"], example["name"], *words]


def from_verl(name: str, *, commit: str = "", rows: int = 0, devices: int = 0) -> Conversion:
    """The conversion of an example by its name, of two verl versions the one given."""
    (example,) = (e for e in VERL if e["name"] == name and e["commit"].startswith(commit))
    return convert_verl(verl_words(example), rows=rows, devices=devices)


def from_trl(name: str, *, rows: int = 0, devices: int = 0) -> Conversion:
    """The conversion of the first example of a script."""
    example = next(e for e in TRL if e["name"].endswith(name))
    return convert_trl(trl_words(example), rows=rows, devices=devices)
