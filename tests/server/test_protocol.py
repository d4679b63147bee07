"""The routes, with the real client of OpenAI, and an engine that answers from a script."""

import http.client
import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import openai
import pytest
from chat_tokenizer import write_chat_tokenizer
from turn_templates import TOOLS

from jaxrl_llm.server.listening import Server
from jaxrl_llm.server.settings import ServerSettings
from jaxrl_llm.tokenizer import Tokenizer, load_tokenizer

END = 3  # <|im_end|>
AGAIN = {"x-stainless-retry-count": "1"}  # as the client marks a retry
IDS = {"return_token_ids": True}
HELLO = [{"role": "user", "content": "hi"}]


class Scripted(SimpleNamespace):
    """A sequence."""

    __hash__ = object.__hash__
    __eq__ = object.__eq__


@dataclass(eq=False)
class ScriptedEngine:
    """Answers by a function of (prompt, key); tokens come three a step, in four slots."""

    answer: Callable[[list[int], tuple[int, ...]], list[int]]
    sequences: list[Any] = field(default_factory=list)
    added: list[Any] = field(default_factory=list)
    go: threading.Event = field(default_factory=threading.Event)  # steps wait for it
    error: Exception | None = None
    num_free_tokens = 77

    @property
    def has_work(self) -> bool:
        return bool(self.sequences)

    def add(self, prompt, *, limit, seed_key, sample_id, sampling):
        if len(prompt) > 1500:
            raise ValueError("too long for the engine")
        key = (*seed_key.tolist(), sample_id)
        ids = self.answer(list(prompt), key)
        sequence = Scripted(
            tokens=list(prompt),
            logprobs=[0.0] * len(prompt),
            status="queued",
            stop_reason="stop" if len(ids) <= limit else "length",
            left=ids[:limit],
            key=key,
            sampling=sampling,
        )
        self.sequences.append(sequence)
        self.added.append(sequence)
        return sequence

    def step(self, most):
        time.sleep(0.002)
        if not self.go.wait(0.01):
            return []
        if self.error is not None:
            raise self.error
        live = self.sequences[:4]
        for sequence in live:
            sequence.status = "running"
            ids, sequence.left = sequence.left[:3], sequence.left[3:]
            sequence.tokens += ids
            sequence.logprobs += [-0.5] * len(ids)
            if not sequence.left:
                sequence.status = "waiting"
        return live

    def finish(self, sequence):
        sequence.status = "ended"
        self.sequences.remove(sequence)

    def abort(self, sequence):
        self.finish(sequence)
        sequence.stop_reason = "aborted"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    return load_tokenizer(write_chat_tokenizer(tmp_path_factory.mktemp("t")))


@contextmanager
def serving(
    tokenizer: Tokenizer, answer: Any = "hello", *, held: bool = False, **options: Any
) -> Iterator[SimpleNamespace]:
    """A server that answers a text or by a function, with a client, and the engine."""
    text = answer if isinstance(answer, str) else ""
    function = (lambda prompt, key: [*tokenizer.encode(text), END]) if text else answer
    engine = ScriptedEngine(function)
    if not held:
        engine.go.set()
    settings = ServerSettings(port=0, **options)
    with Server(engine, tokenizer, "m", 2000, settings) as server:
        client = openai.OpenAI(base_url=server.url, api_key="key")
        yield SimpleNamespace(engine=engine, client=client, server=server)
        engine.go.set()


def chat(client: openai.OpenAI, **changes: Any) -> Any:
    return client.chat.completions.create(**({"model": "m", "messages": HELLO} | changes))


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_chat_and_its_ids(tokenizer):
    with serving(tokenizer) as here:
        reply = chat(here.client, extra_body=IDS, logprobs=True)
    (choice,) = reply.choices
    assert (choice.message.content, choice.finish_reason) == ("hello", "stop")
    text = tokenizer.apply_chat_template(HELLO)
    assert reply.prompt_token_ids == tokenizer.encode(text)
    assert choice.token_ids == [*tokenizer.encode("hello"), END]
    assert reply.usage.prompt_tokens == len(tokenizer.encode(text))
    assert reply.usage.completion_tokens == 6
    entries = choice.logprobs.content
    assert [entry.token for entry in entries] == [*"hello", "<|im_end|>"]
    assert entries[0].logprob == -0.5 and entries[0].bytes == [ord("h")]
    assert reply.object == "chat.completion" and reply.model == "m" and reply.id


