"""The judge against a real server process on this machine."""

import math
import re
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
from recording import RecordingServer, running_server

from jaxrl_llm.config import JUDGE_PATTERN, ConfigError, Judge, load_config
from jaxrl_llm.rewards import http_client
from jaxrl_llm.rewards import judge as module
from jaxrl_llm.rewards.http_client import RequestError
from jaxrl_llm.rewards.judge import AnswerCache, filled, judge, read_score
from jaxrl_llm.rewards.manager import RewardManager
from jaxrl_llm.rewards.workers.process import WorkerLimits
from jaxrl_llm.types import Completion, Prompt


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RecordingServer]:
    folder = tmp_path_factory.mktemp("judge")
    with running_server("judge_server.py", folder, "v1") as server:
        yield server


@pytest.fixture
def server(running: RecordingServer, monkeypatch: pytest.MonkeyPatch) -> RecordingServer:
    monkeypatch.setattr(http_client, "FIRST_WAIT_S", 0.01)
    module._cache.cache_clear()
    http_client.server_of.cache_clear()
    running.requests()
    return running


def ask(server: RecordingServer, *texts: str, **settings) -> tuple[list[float], dict[str, list]]:
    logged: dict[str, list] = {}
    scores = judge(
        [f"say {text}" for text in texts],
        list(texts),
        ["truth"] * len(texts),
        logged.__setitem__,
        url=server.url,
        model="m",
        **settings,
    )
    return scores, logged


def test_a_text_is_not_filled_again():
    texts = ("what {response}?", "I say {ground_truth}", "42")
    found = filled("{question}|{response}|{ground_truth}|{other}", texts)
    assert found == "what {response}?|I say {ground_truth}|42|{other}"


def test_the_last_score_counts():
    assert read_score("Score: 3, no.\nScore: 8", module.PATTERN, 10.0) == 8
    with pytest.raises(RequestError, match="no score.*no idea"):
        read_score("no idea", module.PATTERN, 10.0)
    with pytest.raises(RequestError, match="11 is beyond scale=10"):
        read_score("Score: 11", module.PATTERN, 10.0)


def test_the_server_is_asked_as_the_settings_say(server, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "secret")
    scores, logged = ask(server, "four", temperature=0.5, key_variable="JUDGE_KEY")
    assert scores == [0.75] and "It is good" in logged["judge/answer"][0]
    (request,) = server.requests()
    assert request["path"] == "/v1/chat/completions" and request["key"] == "Bearer secret"
    assert request["body"]["model"] == "m" and request["body"]["temperature"] == 0.5
    text = request["body"]["messages"][0]["content"]
    assert "Question:\nsay four\n" in text and "<<<\nfour\n>>>" in text and "\ntruth\n" in text


def test_a_busy_server_is_asked_again(server):
    assert ask(server, "busy 1", "busy 2")[0] == [0.75, 0.75]
    assert len(server.requests()) == 6


def test_a_failure_is_one_sample(server):
    texts = ("fine", "broken", "mute", "garbled", "generous")
    scores, logged = ask(server, *texts, retries=1)
    assert scores[0] == 0.75 and all(map(math.isnan, scores[1:]))
    _, broken, mute, garbled, generous = logged["judge/error"]
    assert "failed 2 times; the last time: HTTP 500" in broken and "no score" in mute
    assert "failed 2 times; the last time: BadStatusLine" in garbled and "beyond" in generous


def test_a_request_that_the_server_refuses_is_one_sample(server):
    scores, logged = ask(server, "too long", "fine", concurrency=1)
    assert math.isnan(scores[0]) and scores[1] == 0.75
    assert logged["judge/error"] == ["HTTP 400: more tokens than the context", ""]
    assert len(server.requests()) == 2


def test_a_slow_judge_is_asked_once(server):
    """Neither the judge's retries nor the pool, after a failed call, repeat a slow request."""
    function = Judge(url=server.url, model="m", total_s=0.7)
    prompt = Prompt(token_ids=(1,), text="q?")
    answers = [
        Completion(tokens=(2,), text=text, logprobs=(0.0,), finished=True)
        for text in ("slow 1", "slow 2")
    ]
    with RewardManager([function], timeout=8.0, num_workers=1, limits=WorkerLimits()) as manager:
        began = time.monotonic()
        result = manager.score([prompt] * 2, answers, step=1)
        assert time.monotonic() - began < 8.0
    assert len(server.requests()) == 2
    assert len(result.failures) == 2 and "total_s has passed" in result.failures[0].message


