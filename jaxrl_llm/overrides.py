"""From a command line to one checked Config: load a file, apply `--config.a.b=value`, check types.

Values are read by the annotation of the field that they go to, so `--config.seed=1.5` is refused
and `--config.data.train_files=[/data/x.jsonl,/y.jsonl]` needs no quotes. Every mistake is a
ConfigError. Nothing here imports jax.
"""

import dataclasses
import importlib.util
import json
import sys
import traceback
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxrl_llm.coercion import (
    Text,
    coerce,
    describe,
    field_types,
    function_settings,
    without_none,
)
from jaxrl_llm.config import Config, ConfigError, FunctionConfig, TaskConfig
from jaxrl_llm.signatures import UNREADABLE, nearest, nearest_file
from jaxrl_llm.validation import validate


@dataclass(frozen=True)
class Arguments:
    """A command line, split: the config file, its overrides in order, and the script's flags."""

    config_path: str | None
    overrides: tuple[tuple[str, str], ...]  # (key without "config.", text)
    flags: dict[str, Any]


# ------------------------------------------------------------------------- the command line


def config_from_arguments(
    argv: Sequence[str], flags: Mapping[str, Any] | None = None
) -> tuple[Config, dict[str, Any]]:
    """The checked config of a command line that must name one, and the flags it gives.

    `flags` maps the script's other flags to their types, e.g. {"devices": int}.
    """
    arguments = read_arguments(argv, flags)
    if arguments.config_path is None:
        known = ", ".join(sorted(str(path) for path in Path("configs").glob("[!_]*.py")))
        raise ConfigError(f"--config=FILE is missing; there are: {known or 'no files in configs/'}")
    return load_config(arguments.config_path, arguments.overrides), arguments.flags


def read_flags(
    argv: Sequence[str], flags: Mapping[str, Any], required: Sequence[str] = ()
) -> dict[str, Any]:
    """The flags of a script that takes no config; ConfigError where a required one is missing."""
    given = read_arguments(argv, flags, takes_config=False).flags
    require_flags(given, required)
    return given


def require_flags(given: Mapping[str, Any], required: Sequence[str]) -> None:
    """ConfigError for the first required flag that was not given, or given empty."""
    for name in required:
        if not given.get(name):
            raise ConfigError(f"--{name}={name.upper()} is missing; --help shows what it takes")


def read_arguments(
    argv: Sequence[str], flags: Mapping[str, Any] | None = None, *, takes_config: bool = True
) -> Arguments:
    """Split `argv` into --config, --config.key=value (or `--config.key value`) and `flags`."""
    flags = flags or {}
    config_path: str | None = None
    overrides: list[tuple[str, str]] = []
    given: dict[str, Any] = {}
    words = list(argv)
    while words:
        word = words.pop(0)
        name, equals, value = word.partition("=")
        if not name.startswith("--"):
            raise ConfigError(f"{word!r} is no flag; write --config.key=value or --flag=value")
        is_config = takes_config and (name == "--config" or name.startswith("--config."))
        if not is_config and name[2:] not in flags:
            known = [f"--{flag}" for flag in flags]
            if takes_config:
                known = ["--config", *known]
                hint = _nearest_flag(name, known)
                known.append("--config.KEY=VALUE")
            else:
                hint = nearest(name, known)
            raise ConfigError(f"unknown flag {name}{hint}\nflags: {', '.join(known)}")
        if not equals:
            if not is_config and flags[name[2:]] is bool:
                value = "true"  # --flag alone switches it on
            elif not words or words[0].startswith("--"):
                raise ConfigError(f"{name} has no value; write {name}=VALUE")
            else:
                value = words.pop(0)
        if name == "--config":
            config_path = value
        elif is_config:
            overrides.append((name.removeprefix("--config."), value))
        else:
            given[name[2:]] = coerce(Text(value), flags[name[2:]], name)
    return Arguments(config_path, tuple(overrides), given)


def _nearest_flag(name: str, known: list[str]) -> str:
    if name.startswith("--"):
        leaves = {key.rpartition(".")[2]: key for key, _ in leaf_keys(Config())}
        if name[2:] in leaves:
            return f"; did you mean --config.{leaves[name[2:]]}?"
    return nearest(name, known)


# ------------------------------------------------------------------------- loading


def load_config(path: str, overrides: Sequence[tuple[str, str]] = ()) -> Config:
    """Run the config file, apply the overrides in order, and check types and sizes."""
    config = load_file(path)
    for key, text in overrides:
        config = apply_override(config, key, text)
    config = coerce(config, Config, "config")
    validate(config)
    return config


def load_file(path: str) -> Config:
    """What `get_config()` of the Python file at `path` returns."""
    file = Path(path)
    if not file.is_file():
        raise ConfigError(f"the config file {path} does not exist{nearest_file(file)}")
    spec = importlib.util.spec_from_file_location(f"jaxrl_llm_config_{file.stem}", file)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path} is no Python file; a config file holds get_config() -> Config")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses that the file defines look themselves up here
    try:
        spec.loader.exec_module(module)
        if not hasattr(module, "get_config"):
            raise ConfigError(f"{path} has no get_config(); it must return a Config")
        config = module.get_config()
    except SyntaxError as error:
        raise ConfigError(f"{error.filename}, line {error.lineno}: {error.msg}") from None
    except (TypeError, NameError, AttributeError, ImportError) as error:
        # The user's mistake when the config file is the last to have acted, e.g. Config(sed=1).
        frames = traceback.extract_tb(error.__traceback__)
        lines = [f.lineno for f in frames if Path(f.filename) == file or f.filename == str(file)]
        where = f"{path}, line {lines[-1]}" if lines else path
        raise ConfigError(f"{where}: {type(error).__name__}: {error}") from error
    if not isinstance(config, Config):
        raise ConfigError(f"get_config() of {path} returned {type(config).__name__}, not a Config")
    return config