def test_completions_of_texts_and_ids(tokenizer):
    def answer(prompt, key):
        return [*tokenizer.encode(f"{key[2]}"), *prompt, END]

    with serving(tokenizer, answer) as here:
        create = here.client.completions.create
        both = create(model="m", prompt=["ab", "c"], n=2, seed=5, logprobs=0)
        ids = create(model="m", prompt=tokenizer.encode("ab"), max_tokens=2)
    assert [choice.text for choice in both.choices] == ["0ab", "1ab", "2c", "3c"]
    assert [choice.index for choice in both.choices] == [0, 1, 2, 3]
    assert both.choices[0].logprobs.tokens == ["0", "a", "b", "<|im_end|>"]
    assert both.choices[0].logprobs.text_offset == [0, 1, 2, 3]
    assert (ids.choices[0].text, ids.choices[0].finish_reason) == ("4a", "length")
    assert both.usage.prompt_tokens == 3


def test_a_stream_gives_what_a_reply_gives(tokenizer):
    """Also é, and the first half of the stop string, which is not shown too early."""
    with serving(tokenizer, "café or tea, END it is") as here:
        whole = chat(here.client, n=2, stop=["END", "x"])
        options = {"include_usage": True}
        chunks = list(
            chat(
                here.client,
                n=2,
                stop=["END", "x"],
                stream=True,
                stream_options=options,
                logprobs=True,
                extra_body=IDS,
            )
        )
    *chunks, last = chunks
    assert last.choices == [] and last.usage == whole.usage
    for index, choice in enumerate(whole.choices):
        assert choice.message.content == "café or tea, " and choice.finish_reason == "stop"
        parts = [c.choices[0] for c in chunks if c.choices[0].index == index]
        assert len(parts) > 3 and parts[0].delta.role == "assistant"
        assert "".join(part.delta.content or "" for part in parts) == choice.message.content
        assert [part.finish_reason for part in parts][-2:] == [None, "stop"]
        # The ids of the stop string stay, and none after it.
        ids = [i for part in parts for i in part.token_ids]
        assert tokenizer.decode(ids) == "café or tea, END"
        assert [e.token for part in parts for e in part.logprobs.content] == [*"café or tea, END"]
    assert chunks[0].prompt_token_ids == tokenizer.encode(tokenizer.apply_chat_template(HELLO))


def test_a_stop_string_ends_the_sequence_in_the_engine(tokenizer):
    with serving(tokenizer, "ab" * 40) as here:
        reply = chat(here.client, stop="bab")
        until(lambda: not here.engine.sequences)
        assert here.engine.added[0].stop_reason == "aborted"
        token = tokenizer.encode("b")[0]
        ids = here.client.completions.create(
            model="m", prompt="x", extra_body={"stop_token_ids": [token]}
        )
    assert (reply.choices[0].message.content, reply.usage.completion_tokens) == ("a", 4)
    assert (ids.choices[0].text, ids.choices[0].finish_reason) == ("a", "stop")


def test_a_special_token_is_a_stop_string_too(tokenizer):
    def answer(prompt, key):
        return [*tokenizer.encode("ab<|im_start|>cd"), END]

    with serving(tokenizer, answer) as here:
        for stop in ("<|im_start|>", ["d", "<|im_start|>"]):
            (choice,) = chat(here.client, stop=stop, extra_body=IDS).choices
            assert (choice.message.content, choice.finish_reason) == ("ab", "stop")
            assert choice.token_ids == tokenizer.encode("ab<|im_start|>")


