"""How each model family writes tool calls, in marked text (see tool_calls.py).

A call that cannot be used is kept, with a status and the problem in words for the model. Statuses
have the names of Prime Intellect's renderers.
"""

import ast
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Protocol

Status = Literal[
    "ok",
    "invalid_json",
    "missing_name",
    "malformed_structure",
    "unclosed_block",
    "unknown_tool",
    "wrong_arguments",
]
NAME = re.compile(r'"name"\s*:\s*"([\w.-]+)"')
ARGUMENTS = re.compile(r'"(?:arguments|parameters)"\s*:')
BETWEEN = re.compile(r"[\s,:]*")  # signs between the values of valid JSON
JSON_WORDS = {"true": True, "false": False, "null": None}
WORDS = {"True": True, "False": False, "None": None}  # as templates print Python's values
FENCE = re.compile(r"```(?:json|tool_call|tool_code)?[ \t]*\n(.*?)(\n```|\Z)", re.DOTALL)
BUILT_IN = re.compile(r"([\w.-]+)\.call\((.*)\)", re.DOTALL)  # Llama's brave_search.call(query="")
PARAMETER = re.compile(r"\s*<parameter=([^>\n]*)>\n?(.*?)\n?</parameter>", re.DOTALL)
FUNCTION = re.compile(r"\s*<function=([^>\n]*)>(.*?)(</function>\s*|\Z)", re.DOTALL)
GEMMA_WORD = re.compile(r"[^,:{}\[\]]*")
KINDS: dict[str, type | tuple[type, ...]] = {
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "array": list,
    "object": dict,
    "null": type(None),
}


@dataclass(frozen=True)
class Call:
    """A call of a tool. Only `ok` calls can be run."""

    name: str  # name as sampled; empty where it cannot be read
    arguments: str  # JSON text as it was sampled; written here where the family has no JSON
    values: dict[str, Any]  # the arguments, read
    status: Status = "ok"
    problem: str = ""  # what is wrong, in words for the model
    id: str = ""  # id that the model gave the call; empty in most families


class Texts(Protocol):
    """The part of the parser that formats use."""

    def properties(self, name: str) -> Mapping[str, Any]:
        """The schema of each argument of a tool."""
        ...

    def plain(self, marked: str) -> str:
        """A marked text without the tokens of its marks."""
        ...

    def spelled(self, marked: str) -> str:
        """A marked text with the tokens of its marks."""
        ...


Delimiters = Mapping[str, str]  # a delimiter, and how it stands in marked text


# ------------------------------------------------------------------------- JSON


