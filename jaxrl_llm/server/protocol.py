"""The OpenAI API: bodies of requests as what is asked for, and answers as bodies.

What a client asks for is done or refused: a parameter that would change the answer and is not
supported gets 400 with the reason.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any

import orjson
from annotated_types import Ge, Le
from pydantic import Strict, ValidationError

from jaxrl_llm.data.formats import prompt_of
from jaxrl_llm.tokenizer import Tokenizer
from jaxrl_llm.typed_records.bounds import Count, Fraction, NotNegative, Probability, TopK, Whole
from jaxrl_llm.typed_records.messages import explain
from jaxrl_llm.typed_records.record import Record, validate

MOST_CHOICES = 128  # choices of a request
MOST_STOPS = 16  # stop strings of a request
FEW_TOKENS = 16  # most tokens of a completion that names no limit, as in OpenAI's API
BODY = "body"  # how messages name the request

# Parameters that change no answer.
IGNORED = {
    *("user", "metadata", "store", "service_tier", "parallel_tool_calls", "safety_identifier"),
    "prompt_cache_key",
}
# Parameters that are supported at one value.
ONLY: dict[str, Any] = {
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "repetition_penalty": 1,
    "min_tokens": 0,
    "logit_bias": {},
    "best_of": 1,
    "echo": False,
    "ignore_eos": False,
    "suffix": "",
    "response_format": {"type": "text"},
    "top_logprobs": 0,
    "skip_special_tokens": True,
    "include_stop_str_in_output": False,
}


class ApiError(Exception):
    """A refusal or a failure, as the client reads it."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.kind, self.code = status, kind, code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """The JSON of the error."""
        error = {"message": str(self), "type": self.kind, "param": None, "code": self.code}
        return {"error": error}


Row = Mapping[str, Any]  # messages as `prompt`, `tools`, `chat_template_kwargs`
Choices = Annotated[int, Ge(1), Le(MOST_CHOICES)]
TokenIds = Annotated[tuple[Whole, ...], Strict(False)]


class _Body(Record):
    """Parameters of both kinds of requests."""

    model: str = ""
    stream: bool = False
    stream_options: dict[str, Any] = field(default_factory=dict)
    n: Choices = 1
    temperature: NotNegative = 1.0
    top_p: Probability = 1.0
    top_k: TopK = 0
    min_p: Fraction = 0.0
    seed: Whole | None = None
    stop: str | list[str] = ""
    stop_token_ids: TokenIds = ()
    max_tokens: Count | None = None
    return_token_ids: bool = False


class _ChatBody(_Body):
    messages: list[dict[str, Any]]
    max_completion_tokens: Count | None = None
    logprobs: bool = False
    tools: list[dict[str, Any]] = field(default_factory=list)
    tool_choice: str | dict[str, Any] = "auto"
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)


class _CompletionBody(_Body):
    prompt: str | list[str] | list[Whole] | list[list[Whole]]
    logprobs: Annotated[int, Ge(0), Le(0)] | None = None


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What a request asks for."""

    prompts: tuple[tuple[int, ...], ...]  # token ids
    n: int  # choices of each prompt
    limit: int  # most tokens of a choice
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int | None
    stop: tuple[str, ...]
    stop_ids: tuple[int, ...]  # stop ids, also the ones that the engine knows
    own_stops: bool  # it ends where the engine does not
    chat: bool
    tools: tuple[Mapping[str, Any], ...] = ()  # tools that the answer may call
    stream: bool = False
    include_usage: bool = False
    logprobs: bool = False
    token_ids: bool = False

    @property
    def num_choices(self) -> int:
        """Choices of all prompts."""
        return len(self.prompts) * self.n


def read_chat(
    raw: bytes,
    tokenizer: Tokenizer,
    *,
    name: str | None,
    context: int,
    encode: Callable[[Row], Sequence[int]] | None = None,
) -> Asked:
    """The request of a body of /v1/chat/completions. ApiError for a bad one.

    `encode` gives the ids of messages, tools and variables; None: the chat template's own ids.
    Without a `name` the request may name any model.
    """
    body = _read(_ChatBody, raw, name)
    if body.tool_choice not in ("auto", "none"):
        raise ApiError(
            400, f"{BODY}.tool_choice={body.tool_choice!r} is not supported: give auto or none"
        )
    tools = body.tools if body.tool_choice == "auto" else []
    row = {
        "prompt": body.messages,
        "tools": tools or None,
        "chat_template_kwargs": body.chat_template_kwargs or None,
    }
    ids = tuple(encode(row)) if encode else encoded(row, tokenizer, "messages")
    limits = [x for x in (body.max_tokens, body.max_completion_tokens) if x is not None]
    return _asked(
        body,
        [ids],
        tokenizer,
        context,
        limit=min(limits, default=context),
        chat=True,
        tools=tuple(tools),
        logprobs=body.logprobs,
    )


