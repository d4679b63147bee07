"""The routes of the server."""

# Packages of the extra `serve`.
# pyright: reportMissingImports=false

import asyncio
import hashlib
import hmac
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from os.path import commonprefix
from typing import Any

import orjson
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from jaxrl_llm.agents.tool_calls import ToolCallParser
from jaxrl_llm.server.jobs import Choice, Job, Jobs
from jaxrl_llm.server.metrics import Metrics
from jaxrl_llm.server.protocol import (
    ApiError,
    Asked,
    Part,
    TokenTexts,
    Writer,
    read_chat,
    read_completion,
)
from jaxrl_llm.server.responses import ResponseAnswer, read_response
from jaxrl_llm.server.settings import ServerSettings
from jaxrl_llm.server.worker import Worker
from jaxrl_llm.tokenizer import Tokenizer

Endpoint = Callable[[Request], Awaitable[Response]]
GiveBack = Callable[[bool], None]  # takes whether the answer was delivered
LOOPBACK = ("127.0.0.1", "localhost", "[::1]", "::1")
# The first sign of a call of a tool, or of thinking. What follows is not sent before the end, and
# neither is anything once there is a token that may be a delimiter.
BEGINS_CALL = re.compile(r"[<\[{`]")
LONG_BODY = 100_000  # bytes of a body that is read in another thread
GONE = 499  # status in the metrics of a request whose client left
RETRIED = "x-stainless-retry-count"  # header of OpenAI's clients


class Application:
    """The endpoints for one model."""

    def __init__(
        self,
        worker: Worker,
        tokenizer: Tokenizer,
        name: str,
        context: int,
        settings: ServerSettings,
    ) -> None:
        self._tokenizer, self._name, self._context = tokenizer, name, context
        self._settings = settings
        self._worker = worker
        self._jobs = Jobs(self._worker, tokenizer, seed=settings.seed, most=settings.queue)
        self._reader = ThreadPoolExecutor(1)  # encodes long prompts, one after the other
        self._texts = TokenTexts(tokenizer)
        self._metrics = Metrics(self._worker)
        self._started = int(time.time())

    def starlette(self, *, any_host: bool) -> Starlette:
        """The application. Without `any_host`, requests must name the loopback address.

        Otherwise a page of the web could reach the server by a name that points to 127.0.0.1.
        """
        hosts = ["*"] if any_host else [*LOOPBACK]
        return Starlette(
            routes=self._routes(),
            middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=hosts)],
            lifespan=self._lifespan,
        )

    def _routes(self) -> list[Route]:
        return [
            self._route("/v1/chat/completions", partial(self._answer, read_chat), "POST"),
            self._route(
                "/v1/responses", partial(self._answer, read_response, form=ResponseAnswer), "POST"
            ),
            self._route("/v1/completions", partial(self._answer, read_completion), "POST"),
            self._route("/v1/models", self._models),
            self._route("/metrics", self._metric_text),
            self._route("/health", self._health, free=True),
        ]

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        self._worker.start(asyncio.get_running_loop())
        yield
        self._reader.shutdown(wait=False)
        self._worker.close()

    def _route(
        self, path: str, endpoint: Endpoint, method: str = "GET", *, free: bool = False
    ) -> Route:
        """A route whose errors are answers; not `free`, it asks for the key."""

        async def answer(request: Request) -> Response:
            try:
                if not free:
                    self._check_key(request)
                response = await endpoint(request)
            except ApiError as error:
                response = _json(error.body(), error.status, error.headers)
            except ClientDisconnect:
                response = Response(status_code=GONE)
            self._metrics.requests.labels(path, response.status_code).inc()
            return response

        return Route(path, answer, methods=[method])

    def _check_key(self, request: Request) -> None:
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        key = self._settings.api_key
        if key and not hmac.compare_digest(given.encode(), key.encode()):
            raise ApiError(401, "the API key is missing or wrong", code="invalid_api_key")

    # --------------------------------------------------------------------- answers

    async def _answer(
        self,
        read: Callable[..., Asked],
        request: Request,
        *,
        form: "Callable[[_Answer], _Answer | ResponseAnswer]" = lambda answer: answer,
    ) -> Response:
        began = time.monotonic()
        until = began + self._settings.answer_s
        try:
            async with asyncio.timeout(self._settings.answer_s):
                raw = await self._body(request)
        except TimeoutError:
            raise _too_late() from None
        if self._worker.failure is not None:
            raise ApiError(503, f"the engine failed: {self._worker.failure}", kind="server_error")
        job, give_back = await self._job(read, request, raw)
        asked, answer = job.asked, form(self._answer_of(job))
        leave = partial(self._leave, job, give_back, began)
        stream = _EventStream(answer, until, leave)
        response: Response | None = None
        try:
            wait = job.wait_for_first() if asked.stream else job.wait()
            await _in_time(request.receive, wait, until)
            job.check()
            if asked.stream:
                self._metrics.first_token.observe(time.monotonic() - began)
                response = stream
            else:
                response = _json(answer.whole())
            return response
        finally:
            if response is not stream:
                leave(response is not None)

    async def _job(
        self, read: Callable[..., Asked], request: Request, raw: bytes
    ) -> tuple[Job, GiveBack]:
        """The answer in the making, and how its connection gives it back."""
        read = partial(read, raw, self._tokenizer, name=self._name, context=self._context)
        if len(raw) < LONG_BODY:  # another thread would have to wait for the engine's
            asked = read()
        else:  # it may take seconds, and streams go on meanwhile
            asked = await asyncio.get_running_loop().run_in_executor(self._reader, read)
        # A client with the same key that sends the same again is taken for the same client.
        key = request.headers.get("authorization", "").encode()
        name = hashlib.blake2b(b"\0".join((request.url.path.encode(), key, raw))).digest()
        job = self._jobs.take(asked, name, again=is_retry(request))
        return job, lambda delivered: self._jobs.leave(job, name, delivered=delivered)

    def _answer_of(self, job: Job) -> "_Answer":
        writer = Writer(job.asked, self._texts, name=self._name, number=job.id, created=job.created)
        return _Answer(job, writer, self._tokenizer)

    def _leave(self, job: Job, give_back: GiveBack, began: float, delivered: bool) -> None:
        """Count an answer, and give its job back."""
        if delivered:
            self._metrics.answer.observe(time.monotonic() - began)
            self._metrics.prompt_tokens.inc(sum(map(len, job.asked.prompts)))
            self._metrics.sampled_tokens.inc(job.sampled)
        give_back(delivered)

    async def _body(self, request: Request) -> bytes:
        """The body of a request. Raises ApiError if it is too long or no JSON.

        Another content type is refused because a page of the web may send it without being asked.
        """
        if request.headers.get("content-type", "").partition(";")[0] != "application/json":
            raise ApiError(400, "the content-type must be application/json")
        body, most = bytearray(), self._settings.body_mb * 1e6
        async for chunk in request.stream():
            body += chunk
            if len(body) > most:
                raise ApiError(413, f"the body has more than {most:.0f} bytes")
        return bytes(body)

    # --------------------------------------------------------------------- the other routes

    async def _models(self, request: Request) -> Response:
        model = {
            "id": self._name,
            "object": "model",
            "created": self._started,
            "owned_by": "jaxrl_llm",
            "max_model_len": self._context,
        }
        return _json({"object": "list", "data": [model]})

    async def _metric_text(self, request: Request) -> Response:
        return Response(self._metrics.text(), media_type=Metrics.MEDIA_TYPE)

    async def _health(self, request: Request) -> Response:
        """200 while the engine works."""
        failure = self._worker.failure
        if failure is not None:
            return _json({"status": "failed", "reason": str(failure)}, 503)
        return _json({"status": "ok"})