def apply_override(config: Config, key: str, text: str) -> Config:
    """`config` with the value at the dotted `key` (without "config.") read from `text`."""
    return _set(config, Config, key.split("."), Text(text), "config", config)


def _set(node: Any, annotation: Any, parts: list[str], text: Text, key: str, root: Config) -> Any:
    """`node` with the value that `parts` leads to replaced; `key` is how far we are."""
    if not parts:
        return coerce(text, annotation, key)
    part, rest = parts[0], parts[1:]
    below = f"{key}.{part}"
    inner = without_none(annotation)
    if node is None and dataclasses.is_dataclass(inner):
        # --config.warmup.steps=5 asks for a warm-up: start from the defaults.
        node = coerce({}, inner, key)
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        kinds = field_types(type(node))
        if isinstance(node, FunctionConfig | TaskConfig) and (part not in kinds or rest):
            return _set_setting(node, parts, text, key, root)
        if part not in kinds:
            raise _unknown(part, key, list(kinds), root)
        value = _set(getattr(node, part), kinds[part], rest, text, below, root)
        return dataclasses.replace(node, **{part: value})
    if isinstance(node, tuple | list):
        if not part.isdecimal() or int(part) >= len(node):
            have = f"0 to {len(node) - 1}" if node else "none: the list is empty"
            raise ConfigError(f"{below}: {key} has {len(node)} entries; valid indices: {have}")
        entries = list(node)
        kinds = typing.get_args(inner)
        entry_kind = kinds[0] if kinds else Any
        entries[int(part)] = _set(entries[int(part)], entry_kind, rest, text, below, root)
        return tuple(entries) if isinstance(node, tuple) else entries
    if isinstance(node, dict) or (node is None and annotation is Any):
        node = node or {}
        kinds = typing.get_args(inner)
        kind = kinds[1] if len(kinds) == 2 else Any
        return {**node, part: _set(node.get(part), kind, rest, text, below, root)}
    raise ConfigError(f"{below}: {key} is {describe(annotation)} and has no keys below it")


def _set_setting(
    node: FunctionConfig | TaskConfig, parts: list[str], text: Text, key: str, root: Config
) -> Any:
    """`node` with one setting of its function changed; `settings` may be left out of the key."""
    known = function_settings(node, key)
    name, *rest = parts[1:] if parts[0] == "settings" else parts
    if name not in known:
        raise _unknown(name, key, [*field_types(type(node)), *known], root)
    below = f"{key}.settings.{name}"
    value = _set(node.settings.get(name), known[name].annotation, rest, text, below, root)
    return dataclasses.replace(node, settings={**node.settings, name: value})


def _unknown(part: str, key: str, known: list[str], root: Config) -> ConfigError:
    """The error for an unknown `part` of `key`, with the nearest key here, else anywhere."""
    hint = nearest(part, known)
    if hint:
        hint = hint.replace("did you mean '", f"did you mean '{key}.")
    else:
        leaves = [leaf for leaf, _ in leaf_keys(root)]
        same = [leaf for leaf in leaves if leaf.rpartition(".")[2] == part]
        hint = f"; did you mean 'config.{same[0]}'?" if same else ""
    return ConfigError(f"unknown key {key}.{part}{hint}\nkeys of {key}: {', '.join(known)}")


def leaf_keys(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of every value of a config that is no dataclass itself."""
    for entry in dataclasses.fields(config):
        value = getattr(config, entry.name)
        key = f"{prefix}{entry.name}"
        if dataclasses.is_dataclass(value):
            yield from leaf_keys(value, f"{key}.")
        else:
            yield key, value


# ------------------------------------------------------------------------- JSON


def resolve(config: Config) -> Config:
    """`config` with the default of every function and task setting written out."""

    def walk(node: Any, key: str) -> Any:
        if isinstance(node, FunctionConfig | TaskConfig):
            known = function_settings(node, key)
            literal = {n: s.default for n, s in known.items() if s.default is not UNREADABLE}
            return dataclasses.replace(node, settings={**literal, **node.settings})
        if isinstance(node, tuple):
            return tuple(walk(entry, f"{key}.{i}") for i, entry in enumerate(node))
        if dataclasses.is_dataclass(node) and not isinstance(node, type):
            names = [entry.name for entry in dataclasses.fields(node)]
            values = {name: walk(getattr(node, name), f"{key}.{name}") for name in names}
            return dataclasses.replace(node, **values)
        return node

    return walk(config, "config")


def to_json(config: Config) -> str:
    """The resolved config as JSON text; `from_json` reads it back."""
    return json.dumps(dataclasses.asdict(resolve(config)), indent=2) + "\n"


def from_json(text: str) -> Config:
    """The Config that `to_json` wrote; types are checked, sizes are not."""
    return coerce(json.loads(text), Config, "config")
