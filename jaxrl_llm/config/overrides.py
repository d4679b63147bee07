"""Overrides of a config: a dotted key with its value, which may be text of a command line."""

import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from jaxrl_llm.config.bounds import Text
from jaxrl_llm.config.messages import ConfigError, UnknownKeyError, explain
from jaxrl_llm.config.python_objects import GivenRows
from jaxrl_llm.config.records import Custom, Kind, Record, classes_in, fields_of, validate
from jaxrl_llm.config.schema import Config
from jaxrl_llm.config.tree import key_that_ends_in
from jaxrl_llm.references import nearest, shown

__all__ = ["Overrides", "apply_override", "apply_overrides"]

_log = logging.getLogger(__name__)

Overrides = Mapping[str, Any] | Sequence[tuple[str, Any]]


def apply_overrides(config: Config, overrides: Overrides) -> Config:
    """`config` with each override in order; rules that span fields are not checked.

    Data of the overrides, files or a class, replaces the config's tasks, unless the overrides name
    tasks too. A log line says so.
    """
    given: Any = overrides.items() if isinstance(overrides, Mapping) else overrides
    pairs = given if isinstance(given, Iterable) and not isinstance(given, str) else [given]
    keys: set[str] = set()
    for pair in pairs:
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            why = f"the overrides {shown(overrides)} are no dict and no list of pairs"
            raise ConfigError(f"{why}: write {{'rollout.n': 8}}")
        config = apply_override(config, *pair)
        keys.add(pair[0])
    return _with_files_for_tasks(config, keys)


def _with_files_for_tasks(config: Config, keys: set[str]) -> Config:
    """`config` without the tasks that data of `keys`, files or a class, replaces.

    Held-out tasks belong to the training tasks: they go with them where no held-out data is given.
    """

    def names(field: str) -> bool:
        return any(f"{key}.".startswith(f"data.{field}.") for key in keys)

    data, gone = config.data, []
    trains = [field for field in ("train_files", "dataset_class") if getattr(data, field)]
    if any(map(names, trains)) and data.train_tasks and not names("train_tasks"):
        gone.append("train_tasks")
    holds_out = bool(names("val_files") and data.val_files)
    if data.val_tasks and not names("val_tasks") and (holds_out or gone and not names("val_files")):
        gone.append("val_tasks")
    for field in gone:
        config = apply_override(config, f"data.{field}", ())
    if gone:
        fields = " and ".join(f"config.data.{field}" for field in gone)
        _log.warning(
            "your data replaces the tasks of the config, %s; to use both, name tasks too: "
            "--config.data.%s=[chain_sum]",
            fields,
            gone[0],
        )
    return config


def apply_override(config: Config, key: str, value: Any) -> Config:
    """`config` with the `value` at the dotted `key` (without "config."); text is read."""
    if not isinstance(key, str):
        raise ConfigError(f"the key of an override is {shown(key)}: give text such as 'rollout.n'")
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
        same = key_that_ends_in(part, root)
        hint = f"; did you mean 'config.{same}'?" if same else ""
    return UnknownKeyError(
        f"unknown key {key}.{part}{hint}\nkeys of {key}: {', '.join(known) or 'none'}",
        ".".join([key, *parts]).removeprefix("config."),
        text,
    )


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
