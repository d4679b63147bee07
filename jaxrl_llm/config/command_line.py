"""From a command line to one checked Config: load a file, apply `--config.a.b=value`, check."""

import argparse
import importlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from pydantic import ValidationError

from jaxrl_llm.config.given import GivenRows
from jaxrl_llm.config.records import (
    ConfigError,
    Custom,
    Kind,
    Record,
    Text,
    UnknownKeyError,
    classes_in,
    explain,
    fields_of,
    validate,
)
from jaxrl_llm.config.rules import check
from jaxrl_llm.config.schema import Config, as_dict
from jaxrl_llm.references import is_file, load_file, nearest, nearest_file, reason, where

__all__ = [
    "Overrides", "Parser", "apply_override", "apply_overrides", "from_json", "load_config",
    "open_config", "packaged_configs", "read_config", "to_json",
]  # fmt: skip

CONFIGS = "jaxrl_llm.configs"  # the packaged configs


class Parser(argparse.ArgumentParser):
    """The flags of a command without --config. Mistakes are ConfigErrors, without abbreviations."""

    def __init__(self, description: str | None = None) -> None:
        super().__init__(
            description=description,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)

    def read(self, argv: Sequence[str]) -> argparse.Namespace:
        """The flags of a command that takes no config."""
        self._check_names(argv, takes_config=False)
        return self.parse_args(argv)

    def read_with_config(
        self, argv: Sequence[str]
    ) -> tuple[argparse.Namespace, str, list[tuple[str, str]]]:
        """The flags, --config, and the overrides as (key without "config.", text) in order."""
        self.add_argument("--config")
        self._check_names(argv, takes_config=True)
        flags, words = self.parse_known_args(argv)
        overrides: list[tuple[str, str]] = []
        while words:
            word = words.pop(0)
            name, equals, value = word.partition("=")
            if not name.startswith("--config."):
                raise ConfigError(f"{word!r} is no flag; write --config.key=value or --flag=value")
            if not equals:
                if not words or words[0].startswith("--"):
                    raise ConfigError(f"{name} has no value; write {name}=VALUE")
                value = words.pop(0)
            overrides.append((name.removeprefix("--config."), value))
        if not flags.config:
            raise ConfigError(
                "--config=FILE is missing: a file with get_config(), a run's folder, or one of "
                + ", ".join(packaged_configs())
            )
        return flags, flags.config, overrides

    def _check_names(self, argv: Sequence[str], *, takes_config: bool) -> None:
        known = [option for option in self._option_string_actions if option.startswith("--")]
        for word in argv:
            name = word.partition("=")[0]
            is_key = takes_config and name.startswith("--config.")
            if not name.startswith("--") or name in known or is_key:
                continue
            key = _key_that_ends_in(name[2:], Config()) if takes_config else ""
            hint = f"; did you mean --config.{key}?" if key else nearest(name, known)
            shown = [*known, "--config.KEY=VALUE"] if takes_config else known
            raise ConfigError(f"unknown flag {name}{hint}\nflags: {', '.join(shown)}")


# ------------------------------------------------------------------------- loading


Overrides = Mapping[str, Any] | Sequence[tuple[str, Any]]


def load_config(config: str | Path | Config, overrides: Overrides = ()) -> Config:
    """A config with the overrides applied in order, checked.

    `config` is one, or a Python file with get_config(), the name of a packaged config such as
    "grpo", or the folder or config.json of a run. An override is a dotted key with its value: text
    as on the command line, or a Python value, as in {"actor.optimizer.learning_rate": 1e-5}.

    Raises: ConfigError, with a value or key that works.
    """
    found = config if isinstance(config, Config) else open_config(config)
    found = apply_overrides(found, overrides)
    check(found)
    return found


def open_config(path: str | Path) -> Config:
    """The Config of a Python file, a packaged config's name, a run's folder or its config.json."""
    if not isinstance(path, str | Path) or "\0" in str(path):
        raise ConfigError(
            f"config={path!r}: expected a Config, a file with get_config(), the name of a packaged "
            "config such as grpo, or a run's folder"
        )
    path = str(path)
    file = Path(path).expanduser()
    if path in packaged_configs():
        return importlib.import_module(f"{CONFIGS}.{path}").get_config()
    if is_file(file / "config.json"):
        file /= "config.json"
    if not is_file(file):
        known = f"\npackaged configs: {', '.join(packaged_configs())}"
        hint = nearest(path, packaged_configs()) if path.isidentifier() else nearest_file(file)
        raise ConfigError(f"the config file {path} does not exist{hint}{known}")
    if file.suffix == ".json":
        try:
            return from_json(file.read_text(encoding="utf-8"))
        except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
            raise ConfigError(
                f"{file} is no JSON text: {error}; give a Python file with get_config(), or the "
                "folder of another run"
            ) from None
    return _run(file, path)


