"""OpenAI's Responses API, as a form of chat completions.

A body becomes the body of a chat: items of the input are messages. So tools, seeds, limits and
training sessions are the chat's. The answer of the chat becomes output items.
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Protocol

import orjson

from jaxrl_llm.server.protocol import ApiError, Asked, read_chat, values_of
from jaxrl_llm.tokenizer import Tokenizer

# Parameters that change no answer here.
IGNORED = ("include", "truncation", "prompt_cache_retention")
# Parameters that are supported at one value.
ONLY: dict[str, Any] = {
    "previous_response_id": "",
    "conversation": "",
    "prompt": {},
    "background": False,
    "max_tool_calls": 0,
    "reasoning": {},
    "n": 1,
}
LOGPROBS = "message.output_text.logprobs"  # a value of `include`
INCLUDED = (LOGPROBS, "reasoning.encrypted_content")  # the second asks for what there is not
TEXTS = ("input_text", "output_text", "text", "reasoning_text")  # parts of a content


class ChatAnswer(Protocol):
    """The answer of a chat in the making."""

    asked: Asked

    def whole(self) -> dict[str, Any]:
        """The reply that is no stream."""
        ...

    def chunks(self) -> AsyncIterator[list[dict[str, Any]]]:
        """The chunks of a stream; what comes at one time is together."""
        ...


def read_response(raw: bytes, tokenizer: Tokenizer, **how: Any) -> Asked:
    """The request of a body of /v1/responses. ApiError for a bad one; see `read_chat`."""
    return read_chat(orjson.dumps(chat_of(values_of(raw))), tokenizer, **how)


def chat_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """The body of a chat. Parameters that both APIs have stay as they are."""
    values = {key: value for key, value in values.items() if value is not None}
    for key, only in ONLY.items():
        value = values.pop(key, only)
        if value and value != only:
            remedy = "send all items" if key in ("previous_response_id", "conversation") else ""
            raise ApiError(400, f"body.{key} is not supported: {remedy or 'leave it out'}")
    if "input" not in values:
        raise ApiError(400, "body.input is missing: give a text or items")
    said, included = values.pop("instructions", ""), values.get("include", [])
    messages = [{"role": "system", "content": said}] if said else []
    try:
        if values.pop("text", {}).get("format", {"type": "text"}) != {"type": "text"}:
            raise ApiError(400, "body.text.format is not supported: leave it out")
        if unknown := [name for name in included if name not in INCLUDED]:
            raise ApiError(400, f"body.include: {unknown[0]!r} is not supported")
        messages += messages_of(values.pop("input"))
        tools = [_tool(tool) for tool in values.pop("tools", [])]
    except (KeyError, TypeError, AttributeError) as error:
        raise ApiError(400, f"body: an item or a tool is not well formed: {error!r}") from None
    chat = {key: value for key, value in values.items() if key not in IGNORED}
    chat |= {"messages": messages, "tools": tools, "logprobs": LOGPROBS in included}
    chat["stream_options"] = {"include_usage": True}
    if "max_output_tokens" in chat:
        chat["max_tokens"] = chat.pop("max_output_tokens")
    return chat


def messages_of(items: str | Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages of the input. Reasoning, text and calls of one turn are one message.

    Raises: ApiError for an item that is not supported.
    """
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    messages: list[dict[str, Any]] = []
    turn: dict[str, Any] | None = None  # the assistant's message that items add to
    for item in items:
        kind = item.get("type", "message")
        if kind == "message" and item["role"] != "assistant":
            role = "system" if item["role"] == "developer" else item["role"]
            messages.append({"role": role, "content": _text(item["content"])})
            turn = None
        elif kind == "function_call_output":
            content = _text(item["output"])
            messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": content})
            turn = None
        elif kind in ("message", "reasoning", "function_call"):
            # A text or reasoning behind what a turn has already begins another turn.
            if turn is None or (kind == "message" and "content" in turn) or (
                kind == "reasoning" and len(turn) > 1
            ):  # fmt: skip
                turn = {"role": "assistant"}
                messages.append(turn)
            if kind == "message":
                turn["content"] = _text(item["content"])
            elif kind == "reasoning":
                turn["reasoning_content"] = _text(item.get("content") or [])
            else:
                call = {"name": item["name"], "arguments": item["arguments"]}
                call = {"id": item["call_id"], "type": "function", "function": call}
                turn.setdefault("tool_calls", []).append(call)
        else:
            raise ApiError(400, f"body.input: items of the type {kind!r} are not supported")
    for message in messages:
        message.setdefault("content", "")
    return messages


