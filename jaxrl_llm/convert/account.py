"""The account of a conversion, key by key, for a person."""

from collections import defaultdict
from typing import Any

from jaxrl_llm.convert.conversion import Conversion, Converted, is_in
from jaxrl_llm.convert.rules import NoCounterpart, NotNeeded, Ours

MOST = 60  # characters of a value


def lines(conversion: Conversion) -> list[str]:
    """Translated keys, keys that are not needed, keys without counterpart, and what to look at."""
    return [
        *_group("translated", [_translated(each, conversion) for each in conversion.of_kind(Ours)]),
        *_group("not needed here", _reasons(conversion.of_kind(NotNeeded))),
        *_group("no counterpart", [_open(each) for each in conversion.of_kind(NoCounterpart)]),
        *_group("from defaults", [f"{k}={_short(v)}" for k, v in conversion.by_default.items()]),
        *_group("look at", list(conversion.notes)),
        *_group("not on this machine", list(conversion.missing)),
        summary(conversion),
    ]


def summary(conversion: Conversion) -> str:
    """Count the keys by what they became."""
    translated, unneeded = len(conversion.of_kind(Ours)), len(conversion.of_kind(NotNeeded))
    open_keys = len(conversion.of_kind(NoCounterpart))
    return (
        f"{len(conversion.keys)} keys: {translated} translated, {unneeded} not needed, {open_keys} "
        "without counterpart"
    )


def _group(title: str, entries: list[str]) -> list[str]:
    return [title, *(f"  {entry}" for entry in entries), ""] if entries else []


def _translated(each: Converted, conversion: Conversion) -> str:
    answer = each.answer
    assert isinstance(answer, Ours)
    values = dict(answer.values)
    if answer.part_of:
        values = {k: v for k, v in conversion.values.items() if is_in(k, answer.part_of)}
    shown = ", ".join(f"{key}={_short(value)}" for key, value in values.items())
    shown = shown or f"{answer.part_of} has its default" * bool(answer.part_of)
    note = f" ({answer.note})" if shown and answer.note else answer.note
    return f"{each.key}={_short(each.value)} -> {shown}{note}"


def _reasons(converted: list[Converted]) -> list[str]:
    """Keys with one reason share a line."""
    keys: dict[str, list[str]] = defaultdict(list)
    for each in converted:
        assert isinstance(each.answer, NotNeeded)
        keys[each.answer.why].append(each.key)
    return [f"{', '.join(names)}: {why}" for why, names in keys.items()]


def _open(converted: Converted) -> str:
    assert isinstance(converted.answer, NoCounterpart)
    return f"{converted.key}={_short(converted.value)}: {converted.answer.remedy}"


def _short(value: Any) -> str:
    if isinstance(value, list) and value and all(isinstance(entry, dict) for entry in value):
        value = [entry.get("kind") or entry for entry in value]
    text = str(value)
    return text if len(text) <= MOST else f"{text[: MOST - 3]}..."
