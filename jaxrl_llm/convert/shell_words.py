"""The words of a shell script: quotes, `$` expansions, comments and continuations, not expanded.

What a script means is in `shell.py`. Nothing here runs anything.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from jaxrl_llm.config import ConfigError

REDIRECTIONS = ("&>>", "&>", "<<<", "<<", ">>", ">&", "<&", "<", ">")
OPERATORS = (*REDIRECTIONS, "&&", "||", ";;", "\n", ";", "|", "&", "(", ")")
NAME = re.compile(r"[A-Za-z_]\w*")
CLOSING = {"(": ")", "{": "}", "[": "]"}


@dataclass(frozen=True)
class Part:
    """A stretch of a word. A quoted one is never split into several words."""

    kind: Literal["text", "variable", "command", "sum"]
    text: str
    quoted: bool = False


@dataclass(frozen=True)
class Token:
    """A word, or an operator, which has no parts; `line` counts from 1."""

    line: int
    parts: tuple[Part, ...] = ()
    operator: str = ""

    @property
    def plain(self) -> str:
        """The text of a word without expansions; else empty."""
        return "".join(part.text for part in self.parts) if self.is_plain else ""

    @property
    def is_plain(self) -> bool:
        return all(part.kind == "text" for part in self.parts)


def tokens(script: str) -> list[Token]:
    """Words and operators of a script, in order.

    Raises: ConfigError, with the line, where a quote or a bracket is not closed.
    """
    return list(_Reader(script.replace("\\\r\n", "\\\n")).tokens())


class _Reader:
    """A place in a script."""

    def __init__(self, script: str) -> None:
        self.script = script
        self.at = 0

    @property
    def line(self) -> int:
        return self.script.count("\n", 0, self.at) + 1

    def tokens(self) -> Iterator[Token]:
        before, ends = "", list[str]()  # of the here-documents that begin at the next line
        while self._skip_blanks():
            line = self.line
            operator = self._operator()
            if operator == "\n":
                for end in ends:
                    self._skip_document(end, line)
                ends.clear()
            if operator:
                before = operator
                yield Token(line, operator=operator)
                continue
            parts = tuple(self._word())
            if parts and before == "<<":
                ends.append("".join(part.text for part in parts))
            before = ""
            if parts:
                yield Token(line, parts)

    def _skip_document(self, end: str, line: int) -> None:
        """Go behind a here-document, which ends at a line of its own; `<<-` lets it be indented."""
        indent, name = ("\t*", end[1:]) if end.startswith("-") else ("", end)
        closing = re.compile(rf"^{indent}{re.escape(name)}$", re.MULTILINE)
        found = closing.search(self.script, self.at)
        if found is None:
            raise ConfigError(f"line {line}: the text after <<{end} has no line {name}")
        self.at = found.end()

    def _skip_blanks(self) -> bool:
        """Go to the next token; whether there is one."""
        blank = re.compile(r"(?:[ \t\r]+|\\\n|#[^\n]*)*")
        found = blank.match(self.script, self.at)
        assert found is not None
        self.at = found.end()
        return self.at < len(self.script)

    def _operator(self) -> str:
        found = next((op for op in OPERATORS if self.script.startswith(op, self.at)), "")
        self.at += len(found)
        return found

    def _word(self) -> Iterator[Part]:
        start = self.at
        while self.at < len(self.script):
            letter = self.script[self.at]
            if letter in " \t\r\n;|&()<>":
                if letter == "(" and self._is_array(start):
                    self.at += 1
                    yield Part("text", "(")
                return
            if letter == "\\":
                yield from self._escaped()
            elif letter == "'":
                yield Part("text", self._until("'"), quoted=True)
            elif letter == '"':
                yield from self._double()
            elif letter in "$`":
                yield self._expansion(quoted=False)
            else:
                self.at += 1
                yield Part("text", letter)

    def _is_array(self, start: int) -> bool:
        """Whether the word so far is NAME= or NAME+=."""
        return bool(re.fullmatch(r"[A-Za-z_]\w*\+?=", self.script[start : self.at]))

    def _escaped(self) -> Iterator[Part]:
        following = self.script[self.at + 1 : self.at + 2]
        self.at += 2
        if following != "\n":
            yield Part("text", following, quoted=True)

    def _until(self, closing: str) -> str:
        """The text up to a quote that closes the one at this place."""
        line, end = self.line, self.script.find(closing, self.at + 1)
        if end < 0:
            raise ConfigError(f"line {line}: the quote {closing} is not closed")
        text = self.script[self.at + 1 : end]
        self.at = end + 1
        return text

    def _double(self) -> Iterator[Part]:
        line = self.line
        self.at += 1
        yield Part("text", "", quoted=True)  # "" is a word
        while self.at < len(self.script):
            letter = self.script[self.at]
            if letter == '"':
                self.at += 1
                return
            if letter == "\\":
                following = self.script[self.at + 1 : self.at + 2]
                self.at += 2
                kept = following if following in '$`"\\' else "\\" + following
                yield Part("text", "" if following == "\n" else kept, quoted=True)
            elif letter in "$`":
                yield self._expansion(quoted=True)
            else:
                self.at += 1
                yield Part("text", letter, quoted=True)
        raise ConfigError(f'line {line}: the quote " is not closed')

    def _expansion(self, *, quoted: bool) -> Part:
        script, at = self.script, self.at
        if script[at] == "`":
            return Part("command", self._until("`"), quoted)
        if script.startswith("$((", at):
            inner = self._bracket(at + 1)
            return Part("sum", inner[1:-1], quoted)
        if script.startswith("$(", at):
            return Part("command", self._bracket(at + 1), quoted)
        if script.startswith("${", at):
            return Part("variable", self._bracket(at + 1), quoted)
        name = NAME.match(script, at + 1) or re.compile(r"[@*#?$!0-9]").match(script, at + 1)
        if name is None and not quoted and script.startswith("$'", at):
            raise ConfigError(f"line {self.line}: $'...' is not read here; write the text itself")
        if name is None:
            self.at += 1
            return Part("text", "$", quoted)
        self.at = name.end()
        return Part("variable", name[0], quoted)

    def _bracket(self, opening: int) -> str:
        """What the bracket at `opening` holds; brackets and quotes in it are skipped."""
        first = self.script[opening]
        depth, at, quote = 0, opening, ""
        while at < len(self.script):
            letter = self.script[at]
            if letter == "\\":
                at += 1
            elif quote:
                quote = "" if letter == quote else quote
            elif letter in "'\"":
                quote = letter
            elif letter in (first, CLOSING[first]):
                depth += 1 if letter == first else -1
            if depth == 0:
                self.at = at + 1
                return self.script[opening + 1 : at]
            at += 1
        raise ConfigError(f"line {self.line}: the bracket {first} is not closed")