def _text(content: str | Sequence[Mapping[str, Any]]) -> str:
    if isinstance(content, str):
        return content
    for part in content:
        if part["type"] not in TEXTS:
            raise ApiError(400, f"body.input: parts of the type {part['type']!r} are not supported")
    return "".join(part["text"] for part in content)


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    if tool["type"] != "function":
        raise ApiError(400, f"body.tools: tools of the type {tool['type']!r} are not supported")
    dropped = ("type", "strict")
    own = {k: v for k, v in tool.items() if k not in dropped and v is not None}
    return {"type": "function", "function": own}


# ------------------------------------------------------------------------- answers


class ResponseAnswer:
    """The answer of a chat as a response."""

    def __init__(self, answer: ChatAnswer) -> None:
        self._answer = answer

    def whole(self) -> dict[str, Any]:
        """The response that is no stream."""
        reply = self._answer.whole()
        (choice,) = reply["choices"]
        return self._response(reply, output_of(choice, _number(reply)))

    def _response(
        self, reply: Mapping[str, Any], output: Sequence[Mapping[str, Any]], status: str = ""
    ) -> dict[str, Any]:
        asked, (choice,) = self._answer.asked, reply["choices"]
        status = status or _status(choice)
        is_cut, usage = status == "incomplete", reply["usage"]
        ids = choice.get("token_ids") if usage else None
        return {
            "id": f"resp_{_number(reply)}",
            "object": "response",
            "created_at": reply["created"],
            "model": reply["model"],
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": list(output),
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": [{"type": "function", "strict": False, **t["function"]} for t in asked.tools],
            "temperature": asked.temperature,
            "top_p": asked.top_p,
            "usage": None if usage is None else {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage["total_tokens"],
            },
            **({} if ids is None else {
                "token_ids": ids, "prompt_token_ids": reply["prompt_token_ids"],
            }),
        }  # fmt: skip

    async def events(self) -> AsyncIterator[bytes]:
        """The events of a stream: the response begins, items come and end, the response ends."""
        stream = _Stream()
        begun = False
        async for chunks in self._answer.chunks():
            for chunk in chunks:
                if not begun:
                    response = self._response(chunk, [], "in_progress")
                    stream.add("created", response=response)
                    stream.add("in_progress", response=response)
                    begun = True
                for choice in chunk["choices"]:
                    text = choice["delta"].get("content") or ""
                    if choice["finish_reason"] is None:
                        stream.add_text(text, _number(chunk))
                        continue
                    reply = self._answer.whole()
                    stream.end(reply["choices"][0], text, _number(reply))
                    response = self._response(reply, stream.output)
                    stream.add(response["status"], response=response)
            yield stream.take()


