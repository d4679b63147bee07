"""How a conversation becomes ids: by a chat template, or as plain text.

Ids that were sampled are never encoded again. A style gives the ids of the prompt, and of what
stands between a sampled turn and the next.
"""

import json
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any, Protocol

from jaxrl_llm.agents.call_formats import Call
from jaxrl_llm.agents.environments import Observation
from jaxrl_llm.agents.tool_calls import ToolCallParser
from jaxrl_llm.agents.tools import Result, Schema
from jaxrl_llm.tokenizer import Tokenizer
from jaxrl_llm.turns import CALL_ID, END_OF_THINKING, THINKING, Turns

Message = dict[str, Any]
MOST_PROMPTS = 64  # prompts that are kept, as samples of a group have the same
MOST_SUFFIXES = 4096  # suffixes that are kept, as observations are often the same
RESULT = "dummyresult"  # a word that no template writes by itself
LISTING = (
    "You may call these tools. A call is a JSON object with the name and the arguments:\n"
    '<tool_call>\n{{"name": NAME, "arguments": {{KEY: VALUE}}}}\n</tool_call>\n\n{}'
)
USER: Message = {"role": "user", "content": "dummy"}


class Style(Protocol):
    """How a conversation becomes ids."""

    parser: ToolCallParser

    def encode(self, text: str) -> list[int]:
        """Ids of a text, to count them."""
        ...

    def prompt(
        self, messages: Sequence[Message], ids: Sequence[int], opening: Observation
    ) -> tuple[list[int], list[Message]]:
        """Ids of the prompt, and its messages, with what an environment opens with."""
        ...

    def results(
        self, calls: Sequence[Call], results: Sequence[Result], stop: int
    ) -> tuple[list[int], list[Message]]:
        """Ids and messages of the results of a turn. `stop` is the last id of the turn."""
        ...

    def observation(self, observation: Observation, stop: int) -> tuple[list[int], list[Message]]:
        """Ids and messages of what an environment answers."""
        ...

    def again(self, messages: Sequence[Message]) -> list[int] | None:
        """Ids of a whole conversation, encoded again; None where no template writes it."""
        ...

    def without_thinking(self, messages: Sequence[Message], first: int) -> list[int] | None:
        """Ids of the prompt of the next turn, where the template drops thinking of turns.

        Turns from the place `first` on count. None where nothing is dropped.
        """
        ...


