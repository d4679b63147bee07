"""The remote reward function against a real server process on this machine."""

import json
import math
import time
from collections.abc import Iterator
from typing import Any

import pytest
from recording import RecordingServer, running_server

from jaxrl_llm.config import ConfigError, Remote, load_config
from jaxrl_llm.rewards import http_client
from jaxrl_llm.rewards.manager import RewardManager
from jaxrl_llm.rewards.remote import remote
from jaxrl_llm.types import Completion, Prompt


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RecordingServer]:
    folder = tmp_path_factory.mktemp("remote")
    with running_server("reward_server.py", folder, "grade") as server:
        yield server


@pytest.fixture
def server(running: RecordingServer, monkeypatch: pytest.MonkeyPatch) -> RecordingServer:
    monkeypatch.setattr(http_client, "FIRST_WAIT_S", 0.01)
    running.requests()
    return running


def ask(server: RecordingServer, *texts: str, **settings: Any) -> tuple[list[Any], dict[str, Any]]:
    logged: dict[str, Any] = {}

    def log_extra(name: str, values: Any) -> None:
        logged[name] = list(values)

    number = len(texts)
    columns = {"level": list(range(number))}
    found = remote(
        [f"say {text}" for text in texts],
        list(texts),
        log_extra,
        ["truth"] * number,
        ["source"] * number,
        url=server.url,
        **columns,
        **settings,
    )
    return found, logged


def test_rows_are_sent_in_batches_with_all_columns(server, monkeypatch):
    monkeypatch.setenv("MY_KEY", "secret")
    scores, logged = ask(server, "a", "bb", "ccc", batch_size=2, key_variable="MY_KEY")
    assert scores == [1, 2, 3] and logged == {}
    first, second = sorted(server.requests(), key=lambda r: -len(r["body"]["rows"]))
    assert first["path"] == "/grade" and first["key"] == "Bearer secret"
    assert len(second["body"]["rows"]) == 1
    assert first["body"]["rows"][1] == {
        "prompt": "say bb",
        "response": "bb",
        "ground_truth": "truth",
        "data_source": "source",
        "columns": {"level": 1},
    }


def test_grades_may_be_numbers_null_or_maps(server):
    scores, logged = ask(server, "none", "map", "bare")
    assert scores == [None, 0.5, 4]
    assert logged == {"remote/why": [None, "so", None]}


def test_a_key_that_stands_twice_is_no_answer():
    """The last of two `scores` counted."""
    with pytest.raises(ValueError, match="stands twice"):
        json.loads('{"scores": [1], "scores": [0]}', object_pairs_hook=http_client._each_once)


def test_a_failure_is_one_request(server):
    scores, logged = ask(server, "fine", "lost", "text", batch_size=1, retries=1)
    assert scores[0] == 4 and math.isnan(scores[1]) and math.isnan(scores[2])
    errors = logged["remote/error"]
    assert errors[0] == "" and "failed 2 times" in errors[1] and "0 scores for 1 rows" in errors[1]
    assert "is neither a number" in errors[2]
    assert len(server.requests()) == 5


def test_time_is_limited_and_requests_run_side_by_side(server):
    start = time.monotonic()
    scores, logged = ask(server, *["slow"] * 4, batch_size=1, concurrency=4, total_s=5.0)
    assert scores == [4] * 4 and time.monotonic() - start < 1.8
    start = time.monotonic()
    scores, logged = ask(server, "slow", "fast", batch_size=1, total_s=0.3)
    assert math.isnan(scores[0]) and scores[1] == 4
    assert "total_s" in logged["remote/error"][0] and time.monotonic() - start < 0.55


def test_it_runs_in_the_pool_and_may_score_steps(server):
    prompt = Prompt(token_ids=(1,), text="q", messages=({"role": "user", "content": "q?"},))
    texts = ("steps", "lost", "x")
    answers = [Completion(tokens=(2,), text=t, logprobs=(0.0,), finished=True) for t in texts]
    function = Remote(url=server.url, retries=0, batch_size=1)
    with RewardManager([function], failure_value=-1.0) as manager:
        result = manager.score([prompt] * 3, answers, step=1)
    assert result.scores.tolist() == [3.0, -1.0, 1.0]
    assert [steps.ends for _, steps in result.steps[0]] == [(2, 5)]
    assert [failure.index for failure in result.failures] == [1]
    assert "0 scores for 1 rows" in result.failures[0].message
    assert server.requests()[0]["body"]["rows"][0]["prompt"] == [{"role": "user", "content": "q?"}]


def test_wrong_settings_are_refused_before_the_run():
    with pytest.raises(ConfigError, match=r"functions\.0\.url=.*http://"):
        load_config("grpo", {"reward.functions": [{"kind": "remote", "url": "127.0.0.1:8001"}]})
    function = {"kind": "remote", "url": "http://x", "total_s": 40.0}
    with pytest.raises(ConfigError, match="total_s=40: it does not end before"):
        load_config("grpo", {"reward.functions": [function]})