def read_completion(raw: bytes, tokenizer: Tokenizer, *, name: str, context: int) -> Asked:
    """The request of a body of /v1/completions. ApiError for a bad one."""
    body = _read(_CompletionBody, raw, name)
    several = isinstance(body.prompt, list) and not all(isinstance(x, int) for x in body.prompt)
    prompts: list[Any] = list(body.prompt) if several else [body.prompt]
    ids = [
        encoded({"prompt": prompt}, tokenizer, "prompt")
        if isinstance(prompt, str)
        else _known(prompt, tokenizer)
        for prompt in prompts
    ]
    return _asked(
        body,
        ids,
        tokenizer,
        context,
        limit=body.max_tokens or FEW_TOKENS,
        chat=False,
        logprobs=body.logprobs is not None,
    )


def values_of(raw: bytes) -> dict[str, Any]:
    """The object of a body. ApiError for another text."""
    try:
        values = orjson.loads(raw)
    except ValueError as error:
        raise ApiError(400, f"the {BODY} is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise ApiError(400, f"the {BODY} is JSON, but no object")
    return values


def _read(cls: type[Any], raw: bytes, name: str | None) -> Any:
    """A checked body."""
    values = values_of(raw)
    for key, only in ONLY.items():
        value = values.pop(key, None)
        if value is not None and value != only:
            raise ApiError(400, f"{BODY}.{key} is not supported: leave it out")
    values = {k: v for k, v in values.items() if v is not None and k not in IGNORED}
    try:
        body = validate(cls, values)
    except ValidationError as error:
        raise ApiError(400, str(explain(error, cls, BODY))) from None
    if name is not None and body.model not in ("", name):
        message = f"there is no model {body.model!r} here; the model is {name!r}"
        raise ApiError(404, message, code="model_not_found")
    return body


def encoded(row: Row, tokenizer: Tokenizer, key: str) -> tuple[int, ...]:
    """The ids of a text or of messages, as `generate` and training make them."""
    try:
        return prompt_of(row, "prompt", tokenizer, data_source=BODY, index=0).token_ids
    except ValueError as error:  # it speaks of rows of data
        text = str(error).replace("column 'prompt", f"'{BODY}.{key}")
        raise ApiError(400, text.replace("prompt[", f"{BODY}.{key}[")) from None


def _known(ids: Sequence[int], tokenizer: Tokenizer) -> tuple[int, ...]:
    """Ids that a client gives."""
    if not ids or max(ids) >= tokenizer.vocab_size:
        raise ApiError(400, f"{BODY}.prompt has no tokens, or ids above {tokenizer.vocab_size - 1}")
    return tuple(ids)


def _asked(
    body: Any,
    prompts: Sequence[tuple[int, ...]],
    tokenizer: Tokenizer,
    context: int,
    *,
    limit: int,
    **others: Any,
) -> Asked:
    stops = [body.stop] if isinstance(body.stop, str) and body.stop else list(body.stop)
    if len(stops) > MOST_STOPS or not all(stops):
        raise ApiError(400, f"{BODY}.stop takes up to {MOST_STOPS} texts, none of them empty")
    for ids in prompts:
        if len(ids) >= context:
            raise ApiError(
                400,
                f"the prompt has {len(ids)} tokens and the context {context}; give a shorter one",
                code="context_length_exceeded",
            )
    if not prompts or len(prompts) * body.n > MOST_CHOICES:
        raise ApiError(400, f"prompts times n must be 1 to {MOST_CHOICES}")
    # A special token is in no text, so its id stands for it.
    tokens = [tokenizer.added_tokens[text][0] for text in stops if text in tokenizer.added_tokens]
    stop_ids = (*tokenizer.stop_ids, *body.stop_token_ids, *tokens)
    return Asked(
        prompts=tuple(prompts),
        n=body.n,
        limit=limit,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        min_p=body.min_p,
        seed=body.seed,
        stop=tuple(stops),
        stop_ids=tuple(dict.fromkeys(stop_ids)),
        own_stops=bool(stops or body.stop_token_ids),
        stream=body.stream,
        include_usage=bool(body.stream_options.get("include_usage")),
        token_ids=body.return_token_ids,
        **others,
    )


# ------------------------------------------------------------------------- answers


@dataclass(frozen=True, kw_only=True)
class Part:
    """A choice, or the further part of one in a stream."""

    index: int
    text: str
    tokens: Sequence[int]
    logprobs: Sequence[float]
    finish_reason: str | None = None
    thinking: str = ""  # thinking before calls of tools
    tool_calls: Sequence[Mapping[str, Any]] = ()
    first: bool = False  # the first part of a stream


class Writer:
    """Writes the answer to one request."""

    def __init__(
        self, asked: Asked, texts: "TokenTexts", *, name: str, number: str, created: int
    ) -> None:
        self._asked, self._texts = asked, texts
        self._head = {
            "id": f"{'chatcmpl' if asked.chat else 'cmpl'}-{number}",
            "object": "chat.completion" if asked.chat else "text_completion",
            "created": created,
            "model": name,
        }
        self._lengths: dict[int, int] = {}  # characters of each choice so far

    def reply(self, parts: Sequence[Part]) -> dict[str, Any]:
        """The whole answer."""
        choices = [self._choice(part, "message") for part in parts]
        sampled = sum(len(part.tokens) for part in parts)
        return self._head | {"choices": choices, **self._prompt(), "usage": self._usage(sampled)}

    def chunk(self, part: Part) -> dict[str, Any]:
        """A chunk of a stream."""
        prompt = self._prompt() if part.first and part.index == 0 else {}
        choices = [self._choice(part, "delta")]
        return self._chunk_head | {"choices": choices, **prompt} | self._no_usage

    def usage_chunk(self, sampled: int) -> dict[str, Any]:
        """The last chunk of a stream that was asked for the usage."""
        return self._chunk_head | {"choices": [], "usage": self._usage(sampled)}

    @property
    def _chunk_head(self) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self._asked.chat else "text_completion"
        return self._head | {"object": kind}

    @property
    def _no_usage(self) -> dict[str, Any]:
        return {"usage": None} if self._asked.include_usage else {}

    def _prompt(self) -> dict[str, Any]:
        """The prompt's ids. Several prompts give a list of each."""
        if not self._asked.token_ids:
            return {}
        ids = [list(prompt) for prompt in self._asked.prompts]
        return {"prompt_token_ids": ids[0] if len(ids) == 1 else ids}

    def _usage(self, sampled: int) -> dict[str, int]:
        prompt = sum(map(len, self._asked.prompts))
        return {
            "prompt_tokens": prompt,
            "completion_tokens": sampled,
            "total_tokens": prompt + sampled,
        }

    def _choice(self, part: Part, field: str) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": part.index, "finish_reason": part.finish_reason}
        if self._asked.chat:
            choice |= {field: self._message(part, field), "logprobs": None}
        else:
            choice |= {"text": part.text, "logprobs": None}
        if self._asked.logprobs and self._asked.chat:
            choice["logprobs"] = {"content": self._content(part), "refusal": None}
        elif self._asked.logprobs:
            choice["logprobs"] = self._token_logprobs(part)
        if self._asked.token_ids:
            choice["token_ids"] = list(part.tokens)
        return choice

    def _message(self, part: Part, field: str) -> dict[str, Any]:
        message: dict[str, Any] = {}
        if field == "message" or part.first:
            message["role"] = "assistant"
        if field == "message":
            message |= {"content": part.text or None if part.tool_calls else part.text}
        elif part.text or part.first:
            message["content"] = part.text
        if part.thinking:
            message["reasoning_content"] = part.thinking
        if part.tool_calls:
            calls = [dict(call) for call in part.tool_calls]
            if field == "delta":
                calls = [{"index": i, **call} for i, call in enumerate(calls)]
            message["tool_calls"] = calls
        return message

    def _content(self, part: Part) -> list[dict[str, Any]]:
        return [
            {
                "token": self._texts.text(token),
                "logprob": _finite(logprob),
                "bytes": list(self._texts.bytes_of(token)),
                "top_logprobs": [],
            }
            for token, logprob in zip(part.tokens, part.logprobs, strict=True)
        ]

    def _token_logprobs(self, part: Part) -> dict[str, Any]:
        texts = [self._texts.text(token) for token in part.tokens]
        place = self._lengths.get(part.index, 0)
        offsets = []
        for text in texts:
            offsets.append(place)
            place += len(text)
        self._lengths[part.index] = place
        return {
            "tokens": texts,
            "token_logprobs": [_finite(logprob) for logprob in part.logprobs],
            "top_logprobs": None,
            "text_offset": offsets,
        }


def _finite(logprob: float) -> float:
    """JSON has no infinity; OpenAI's API writes -9999."""
    return logprob if math.isfinite(logprob) else -9999.0


class TokenTexts:
    """Texts and bytes of single tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def text(self, token: int) -> str:
        """The text of a token, also of a special one."""
        return self._tokenizer.decode([token], skip_special=False)

    def bytes_of(self, token: int) -> bytes:
        """The bytes of a token, which may be a part of a character."""
        known = self._all[token] if token < len(self._all) else b""
        return known or self.text(token).encode()

    @cached_property
    def _all(self) -> list[bytes]:
        try:
            return self._tokenizer.token_bytes()
        except ValueError:  # a tokenizer whose bytes are not known
            return []