def test_keys(tokenizer):
    """With a seed only the seed counts; without one each choice has another number."""
    with serving(tokenizer, seed=7) as here:
        for _ in range(2):
            chat(here.client, n=2)
            chat(here.client, n=2, seed=9, temperature=0.5, top_p=0.9)
        added = here.engine.added
        assert [x.key for x in added if x.sampling.temperature == 0.5] == [(0, 9, 0), (0, 9, 1)] * 2
        others = [x.key for x in added if x.sampling.temperature == 1.0]
        assert others == [(1, 7, 0), (1, 7, 1), (1, 7, 4), (1, 7, 5)]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"temperature": -1}, "body.temperature=-1.*0 or more"),
        ({"messages": []}, "'body.messages' is empty"),
        ({"messages": [{"role": "user", "content": ""}]}, "'body.messages.0..content' is empty"),
        ({"messages": [{"content": "a"}]}, "body.messages.0. has no role"),
        ({"messages": [{"role": "robot", "content": "a"}]}, "unknown role robot"),
        ({"messages": "hi"}, "body.messages"),
        ({"max_tokens": 0}, "body.max_tokens=0"),
        ({"n": 129}, "body.n=129"),
        ({"stop": [""]}, "body.stop"),
        ({"extra_body": {"max_token": 3}}, "did you mean 'body.max_tokens'"),
        ({"frequency_penalty": 0.5}, "frequency_penalty is not supported"),
        ({"response_format": {"type": "json_object"}}, "response_format is not supported"),
        ({"logprobs": True, "top_logprobs": 3}, "top_logprobs is not supported"),
        ({"tool_choice": "required"}, "tool_choice='required' is not supported"),
        ({"messages": [{"role": "user", "content": "a" * 150_000}]}, "the context 2000"),
        ({"messages": [{"role": "user", "content": "a" * 1600}]}, "too long for the engine"),
        ({"messages": [{"role": "user", "content": "\u1234"}]}, "cannot encode"),
    ],
)
def test_bad_requests_are_refused_with_the_reason(tokenizer, changes, message):
    with serving(tokenizer) as here:
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError, match=message):
                chat(here.client, stream=stream, **changes)
        assert here.engine.sequences == []
        assert chat(here.client).choices[0].message.content == "hello"  # it goes on


def raw(server: Server, body: bytes, headers: dict[str, str], path: str = "/v1/completions") -> Any:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    connection.request("POST", path, body, headers)
    answer = connection.getresponse()
    return answer.status, answer.read()


def test_bodies_that_are_refused(tokenizer):
    json_type = {"Content-Type": "application/json"}
    body = b'{"model": "m", "prompt": "a"}'
    with serving(tokenizer, body_mb=1e-4) as here:
        assert raw(here.server, body, json_type)[0] == 200
        for bad in (b"{", b"[]", b"\xff", b'{"prompt": NaN}', b""):
            status, answer = raw(here.server, bad, json_type)
            assert status == 400 and b"JSON" in answer
        assert raw(here.server, body, {"Content-Type": "text/plain"})[0] == 400
        assert raw(here.server, body + b" " * 100, json_type)[0] == 413
        # A page of the web whose name points to this machine.
        assert raw(here.server, body, json_type | {"Host": "evil.example"})[0] == 400
        with pytest.raises(openai.NotFoundError, match="there is no model 'other'"):
            chat(here.client, model="other")


def test_the_key(tokenizer):
    with serving(tokenizer, api_key="secret") as here:
        with pytest.raises(openai.AuthenticationError):
            chat(here.client)
        right = here.client.with_options(api_key="secret")
        assert chat(right).choices[0].message.content == "hello"
        assert [model.id for model in right.models.list()] == ["m"]
        connection = http.client.HTTPConnection("127.0.0.1", here.server.port)
        connection.request("GET", "/health")
        assert connection.getresponse().status == 200


# ------------------------------------------------------------------------- tools

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
# Not as json.dumps would write it: the arguments are what was sampled.
ARGUMENTS = '{"city":  "Lima"}'
CALL = f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>'


