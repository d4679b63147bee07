"""Changes of every row before its format is known: names, chat, system prompt."""

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from jaxrl_llm.data.sources import BadRow, RawRow, Rows, parse_json
from jaxrl_llm.references import nearest

CONVERSATIONS = ("prompt", "messages")  # columns that may get the system prompt
ANSWERS = ("chosen", "rejected")  # columns that get it in rows without the others
AS_JSON = (*CONVERSATIONS, *ANSWERS, "completion")  # columns that may hold messages as JSON text
_PYTHON = re.compile(r"\s*\[\s*\{\s*'(role|content)'\s*:")  # messages as Python prints them


@dataclass(frozen=True, kw_only=True)
class Shape:
    """`columns` maps our name of a column to the file's; `a+b` joins the texts of two columns.

    `chat` makes a message of a text prompt.

    The row's column `system`, else the system prompt, goes before conversations that have none of
    their own. Without messages there, it goes before `chosen` and `rejected`.
    """

    columns: Mapping[str, str] = field(default_factory=dict)
    chat: bool = False
    system_prompt: str = ""

    def without_columns(self) -> "Shape":
        """For rows that already have our names."""
        return replace(self, columns={})

    def of(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """The row with our names, messages and the system prompt.

        Raises ValueError for a column that is not there, for messages in Python's form, and for a
        row without a conversation that could take the system prompt.
        """
        shaped = self._renamed(row)
        for name in AS_JSON:
            if isinstance(shaped.get(name), str):
                shaped[name] = messages_in(shaped[name], name)
        if self.chat and isinstance(shaped.get("prompt"), str):
            shaped["prompt"] = [{"role": "user", "content": shaped["prompt"]}]
        if self.system_prompt:
            self._check_conversation(shaped)
        own = shaped.get("system")  # as in ShareGPT's files
        if system := own if isinstance(own, str | bytes) and own else self.system_prompt:
            answers = [_first_role(shaped.get(name)) for name in ANSWERS]
            if isinstance(shaped.get("prompt"), str) and set(answers) <= {"assistant", "gpt"}:
                shaped["prompt"] = [{"role": "user", "content": shaped["prompt"]}]
            names = [name for name in CONVERSATIONS if _is_conversation(shaped.get(name))]
            for name in names or ANSWERS:
                if _is_conversation(shaped.get(name)):
                    shaped[name] = _with_system(shaped[name], system)
        return shaped

    def _renamed(self, row: Mapping[str, Any]) -> dict[str, Any]:
        if not self.columns:
            return dict(row)
        for name in (part for theirs in self.columns.values() for part in _joined(theirs, row)):
            if name not in row:
                raise ValueError(
                    f"the row has no column {name!r}{nearest(name, row)}, which "
                    f"config.data.columns names; it has {', '.join(map(repr, row)) or 'none'}"
                )
        parts = {ours: _joined(theirs, row) for ours, theirs in self.columns.items()}
        renamed = {
            ours: row[names[0]]
            if len(names) == 1
            else "\n\n".join(str(row[name]) for name in names if row[name])
            for ours, names in parts.items()
        }
        taken = {name for names in parts.values() for name in names} | renamed.keys()
        return {name: value for name, value in row.items() if name not in taken} | renamed

    def _check_conversation(self, row: Mapping[str, Any]) -> None:
        if not any(isinstance(row.get(name), list) for name in (*CONVERSATIONS, *ANSWERS)):
            raise ValueError(
                "config.data.system_prompt goes before a conversation, and the row has none: set "
                "--config.data.prompt_style=chat, or --config.data.system_prompt="
            )


def _with_system(messages: list[Any], system: str | bytes) -> list[Any]:
    if _first_role(messages) == "system":
        return messages
    return [{"role": "system", "content": system}, *messages]


def _first_role(value: Any) -> str | None:
    first = value[0] if _is_conversation(value) else None
    return first.get("role", first.get("from")) if isinstance(first, Mapping) else None


def _joined(theirs: str, row: Mapping[str, Any]) -> list[str]:
    """The columns that a value of data.columns names: `a+b` joins two, unless one has that name."""
    return [theirs] if theirs in row else theirs.split("+")


def messages_in(text: str, column: str) -> Any:
    """The messages that a text holds as JSON, as a CSV has them; another text as it is.

    Raises ValueError for messages as Python prints them, which a model would see as a text.
    """
    if not text.lstrip().startswith("[") or "role" not in text:
        return text
    if _PYTHON.match(text):
        raise ValueError(f"column {column!r} holds messages as Python prints them: write JSON")
    try:
        messages = parse_json(text)
    except ValueError:
        return text
    if not all(isinstance(message, dict) for message in messages):
        return text
    return messages if any({"role", "content"} <= m.keys() for m in messages) else text


def _is_conversation(value: Any) -> bool:
    return isinstance(value, list) and bool(value)


@dataclass(frozen=True)
class ShapedRows(Rows):
    """The rows of a source in another shape."""

    rows: Rows
    shape: Shape

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def bytes_of_one(self) -> int:
        return self.rows.bytes_of_one

    def read(self, start: int, stop: int) -> Iterator[RawRow | BadRow]:
        return map(self._shaped, self.rows.read(start, stop))

    def one(self, place: int) -> RawRow | BadRow:
        return self._shaped(self.rows.one(place))

    def only(self, columns: Collection[str]) -> Rows:
        renamed = self.shape.columns
        theirs = {part for name in renamed.values() for part in (name, *name.split("+"))}
        return ShapedRows(self.rows.only({*columns, *theirs}), self.shape)

    def _shaped(self, row: RawRow | BadRow) -> RawRow | BadRow:
        if isinstance(row, BadRow):
            return row
        try:
            return RawRow(row.source, row.row, self.shape.of(row.data))
        except ValueError as error:
            return BadRow(row.source, row.row, str(error))
