"""A config as the Python file that makes it, with what differs from the defaults alone."""

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import MISSING
from typing import Any

from jaxrl_llm.config import Config
from jaxrl_llm.convert.conversion import Conversion, Converted
from jaxrl_llm.convert.rules import NoCounterpart
from jaxrl_llm.typed_records.record import Record, fields_of

WIDTH = 100


TITLES = {"verl": "verl", "trl": "TRL"}


def file_of(conversion: Conversion, library: str) -> str:
    """The Python file of a conversion; its docstring says what to look at before a run."""
    todo = [f"{each.key}: {_remedy(each)}" for each in conversion.of_kind(NoCounterpart)]
    parts = [f"Converted from a command line of {TITLES[library]} by `jaxrl convert-config`."]
    if conversion.notes:
        parts += ["Look at:", *(f"- {note}" for note in conversion.notes)]
    if todo:
        parts += ["No counterpart:", *(f"- {each}" for each in todo)]
    return python_file(conversion.config, _docstring(parts))


def _remedy(converted: Converted) -> str:
    assert isinstance(converted.answer, NoCounterpart)
    return converted.answer.remedy


def _docstring(parts: list[str]) -> str:
    """Paragraphs and lists within the width, without what would end a docstring."""
    lines: list[str] = []
    for part in parts:
        plain = part.replace("\\", "/").replace('"', "'")
        is_entry = plain.startswith("- ")
        if lines and not is_entry:
            lines.append("")
        lines += textwrap.wrap(
            plain,
            WIDTH - 3 * (not lines),
            subsequent_indent="  " * is_entry,
            break_long_words=False,
        )
    return lines[0] if len(lines) == 1 else "\n".join([*lines, ""])


def python_file(config: Config, docstring: str) -> str:
    """A file with get_config(), which returns `config`."""
    lines = expression(config, indent=4, prefix=len("return "))
    return (
        f'"""{docstring}"""\n\nfrom jaxrl_llm import config as c\n\n\n'
        f"def get_config() -> c.Config:\n"
        f'    """The run; every value can be overridden on the command line."""\n'
        f"    return {lines}\n"
    )


def expression(value: Any, *, indent: int, prefix: int = 0) -> str:
    """A value as Python; on one line if it fits behind `indent` and `prefix` characters."""
    if isinstance(value, Record):
        name = f"c.{type(value).__name__}"
        entries = [(f"{field}=", entry) for field, entry in changed(value)]
        return _call(f"{name}(", entries, ")", indent, prefix)
    if isinstance(value, Mapping):
        entries = [(f"{_text(key)}: ", entry) for key, entry in value.items()]
        return _call("{", entries, "}", indent, prefix)
    if isinstance(value, Sequence) and not isinstance(value, str):
        entries = [("", entry) for entry in value]
        return _call("(", entries, ",)" if len(entries) == 1 else ")", indent, prefix)
    return _text(value)


def _call(
    opening: str, entries: list[tuple[str, Any]], closing: str, indent: int, prefix: int
) -> str:
    flat = ", ".join(name + expression(value, indent=0) for name, value in entries)
    line = f"{opening}{flat}{closing}"
    if "\n" not in line and indent + prefix + len(line) + 1 <= WIDTH and len(entries) < 6:
        return line
    inner = indent + 4
    rows = [
        " " * inner + name + expression(value, indent=inner, prefix=len(name)) + ","
        for name, value in entries
    ]
    return "\n".join([opening, *rows, " " * indent + closing.lstrip(",")])


def changed(record: Record) -> list[tuple[str, Any]]:
    """The fields of a record that are not its class's defaults, in order."""
    fields: list[tuple[str, Any]] = []
    for name, entry in fields_of(record).items():
        value = getattr(record, name)
        default = (
            entry.get_default(call_default_factory=True) if not entry.is_required() else MISSING
        )
        if value != default:
            fields.append((name, value))
    return fields


def _text(value: Any) -> str:
    """A plain value, with double quotes as the formatter writes them."""
    if isinstance(value, str):
        shown = repr(value)
        if shown[0] == "'" and '"' not in shown and "\\" not in shown:
            return f'"{shown[1:-1]}"'
        return shown
    return repr(value)