class _Answer:
    """The parts of an answer as they are written. With tools, calls are read out of it."""

    def __init__(self, job: Job, writer: Writer, tokenizer: Tokenizer) -> None:
        self.asked, self._job, self._writer = job.asked, job, writer
        tools = job.asked.tools
        self._parser = (job.parser or ToolCallParser(tokenizer, tools)) if tools else None
        self._delimiters = {i for i, _ in tokenizer.added_tokens.values()} if tools else set()

    def whole(self) -> dict[str, Any]:
        """The reply that is no stream."""
        parts = [
            self._part(i, choice, _Sent(), len(choice.text))
            for i, choice in enumerate(self._job.choices)
        ]
        return self._writer.reply(parts)

    async def events(self) -> AsyncIterator[bytes]:
        """The events of a stream; what comes at one time is sent at once."""
        async for chunks in self.chunks():
            yield b"".join(map(_event, chunks))
        yield b"data: [DONE]\n\n"

    async def chunks(self) -> AsyncIterator[list[dict[str, Any]]]:
        """The chunks of a stream; what comes at one time is together."""
        job = self._job
        sent = [_Sent() for _ in job.choices]
        while True:
            job.check()
            ended, changed = job.ended, job.changed
            parts = [self._further(i, choice, sent[i]) for i, choice in enumerate(job.choices)]
            yield [self._writer.chunk(part) for part in parts if part]
            if ended:
                break
            await changed.wait()
        if job.asked.include_usage:
            yield [self._writer.usage_chunk(job.sampled)]

    def _further(self, index: int, choice: Choice, sent: "_Sent") -> Part | None:
        """What a choice has more than was sent."""
        asked, count = self._job.asked, len(choice.tokens)
        shown = choice.shown if self._parser is None else self._before_calls(choice)
        with_tokens = (asked.logprobs or asked.token_ids) and count > sent.tokens
        if sent.all or not (shown > sent.characters or with_tokens or choice.ended):
            return None
        part = self._part(index, choice, sent, shown)
        sent.characters, sent.tokens, sent.first, sent.all = shown, count, False, choice.ended
        return part

    def _before_calls(self, choice: Choice) -> int:
        """Characters that are no part of a call. At its end a choice is read as a whole."""
        if choice.ended:
            return len(choice.text)
        if not self._delimiters.isdisjoint(choice.tokens):
            return 0
        first = BEGINS_CALL.search(choice.text)
        return min(choice.shown, first.start() if first else len(choice.text))

    def _part(self, index: int, choice: Choice, sent: "_Sent", shown: int) -> Part:
        part = Part(
            index=index,
            text=choice.text[sent.characters : shown],
            tokens=choice.tokens[sent.tokens :],
            logprobs=choice.logprobs[sent.tokens :],
            finish_reason=choice.finish_reason,
            first=sent.first,
        )
        if self._parser is None or not choice.ended:
            return part
        return self._with_calls(part, choice, sent, self._parser)

    def _with_calls(
        self, part: Part, choice: Choice, sent: "_Sent", parser: ToolCallParser
    ) -> Part:
        """The part with its calls of tools. A call without a name or an end makes it a text."""
        prompt = self._job.asked.prompts[part.index // self._job.asked.n]
        parsed = parser.parse(choice.tokens, thinking=parser.opens_thinking(prompt))
        if not parsed.calls or any(
            not call.name or call.status == "unclosed_block" for call in parsed.calls
        ):
            return part
        shown = choice.text[: sent.characters]
        calls = [
            {
                "id": call.id or _call_id(f"{self._job.id} {part.index} {i}"),
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for i, call in enumerate(parsed.calls)
        ]
        return replace(
            part,
            text=parsed.content[len(commonprefix([parsed.content, shown.lstrip()])) :],
            thinking=parsed.thinking,
            tool_calls=calls,
            finish_reason="tool_calls" if part.finish_reason == "stop" else part.finish_reason,
        )


def is_retry(request: Request) -> bool:
    """True if the client sends a request again."""
    return request.headers.get(RETRIED, "0") != "0"


def _call_id(place: str) -> str:
    """An id of nine letters and digits, as Mistral's chat template wants it."""
    return hashlib.blake2b(place.encode()).hexdigest()[:9]


@dataclass
class _Sent:
    """How much of a choice a client has."""

    characters: int = 0
    tokens: int = 0
    first: bool = True  # nothing yet
    all: bool = False


class _EventStream(Response):
    """An answer as server-sent events."""

    media_type = "text/event-stream"

    def __init__(
        self, answer: _Answer | ResponseAnswer, until: float, leave: Callable[[bool], None]
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-store"})
        del self.headers["content-length"]
        self._answer, self._until, self._leave = answer, until, leave

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events until the client leaves."""
        delivered = False
        try:
            await _in_time(receive, self._send(send), self._until)
            delivered = True
        except (ClientDisconnect, OSError):
            pass
        except ApiError as error:
            await send(_piece(_event(error.body())))
            await send(_piece(b"", more=False))
        finally:
            self._leave(delivered)

    async def _send(self, send: Send) -> None:
        headers = self.raw_headers
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        async for events in self._answer.events():
            if events:
                await send(_piece(events))
        await send(_piece(b"", more=False))


def _piece(body: bytes, *, more: bool = True) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": more}


def _event(value: Any) -> bytes:
    return b"data: " + orjson.dumps(value) + b"\n\n"


def _json(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(orjson.dumps(value), status, headers, "application/json")


async def _in_time(receive: Receive, work: Coroutine[Any, Any, None], until: float) -> None:
    """Do the work while the client is there.

    Raises: ClientDisconnect when it leaves, ApiError at the monotonic time `until`.
    """
    tasks = [asyncio.ensure_future(work), asyncio.ensure_future(_left(receive))]
    try:
        late = max(until - time.monotonic(), 0.0)
        await asyncio.wait(tasks, timeout=late, return_when=asyncio.FIRST_COMPLETED)
        if tasks[0].done():
            tasks[0].result()
        elif tasks[1].done():
            raise ClientDisconnect
        else:
            raise _too_late()
    finally:
        for task in tasks:
            task.cancel()


def _too_late() -> ApiError:
    headers = {"x-should-retry": "false"}  # the client would wait as long again
    return ApiError(504, "the answer took too long", kind="timeout", headers=headers)


async def _left(receive: Receive) -> None:
    """Wait until the client has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass
