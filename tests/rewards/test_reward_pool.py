"""User reward functions in the process pool: crashes, hangs, exceptions, odd answers."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from jaxrl_llm.references import load as load_function
from jaxrl_llm.rewards.loading import inspect_function
from jaxrl_llm.rewards.manager import RewardManager
from jaxrl_llm.rewards.workers import pool
from jaxrl_llm.types import Completion, Prompt

REWARDS = """
import asyncio, math, os, sys, time

def misbehave(text):
    if text == "crash":
        os._exit(3)
    if text == "hang":
        time.sleep(60)
    if text == "raise":
        raise KeyError("no such thing")
    odd = {"nan": math.nan, "text": "1.0", "huge": 1e39, "none": None}
    return odd.get(text, len(text) / 2)

def compute_score(data_source, solution_str, ground_truth, extra_info):
    return misbehave(solution_str)

def graded(solution_str, ground_truth, *, bonus=0.0):
    return {"score": 0.25 + bonus, "acc": solution_str == ground_truth, "pred": solution_str}

def no_score(solution_str):
    return {"acc": 1.0}

def batch(prompts, completions, completion_ids, trainer_state, log_extra, log_metric, **columns):
    log_metric("mine/step", trainer_state.global_step)
    log_extra("shout", [c.upper() for c in completions])
    return [misbehave(c) for c in completions]

def short_list(completions):
    return [1.0]

def a_set(completions):
    return {0.5 * i for i, _ in enumerate(completions)}


def not_a_list(completions):
    return 1.0

def bad_extra(completions, log_extra):
    log_extra("column", [1])
    return [1.0] * len(completions)

def needs_column(completions, solution):
    return [float(s) for s in solution]

async def polite(completions, *, delay=0.0, value=1.0):
    await asyncio.sleep(delay)
    return [value for _ in completions]

async def judge(solution_str):
    await asyncio.sleep(60 if solution_str == "hang" else 0.2)
    return misbehave(solution_str) if solution_str != "block" else time.sleep(60)

def modules(completions):
    return [float("jax" in sys.modules)] * len(completions)

def leave_pid(solution_str, *, file):
    open(file, "w").write(str(os.getpid()))
    time.sleep(60)

def hold_the_lock(solution_str, *, file):
    import re
    open(file, "w").write(str(os.getpid()))
    re.match("(a+)+b", "a" * 60)

def flaky(solution_str, *, folder):
    if solution_str == "fails once":
        path = os.path.join(folder, str(len(os.listdir(folder))))
        open(path, "x").close()
        if len(os.listdir(folder)) <= 2:
            raise RuntimeError("the server is away")
    return 1.0

def flaky_batch(completions, *, folder):
    return [flaky(text, folder=folder) for text in completions]

def abstain(completions):
    return [None] * len(completions)

def sometimes(solution_str):
    return None if solution_str == "none" else 1.0
"""


@dataclass(frozen=True)
class Reference:
    path: str
    settings: dict[str, Any] = field(default_factory=dict)


@pytest.fixture
def rewards(tmp_path):
    file = tmp_path / "my_rewards.py"
    file.write_text(REWARDS)
    return lambda name, **settings: Reference(f"{file}:{name}", settings)


def samples(*texts):
    prompts = [
        Prompt(token_ids=(1,), text=f"prompt {i}", ground_truth="ab") for i in range(len(texts))
    ]
    completions = [
        Completion(tokens=(1,), text=text, logprobs=(0.0,), finished=True) for text in texts
    ]
    return prompts, completions


def score(functions, *texts, step=1, **settings):
    settings = {"timeout": 5.0, "failure_value": -1.0} | settings
    with RewardManager(functions, **settings) as manager:
        return manager.score(*samples(*texts), step=step)


def kinds(result):
    return {failure.index: failure.kind for failure in result.failures}


def test_verl_function_isolates_the_culprits(rewards):
    texts = ("ab", "crash", "abc", "raise", "hang", "a")
    with RewardManager([rewards("compute_score")], failure_value=-1.0, timeout=0.5) as manager:
        result = manager.score(*samples(*texts), step=1)
        again = manager.score(*samples("ab"), step=2)  # the pool has recovered
    np.testing.assert_array_equal(result.scores, np.float32([1.0, -1.0, 1.5, -1.0, -1.0, 0.5]))
    assert kinds(result) == {1: "crash", 3: "exception", 4: "timeout"}
    crash, error, hang = result.failures
    assert "exit code 3" in crash.message
    assert "KeyError: 'no such thing' (" in error.message and "my_rewards.py:" in error.message
    assert "longer than 0.5 s" in hang.message
    assert (hang.prompt, hang.completion) == ("prompt 4", "hang")
    assert result.metrics["rewards/failures"] == 3.0
    assert result.metrics["rewards/compute_score/failures"] == 3.0
    assert again.scores.tolist() == [1.0] and again.failures == []


def test_trl_function_is_called_again_one_by_one(rewards):
    result = score([rewards("batch")], "ab", "crash", "hang", "raise", "a", step=7, timeout=0.5)
    np.testing.assert_array_equal(result.scores, np.float32([1.0, -1.0, -1.0, -1.0, 0.5]))
    assert kinds(result) == {1: "crash", 2: "timeout", 3: "exception"}
    assert result.metrics["mine/step"] == 7.0
    assert result.extras[0] == {"shout": "AB"} and result.extras[4] == {"shout": "A"}


def test_unusable_values_are_reported_by_name(rewards):
    result = score([rewards("compute_score")], "nan", "text", "huge", "a")
    assert result.scores.tolist() == [-1.0, -1.0, -1.0, 0.5]
    assert set(kinds(result).values()) == {"bad return"}
    assert [failure.message for failure in result.failures] == [
        "compute_score returned nan (float), which is not finite in float32",
        "compute_score returned '1.0' (str), which is not a number",
        "compute_score returned 1e+39 (float), which is not finite in float32",
    ]


@pytest.mark.parametrize("path", ["builtins:max", "builtins:dict"])
def test_a_function_that_does_not_say_what_it_takes_is_refused(path):
    with pytest.raises(ValueError, match="does not say what it takes. Write f"):
        RewardManager([Reference(path)], num_workers=1)


def test_a_signature_in_a_message_is_whole(rewards, tmp_path):
    (tmp_path / "own.py").write_text("def f(a, /, *, k=1):\n    return a\n")
    with pytest.raises(ValueError, match=r"has the signature \(a, k=1\), which"):
        inspect_function("own.py:f", load_function(f"{tmp_path}/own.py:f"), {})


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("short_list", "short_list returned 1 rewards for 2 completions"),
        ("not_a_list", "not_a_list returned 1.0 (float) instead of a list"),
        ("a_set", "a_set returned {"),  # it has no order
        ("no_score", "no_score returned a dict without 'score'"),
    ],
)
def test_returns_of_the_wrong_shape(rewards, name, message):
    result = score([rewards(name)], "a", "b")
    assert result.scores.tolist() == [-1.0, -1.0]
    assert all(message in failure.message for failure in result.failures)


def test_log_extra_of_the_wrong_length(rewards):
    result = score([rewards("bad_extra")], "a", "b", "c")
    # Alone, each sample's column has the right length: nothing is lost.
    assert result.scores.tolist() == [1.0, 1.0, 1.0]


def test_none_and_weights(rewards):
    functions = [rewards("sometimes"), rewards("compute_score")]
    result = score(functions, "none", "ab", weights=[2.0, 0.5])
    np.testing.assert_array_equal(result.scores, np.float32([-1.0, 2.5]))
    np.testing.assert_array_equal(result.parts["sometimes"], np.float32([np.nan, 1.0]))
    assert kinds(result) == {0: "not applicable"}
    assert result.metrics["rewards/sometimes/mean"] == 1.0
    assert result.metrics["rewards/compute_score/mean"] == 1.0  # over the one that applied
    assert result.metrics["rewards/sometimes/failures"] == 0.0
    assert result.metrics["rewards/failures"] == 1.0
    only_none = score([rewards("abstain"), rewards("graded")], "a")
    assert only_none.scores.tolist() == [0.25] and only_none.failures == []
    assert "rewards/abstain/mean" not in only_none.metrics


def test_verl_dict_gives_metrics_and_extras(rewards):
    result = score([rewards("graded", bonus=0.5)], "ab", "x")
    assert result.scores.tolist() == [0.75, 0.75]
    assert result.metrics["rewards/graded/acc"] == 0.5
    assert result.extras == [
        {"graded/acc": True, "graded/pred": "ab"},
        {"graded/acc": False, "graded/pred": "x"},
    ]


def test_async_functions_wait_at_the_same_time(rewards):
    functions = [rewards("polite", delay=1.0), rewards("polite", delay=1.0, value=0.5)]
    with RewardManager(functions, timeout=5.0) as manager:
        manager.score(*samples("a"), step=1)  # both workers are up after this
        start = time.perf_counter()
        result = manager.score(*samples("a", "b"), step=2)
        seconds = time.perf_counter() - start
    assert result.scores.tolist() == [1.5, 1.5]
    assert seconds < 1.9


def test_async_per_sample_function_has_a_limit_for_each(rewards):
    texts = ["ab"] * 30 + ["hang", "raise"]
    start = time.perf_counter()
    result = score([rewards("judge")], *texts, timeout=1.0)
    assert time.perf_counter() - start < 5.0  # 30 x 0.2 s one after the other
    assert result.scores.tolist() == [1.0] * 30 + [-1.0, -1.0]
    assert kinds(result) == {30: "timeout", 31: "exception"}


def test_async_function_that_blocks_its_loop(rewards):
    result = score([rewards("judge")], "ab", "block", "abc", timeout=0.5)
    assert result.scores.tolist() == [1.0, -1.0, 1.5]
    assert kinds(result) == {1: "timeout"}


def test_gives_up_on_a_function_that_always_hangs(rewards, monkeypatch):
    monkeypatch.setattr(pool, "MOST_LOST", 2)
    texts = ["hang"] * 12
    result = score([rewards("compute_score")], *texts, timeout=0.2, num_workers=1)
    assert set(result.scores.tolist()) == {-1.0}
    assert list(kinds(result).values()) == ["timeout"] * 2 + ["not run"] * 10


@pytest.mark.parametrize("name", ["flaky", "flaky_batch"])
def test_a_failed_sample_is_tried_again(rewards, tmp_path, name):
    texts, functions = ("a", "fails once", "b", "fails once"), [rewards(name, folder=str(tmp_path))]
    assert score(functions, *texts, max_retries=1).scores.tolist() == [1.0] * 4
    functions = [rewards(name, folder=str(tmp_path / "none"))]  # it cannot note its first call
    result = score(functions, *texts, max_retries=1, on_failure="mask")
    assert result.failed.tolist() == [0.0, 1.0, 0.0, 1.0]
    assert result.scores.tolist() == [1.0, 0.0, 1.0, 0.0]
    np.testing.assert_array_equal(result.parts[name], np.float32([1.0, np.nan, 1.0, np.nan]))
    assert result.metrics[f"rewards/{name}/mean"] == 1.0 and result.metrics["rewards/failures"] == 2


def test_a_sample_that_no_function_applies_to_has_no_score(rewards):
    result = score([rewards("sometimes")], "none", "a", on_failure="mask")
    assert result.failed.tolist() == [1.0, 0.0] and kinds(result) == {0: "not applicable"}


def test_workers_do_not_import_jax(rewards):
    assert score([rewards("modules")], "a").scores.tolist() == [0.0]


def test_a_worker_lost_between_steps_costs_no_sample(rewards):
    with RewardManager([rewards("compute_score")], num_workers=1) as manager:
        manager.score(*samples("ab"), step=1)
        process = manager._pool._workers[0]._process._process
        assert process is not None
        process.send_signal(signal.SIGKILL)
        process.wait()
        result = manager.score(*samples("ab"), step=2)
    assert result.scores.tolist() == [1.0] and result.failures == []


def test_load_errors_come_from_the_constructor(rewards):
    with pytest.raises(ValueError, match="did you mean 'graded'"):
        RewardManager([rewards("grade")])
    with pytest.raises(ValueError, match="no setting 'bonsu'; did you mean 'bonus'"):
        RewardManager([rewards("graded", bonsu=1.0)])


def test_missing_column_is_refused(rewards):
    with pytest.raises(ValueError, match=r"asks for 'solution'.*Add the column"):
        score([rewards("needs_column")], "a")


def test_a_column_that_no_row_has_is_refused_before_the_first_step(rewards):
    with RewardManager([rewards("needs_column")], num_workers=1) as manager:
        with pytest.raises(ValueError, match=r"asks for 'solution'; did you mean 'solutions'"):
            manager.check(["solutions"])
        with pytest.raises(ValueError, match=r"renames to 'answer'; .* Ask for 'answer', or add"):
            manager.check(["answer"], {"answer": "solution"})
        manager.check(["other"], all_rows=False)  # a row that was not seen may have it
        assert "NoneType" in manager.score(*samples("a"), step=1).failures[0].message
        manager.check(["solution", "other"])
        # Rows of another source do not have it, and a batch may hold only those.
        assert "NoneType" in manager.score(*samples("a"), step=1).failures[0].message


def test_module_path_and_format_in_the_pool(tmp_path, monkeypatch):
    (tmp_path / "house_rewards.py").write_text("def one(solution_str):\n    return 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    functions = [
        Reference("house_rewards:one"),
        Reference("jaxrl_llm.rewards.format:format_match", {"pattern": "(a+)+b"}),
    ]
    result = score(functions, "ab", "a" * 60, timeout=0.5)
    assert result.scores.tolist() == [2.0, 0.0]
    assert kinds(result) == {1: "timeout"}  # catastrophic backtracking does not hang the trainer


TRAINER = """
import sys, threading
from types import SimpleNamespace
from jaxrl_llm.rewards.manager import RewardManager

path, file = sys.argv[1:]
reference = SimpleNamespace(path=path, settings={"file": file})
prompt = SimpleNamespace(
    text="p", messages=None, columns={}, data_source="d", ground_truth=None
)
manager = RewardManager([reference], timeout=60.0)
assert "jax" not in sys.modules
completion = SimpleNamespace(text="c", tokens=(1,))
threading.Thread(target=manager.score, args=([prompt], [completion], 1)).start()
"""


@pytest.mark.parametrize("name", ["leave_pid", "hold_the_lock"])
def test_workers_end_with_a_killed_trainer(rewards, tmp_path, name):
    path, file = rewards(name).path, tmp_path / "pid"
    trainer = subprocess.Popen([sys.executable, "-c", TRAINER, path, str(file)])
    try:
        pid = wait_for(lambda: file.exists() and json.loads(file.read_text() or "0"))
    finally:
        trainer.kill()
        trainer.wait()
    assert wait_for(lambda: not is_running(pid))


def is_running(pid):
    try:
        state = open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z" and os.path.exists(f"/proc/{pid}")


def wait_for(condition, seconds=20.0):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        value = condition()
        if value:
            return value
        time.sleep(0.05)
    raise AssertionError("waited in vain")
