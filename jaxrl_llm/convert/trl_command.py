"""A TRL command line as keys and values."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxrl_llm.config import ConfigError
from jaxrl_llm.convert.conversion import Conversion, convert, rows_of
from jaxrl_llm.convert.rules import Source
from jaxrl_llm.convert.trl import TRL
from jaxrl_llm.convert.trl_keys import COMMON_DEFAULTS, DEFAULTS, SCRIPTS, TRAINERS
from jaxrl_llm.convert.values import value_of
from jaxrl_llm.references import nearest

OTHERS = {"online", "vlm", "agent"}  # scripts of a trainer whose data are of another kind


def convert_trl(words: Sequence[str], *, rows: int = 0, devices: int = 0) -> Conversion:
    """The run of a TRL command line.

    `rows` of the training data and `devices`, its processes, count where the words do not say them.
    Raises: ConfigError.
    """
    at = _entry(words)
    if at is None:
        raise ConfigError("it has no command of TRL, such as `trl grpo` or `python grpo.py`")
    trainer = _trainer(words[at])
    settings = _settings(words[at + 1 :])
    processes = settings.pop("num_processes", None) or _flag(words[:at], "num_processes")
    file = settings.pop("config", None)
    if file is not None:
        settings = _yaml(Path(str(file)).expanduser()) | settings
    settings = {_positive(key): _truth(key, value) for key, value in settings.items()}
    source = Source(
        settings=settings,
        defaults=COMMON_DEFAULTS | DEFAULTS[trainer],
        devices=devices or processes or 1,
        rows=rows or rows_of([str(settings.get("dataset_name", ""))]),
        trainer=trainer,
    )
    return convert(source, TRL)


def _entry(words: Sequence[str]) -> int | None:
    """The place of the script, or of the subcommand of `trl`."""
    for i, word in enumerate(words):
        if word.endswith(".py"):
            return i
        if i and Path(words[i - 1]).name == "trl" and not word.startswith("-"):
            return i
    return None


def _trainer(word: str) -> str:
    """The trainer of a subcommand, of one of TRL's scripts, or of a script named after it."""
    name = Path(word).stem
    parts = name.split("_")
    named = [part for part in parts if part in TRAINERS]
    if name in SCRIPTS:
        return SCRIPTS[name]
    if len(named) == 1 and not OTHERS.intersection(parts):
        return named[0]
    raise ConfigError(
        f"TRL's {name} has no counterpart{nearest(name, TRAINERS)}; {', '.join(TRAINERS)} have"
    )


def _settings(words: Sequence[str]) -> dict[str, Any]:
    """--key value ..., --key=value, and --key alone, which is true.

    Raises: ConfigError for a word without a key.
    """
    settings: dict[str, list[Any]] = {}
    key = ""
    for word in words:
        if re.match(r"--[A-Za-z]", word):
            name, equals, text = word[2:].partition("=")
            key = name.replace("-", "_")
            settings[key] = []
            if not equals:
                continue
            word = text
        if not key:
            raise ConfigError(f"{word!r} has no key before it: TRL takes --key value")
        settings[key].append(value_of(word))
    return {key: _one(values) for key, values in settings.items()}


def _one(values: list[Any]) -> Any:
    return True if not values else values[0] if len(values) == 1 else values


def _positive(key: str) -> str:
    """The key that a --no_key switches off."""
    return key.removeprefix("no_")


def _truth(key: str, value: Any) -> Any:
    return not value if key.startswith("no_") and isinstance(value, bool) else value


def _flag(words: Sequence[str], name: str) -> int:
    """A number on the command line of the launcher; 0 without one."""
    for i, word in enumerate(words):
        flag, equals, text = word.partition("=")
        if flag.lstrip("-").replace("-", "_") in (name, "nproc_per_node"):
            text = text if equals else "".join(words[i + 1 : i + 2])
            return int(text) if text.isdecimal() else 0
    return 0


def _yaml(file: Path) -> dict[str, Any]:
    """The keys of TRL's --config file."""
    import yaml

    keys = yaml.safe_load(file.read_text(encoding="utf-8"))
    keys.pop("env", None)
    return {str(key): value_of(v) if isinstance(v, str) else v for key, v in keys.items()}