def packaged_configs() -> list[str]:
    """The names of the configs that come with the package."""
    folders = importlib.import_module(CONFIGS).__path__
    return sorted(file.stem for folder in folders for file in Path(folder).glob("[!_]*.py"))


def _run(file: Path, path: str) -> Config:
    try:
        module = load_file(file, again=True)
        if not hasattr(module, "get_config"):
            raise ConfigError(f"{path} has no get_config(); it must return a Config")
        config = module.get_config()
    except ConfigError:
        raise
    except Exception as error:  # the user's code may raise anything
        cause = error.__cause__ if isinstance(error.__cause__, Exception) else error
        if isinstance(cause, ValidationError):
            text = str(explain(cause, Config, cause.title))
        else:
            text = reason(cause)
        raise ConfigError(f"{where(file, cause)}: {text}") from error
    if not isinstance(config, Config):
        raise ConfigError(f"get_config() of {path} returned {type(config).__name__}, not a Config")
    return config


def to_json(config: Config) -> str:
    """The config with all defaults as JSON text; `from_json` reads it back."""
    return json.dumps(as_dict(config), indent=2) + "\n"


def from_json(text: str) -> Config:
    """The Config that `to_json` wrote; fields are checked, rules that span fields are not."""
    try:
        return validate(Config, json.loads(text))
    except ValidationError as error:
        raise explain(error, Config, "config") from None


# ------------------------------------------------------------------------- overrides


def apply_overrides(config: Config, overrides: Overrides) -> Config:
    """`config` with each override in order; rules that span fields are not checked."""
    for key, value in _pairs(overrides):
        config = apply_override(config, key, value)
    return config


def _pairs(overrides: Any) -> list[tuple[Any, Any]]:
    """The overrides in order. ConfigError for anything else than a dict or pairs."""
    given = overrides.items() if isinstance(overrides, Mapping) else overrides
    pairs = list(given) if isinstance(given, Iterable) and not isinstance(given, str) else [given]
    for pair in pairs:
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise ConfigError(
                f"the overrides {repr(overrides)[:80]} are no dict and no list of pairs: write "
                "{'rollout.n': 8}"
            )
    return [(key, value) for key, value in pairs]


def apply_override(config: Config, key: str, value: Any) -> Config:
    """`config` with the `value` at the dotted `key` (without "config."); text is read."""
    if not isinstance(key, str):
        raise ConfigError(f"the key of an override is {key!r}: give text such as 'rollout.n'")
    return _set(config, key.split("."), value, "config", config)


def _set(node: Any, parts: list[str], text: Any, key: str, root: Config) -> Any:
    """`node` with the value that `parts` leads to replaced; `key` is how far we are."""
    part, rest, raw = parts[0], parts[1:], False
    below = f"{key}.{part}"
    if isinstance(node, Record):
        if part not in fields_of(node):
            raise _unknown(node, parts, str(text), key, root)
        annotation, child = fields_of(node)[part].annotation, getattr(node, part)
        raw = annotation is str
        if rest and child is None:
            child = _default(annotation, below)
    elif isinstance(node, tuple | list):
        if not part.isdecimal() or int(part) >= len(node):
            have = f"0 to {len(node) - 1}" if node else "none: the list is empty"
            raise ConfigError(f"{below}: {key} has {len(node)} entries; valid indices: {have}")
        child = node[int(part)]
    elif isinstance(node, dict):
        child = node.get(part, {})
    else:
        raise ConfigError(f"{below}: {key} is a single value and has no keys below it")
    value = _set(child, rest, text, below, root) if rest else _parse(text, below, raw=raw)
    if isinstance(node, dict):
        return {**node, part: value}
    if isinstance(node, tuple | list):
        return [*node[: int(part)], value, *node[int(part) + 1 :]]
    try:
        return validate(type(node), {n: getattr(node, n) for n in fields_of(node)} | {part: value})
    except ValidationError as error:
        raise explain(error, node, key) from None