class ChatStyle:
    """A chat template. Raises ValueError where turns cannot be added to it."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        tools: Sequence[Schema] = (),
        variables: Mapping[str, Any] | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._tools, self._listed = list(tools), ""
        turns = tokenizer.turns(tools, variables)
        names = [tool["function"]["name"] for tool in tools]
        if tools and not all(name in turns.prompt([USER]) for name in names):
            self._listed = LISTING.format("\n".join(map(json.dumps, tools)))
            turns = tokenizer.turns(None, variables)
        self._turns: Turns = turns
        self.parser = ToolCallParser(tokenizer, tools, "plain" if self._listed else "")
        self._suffix = lru_cache(MOST_SUFFIXES)(self._find_suffix)
        self._encoded = lru_cache(MOST_PROMPTS)(tokenizer.encode)
        self._as_tool = bool(tools) and self._writes_results(names[0], 1)
        self._several = self._as_tool and self._writes_results(names[0], 2)
        self._check(names[:1])

    def _check(self, names: Sequence[str]) -> None:
        """Try a user message, one result and two: their texts must be there."""
        call = [Call(name, "{}", {}) for name in names]
        tried = [self.observation(RESULT, -1)]
        tried += [self.results(call * n, [Result(RESULT)] * n, -1) for n in (1, 2) if call]
        for ids, _ in tried:
            if RESULT not in self._tokenizer.decode(ids):
                raise ValueError("the chat template does not write what follows a turn")

    def _writes_results(self, name: str, number: int) -> bool:
        """Whether the template has a role for so many results."""
        messages = [_tool_message(name, "", RESULT)] * number
        try:
            ids = self._turns.suffix(messages, calls=[name] * number)
        except ValueError:
            return False
        return RESULT in self._tokenizer.decode(ids)

    def encode(self, text: str) -> list[int]:
        """Ids of a text."""
        return self._tokenizer.encode(text)

    def prompt(
        self, messages: Sequence[Message], ids: Sequence[int], opening: Observation
    ) -> tuple[list[int], list[Message]]:
        """The row's own ids; with tools or an opening, ids of the whole prompt."""
        messages = [dict(message) for message in messages]
        if not self._tools and opening is None:
            return list(ids), messages
        if isinstance(opening, str):
            last = next((m for m in reversed(messages) if m["role"] == "user"), None)
            if last is None:
                messages.append(last := {"role": "user", "content": ""})
            last["content"] = f"{last['content']}{opening}"
        else:
            messages += opening or []
        if not self._listed:
            return self._ids(self._turns.prompt(messages)), messages
        try:
            listed = _with_system(messages, self._listed)
            return self._ids(self._turns.prompt(listed)), listed
        except ValueError:  # a template without a system message
            listed = [dict(message) for message in messages]
            listed[0]["content"] = f"{self._listed}\n\n{listed[0]['content']}"
            return self._ids(self._turns.prompt(listed)), listed

    def _ids(self, text: str) -> list[int]:
        return list(self._encoded(text))

    def results(
        self,
        calls: Sequence[Call],
        results: Sequence[Result],
        stop: int,
        then: Sequence[Message] = (),
    ) -> tuple[list[int], list[Message]]:
        """Results as one group: in the template's role for them, else as one message.

        Messages may follow in the same turn.
        """
        names = [call.name or "unknown" for call in calls]
        messages = [
            _tool_message(name, call.id, result.text)
            for name, call, result in zip(names, calls, results, strict=True)
        ]
        if len(messages) > 1 and not self._several:
            text = "\n".join(result.text for result in results)
            messages, names = [messages[0] | {"content": text}], names[:1]
        if self._as_tool:
            said = [*messages, *then]
            return self._suffix(json.dumps(said), tuple(names), stop), said
        asked = [{"role": "user", "content": messages[0]["content"]}, *then]
        return self._suffix(json.dumps(asked), (), stop), [*messages, *then]

    def observation(self, observation: Observation, stop: int) -> tuple[list[int], list[Message]]:
        """Messages of an environment; a text is a user message."""
        text = {"role": "user", "content": observation or ""}
        messages = observation if isinstance(observation, list) and observation else [text]
        return self._suffix(json.dumps(messages), (), stop), messages

    def again(self, messages: Sequence[Message]) -> list[int] | None:
        """Ids of a whole conversation; None where the template has no calls of tools.

        Raises: ValueError where the template refuses the conversation.
        """
        return None if self._listed else self._tokenizer.encode(self._turns.text(messages))

    def without_thinking(self, messages: Sequence[Message], first: int) -> list[int] | None:
        """See `Style`. Thinking stays where the template has no calls of tools, or refuses them."""
        thoughts = [_thought(message) for message in messages]
        marks = [RESULT if i >= first and thought else "" for i, thought in enumerate(thoughts)]
        if self._listed or not any(marks):
            return None
        try:
            marked = self._turns.prompt(self._thinking(messages, marks))
            if marked.count(RESULT) >= sum(map(bool, marks)):
                return None
            return self._tokenizer.encode(self._turns.prompt(self._thinking(messages, thoughts)))
        except ValueError:  # for example arguments that are no JSON
            return None

    def _thinking(self, messages: Sequence[Message], thoughts: Sequence[str]) -> list[Message]:
        """The messages with this thinking, as the template reads it."""
        shown = []
        for message, thought in zip(messages, thoughts, strict=True):
            if message["role"] == "tool" and not self._as_tool:
                message = {"role": "user", "content": message["content"]}
            if message["role"] == "assistant":
                said = (message.get("content") or "").rpartition(END_OF_THINKING)[2]
                message = {k: v for k, v in message.items() if k not in THINKING}
                message["content"] = said.lstrip("\n")
                if thought and self._thinking_key:
                    message[self._thinking_key] = thought
                elif thought:
                    block = f"<think>\n{thought}\n{END_OF_THINKING}\n\n"
                    message["content"] = block + message["content"]
            shown.append(message)
        return shown

    @cached_property
    def _thinking_key(self) -> str:
        """The key of a message whose text the template writes as thinking; else empty."""
        for key in THINKING:
            try:
                text = self._turns.text([USER, USER | {"role": "assistant", key: RESULT}])
            except ValueError:
                continue
            if RESULT in text:
                return key
        return ""

    def _find_suffix(self, messages: str, names: tuple[str, ...], stop: int) -> list[int]:
        return self._turns.suffix(json.loads(messages), calls=names, sampled_stop=stop)