def _refuse(word: str) -> Any:
    raise ValueError(f"{word} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse)


def _load(text: str) -> Any:
    """The value of a JSON text. ValueError, with the place, for any other text."""
    try:
        return _DECODER.decode(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _parts(text: str) -> Iterator[tuple[str, Any, str]]:
    """(key, value, text) of each entry of a JSON object or list, which is valid."""
    place = BETWEEN.match(text).end()  # pyright: ignore[reportOptionalMemberAccess]
    is_object, place = text[place] == "{", place + 1
    while True:
        place = BETWEEN.match(text, place).end()  # pyright: ignore[reportOptionalMemberAccess]
        if text[place] in "}]":
            return
        key = ""
        if is_object:
            key, place = _DECODER.raw_decode(text, place)
            place = BETWEEN.match(text, place).end()  # pyright: ignore[reportOptionalMemberAccess]
        value, end = _DECODER.raw_decode(text, place)
        yield key, value, text[place:end]
        place = end


def _failed(text: str, error: ValueError, *, open_end: bool = False) -> Call:
    """The call of a text that is not JSON. `open_end`: the block has no closing delimiter."""
    cut = isinstance(error, json.JSONDecodeError) and (
        error.pos >= len(text.rstrip()) or error.msg.startswith("Unterminated")
    )
    name = NAME.search(text)
    status: Status = "unclosed_block" if open_end and cut else "invalid_json"
    problem = f"the call is not valid JSON: {error}"
    return Call(name[1] if name else "", text, {}, status, problem)


def _json_call(text: str) -> Call:
    """The call that an object {"name", "arguments"} writes; "parameters" is another word for it."""
    try:
        value = _load(text)
    except ValueError as error:
        return _failed(text, error)
    if not isinstance(value, dict):
        problem = 'expected a JSON object with "name" and "arguments"'
        return Call("", text, {}, "malformed_structure", problem)
    entries = {key: (value, raw) for key, value, raw in _parts(text)}
    name, _ = entries.get("name", ("", ""))
    arguments, raw = entries.get("arguments", entries.get("parameters", ({}, "{}")))
    if not isinstance(name, str) or not name:
        return Call("", raw, {}, "missing_name", 'the call has no "name"')
    identity = value.get("id")
    call = _named(name, raw, arguments)
    return replace(call, id=identity) if isinstance(identity, str) else call


def _named(name: str, raw: str, arguments: Any) -> Call:
    """The call of a tool with arguments as an object, or as JSON text of one."""
    if isinstance(arguments, str):
        raw = arguments
        try:
            arguments = _load(raw or "{}")
        except ValueError as error:
            return replace(_failed(raw, error), name=name)
    if arguments is None:
        return Call(name, "{}", {})
    if not isinstance(arguments, dict):
        problem = "the arguments are not a JSON object"
        return Call(name, raw, {}, "malformed_structure", problem)
    return Call(name, raw, arguments)


def _looks_like_call(text: str) -> bool:
    """True if a bare JSON text is meant as a call, and not as an answer."""
    return bool(NAME.search(text) and ARGUMENTS.search(text))


def _json_calls(text: str, *, open_end: bool = False) -> list[Call]:
    """The calls that one object writes, or a list of them."""
    text = text.strip()
    try:
        value = _load(text)
    except ValueError as error:
        return [_failed(text, error, open_end=open_end)]
    if isinstance(value, list):
        return [_json_call(raw) for _, _, raw in _parts(text)]
    return [_json_call(text)]


# ------------------------------------------------------------------------- values by schema


def schema_types(schema: Mapping[str, Any]) -> set[str]:
    """The names of the types that a schema allows; empty where it does not say."""
    kinds = schema.get("type", ())
    types = {kinds} if isinstance(kinds, str) else set(kinds)
    for choice in (*schema.get("anyOf", ()), *schema.get("oneOf", ())):
        types |= schema_types(choice)
    return types | ({"null"} if types and schema.get("nullable") else set())


def has_type(value: Any, types: set[str]) -> bool:
    """True if a value has one of the types; True where there are none."""
    if isinstance(value, bool) and types:
        return "boolean" in types
    if isinstance(value, float) and value.is_integer() and "integer" in types:
        return True
    return not types or any(isinstance(value, KINDS.get(kind, object)) for kind in types)


def _typed(text: str, schema: Mapping[str, Any]) -> Any:
    """The value of a bare text. A text of no allowed type stays a text."""
    types = schema_types(schema)
    if types == {"string"}:
        return text
    try:
        value = WORDS[text] if text in WORDS else _load(text.strip())
    except ValueError:
        return text
    return value if has_type(value, types - {"string"} or types) else text


def _bare_call(name: str, values: Mapping[str, str], texts: Texts) -> Call:
    """The call of a family that writes each value as a bare text."""
    name, known = name.strip(), texts.properties(name.strip())
    typed = {key: _typed(value, known.get(key, {})) for key, value in values.items()}
    return _written(name, typed)


def _written(name: str, values: dict[str, Any]) -> Call:
    """A call whose arguments are written as JSON here."""
    text = json.dumps(values, ensure_ascii=False)
    if not name:
        return Call("", text, values, "missing_name", "the call has no name")
    return Call(name, text, values)


# ------------------------------------------------------------------------- formats


def _blocks(text: str, start: str, end: str) -> tuple[str, list[tuple[str, bool]]]:
    """The text outside of blocks, and each block with whether it is closed."""
    said, *opened = text.split(start)
    blocks: list[tuple[str, bool]] = []
    for part in opened:
        block, closed, after = part.partition(end)
        blocks.append((block, bool(closed)))
        said += after
    return said, blocks


def _unclosed(call: Call, closed: bool, end: str) -> Call:
    """A call in a block without its end cannot be used, whatever it holds."""
    if closed:
        return call
    return replace(call, status="unclosed_block", problem=f"the call does not end with {end}")


class Format:
    """A format of calls; this one is JSON: the whole answer, a fence, or <tool_call> in text."""

    delimiters: ClassVar[tuple[str, ...]] = ("<tool_call>", "</tool_call>")
    thinking: ClassVar[tuple[str, str]] = ("<think>", "</think>")

    def read(self, text: str, marks: Delimiters, texts: Texts) -> tuple[str, list[Call]]:
        """The content of an answer, and its calls."""
        if marks["<tool_call>"] in text:
            return Hermes().read(text, marks, texts)
        text = texts.plain(text)
        calls: list[Call] = []
        for match in FENCE.finditer(text):
            if _looks_like_call(match[1]):
                calls += _json_calls(match[1], open_end=not match[2])
                text = text.replace(match[0], "")
        if not calls and text.lstrip()[:1] in ("{", "[") and _looks_like_call(text):
            return "", _json_calls(text, open_end=True)
        return text, calls

    def split_thinking(self, text: str, marks: Delimiters, is_open: bool) -> tuple[str, str]:
        """The thinking, and the rest. `is_open`: the text begins with thinking."""
        opening, closing = (marks[token] for token in self.thinking)
        before, closed, _ = text.partition(closing)
        is_open = is_open or bool(closed) and opening not in before
        thought = rest = ""
        while text:
            if is_open:
                part, _, text = text.partition(closing)
                thought, is_open = thought + part, False
            else:
                part, opened, text = text.partition(opening)
                rest, is_open = rest + part, bool(opened)
        return thought, rest


class Hermes(Format):
    """Hermes, Qwen2.5, Qwen3, SmolLM3: a JSON object between <tool_call> and </tool_call>."""

    delimiters = ("<tool_call>", "</tool_call>")

    def read(self, text: str, marks: Delimiters, texts: Texts) -> tuple[str, list[Call]]:
        start, end = (marks[token] for token in self.delimiters)
        said, blocks = _blocks(text, start, end)
        calls = [
            _unclosed(call, closed, self.delimiters[1])
            for block, closed in blocks
            for call in self.block(block, marks, texts)
        ]
        return said, calls

    def block(self, block: str, marks: Delimiters, texts: Texts) -> list[Call]:
        """The calls of one block."""
        return _json_calls(texts.spelled(block))


class Phi4(Hermes):
    """Phi-4-mini: a list of JSON objects between <|tool_call|> and <|/tool_call|>."""

    delimiters = ("<|tool_call|>", "<|/tool_call|>")


class Lfm2(Hermes):
    """LFM2: a list of Python calls, [name(key="value")], with values of Python or JSON."""

    delimiters = ("<|tool_call_start|>", "<|tool_call_end|>")

    def block(self, block: str, marks: Delimiters, texts: Texts) -> list[Call]:
        text = texts.spelled(block).strip()
        try:
            tree = ast.parse(text if text.startswith("[") else f"[{text}]", mode="eval").body
            assert isinstance(tree, ast.List)
            return [_python_call(node) for node in tree.elts]
        except (ValueError, SyntaxError, RecursionError, MemoryError) as error:
            name = re.match(r"\[?\s*([\w.]+)\(", text)
            problem = f"expected calls such as [NAME(KEY=VALUE)]: {error}"
            return [Call(name[1] if name else "", text, {}, "malformed_structure", problem)]


def _python_call(node: ast.expr) -> Call:
    """A call of Python with literals as keyword arguments. ValueError for another expression."""
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError(f"{ast.unparse(node)} is no call with keyword arguments")
    values = {str(keyword.arg): _literal(keyword.value) for keyword in node.keywords}
    return _written(ast.unparse(node.func), values)


class _JsonWords(ast.NodeTransformer):
    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(JSON_WORDS[node.id]) if node.id in JSON_WORDS else node


def _literal(node: ast.expr) -> Any:
    """A value of Python, in which JSON's words for constants are known."""
    return ast.literal_eval(_JsonWords().visit(node))


class Qwen3Coder(Hermes):
    """Qwen3-Coder, Qwen3.5, Nemotron 3: <function=name> with <parameter=key> values in a block."""

    def block(self, block: str, marks: Delimiters, texts: Texts) -> list[Call]:
        block = texts.spelled(block)
        match = FUNCTION.fullmatch(block)
        if match is None:
            problem = "expected <function=NAME> and </function> in the call"
            return [Call("", block, {}, "malformed_structure", problem)]
        name, body, end = match.groups()
        values = {key: value for key, value in PARAMETER.findall(body)}
        call = _bare_call(name, values, texts)
        if PARAMETER.sub("", body).strip():
            problem = "expected <parameter=KEY>, a value and </parameter>, and nothing else"
            return [replace(call, status="malformed_structure", problem=problem)]
        return [_unclosed(call, bool(end), "</function>")]


class Glm(Hermes):
    """GLM-4.5: the name, then <arg_key> and <arg_value> pairs, in a block."""

    pair: ClassVar = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
    delimiters = ("<tool_call>", "</tool_call>", *pair)

    def read(self, text: str, marks: Delimiters, texts: Texts) -> tuple[str, list[Call]]:
        said, blocks = _blocks(text, marks["<tool_call>"], marks["</tool_call>"])
        calls = [
            _unclosed(self._call(block, marks, texts), closed, "</tool_call>")
            for block, closed in blocks
        ]
        return said, calls

    def _call(self, block: str, marks: Delimiters, texts: Texts) -> Call:
        key, key_end, value, value_end = (re.escape(marks[token]) for token in self.pair)
        pair = re.compile(rf"\s*{key}(.*?){key_end}\s*{value}(.*?){value_end}", re.DOTALL)
        name, _, body = block.partition(marks["<arg_key>"])
        body = block[len(name) :]
        values = {texts.spelled(k).strip(): texts.spelled(v) for k, v in pair.findall(body)}
        call = _bare_call(texts.spelled(name), values, texts)
        if pair.sub("", body).strip():
            problem = "expected pairs of <arg_key>KEY</arg_key> and <arg_value>VALUE</arg_value>"
            return replace(call, status="malformed_structure", problem=problem)
        return call


class Llama3(Format):
    """Llama 3.1, 3.2: the whole answer is a JSON object, or a call of a built-in tool."""

    delimiters = ("<|python_tag|>",)

    def read(self, text: str, marks: Delimiters, texts: Texts) -> tuple[str, list[Call]]:
        said, tagged, body = text.partition(marks["<|python_tag|>"])
        if not tagged:
            said, body = "", text
        body = texts.plain(body).strip()
        if tagged and (built_in := BUILT_IN.fullmatch(body)):
            name, inside = built_in.groups()
            values = re.fullmatch(r'\s*(\w+)\s*=\s*("(?:\\.|[^"\\])*")\s*', inside, re.DOTALL)
            if values is not None:
                return said, [_named(name, "", f"{{{json.dumps(values[1])}: {values[2]}}}")]
        if tagged or body.startswith("{") and _looks_like_call(body):
            # Several calls have a semicolon between them.
            first, *others = re.split(r"(?<=\})\s*;\s*(?=\{)", body)
            return said, [c for each in (first, *others) for c in _json_calls(each, open_end=True)]
        return body, []


class Mistral(Format):
    """Mistral: [TOOL_CALLS] and a list of JSON objects, or since v11 name[ARGS]{...} for each."""

    delimiters = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")
    thinking = ("[THINK]", "[/THINK]")

    def read(self, text: str, marks: Delimiters, texts: Texts) -> tuple[str, list[Call]]:
        said, *blocks = text.split(marks["[TOOL_CALLS]"])
        calls: list[Call] = []
        for block in blocks:
            if marks["[ARGS]"] not in block:
                calls += _json_calls(texts.plain(block), open_end=True)
                continue
            name, _, arguments = block.partition(marks["[ARGS]"])
            name, _, identity = name.partition(marks["[CALL_ID]"])
            call = self._call(texts.plain(name).strip(), texts.plain(arguments).strip())
            calls.append(replace(call, id=texts.plain(identity).strip()))
        return said, calls

    def _call(self, name: str, arguments: str) -> Call:
        try:
            return _named(name, arguments, _load(arguments))
        except ValueError as error:
            return replace(_failed(arguments, error, open_end=True), name=name)


class DeepSeek(Format):
    """DeepSeek V3: a type, the name and fenced JSON in each call; since V3.1 name and JSON."""

    begin, end, call, sep, call_end = (
        f"<\uff5ctool\u2581{words}\uff5c>"
        for words in ("calls\u2581begin", "calls\u2581end", "call\u2581begin", "sep",
                      "call\u2581end")
    )  # fmt: skip
    delimiters = (begin, end, call, sep, call_end)

    def read(self, text: str, marks: Delimiters, texts: Texts) -> tuple[str, list[Call]]:
        said, opened, inside = text.partition(marks[self.begin])
        if not opened:
            return text, []
        inside, _, after = inside.partition(marks[self.end])
        between, blocks = _blocks(inside, marks[self.call], marks[self.call_end])
        calls = [
            _unclosed(self._call(block, marks[self.sep], texts), closed, self.call_end)
            for block, closed in blocks
        ]
        if not calls or texts.plain(between).strip():
            problem = f"expected {self.call} and {self.call_end} around each call"
            calls.append(Call("", texts.spelled(inside), {}, "malformed_structure", problem))
        return said + after, calls

    def _call(self, block: str, sep: str, texts: Texts) -> Call:
        kind, _, rest = block.partition(sep)
        name, body = kind, rest
        if "\n" in rest and "```" in rest:
            name, _, body = rest.partition("\n")
            body = body.strip().removeprefix("```json").removesuffix("```")
        name, body = texts.spelled(name).strip(), texts.spelled(body).strip()
        if not name:
            return Call("", body, {}, "missing_name", "the call has no name")
        try:
            return _named(name, body, _load(body))
        except ValueError as error:
            return replace(_failed(body, error), name=name)


class GptOss(Format):
    """gpt-oss: messages of channels; a call goes to functions.NAME in the commentary channel."""

    ends: ClassVar = ("<|end|>", "<|call|>", "<|return|>")
    delimiters = ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", *ends)
    thinking = ("", "")

    def split_thinking(self, text: str, marks: Delimiters, is_open: bool) -> tuple[str, str]:
        messages = text.split(marks["<|start|>"])
        thoughts = [m for m in messages if self._header(m, marks)[0] == "analysis"]
        thought = "\n".join(m.partition(marks["<|message|>"])[2] for m in thoughts)
        return thought, marks["<|start|>"].join(m for m in messages if m not in thoughts)

    def read(self, text: str, marks: Delimiters, texts: Texts) -> tuple[str, list[Call]]:
        said, calls = "", []
        for message in text.split(marks["<|start|>"]):
            channel, recipient = self._header(message, marks)
            _, has_body, body = message.partition(marks["<|message|>"])
            places = [body.find(marks[end]) for end in self.ends if marks[end] in body]
            inside = body[: min(places)] if places else body
            if not recipient or channel != "commentary":
                said += inside if has_body else message
                continue
            name, inside = recipient.removeprefix("functions."), texts.spelled(inside).strip()
            try:
                call = _named(name, inside, _load(inside))
            except ValueError as error:
                call = replace(_failed(inside, error), name=name)
            calls.append(_unclosed(call, bool(places), "<|call|>"))
        return said, calls

    def _header(self, message: str, marks: Delimiters) -> tuple[str, str]:
        """The channel of a message, and its recipient."""
        header, has_body, _ = message.partition(marks["<|message|>"])
        for token in ("<|channel|>", "<|constrain|>"):
            header = header.replace(marks[token], f" {token} ")
        channel = re.search(r"<\|channel\|>\s*(\w+)", header)
        recipient = re.search(r"(?:^|\s)to=(\S+)", header) if has_body else None
        return channel[1] if channel else "", recipient[1] if recipient else ""


class Gemma4(Format):
    """Gemma 4: call:NAME{key:value} between <|tool_call> and <tool_call|>, texts in <|"|>."""

    delimiters = ("<|tool_call>", "<tool_call|>", '<|"|>')
    thinking = ("<|channel>", "<channel|>")

    def split_thinking(self, text: str, marks: Delimiters, is_open: bool) -> tuple[str, str]:
        thought, rest = super().split_thinking(text, marks, is_open)
        return thought.removeprefix("thought\n"), rest

    def read(self, text: str, marks: Delimiters, texts: Texts) -> tuple[str, list[Call]]:
        start, end, quote = (marks[token] for token in self.delimiters)
        said, blocks = _blocks(text, start, end)
        calls: list[Call] = []
        for block, closed in blocks:
            match = re.fullmatch(r"\s*call:([^{]*)(\{.*\})\s*", block, re.DOTALL)
            try:
                if match is None:
                    raise ValueError("expected call:NAME{KEY:VALUE}")
                values, place = _gemma_value(match[2], 0, quote, texts)
                if match[2][place:].strip():
                    raise ValueError("a sign follows the last brace")
                call = _written(texts.spelled(match[1]).strip(), values)
            except (ValueError, IndexError, RecursionError) as error:
                name = texts.spelled(match[1]).strip() if match else ""
                raw, problem = texts.spelled(block), f"the call cannot be read: {error}"
                call = Call(name, raw, {}, "malformed_structure", problem)
            calls.append(_unclosed(call, closed, "<tool_call|>"))
        return said, calls


def _gemma_value(text: str, place: int, quote: str, texts: Texts) -> tuple[Any, int]:
    """A value of Gemma 4's own notation, and where it ends. ValueError where there is none."""
    if text.startswith(quote, place):
        start = place + len(quote)
        end = text.index(quote, start)
        return texts.spelled(text[start:end]), end + len(quote)
    if text[place] not in "{[":
        match = GEMMA_WORD.match(text, place)
        assert match is not None
        return _load(match[0].strip()), match.end()
    closing = "}" if text[place] == "{" else "]"
    entries: dict[str, Any] | list[Any] = {} if closing == "}" else []
    place += 1
    while text[place] != closing:
        key = ""
        if isinstance(entries, dict):
            if text.startswith(quote, place):
                key, place = _gemma_value(text, place, quote, texts)
            else:
                end = text.index(":", place)
                key, place = text[place:end].strip(), end
            place = text.index(":", place) + 1
        value, place = _gemma_value(text, place, quote, texts)
        if isinstance(entries, dict):
            entries[key] = value
        else:
            entries.append(value)
        if text[place] == ",":
            place += 1
        elif text[place] != closing:
            raise ValueError(f"expected , or {closing} after a value")
    return entries, place + 1


FORMATS: Mapping[str, Format] = {
    "plain": Format(),
    "hermes": Hermes(),
    "qwen3_coder": Qwen3Coder(),
    "lfm2": Lfm2(),
    "llama3": Llama3(),
    "mistral": Mistral(),
    "deepseek": DeepSeek(),
    "glm": Glm(),
    "gpt_oss": GptOss(),
    "gemma4": Gemma4(),
    "phi4": Phi4(),
}