def _default(annotation: Any, key: str) -> Any:
    """The record that a key below None begins with: --config.warmup.steps=5 asks for a warm-up."""
    for cls in classes_in(annotation):
        if cls is GivenRows:
            raise ConfigError(f"{key} holds rows of a Python program; name files or tasks instead")
        if issubclass(cls, Kind):
            raise ConfigError(f"{key} is not set: name its kind first, {key}=NAME")
        if issubclass(cls, Record):
            return cls()
    raise ConfigError(f"{key} is a single value and has no keys below it")


def _unknown(node: Record, parts: list[str], text: str, key: str, root: Config) -> ConfigError:
    """The error for an unknown part of `key`, with the nearest key here, else anywhere."""
    part, rest = parts[0], parts[1:]
    known = fields_of(node)
    hint = nearest(part, known).replace("did you mean '", f"did you mean '{key}.")
    if isinstance(node, Custom):
        hint = hint or f"; a setting of your function is {key}.settings.{part}"
    elif isinstance(node, Kind) and part in ("kind", "path", "name"):
        hint = f": write --{key}={text.rpartition(':')[2] if 'jaxrl_llm' in text else text}"
    elif isinstance(node, Kind) and part == "settings" and rest:
        hint = f": settings are keys of their own, write {key}.{'.'.join(rest)}"
    elif not hint:
        same = _key_that_ends_in(part, root)
        hint = f"; did you mean 'config.{same}'?" if same else ""
    return UnknownKeyError(
        f"unknown key {key}.{part}{hint}\nkeys of {key}: {', '.join(known) or 'none'}",
        ".".join([key, *parts]).removeprefix("config."),
        text,
    )


def leaf_keys(config: Record, prefix: str = "") -> Iterator[str]:
    """The dotted key of every value of a config that is no record itself."""
    for name in fields_of(config):
        value = getattr(config, name)
        key = f"{prefix}{name}"
        yield from leaf_keys(value, f"{key}.") if isinstance(value, Record) else [key]


def _key_that_ends_in(name: str, config: Config) -> str:
    """The first dotted key that ends in `name`; empty where there is none."""
    return next((key for key in leaf_keys(config) if key.rpartition(".")[2] == name), "")


# ------------------------------------------------------------------------- text


def _parse(text: Any, key: str, *, raw: bool = False) -> Any:
    """`text` without quotes; where it is no `raw` text, brackets make lists and braces dicts.

    A value that is no text is a Python program's, and stays as it is.
    """
    if not isinstance(text, str):
        return text
    text = text if raw else text.strip()
    if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
        return str(text[1:-1])
    closing = {"[": "]", "(": ")", "{": "}"}.get(text[:1])
    if raw or closing is None:
        return Text(text)
    if not text.endswith(closing) or len(text) < 2:
        raise ConfigError(f"{key}={text}: the {text[0]!r} is not closed by a final {closing!r}")
    entries = split_entries(text[1:-1])
    if entries is None:
        raise ConfigError(f"{key}={text[1:-1]}: a bracket or quote is not closed")
    if closing != "}":
        return [_parse(entry, f"{key}.{i}") for i, entry in enumerate(entries)]
    pairs: dict[str, Any] = {}
    for entry in entries:
        name, colon, value = entry.partition(":")
        if not colon:
            raise ConfigError(f"{key}={entry}: expected a pair key: value")
        name = name.strip().strip("'\"")
        pairs[name] = _parse(value, f"{key}.{name}")
    return pairs


def split_entries(text: str) -> list[str] | None:
    """What stands between commas outside brackets and quotes, stripped; empty ones are left out.

    None where a bracket or a quote is not closed.
    """
    entries, depth = [""], 0
    for token in re.findall(r"'[^']*'|\"[^\"]*\"|.", text, re.DOTALL):
        if token in ("'", '"'):
            return None
        depth += (token in "[({") - (token in "])}")
        if token == "," and depth == 0:
            entries.append("")
        else:
            entries[-1] += token
    return None if depth else [entry.strip() for entry in entries if entry.strip()]


def read_config(argv: Sequence[str], parser: Parser) -> tuple[Config, argparse.Namespace]:
    """The checked config of a command line, and the command's other flags."""
    flags, path, overrides = parser.read_with_config(argv)
    return load_config(path, overrides), flags
