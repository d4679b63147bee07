"""Conversations as token ids: the text that a chat template writes, and the part a model learns.

A turn is an assistant's message. It begins where the generation prompt ends. It ends with the token
that the template writes after it, such as <|im_end|>. Everything is found by rendering, so that it
holds for any template: the rows themselves, and small conversations of the word "dummy".

Guarantees: the ids of a row encode the template's own text as a whole. The ids of the prompt are
what the model gets in RL.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from os.path import commonprefix
from typing import Any, Protocol

Message = Mapping[str, Any]
DUMMY = "dummy"
SAID, RESULT = "dummyanswer", "dummyresult"  # words that no template writes by itself
CALL_ID = "dummycall"  # nine characters, as Mistral's template wants
TEMPLATE = "chat template"
USER: Message = {"role": "user", "content": DUMMY}
THINKING = ("reasoning_content", "thinking", "reasoning")  # keys of a message
END_OF_THINKING = "</think>"
KEEP = "--config.data.keep_thinking=true keeps it"


class ChatTokenizer(Protocol):
    """The part of a tokenizer that this file uses."""

    @property
    def eos_id(self) -> int:
        """End of a text."""
        ...

    @property
    def model_stop_ids(self) -> tuple[int, ...]:
        """End ids that the files of the model name."""
        ...

    @property
    def added_tokens(self) -> Mapping[str, tuple[int, bool]]:
        """Id of each added token, and whether it is a special one."""
        ...

    @property
    def template_name(self) -> str:
        """The chat template, for messages."""
        ...

    def encode(self, text: str) -> list[int]:
        """Ids of a text, without added special tokens."""
        ...

    def encode_parts(self, text: str, places: Sequence[int]) -> list[list[int]]:
        """Ids of the parts between `places`."""
        ...

    def apply_chat_template(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Any] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The conversation as one text. ValueError if the template refuses it."""
        ...


@dataclass(frozen=True)
class Piece:
    """Consecutive tokens of a row."""

    ids: Sequence[int]
    learned: bool
    origin: str  # where it comes from, for a reader


@dataclass(frozen=True)
class TurnEnd:
    """How a template ends a turn. Without a token, it writes none."""

    token: str = ""
    after: str = ""  # text that follows the token where the conversation ends
    begins_next: bool = False  # the token is the beginning of the next message, as in GLM


@dataclass(frozen=True)
class _Form:
    """How a template wants messages."""

    parts: bool = False  # content as a list of parts
    text_arguments: bool = False  # the arguments of a call may be JSON text
    object_arguments: bool = False  # the arguments of a call may be an object
    empty_content: bool = False  # a message with calls needs a content
    results: bool = True  # results of tools are written

    @property
    def writes_calls(self) -> bool:
        """True if the template writes tool_calls."""
        return self.text_arguments or self.object_arguments


@dataclass(frozen=True)
class _Turn:
    """A conversation up to a turn, and where in its text the turn stands."""

    index: int  # its message
    text: str
    start: int
    end: int
    is_open: bool  # the text lacks an end token
    calls: bool  # the turn calls tools


