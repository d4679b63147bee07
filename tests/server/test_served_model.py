"""A tiny model, served: answers are the ones that `generate` gives."""

import asyncio
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import openai
import pytest
from chat_tokenizer import write_chat_tokenizer
from further import further
from tiny_models import tiny_config, write_directory

import jaxrl_llm as rl
from jaxrl_llm.server.listening import Server

HELLO = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    directory = write_directory(
        tmp_path_factory.mktemp("m") / "chat", tiny_config(vocab_size=104, num_heads=4)
    )
    write_chat_tokenizer(directory)
    return directory


@pytest.fixture(scope="module")
def model(folder) -> rl.OpenModel:
    return rl.open_model(folder)


@pytest.fixture(scope="module")
def server(model) -> Iterator[Server]:
    with model.serve(port=0, slots=3) as server:
        yield server


@pytest.fixture(scope="module")
def client(server) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url, api_key="none")


def test_greedy_answers_are_the_ones_of_generate(model, client):
    name = model.name
    (answer,) = model.generate([HELLO], temperature=0.0, max_new_tokens=20)
    completion = answer.completions[0]
    reply = client.chat.completions.create(
        model=name,
        messages=HELLO,
        temperature=0.0,
        max_tokens=20,
        logprobs=True,
        extra_body={"return_token_ids": True},
    )
    (choice,) = reply.choices
    assert choice.message.content == completion.text
    assert choice.token_ids == list(completion.tokens)
    assert reply.prompt_token_ids == list(answer.prompt.token_ids)
    logprobs = [entry.logprob for entry in choice.logprobs.content]
    assert logprobs == pytest.approx(completion.logprobs, abs=1e-5)
    assert choice.finish_reason == ("stop" if completion.finished else "length")


def test_a_seed_gives_the_samples_of_generate_whatever_else_runs(model, client):
    create = client.completions.create
    prompts = [f"text {i}" for i in range(6)]
    settings = {"seed": 11, "temperature": 0.7, "top_p": 0.9, "n": 2}

    def ask(prompt: str, **seed: int) -> list[str]:
        reply = create(model=model.name, prompt=prompt, max_tokens=12, **settings | seed)
        return [choice.text for choice in reply.choices]

    with ThreadPoolExecutor(12) as threads:
        others = threads.map(lambda prompt: ask(prompt, seed=12), prompts)
        found = [*threads.map(ask, prompts)]
        assert len({*map(tuple, others)} | {*map(tuple, found)}) == 12
    expected = [
        [completion.text for completion in answer.completions]
        for prompt in prompts
        for answer in model.generate(prompt, chat=False, max_new_tokens=12, **settings)
    ]
    assert found == expected
    assert ask(prompts[0]) == expected[0]


def test_without_a_seed_equal_requests_differ(model, client):
    create = client.completions.create
    texts = {create(model=model.name, prompt="a", max_tokens=20).choices[0].text for _ in range(4)}
    assert len(texts) == 4


def test_many_streams_at_once_with_a_stop_string(model, server):
    """64 streams in three slots; each is the beginning of what `generate` gives."""
    texts = [f"prompt {i}" for i in range(64)]

    async def ask(client: openai.AsyncOpenAI, text: str) -> tuple[str, str]:
        stream = await client.completions.create(
            model=model.name, prompt=text, max_tokens=16, seed=1, stop=["e", "zz"], stream=True
        )
        chunks = [chunk.choices[0] async for chunk in stream]
        return "".join(chunk.text for chunk in chunks), chunks[-1].finish_reason

    async def ask_all() -> list[tuple[str, str]]:
        async with openai.AsyncOpenAI(base_url=server.url, api_key="none") as client:
            return await asyncio.gather(*(ask(client, text) for text in texts))

    whole = [model.generate(t, chat=False, max_new_tokens=16, seed=1)[0].text for t in texts]
    for text, (found, reason) in zip(whole, asyncio.run(ask_all()), strict=True):
        assert found == text.partition("e")[0].partition("zz")[0]
        assert reason == ("stop" if found != text else reason)


def test_a_client_that_leaves_frees_its_slot(model, client):
    """The slots serve others afterwards."""
    for _ in range(6):
        stream = client.completions.create(model=model.name, prompt="a", max_tokens=60, stream=True)
        next(iter(stream))
        stream.close()
    reply = client.completions.create(model=model.name, prompt="a", temperature=0, max_tokens=5)
    expected = model.generate("a", chat=False, temperature=0.0, max_new_tokens=5)
    assert reply.choices[0].text == expected[0].text