class PlainStyle:
    """Text without roles. A turn ends with one of the environment's texts, each of them one id."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self.parser = ToolCallParser(tokenizer, (), "plain")
        ids = [self.encode(text) for text in stop]
        for text, own in zip(stop, ids, strict=True):
            if len(own) != 1:
                raise ValueError(
                    f"the environment ends turns with {text!r}, which is {len(own)} tokens: choose "
                    "texts of one token, or a model with a chat template"
                )
        self.stop_ids = tuple(dict.fromkeys([*tokenizer.stop_ids, *(own[0] for own in ids)]))

    def prompt(
        self, messages: Sequence[Message], ids: Sequence[int], opening: Observation
    ) -> tuple[list[int], list[Message]]:
        """The prompt with the opening behind it, which is a message of its own."""
        text = _joined(opening)
        said = [{"role": "user", "content": text}] if text else []
        return [*ids, *self.encode(text)], [*messages, *said]

    def results(
        self, calls: Sequence[Call], results: Sequence[Result], stop: int
    ) -> tuple[list[int], list[Message]]:
        """Results, each on lines of its own."""
        text = "".join(f"\n{result.text}" for result in results) + "\n"
        return self.encode(text), [{"role": "tool", "content": text}]

    def observation(self, observation: Observation, stop: int) -> tuple[list[int], list[Message]]:
        """The text of an environment as it is."""
        text = _joined(observation)
        return self.encode(text), [{"role": "user", "content": text}]

    def again(self, messages: Sequence[Message]) -> None:
        """A text has no template."""

    def without_thinking(self, messages: Sequence[Message], first: int) -> None:
        """A text drops nothing."""

    def encode(self, text: str) -> list[int]:
        """Ids of a text that does not begin a document; an unknown character becomes a ?."""
        try:
            return self._tokenizer.encode_parts(f"\n{text}", [1])[1]
        except ValueError:
            known = [c if self._knows(c) else "?" for c in text]
            return self._tokenizer.encode_parts(f"\n{''.join(known)}", [1])[1]

    def _knows(self, character: str) -> bool:
        try:
            self._tokenizer.encode(character)
        except ValueError:
            return False
        return True


def _joined(observation: Observation) -> str:
    if isinstance(observation, list):
        return "".join(str(message.get("content", "")) for message in observation)
    return observation or ""


def _thought(message: Message) -> str:
    """The thinking of a message: a part of its own, or of its content."""
    if message["role"] != "assistant":
        return ""
    own = next((str(message[key]) for key in THINKING if message.get(key)), "")
    content = str(message.get("content") or "").rpartition(END_OF_THINKING)[0]
    return (own or content.rpartition("<think>")[2]).strip()


def _tool_message(name: str, identity: str, text: str) -> Message:
    return {"role": "tool", "name": name, "tool_call_id": identity or CALL_ID, "content": text}


def _with_system(messages: Sequence[Message], text: str) -> list[Message]:
    """The messages, with a text before the system message."""
    first, rest = (messages[0], messages[1:]) if messages[0]["role"] == "system" else ({}, messages)
    said = f"{text}\n\n{first['content']}" if first else text
    return [{"role": "system", "content": said}, *(dict(message) for message in rest)]