class _Stream:
    """The events of one response as they are made."""

    def __init__(self) -> None:
        self.output: list[dict[str, Any]] = []  # items that have ended
        self._events: list[bytes] = []
        self._number = 0
        self._text: str | None = None  # text of the message so far; None: it has not begun

    def take(self) -> bytes:
        """The events since the last call."""
        events, self._events = self._events, []
        return b"".join(events)

    def add(self, kind: str, **fields: Any) -> None:
        """Add an event."""
        value = {"type": f"response.{kind}", "sequence_number": self._number, **fields}
        self._number += 1
        self._events.append(f"event: {value['type']}\ndata: ".encode())
        self._events.append(orjson.dumps(value) + b"\n\n")

    def add_text(self, text: str, number: str) -> None:
        """Add further text of the message, which the first one begins."""
        if text and self._text is None:
            self._begin_message(number)
        if text:
            self._text = f"{self._text}{text}"
            place = self._place(f"msg_{number}") | {"content_index": 0}
            self.add("output_text.delta", **place, delta=text, logprobs=[])

    def end(self, choice: Mapping[str, Any], text: str, number: str) -> None:
        """End the message, and add what comes at once. `text` is the last part of the message."""
        items = output_of(choice, number)
        if self._text is not None:  # it began before calls were known, and is the first item
            message = _message(number, choice, status=_status(choice))
            items = [message, *(item for item in items if item["type"] != "message")]
        for item in items:
            if item["type"] == "message":
                self.add_text(text, number)
                self._end_message(item, number)
            else:
                self._add_item(item)

    def _place(self, item: str) -> dict[str, Any]:
        return {"output_index": len(self.output), "item_id": item}

    def _begin_message(self, number: str) -> None:
        self._text = ""
        item = _message(number, None, status="in_progress")
        self.add("output_item.added", output_index=len(self.output), item=item)
        place = self._place(item["id"])
        self.add("content_part.added", **place, content_index=0, part=_part(""))

    def _end_message(self, item: dict[str, Any], number: str) -> None:
        if self._text is None:
            self._begin_message(number)
        (part,) = item["content"]
        part["text"] = self._text
        place = self._place(item["id"]) | {"content_index": 0}
        texts = {name: part[name] for name in ("text", "logprobs")}
        self.add("output_text.done", **place, **texts)
        self.add("content_part.done", **place, part=part)
        self._end_item(item)

    def _add_item(self, item: dict[str, Any]) -> None:
        begun = item | {"status": "in_progress"}
        is_call, place = item["type"] == "function_call", self._place(item["id"])
        begun |= {"arguments": ""} if is_call else {}
        self.add("output_item.added", output_index=len(self.output), item=begun)
        if is_call:
            given = item["arguments"]
            self.add("function_call_arguments.delta", **place, delta=given)
            name = item["name"]
            self.add("function_call_arguments.done", **place, name=name, arguments=given)
        self._end_item(item)

    def _end_item(self, item: dict[str, Any]) -> None:
        self.add("output_item.done", output_index=len(self.output), item=item)
        self.output.append(item)


def output_of(choice: Mapping[str, Any], number: str) -> list[dict[str, Any]]:
    """The items of an answer: reasoning before calls, the text, calls."""
    message = choice["message"]
    calls, thinking = message.get("tool_calls") or (), message.get("reasoning_content")
    items: list[dict[str, Any]] = []
    status = _status(choice)
    if thinking:
        content = [{"type": "reasoning_text", "text": thinking}]
        items.append({"id": f"rs_{number}", "type": "reasoning", "summary": [], "content": content})
    if message["content"] or not calls:
        items.append(_message(number, choice, status=status))
    for call in calls:
        items.append(
            {
                "id": f"fc_{call['id']}",
                "type": "function_call",
                "call_id": call["id"],
                "status": status,
                **call["function"],
            }
        )
    return items


def _status(choice: Mapping[str, Any]) -> str:
    return "incomplete" if choice["finish_reason"] == "length" else "completed"


def _message(number: str, choice: Mapping[str, Any] | None, *, status: str) -> dict[str, Any]:
    content = []
    if choice is not None:
        logprobs = (choice["logprobs"] or {}).get("content", [])
        content = [_part(choice["message"]["content"], logprobs)]
    kind = {"id": f"msg_{number}", "type": "message", "role": "assistant"}
    return kind | {"status": status, "content": content}


def _part(text: str, logprobs: Sequence[Any] = ()) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}


def _number(reply: Mapping[str, Any]) -> str:
    """The name of an answer, without what says that it is a chat."""
    return reply["id"].partition("-")[2]
