"""What a conversion did, key by key, for a person."""

from collections import defaultdict
from typing import Any

from jaxrl_llm.convert.conversion import Conversion, Converted, is_in
from jaxrl_llm.convert.rules import NoCounterpart, NotNeeded, Ours

MOST = 60  # characters of a value


def lines(found: Conversion) -> list[str]:
    """Translated keys, keys that are not needed, keys without counterpart, and what to look at."""
    return [
        *_group("translated", [_translated(each, found) for each in found.of_kind(Ours)]),
        *_group("not needed here", _reasons(found.of_kind(NotNeeded))),
        *_group("no counterpart", [_open(each) for each in found.of_kind(NoCounterpart)]),
        *_group("from defaults", [f"{k}={_short(v)}" for k, v in found.by_default.items()]),
        *_group("look at", list(found.notes)),
        *_group("not on this machine", list(found.missing)),
        summary(found),
    ]


def summary(found: Conversion) -> str:
    """How many keys became what."""
    translated, unneeded = len(found.of_kind(Ours)), len(found.of_kind(NotNeeded))
    open_keys = len(found.of_kind(NoCounterpart))
    return (
        f"{len(found.keys)} keys: {translated} translated, {unneeded} not needed, {open_keys} "
        "without counterpart"
    )


def _group(title: str, entries: list[str]) -> list[str]:
    return [title, *(f"  {entry}" for entry in entries), ""] if entries else []


def _translated(each: Converted, found: Conversion) -> str:
    answer = each.answer
    assert isinstance(answer, Ours)
    values = dict(answer.values)
    if answer.part_of:
        values = {k: v for k, v in found.values.items() if is_in(k, answer.part_of)}
    shown = ", ".join(f"{key}={_short(value)}" for key, value in values.items())
    shown = shown or f"{answer.part_of} has its default" * bool(answer.part_of)
    note = f" ({answer.note})" if shown and answer.note else answer.note
    return f"{each.key}={_short(each.value)} -> {shown}{note}"


def _reasons(found: list[Converted]) -> list[str]:
    """Keys with one reason share a line."""
    keys: dict[str, list[str]] = defaultdict(list)
    for each in found:
        assert isinstance(each.answer, NotNeeded)
        keys[each.answer.why].append(each.key)
    return [f"{', '.join(names)}: {why}" for why, names in keys.items()]


def _open(found: Converted) -> str:
    assert isinstance(found.answer, NoCounterpart)
    return f"{found.key}={_short(found.value)}: {found.answer.remedy}"


def _short(value: Any) -> str:
    if isinstance(value, list) and value and all(isinstance(entry, dict) for entry in value):
        value = [entry.get("kind") or entry for entry in value]
    text = str(value)
    return text if len(text) <= MOST else f"{text[: MOST - 3]}..."