@pytest.mark.parametrize(
    ("text", "message"), [("locked", "401.*the variable OPENAI_API_KEY"), ("moved", "HTTP 307")]
)
def test_what_can_never_work_is_not_repeated(server, text, message):
    scores, logged = ask(server, *(f"{text} {i}" for i in range(20)), concurrency=1)
    assert all(map(math.isnan, scores)) and len(server.requests()) == 1
    assert all(re.search(message, error) for error in logged["judge/error"])


@pytest.mark.parametrize("pattern", [JUDGE_PATTERN, r"score:\s*\**\s*(\d+)"])
def test_a_long_answer_is_read_in_time(pattern):
    began = time.monotonic()
    for text in ("score:" + " " * 10**6, "score " * 10**5, "score:" + "* " * 10**5):
        with pytest.raises(RequestError, match="no score"):
            read_score(text, pattern, 10.0)
    assert read_score(" " * 10**6 + "score: ** 7", pattern, 10.0) == 7.0
    assert time.monotonic() - began < 8.0


def test_a_repeated_request_is_answered_from_the_cache(server, tmp_path):
    path = str(tmp_path / "new" / "cache.jsonl")
    ask(server, "one", "two", cache_file=path)
    assert ask(server, "one", "three", cache_file=path)[0] == [0.75, 0.75]
    assert len(server.requests()) == 3
    module._cache.cache_clear()  # as in a resumed run
    with open(path, "a") as file:
        file.write('{"request": "torn')
    ask(server, "one", "two", "three", cache_file=path)
    assert server.requests() == [] and len(AnswerCache(path)._answers) == 3


def test_requests_keep_their_pace(server):
    ask(server, *"abcd", requests_per_minute=600)
    times = sorted(request["at"] for request in server.requests())
    assert times[-1] - times[0] > 0.25  # three pauses of 0.1 s


def test_it_runs_in_the_pool(server):
    prompt = Prompt(token_ids=(1,), text="what?", messages=({"role": "user", "content": "q?"},))
    texts = ("four", "mute")
    answers = [Completion(tokens=(2,), text=t, logprobs=(0.0,), finished=True) for t in texts]
    function = Judge(url=server.url, model="m", retries=0)
    with RewardManager([function], failure_value=-1.0, limits=WorkerLimits()) as manager:
        result = manager.score([prompt] * 2, answers, step=1)
    assert result.scores.tolist() == [0.75, -1.0]
    assert [failure.index for failure in result.failures] == [1]
    assert "not finite in float32: no score" in result.failures[0].message
    assert "no score" in result.extras[1]["judge/error"]
    assert "Question:\nq?\n" in server.requests()[0]["body"]["messages"][0]["content"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"url": "127.0.0.1:8000"}, "http://"),
        ({"url": "http://x", "template": "{question}"}, "lacks {response}"),
        ({"url": "http://x", "pattern": "x"}, "one group"),
        ({"url": "http://x", "pattern": "("}, "pattern.*: expected a regular expression"),
    ],
)
def test_wrong_settings_are_refused_before_the_run(settings, message):
    function = {"kind": "judge", "model": "m", **settings}
    with pytest.raises(ConfigError, match=message):
        load_config("grpo", {"reward.functions": [function]})


def test_the_failed_requests_of_a_step_are_asked_again_together(server: RecordingServer) -> None:
    """One by one, each would wait for its own total_s: an hour for a server that is away."""
    function = Judge(url=server.url, model="m", retries=0, concurrency=8)
    prompt = Prompt(token_ids=(1,), text="q", ground_truth="1")
    texts = ["fine", *(f"slow {i}" for i in range(4))]
    answers = [Completion(tokens=(1,), text=t, logprobs=(0.0,), finished=True) for t in texts]
    function = replace(function, total_s=1.0)
    began = time.monotonic()
    with RewardManager([function], max_retries=1, on_failure="mask", timeout=20.0) as manager:
        result = manager.score([prompt] * 5, answers, step=1)
    assert result.failed.tolist() == [0.0] + [1.0] * 4 and time.monotonic() - began < 8.0
    asked = [request["body"]["messages"][0]["content"] for request in server.requests()]
    assert len(asked) == 9 and sum("fine" in text for text in asked) == 1
