"""An override of a config: a dotted key with its value, which may be text of a command line."""

import re
from typing import Any, TypeVar, get_args, get_origin

from pydantic import ValidationError

from jaxrl_llm.references import nearest
from jaxrl_llm.typed_records.bounds import Text
from jaxrl_llm.typed_records.messages import ConfigError, UnknownKeyError, explain
from jaxrl_llm.typed_records.other_words import answer
from jaxrl_llm.typed_records.python_objects import GivenParams, GivenRows
from jaxrl_llm.typed_records.record import Custom, Kind, Record, classes_in, fields_of, validate
from jaxrl_llm.typed_records.tree import key_that_ends_in

__all__ = ["apply_override"]

R = TypeVar("R", bound=Record)
OPENING = {"[": "]", "(": ")", "{": "}"}
ENCLOSING = (*OPENING, "'", '"')


def apply_override(config: R, key: str, value: Any) -> R:
    """`config` with the `value` at the dotted `key` (without "config."); text is read."""
    return _set(config, key.split("."), value, "config", config)


def _set(node: Any, parts: list[str], text: Any, key: str, root: Record) -> Any:
    """`node` with the value that `parts` leads to replaced; `key` is how far we are."""
    part, rest, raw = parts[0], parts[1:], False
    below = f"{key}.{part}"
    if isinstance(node, Record):
        if part not in fields_of(node):
            raise _unknown(node, parts, str(text), key, root)
        annotation, child = fields_of(node)[part].annotation, getattr(node, part)
        raw = annotation is str or _is_only_entry(text, annotation)
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


def _is_only_entry(text: Any, annotation: Any) -> bool:
    """True if text is all of a list of texts, as in tuple[str, ...]. It may be a new line."""
    entry = next(iter(get_args(annotation)), None) if get_origin(annotation) is tuple else None
    of_texts = entry is str or get_args(entry)[:1] == (str,)
    return of_texts and isinstance(text, str) and not text.strip().startswith(ENCLOSING)


def _default(annotation: Any, key: str) -> Any:
    """The record that a key below None begins with: --config.warmup.steps=5 asks for a warm-up."""
    for cls in classes_in(annotation):
        if cls in (GivenRows, GivenParams):
            raise ConfigError(f"{key} holds an object of a Python program; name files instead")
        if issubclass(cls, Kind):
            raise ConfigError(f"{key} is not set: name its kind first, {key}=NAME")
        if issubclass(cls, Record):
            return cls()
    raise ConfigError(f"{key} is a single value and has no keys below it")


def _unknown(node: Record, parts: list[str], text: str, key: str, root: Record) -> ConfigError:
    """The error for an unknown part of `key`, with the nearest key here, else anywhere.

    For a word of TRL or verl it names the key that does the same.
    """
    part, known = parts[0], fields_of(node)
    name = ".".join([key, *parts]).removeprefix("config.")
    ours = "" if parts[1:] or isinstance(node, Custom) else answer(part, key)
    if ours:
        return UnknownKeyError(f"unknown key {key}.{part}: here it is {ours}", name, text)
    hint = nearest(part, known, prefix=f"{key}.")
    if isinstance(node, Custom):
        hint = hint or f"; a setting of your function is {key}.settings.{part}"
    elif isinstance(node, Kind) and part in ("kind", "path"):
        hint = f": write --{key}={text}"
    elif not hint:
        same = key_that_ends_in(part, root)
        hint = f"; did you mean 'config.{same}'?" if same else ""
    return UnknownKeyError(
        f"unknown key {key}.{part}{hint}\nkeys of {key}: {', '.join(known) or 'none'}", name, text
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
    closing = OPENING.get(text[:1])
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
        if name in pairs:
            raise ConfigError(f"{key}.{name} stands twice; give one of its values")
        pairs[name] = _parse(value, f"{key}.{name}")
    return pairs


def split_entries(text: str) -> list[str] | None:
    """The entries between commas outside brackets and quotes, stripped; empty ones are left out.

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