class Turns:
    """How one chat template writes turns. `tools` and `variables` come from a row.

    `known` has tried the template already, with other tools of the same tokenizer.
    """

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        tools: Sequence[Any] | None = None,
        variables: Mapping[str, Any] | None = None,
        known: "Turns | None" = None,
    ):
        self._tokenizer = tokenizer
        self._tools, self._variables = tools or None, variables
        self._known = known or self
        self._ends: dict[bool, TurnEnd] = {}

    # --------------------------------------------------------------------- rows

    def prompt(self, messages: Sequence[Message]) -> str:
        """The text that the model continues. A last message of the assistant is continued."""
        if messages[-1]["role"] != "assistant":
            return self._render(messages, prompt=True)
        return self._tokenizer.apply_chat_template(
            self._shaped(messages),
            add_generation_prompt=False,
            continue_final_message=True,
            tools=self._tools,
            variables=self._variables,
        )

    def text(self, messages: Sequence[Message]) -> str:
        """The text of a whole conversation."""
        return self._render(messages)

    def completion(
        self,
        messages: Sequence[Message],
        learned: Sequence[int],
        *,
        keep_thinking: bool = False,
    ) -> list[Piece]:
        """One row that ends with its last turn. `learned` are the places of the turns to learn.

        Raises ValueError for turns that the template cannot write in one row.
        """
        if keep_thinking:
            return self._kept(messages, set(learned), first=min(learned))
        rows = self._groups([self._turn(messages, i) for i in learned])
        if len(rows) != 1:
            raise ValueError(
                f"{self._name} rewrites earlier turns when a turn is added: give one turn of the "
                "assistant as the completion"
            )
        return self._pieces(rows[0])

    def conversation(
        self, messages: Sequence[Message], learned: Sequence[int], *, keep_thinking: bool = False
    ) -> list[list[Piece]]:
        """The rows of a conversation, with the text that the template writes after the last turn.

        A template may drop the thinking of earlier turns. Then each turn that it rewrites is a row
        of its own, or with `keep_thinking` all of them are one row with their thinking.
        """
        if keep_thinking:
            return [self._kept(messages, set(learned), first=0)]
        rows = self._groups([self._turn(messages, i) for i in learned])
        return [self._pieces(row, whole=True) for row in rows]

    def suffix(
        self, new: Sequence[Message], *, calls: Sequence[str] = (), sampled_stop: int = -1
    ) -> list[int]:
        """Ids between a sampled turn and the next: the end of the turn, `new`, generation prompt.

        `calls` names the tools that the turn called. `sampled_stop` is its last id, -1 where it is
        not known. If that id ends no turn, because the turn was cut, the template's end token comes
        first. The ids are the difference of two small conversations, so no sampled text is encoded
        again.
        """
        text, place, end = self._suffix_text(new, calls)
        if sampled_stop >= 0 and sampled_stop not in self._stops:
            place -= len(end)
        ids = self._tokenizer.encode_parts(text, [place])[1]
        return ids[1:] if ids[:1] == [sampled_stop] else ids

    def end(self, *, calls: bool = False) -> TurnEnd:
        """How the template ends a turn, with `calls` one that calls tools."""
        known = self._known
        if calls not in known._ends:
            try:
                known._ends[calls] = known._find_end(calls)
            except ValueError:  # the template refuses the small conversation
                known._ends[calls] = TurnEnd()
        return known._ends[calls]

    def end_ids(self) -> tuple[int, ...]:
        """Ids with which the template ends a turn."""
        ends = [self.end(), *([self.end(calls=True)] if self._form.writes_calls else [])]
        return tuple(
            dict.fromkeys(self._tokenizer.added_tokens[e.token][0] for e in ends if e.token)
        )

    # --------------------------------------------------------------------- one turn

    def _turn(self, messages: Sequence[Message], index: int) -> _Turn:
        message = messages[index]
        text = self._render(messages[: index + 1])
        start = self._start(messages, index, text)
        self._check_thinking(message, text[start:])
        calls = bool(message.get("tool_calls"))
        end = self.end(calls=calls)
        if not end.token or end.begins_next or end.token not in text[start:]:
            return _Turn(index, text, start, len(text), is_open=True, calls=calls)
        if text.endswith(end.token + end.after):
            stop = len(text) - len(end.after)
        else:
            stop = text.rindex(end.token) + len(end.token)
        return _Turn(index, text, start, stop, is_open=False, calls=calls)

    def _start(self, messages: Sequence[Message], index: int, text: str) -> int:
        """The place in a text where its last message begins, behind the generation prompt."""
        if not index:
            return self._first_start(text)
        # An answer may make the template drop the thinking of calls before it, as in gpt-oss.
        earlier = [_without_thinking(message) for message in messages[:index]]
        for history in (messages[:index], earlier):
            before = self._render(history, prompt=True)
            if text.startswith(before):
                return len(before)
        return self._after_header(messages, index)

    def _first_start(self, text: str) -> int:
        """The place where a first message begins: behind the header of a dummy turn."""
        dummy = self._render([{"role": "assistant", "content": SAID}])
        return len(commonprefix([dummy[: dummy.rfind(SAID)], text]))

    def _after_header(self, messages: Sequence[Message], index: int) -> int:
        """The place of a turn whose header is not the generation prompt, as in DeepSeek-R1."""
        before, text = self._render(messages[:index]), self._render(messages[: index + 1])
        user, answer = [USER], [USER, {"role": "assistant", "content": SAID}]
        short = self._render(user)
        asked, written = self._render(user, prompt=True), self._render(answer)
        header = commonprefix([asked[len(short) :], written[len(short) : written.rfind(SAID)]])
        if not header or not text.startswith(before + header):
            raise ValueError(f"{self._name} rewrites the prompt when the answer is added")
        return len(before + header)

    def _check_thinking(self, message: Message, turn: str) -> None:
        """ValueError where the template drops the thinking of the turn itself."""
        content = str(message.get("content", ""))
        thought = content.rpartition(END_OF_THINKING)[0].rpartition("<think>")[2].strip()
        if thought and thought not in turn:
            raise ValueError(f"{self._name} drops the thinking of the answer; {KEEP}")
        for key in THINKING:
            thought = message.get(key)
            if isinstance(thought, str) and thought.strip() not in turn:
                raise ValueError(f"{self._name} does not write {key!r} of the answer")

    # --------------------------------------------------------------------- rows of turns

    def _groups(self, turns: Sequence[_Turn]) -> list[list[_Turn]]:
        """Turns that one text holds: the text of each begins with the text before it."""
        groups: list[list[_Turn]] = []
        for turn in turns:
            if groups and turn.text.startswith(groups[-1][-1].text[: groups[-1][-1].end]):
                groups[-1].append(turn)
            else:
                groups.append([turn])
        return groups

    def _pieces(self, turns: Sequence[_Turn], *, whole: bool = False) -> list[Piece]:
        text, last = turns[-1].text, turns[-1]
        places: list[int] = []
        origins: list[tuple[bool, str]] = []
        for turn in turns:
            # The end token that a turn lacks may begin the next message.
            token = self._first_special(text[turn.end :]) if turn.is_open else ""
            places += [turn.start, turn.end + len(token)]
            origins += [(False, TEMPLATE), (True, f"message {turn.index}")]
        return self._encoded(text, places, origins, last if last.is_open else None, whole)

    def _encoded(
        self,
        text: str,
        places: Sequence[int],
        origins: Sequence[tuple[bool, str]],
        open_turn: _Turn | None,
        whole: bool,
    ) -> list[Piece]:
        *parts, rest = self._tokenizer.encode_parts(text, places)
        pieces = [Piece(ids, *origin) for ids, origin in zip(parts, origins, strict=True)]
        if open_turn is not None:
            token = self.end(calls=open_turn.calls).token or self.end().token
            end = self._tokenizer.added_tokens[token][0] if token else self._tokenizer.eos_id
            pieces.append(Piece([end], pieces[-1].learned, "end token, not in the template's text"))
        if whole:
            pieces.append(Piece(rest, False, TEMPLATE))
        return [piece for piece in pieces if piece.ids]

    def _kept(self, messages: Sequence[Message], learned: set[int], first: int) -> list[Piece]:
        """One row of all turns from `first` on, each as it is written when it is the last."""
        text, last = "", None
        places: list[int] = []
        origins: list[tuple[bool, str]] = []
        for i in range(first, max(learned) + 1):
            if messages[i]["role"] != "assistant":
                continue
            if last is None:
                before = self._render(messages[:i], prompt=True) if i else ""
            else:
                calls = [_name_of(call) for call in messages[last.index].get("tool_calls", ())]
                small, place, _ = self._suffix_text(messages[last.index + 1 : i], calls)
                before = small[place:]
                if last.is_open and (token := self._first_special(before)):
                    text, before = text + token, before[len(token) :]
                    places[-1] = len(text)
            last = self._with_thinking(messages, i, before)
            answer = last.text[last.start : last.end]
            text += before
            places += [len(text), len(text) + len(answer)]
            text += answer
            origins += [(False, TEMPLATE), (i in learned, f"message {i}")]
        assert last is not None
        return self._encoded(text, places, origins, last if last.is_open else None, False)

    def _with_thinking(self, messages: Sequence[Message], index: int, before: str) -> _Turn:
        """A turn with its thinking. Where the template drops it, the content as it stands."""
        try:
            return self._turn(messages, index)
        except ValueError:
            content, end = messages[index].get("content", ""), self.end()
            if END_OF_THINKING not in content or messages[index].get("tool_calls"):
                raise
        # The generation prompt may hold the beginning of the content, such as <think>.
        most = min(len(content), len(before))
        start = next(n for n in range(most, -1, -1) if before.endswith(content[:n]))
        is_open = end.begins_next or not end.token
        text = content + ("" if is_open else end.token)
        return _Turn(index, text, start, len(text), is_open, False)

    @property
    def _stops(self) -> set[int]:
        """Ids that end a turn."""
        return {*self._tokenizer.model_stop_ids, *self.end_ids()}

    def _suffix_text(self, new: Sequence[Message], calls: Sequence[str]) -> tuple[str, int, str]:
        """A small conversation with `new` and a generation prompt, and where its suffix begins.

        The end token of the turn stands before that place; it is empty where `new` begins with it.
        """
        answer: Message = {"role": "assistant", "content": DUMMY}
        if calls and self._form.writes_calls:
            answer = _calling([(name, {}) for name in calls])
        elif calls:  # the call is a text of the answer
            answer = {"role": "assistant", "content": ""}
        system: Message = {"role": "system", "content": DUMMY}
        stops = self._stops
        ends = {token for token, (i, _) in self._tokenizer.added_tokens.items() if i in stops}
        for small in ([USER, answer], [system, USER]):
            try:
                before = self._render(small)
                text = self._render([*small, *new], prompt=True)
            except ValueError:
                if small[0] is USER and calls:
                    raise
                continue
            start = len(self._render(small[:1])) if small[0] is USER else 0
            # The last end token that stays when messages are added: Phi-3's own end does not.
            cuts = [(before.rindex(end) + len(end), end) for end in ends if end in before[start:]]
            for place, end in sorted(cuts, reverse=True) or [(len(before), "")]:
                if text.startswith(before[:place]):
                    return text, place, end
        raise ValueError(f"{self._name} rewrites earlier turns when messages are added")

    # --------------------------------------------------------------------- ends and forms

    def _find_end(self, calls: bool) -> TurnEnd:
        answer: Message = {"role": "assistant", "content": SAID}
        follows: Message = USER
        if calls:
            answer = _calling([(self._tool_name, {SAID: 1})])
            follows = {"role": "tool", "name": self._tool_name, "content": DUMMY}
        last = _after_last(self._render([USER, answer]), SAID)
        try:
            more = _after_last(self._render([USER, answer, follows]), SAID)
        except ValueError:  # for example a template without results of tools
            more = last
        added = self._tokenizer.added_tokens
        # A call may hold added tokens that are not special, such as </tool_call>.
        plain = {self.end().token} - {""} if calls else set(added)
        stops = {t for t, (i, _) in added.items() if i in self._tokenizer.model_stop_ids}
        stops |= plain if calls else set()
        ends = self._special_tokens | plain | stops
        shared, own = _tokens_in(commonprefix([last, more]), ends), _tokens_in(last, ends)
        if tokens := shared or own:
            # An answer may end with several tokens, such as Cohere's: the last one ends the turn.
            # A call does not, and the template may begin its result, as Gemma's does.
            first = next((x for x in tokens if x[1] in stops), None)
            place, token = first or (shared[-1] if shared and not calls else tokens[0])
            return TurnEnd(token, last[place + len(token) :])
        token = self._first_special(more[len(last) :].lstrip())
        return TurnEnd(token, begins_next=bool(token))

    @cached_property
    def _special_tokens(self) -> frozenset[str]:
        added = self._tokenizer.added_tokens.items()
        return frozenset(token for token, (_, is_special) in added if is_special)

    def _first_special(self, text: str) -> str:
        """The special token with which a text begins, else ""."""
        tokens = _tokens_in(text, self._special_tokens)
        return tokens[0][1] if tokens and tokens[0][0] == 0 else ""

    @property
    def _form(self) -> _Form:
        return self._known._tried_form

    @cached_property
    def _tried_form(self) -> _Form:
        """The form of messages that the template writes, found by trying."""
        as_parts = {"role": "user", "content": [{"type": "text", "text": DUMMY}]}
        parts = self._writes([USER], DUMMY) is False and bool(self._writes([as_parts], DUMMY))
        asked: Message = as_parts if parts else USER
        said: Message = {"role": "assistant", "content": SAID}
        form, call = _Form(parts=parts), said
        for more in ({}, {"content": [] if parts else ""}):
            as_object = {**_calling([(self._tool_name, {SAID: 1})]), **more}
            json_text = json.dumps({SAID: 1})
            as_text = {**_calling([(self._tool_name, json_text)]), **more}
            objects = bool(self._writes([asked, as_object], SAID))
            texts = bool(self._writes([asked, as_text], json_text))
            if objects or texts:
                call = as_object if objects else as_text
                form = _Form(parts, texts, objects, bool(more))
                break
        result: Message = {"role": "tool", "name": self._tool_name, "content": RESULT}
        written = [self._writes([asked, answer, result], RESULT) for answer in (call, said)]
        # None: the template refuses each of them, and says so of the rows too.
        return replace(form, results=any(written) or None in written and False not in written)

    def _writes(self, messages: Sequence[Message], text: str) -> bool | None:
        """True if the template writes a text; None where it refuses the messages."""
        try:
            return text in self._plain(messages)
        except ValueError:
            return None

    def _plain(self, messages: Sequence[Message], *, prompt: bool = False) -> str:
        return self._tokenizer.apply_chat_template(
            messages,
            add_generation_prompt=prompt,
            tools=self._tools,
            variables=self._variables,
        )

    def _render(self, messages: Sequence[Message], *, prompt: bool = False) -> str:
        return self._plain(self._shaped(messages), prompt=prompt)

    def _shaped(self, messages: Sequence[Message]) -> list[Message]:
        """The messages in the form that the template writes. ValueError for one that it drops."""
        form = self._form
        if not form.writes_calls and any(message.get("tool_calls") for message in messages):
            raise ValueError(f"{self._name} does not write tool_calls")
        if not form.results and any(message["role"] == "tool" for message in messages):
            raise ValueError(f"{self._name} does not write results of tools")
        return [_shaped(message, form) for message in messages]

    @property
    def _name(self) -> str:
        return self._tokenizer.template_name

    @property
    def _tool_name(self) -> str:
        first = self._tools[0] if self._tools else {}
        return _name_of(first) if isinstance(first, Mapping) else DUMMY