@pytest.fixture(scope="module")
def hermes(tmp_path_factory) -> Tokenizer:
    return load_tokenizer(write_chat_tokenizer(tmp_path_factory.mktemp("h"), template=TOOLS))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("text", "content", "number"),
    [
        (f"Let me see.\n{CALL}\n{CALL}", "Let me see.", 2),
        (CALL, None, 1),
        ("It is fine.", "It is fine.", 0),
        ("<tool_call>\n{", "<tool_call>\n{", 0),  # no name, no end
        (f"One. {CALL} Two.", "One.  Two.", 1),
    ],
)
def test_calls_of_tools(hermes, text, content, number, stream):
    with serving(hermes, text) as here:
        if stream:
            chunks = chat(here.client, tools=[WEATHER], stream=True)
            parts = [chunk.choices[0] for chunk in chunks]
            found = "".join(part.delta.content or "" for part in parts) or None
            found = found and found.strip()
            calls = [call for part in parts for call in part.delta.tool_calls or []]
            assert [call.index for call in calls] == [*range(number)]
            # Text before a call comes while it is made, and nothing of the call.
            early = "".join(part.delta.content or "" for part in parts[:-1])
            assert early == text.partition("<")[0] if number else text.startswith(early)
            reason = parts[-1].finish_reason
        else:
            (choice,) = chat(here.client, tools=[WEATHER]).choices
            found, calls = choice.message.content, choice.message.tool_calls or []
            reason = choice.finish_reason
        prompt = here.engine.added[0].tokens[: -len(hermes.encode(text)) - 1]
    assert (found, len(calls), reason) == (content, number, "tool_calls" if number else "stop")
    assert len({call.id for call in calls}) == number
    for call in calls:
        assert (call.function.name, call.function.arguments) == ("weather", ARGUMENTS)
    assert prompt == hermes.encode(hermes.apply_chat_template(HELLO, tools=[WEATHER]))


def test_thinking_before_a_call_is_apart(hermes):
    with serving(hermes, f"<think>Which city?</think>{CALL}") as here:
        (choice,) = chat(here.client, tools=[WEATHER]).choices
    assert (choice.message.content, choice.message.reasoning_content) == (None, "Which city?")
    assert len(choice.message.tool_calls) == 1


def test_a_conversation_goes_on_with_the_result(hermes):
    """The history has the arguments as text. An empty result is one too."""
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": ARGUMENTS}}
    messages = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": ""},
    ]
    with serving(hermes) as here:
        reply = chat(
            here.client,
            messages=messages,
            tools=[WEATHER],
            tool_choice="none",  # the prompt has no tools then
            extra_body=IDS,
        )
    text = hermes.turns().prompt(messages)
    assert "Lima" in text and reply.prompt_token_ids == hermes.encode(text)
    assert reply.choices[0].message.content == "hello"


def test_plain_json_is_a_call(tokenizer):
    """A template that says nothing of tools: the caller describes them in a message."""
    with serving(tokenizer, f'{{"name": "weather", "arguments": {ARGUMENTS}}}') as here:
        (choice,) = chat(here.client, tools=[WEATHER]).choices
    (call,) = choice.message.tool_calls
    assert (call.function.arguments, choice.finish_reason) == (ARGUMENTS, "tool_calls")
    assert choice.message.content is None


# ------------------------------------------------------------------------- many and again


def test_many_at_once(tokenizer):
    def answer(prompt, key):
        return [*prompt, END]

    with serving(tokenizer, answer) as here, ThreadPoolExecutor(64) as threads:
        create = here.client.completions.create
        texts = [f"number {i}" for i in range(64)]
        found = threads.map(lambda text: create(model="m", prompt=text).choices[0].text, texts)
        assert [*found] == texts
        assert here.engine.sequences == []


def test_too_many_are_refused_and_come_again(tokenizer):
    with (
        serving(tokenizer, held=True, queue=2) as here,
        ThreadPoolExecutor(1) as threads,
    ):
        first = threads.submit(chat, here.client, n=2)
        until(lambda: len(here.engine.added) == 2)
        with pytest.raises(openai.RateLimitError, match="2 answers are unfinished"):
            chat(here.client.with_options(max_retries=0))
        metrics = metrics_of(here.server)
        assert metrics["jaxrl_unfinished_choices"] == 2
        assert metrics['jaxrl_requests_total{route="/v1/chat/completions",status="429"}'] == 1
        here.engine.go.set()
        assert len(first.result().choices) == 2
        metrics = metrics_of(here.server)
        assert metrics["jaxrl_sampled_tokens_total"] == 12
        assert metrics["jaxrl_answer_seconds_count"] == 1
        assert metrics["jaxrl_queued_choices"] == 0
        assert metrics["jaxrl_free_cache_tokens"] == 77


