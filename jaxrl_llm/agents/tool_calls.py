"""Tool calls in sampled ids, in the format of each model family.

Delimiters that are tokens are found by their ids, so a text that only spells one is harmless. In
`marked` text each such token is one character, a lone surrogate, which no decoding gives.
Thinking holds no calls: what follows it counts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from jaxrl_llm.agents.call_formats import FORMATS, Call, Format
from jaxrl_llm.references import nearest

__all__ = ["Call", "Parsed", "ToolCallParser", "find_family"]

# Text that shows a family, in its chat template or among its tokens. The first row that fits wins.
SIGNS = (
    ("gpt_oss", "<|call|>"),
    ("deepseek", "<\uff5ctool\u2581calls\u2581begin\uff5c>"),
    ("gemma4", "<|tool_call>"),
    ("phi4", "<|tool_call|>"),
    ("lfm2", "<|tool_call_start|>"),
    ("mistral", "[TOOL_CALLS]"),
    ("qwen3_coder", "<function="),
    ("glm", "<arg_key>"),
    ("hermes", "<tool_call>"),
    ("llama3", "ipython"),
    ("llama3", "<|python_tag|>"),
)
MOST_ENDS = 1024  # ends of prompts that are kept; few differ
FIRST_MARK, NUM_MARKS = 0xD800, 2048  # the lone surrogates


class TokenTexts(Protocol):
    """The part of a tokenizer that this file uses."""

    @property
    def added_tokens(self) -> Mapping[str, tuple[int, bool]]:
        """Id of each added token, and whether it is a special one."""
        ...

    @property
    def template_text(self) -> str:
        """The chat template; empty without one."""
        ...

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Text of ids."""
        ...


@dataclass(frozen=True)
class Parsed:
    """An answer in parts, without special tokens."""

    content: str  # text outside of thinking and calls
    thinking: str
    calls: tuple[Call, ...]
    text: str  # content and calls as they were written


def find_family(tokenizer: TokenTexts) -> str:
    """The family whose calls the chat template writes, else whose tokens there are, else plain."""
    for place in (tokenizer.template_text, tokenizer.added_tokens):
        for family, sign in SIGNS:
            if sign in place:
                return family
    return "plain"


class ToolCallParser:
    """Parses answers of one model. `tools` are JSON schemas, which give values their types."""

    def __init__(
        self, tokenizer: TokenTexts, tools: Sequence[Mapping[str, Any]] = (), family: str = ""
    ):
        self.family = family or find_family(tokenizer)
        if self.family not in FORMATS:
            raise ValueError(
                f"there is no family {family!r} of tool calls{nearest(family, FORMATS)}\n"
                f"there are: {', '.join(FORMATS)}"
            )
        self._tokenizer = tokenizer
        self._format: Format = FORMATS[self.family]
        added = tokenizer.added_tokens
        special = {i for i, is_special in added.values() if is_special}
        wanted = (*self._format.delimiters, *self._format.thinking)
        self._delimiters = {token: token for token in wanted}  # as they stand in marked text
        self._marks: dict[int, str] = {}
        self._spelled: dict[int, str] = {}  # token of each mark
        self._decoded: dict[int, str] = {}  # the same, without special tokens
        self._known_ends: dict[tuple[int, ...], bool] = {}
        self._texts = {i: token for token, (i, _) in added.items()}
        self._special = special
        for token in dict.fromkeys(wanted):
            if token in added:
                self._delimiters[token] = self._mark(added[token][0])
        self._properties = {
            str(function.get("name")): (function.get("parameters") or {}).get("properties") or {}
            for function in (tool.get("function", tool) for tool in tools)
        }

    def parse(self, ids: Sequence[int], *, thinking: bool = False) -> Parsed:
        """The content and the calls of an answer. `thinking`: the prompt has opened it already."""
        text = self._marked(ids)
        while text and ord(text[-1]) in self._spelled and text[-1] not in self._delimiters.values():
            text = text[:-1]  # the end of the turn
        thought, text = self._format.split_thinking(text, self._delimiters, thinking)
        content, calls = self._format.read(text, self._delimiters, self)
        return Parsed(
            content=self.plain(content).strip(),
            thinking=self.plain(thought).strip(),
            calls=tuple(calls),
            text=self.plain(text).strip(),
        )

    def opens_thinking(self, prompt: Sequence[int]) -> bool:
        """True if a prompt ends with thinking that is open."""
        return self._opens(tuple(prompt[-16:]))

    def _opens(self, end: tuple[int, ...]) -> bool:
        if end not in self._known_ends:
            opening, closing = (self._delimiters[token] for token in self._format.thinking)
            text = self._marked(end)
            if len(self._known_ends) >= MOST_ENDS:
                self._known_ends.clear()
            self._known_ends[end] = text.rfind(opening) > text.rfind(closing)
        return self._known_ends[end]

    # --------------------------------------------------------------------- for the formats

    def properties(self, name: str) -> Mapping[str, Any]:
        """The schema of each argument of a tool; empty for an unknown tool."""
        return self._properties.get(name, {})

    def plain(self, marked: str) -> str:
        """A marked text without special tokens, as the tokenizer decodes it."""
        return marked.translate(self._decoded)

    def spelled(self, marked: str) -> str:
        """A marked text with the tokens that its marks stand for."""
        return marked.translate(self._spelled)

    def _mark(self, i: int) -> str:
        if i not in self._marks:
            self._marks[i] = chr(FIRST_MARK + len(self._marks))
            self._spelled[ord(self._marks[i])] = self._texts[i]
            self._decoded[ord(self._marks[i])] = "" if i in self._special else self._texts[i]
        return self._marks[i]

    def _marked(self, ids: Sequence[int]) -> str:
        """The text of ids, with one character for each special token and each delimiter."""
        parts: list[str] = []
        run: list[int] = []
        for i in ids:
            is_mark = i in self._marks or i in self._special and len(self._marks) < NUM_MARKS
            if not is_mark:
                run.append(i)
                continue
            parts += [self._tokenizer.decode(run, skip_special=False), self._mark(i)]
            run = []
        return "".join(parts) + self._tokenizer.decode(run, skip_special=False)