def _without_thinking(message: Message) -> Message:
    dropped = (*THINKING, "content") if message.get("tool_calls") else THINKING
    return {key: part for key, part in message.items() if key not in dropped}


def _shaped(message: Message, form: _Form) -> Message:
    shaped = dict(message)
    if calls := message.get("tool_calls"):
        shaped["tool_calls"] = [_shaped_call(call, form) for call in calls]
        if form.empty_content:
            shaped.setdefault("content", "")
    if form.parts and isinstance(shaped.get("content"), str):
        shaped["content"] = [{"type": "text", "text": shaped["content"]}]
    return shaped


def _shaped_call(call: Any, form: _Form) -> Any:
    """A call with its arguments as an object or as JSON text, as the template reads them."""
    holder = call.get("function", call) if isinstance(call, Mapping) else call
    if not isinstance(holder, Mapping) or "arguments" not in holder:
        return call
    arguments = holder["arguments"]
    if isinstance(arguments, str) and not form.text_arguments:
        arguments = json.loads(arguments)
    elif not isinstance(arguments, str) and not form.object_arguments:
        arguments = json.dumps(arguments, ensure_ascii=False)
    changed = {**holder, "arguments": arguments}
    return {**call, "function": changed} if "function" in call else changed


def _calling(calls: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """A message of the assistant that calls tools."""
    return {
        "role": "assistant",
        "tool_calls": [
            {"type": "function", "id": CALL_ID, "function": {"name": name, "arguments": arguments}}
            for name, arguments in calls
        ],
    }


def _name_of(tool: Mapping[str, Any]) -> str:
    """The name of a tool, or of the tool that a call names."""
    return str(tool.get("function", tool).get("name", DUMMY))


def _after_last(text: str, mark: str) -> str:
    """The text after the last `mark`. ValueError without one."""
    return text[text.rindex(mark) + len(mark) :]


def _tokens_in(text: str, tokens: Iterable[str]) -> list[tuple[int, str]]:
    """Places of tokens in a text, the longest token at each place."""
    pattern = "|".join(re.escape(token) for token in sorted(tokens, key=len, reverse=True))
    return [(m.start(), m[0]) for m in re.finditer(pattern, text)] if pattern else []