def test_a_prompt_that_fills_the_context(model, client):
    positions = model.spec.config.max_position_embeddings
    with pytest.raises(openai.BadRequestError, match=f"the context {positions}"):
        client.completions.create(model=model.name, prompt="a" * positions)
    reply = client.completions.create(model=model.name, prompt="a" * (positions - 2), max_tokens=9)
    assert reply.usage.completion_tokens <= 2


def test_settings_are_checked(model):
    with pytest.raises(rl.ConfigError, match="serve.port=70000"):
        model.serve(port=70000)
    with pytest.raises(rl.ConfigError, match="the model has 64 positions"):
        model.serve(context=65)
    with model.serve(port=0) as server, pytest.raises(rl.ConfigError, match="in use"):
        model.serve(port=server.port)


def test_tasks_share_an_engine(model):
    """With the samples of `generate`; a task that is cancelled leaves the others alone."""
    prompts = [f"task {i}" for i in range(9)]
    settings = {"seed": 4, "n": 2, "max_new_tokens": 12, "stop": ["e"], "chat": False}

    async def ask() -> list[rl.Answer]:
        async with rl.AsyncModel(model, slots=4) as answering:
            other = asyncio.create_task(answering.generate("x", max_new_tokens=40))
            await asyncio.sleep(0)
            other.cancel()
            answers = [answering.generate(prompt, **settings) for prompt in prompts]
            with pytest.raises(rl.ConfigError, match="the prompt has"):
                await answering.generate("x" * 99)
            return await asyncio.gather(*answers)

    for prompt, found in zip(prompts, asyncio.run(ask()), strict=True):
        (expected,) = model.generate(prompt, **settings)
        for one, other in zip(found.completions, expected.completions, strict=True):
            assert (one.tokens, one.text) == (other.tokens, other.text)
            assert one.finished == other.finished
            assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)


@pytest.mark.parametrize("tensor", further([4, 2]))
def test_devices_that_share_the_heads_give_the_same_answers(folder, model, tensor):
    """All ways: one program, a stream, an event loop and the server.

    Four devices have more than the two KV heads, so two devices have each of them.
    """
    split = rl.open_model(folder, tensor=tensor)
    assert split.layout is not None and split.layout.size("kv_heads") == 2
    assert not all(x.sharding.is_fully_replicated for x in jax.tree.leaves(split.params))
    how = {"max_new_tokens": 12, "seed": 5}
    texts = ["hi", "you there?"]
    expected = [x.text for x in model.generate(texts, **how)]
    assert [x.text for x in split.generate(texts, **how)] == expected
    assert "".join(split.stream(texts[0], **how)) == expected[0]

    async def both() -> list[str]:
        async with rl.AsyncModel(split, slots=2, context=64) as answering:
            found = await asyncio.gather(*(answering.generate(x, **how) for x in texts))
        return [x.text for x in found]

    # Samples are numbered from 0 in each request.
    assert asyncio.run(both()) == [model.generate(x, **how)[0].text for x in texts]
    with split.serve(port=0, slots=2) as server:
        client = openai.OpenAI(base_url=server.url, api_key="none")
        reply = client.chat.completions.create(
            model=str(folder), messages=HELLO, max_tokens=12, seed=5
        )
        assert reply.choices[0].message.content == model.generate("hi", **how)[0].text


def test_the_command(folder, model):
    """SIGTERM ends it, as a cluster does; the model has the name that the flag gives."""
    command = [sys.executable, "-m", "jaxrl_llm", "serve", f"--model={folder}", "--port=0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    name, url = process.stdout.readline().split()[:3:2]
    client = openai.OpenAI(base_url=url, api_key="none")
    assert client.models.list().data[0].id == name == str(folder)
    reply = client.completions.create(model=name, prompt="ab", temperature=0, max_tokens=4)
    (answer,) = model.generate("ab", chat=False, temperature=0.0, max_new_tokens=4)
    assert reply.choices[0].text == answer.text
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 0


def test_it_serves_after_ctrl_c_and_ends_with_close(model):
    """Until Python 3.13 a `join` that Ctrl-C ends says the thread ended; `close` did not wait."""
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # xdist ignores Ctrl-C
    with model.serve(port=0) as server:
        timer = threading.Timer(0.3, signal.raise_signal, [signal.SIGINT])
        with pytest.raises(KeyboardInterrupt):
            timer.start()
            server.wait()
        signal.signal(signal.SIGINT, handler)
        client = openai.OpenAI(base_url=server.url, api_key="none")
        assert client.models.list().data[0].id == model.name
        threads = {thread for thread in threading.enumerate() if thread.name == "server"}
        server.close()
        assert len(threads - {*threading.enumerate()}) == 1