def metrics_of(server: Server) -> dict[str, float]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port)
    connection.request("GET", "/metrics")
    lines = connection.getresponse().read().decode().splitlines()
    return {k: float(v) for k, v in (x.rsplit(" ", 1) for x in lines if not x.startswith("#"))}


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_slot(tokenizer, stream):
    """And its retry, which the client sends by itself, gets the same keys."""
    with serving(tokenizer, "x" * 99, held=True) as here:
        impatient = here.client.with_options(timeout=0.3, max_retries=0)
        with pytest.raises(openai.APITimeoutError):
            chat(impatient, n=2, stream=stream)
        here.engine.go.set()
        until(lambda: not here.engine.sequences)
        assert [x.stop_reason for x in here.engine.added] == ["aborted"] * 2
        chat(here.client)  # another request in between
        [*chat(here.client, n=2, stream=stream, extra_headers=AGAIN)]
        keys = [x.key[2] for x in here.engine.added]
        assert keys == [0, 1, 2, 0, 1]
        [
            *chat(here.client, n=2, stream=stream, extra_headers=AGAIN)
        ]  # it was delivered a moment ago
        assert len(here.engine.added) == 5


def test_a_stream_that_is_closed_early_frees_its_slot(tokenizer):
    with serving(tokenizer, "x" * 150) as here:
        stream = chat(here.client, stream=True)
        assert next(iter(stream)).choices[0].delta.content
        stream.close()
        until(lambda: not here.engine.sequences)
        assert here.engine.added[0].stop_reason == "aborted"


def test_an_equal_request_joins_the_first_while_it_runs(tokenizer):
    def answer(prompt, key):
        return [*tokenizer.encode(f"number {key[2]}"), END]

    with serving(tokenizer, answer, held=True) as here, ThreadPoolExecutor(3) as threads:
        first = threads.submit(chat, here.client)
        until(lambda: len(here.engine.added) == 1)
        joined = threads.submit(chat, here.client, extra_headers=AGAIN)
        other = threads.submit(chat, here.client)  # no retry: another sample of the same prompt
        until(lambda: len(here.engine.added) == 2)
        here.engine.go.set()
        assert first.result() == joined.result()
        assert other.result().choices[0].message.content == "number 1"
        assert first.result().choices[0].message.content == "number 0"


# ------------------------------------------------------------------------- failures


def test_a_request_has_a_time_limit(tokenizer):
    with serving(tokenizer, held=True, answer_s=0.3) as here:
        began = time.monotonic()
        with pytest.raises(openai.InternalServerError, match="took too long"):
            chat(here.client)
        assert time.monotonic() - began < 5 and len(here.engine.added) == 1  # no retry
        here.engine.go.set()
        until(lambda: not here.engine.sequences)


def test_an_engine_that_fails_ends_every_answer(tokenizer):
    with serving(tokenizer, held=True) as here, ThreadPoolExecutor(4) as threads:
        client = here.client.with_options(max_retries=0)
        waiting = [threads.submit(chat, client, stream=bool(i % 2)) for i in range(4)]
        until(lambda: len(here.engine.added) == 4)
        here.engine.error = RuntimeError("out of memory")
        here.engine.go.set()
        for one in waiting:
            assert "out of memory" in str(one.exception())
        with pytest.raises(openai.InternalServerError, match="the engine failed: out of memory"):
            chat(client)
        connection = http.client.HTTPConnection("127.0.0.1", here.server.port)
        connection.request("GET", "/health")
        answer = connection.getresponse()
        assert (answer.status, json.loads(answer.read())["reason"]) == (503, "out of memory")
