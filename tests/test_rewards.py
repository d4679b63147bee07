"""Graders against cases worked out by hand; loading and combining reward functions."""

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from jaxrl_llm.rewards.calls import TrainerState, batch_call, sample_call
from jaxrl_llm.rewards.combine import RewardManager
from jaxrl_llm.rewards.exact_answer import exact_answer, last_number
from jaxrl_llm.rewards.format import format_match
from jaxrl_llm.rewards.function import inspect_function, load_bound, load_function
from jaxrl_llm.rewards.gsm8k import gsm8k
from jaxrl_llm.rewards.invoke import as_number, plain
from jaxrl_llm.rewards.length import length_range
from jaxrl_llm.rewards.overlong import overlong_penalty
from jaxrl_llm.types import Completion, Prompt


@dataclass(frozen=True)
class Reference:
    path: str
    settings: dict[str, Any] = field(default_factory=dict)


def make_prompt(text="1+1=", **changes):
    return Prompt(**{"token_ids": (1,), "text": text, "ground_truth": "2"} | changes)


def make_completion(text="2", tokens=(1, 2)):
    return Completion(tokens=tokens, text=text, logprobs=(0.0,) * len(tokens), finished=True)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("12", 12),
        ("3+4=7", 7),
        ("3-5=-2", -2),
        ("5-3", 3),
        ("so the answer is 1,234.", 1234),
        ("18.0", 18),
        ("-7 apples", -7),
        ("1, 2", 2),
        ("3.5", 3.5),
        ("none", None),
        ("", None),
    ],
)
def test_last_number(text, number):
    assert last_number(text) == number


def test_exact_answer():
    assert exact_answer("= 12", "12")["score"] == 1.0
    assert exact_answer("= 12", 12)["score"] == 1.0
    assert exact_answer("12 or 13", "12") == {"score": 0.0, "reason": "answered '13', not '12'"}
    assert exact_answer("", "12") == {"score": 0.0, "reason": "no number in the completion"}
    assert exact_answer(" yes\n", "yes", extract="whole")["score"] == 1.0
    assert exact_answer("12 ", "12", extract="whole", score=0.5)["score"] == 0.5
    assert exact_answer("= 12", "12", extract="whole")["score"] == 0.0
    with pytest.raises(ValueError, match="no ground truth"):
        exact_answer("1", None)
    with pytest.raises(ValueError, match="extract='whole'"):
        exact_answer("1", "yes")


@pytest.mark.parametrize(
    ("text", "method", "score"),
    [
        ("so\n#### 18", "strict", 1.0),
        ("#### 3\n#### 18", "strict", 1.0),
        ("18", "strict", 0.0),
        ("#### 19", "strict", 0.1),
        ("#### 18.", "strict", 0.1),  # text against text, as in verl
        ("####18", "strict", 0.0),
        ("it is 18", "flexible", 1.0),
        ("it is 18 .", "flexible", 1.0),
        ("it is 18 or 19", "flexible", 0.1),
        ("no idea.", "flexible", 0.1),  # a lone dot counts as an answer in verl
        ("no idea", "flexible", 0.0),
        ("#### 18" + "x" * 300, "strict", 0.0),
    ],
)
def test_gsm8k(text, method, score):
    assert gsm8k(text, "18", method=method, format_score=0.1)["score"] == score


def test_gsm8k_removes_commas():
    assert gsm8k("#### 1,234", "1234")["score"] == 1.0
    assert gsm8k("#### -5", "-5")["score"] == 1.0


def test_format_match():
    pattern = r"<think>.*?</think>.*"
    assert format_match("<think>a\nb</think> 3\n", pattern=pattern) == 1.0
    assert format_match("x <think>a</think>", pattern=pattern, otherwise=-1.0) == -1.0
    assert format_match("x <think>a</think>", pattern=pattern, whole=False, reward=0.5) == 0.5


def test_length_range():
    lengths = [(0,) * n for n in (0, 1, 2, 4, 5, 6, 8)]
    expected = [0.0, 0.5, 1.0, 1.0, 0.5, 0.0, 0.0]
    assert length_range(lengths, minimum=2, maximum=4, width=2) == expected
    assert length_range([(0,) * 4, (0,) * 5], maximum=4) == [1.0, 0.0]
    with pytest.raises(ValueError, match="minimum=5"):
        length_range(lengths, minimum=5, maximum=4)


def test_overlong_penalty():
    tokens = [(0,) * n for n in (3, 16, 17, 18, 20)]
    assert overlong_penalty(tokens, max_length=20, buffer=4) == [0.0, 0.0, -0.25, -0.5, -1.0]
    assert overlong_penalty([(0,) * 20], max_length=20, buffer=4, penalty=0.5) == [-0.5]
    with pytest.raises(ValueError, match="buffer=0"):
        overlong_penalty(tokens, max_length=20, buffer=0)


def test_numbers_of_other_libraries():
    assert as_number(np.float32(0.5)) == 0.5
    assert as_number(np.bool_(True)) == 1.0
    assert as_number(np.array(2)) == 2.0
    assert as_number(np.array([2.0])) is None
    assert as_number("1.0") is None
    assert as_number(10**400) == math.inf
    assert plain({"a": np.float32(0.5), 1: (True, None, object)}) == {
        "a": 0.5,
        "1": [True, None, "<class 'object'>"],
    }


def test_load_function_names_the_remedy(tmp_path):
    file = tmp_path / "my_rewards.py"
    file.write_text("def brevity(completions, **columns):\n    return [0.0] * len(completions)\n")
    assert load_function(f"{file}:brevity")(["a"]) == [0.0]
    with pytest.raises(ValueError, match=r"no function 'brevty'.*Did you mean 'brevity'"):
        load_function(f"{file}:brevty")
    with pytest.raises(ValueError, match=r"no file .*my_reward\.py.*Did you mean 'my_rewards\.py'"):
        load_function(f"{tmp_path}/my_reward.py:brevity")
    with pytest.raises(ValueError, match="'my_rewards.py:fn' or 'package.module:fn'"):
        load_function(str(file))
    with pytest.raises(ValueError, match="no_such_package"):
        load_function("no_such_package.module:fn")
    broken = tmp_path / "broken.py"
    broken.write_text("1 / 0\n")
    with pytest.raises(ValueError, match=r"broken\.py failed: ZeroDivisionError"):
        load_function(f"{broken}:fn")


def test_signatures():
    def trl(prompts, completions, answer, *, scale=1.0, **columns): ...

    def verl(data_source, solution_str, ground_truth, extra_info=None, threshold=0.5): ...

    async def short(completions): ...

    def neither(completion): ...

    def needs(completions, *, target): ...

    info = inspect_function("f.py:trl", trl, {"scale": 2.0})
    assert (info.kind, info.is_async, info.takes_columns, info.isolated) == (
        "batch",
        False,
        True,
        True,
    )
    info = inspect_function("f.py:verl", verl, {"threshold": 1.0})
    assert info.kind == "sample" and info.required == (
        "data_source",
        "solution_str",
        "ground_truth",
    )
    assert inspect_function("f.py:short", short, {}).is_async
    with pytest.raises(ValueError, match="compute_score"):
        inspect_function("f.py:neither", neither, {})
    with pytest.raises(ValueError, match=r"no setting 'scal'.*Did you mean 'scale'"):
        inspect_function("f.py:trl", trl, {"scal": 2.0})
    with pytest.raises(ValueError, match="needs the setting 'target'"):
        inspect_function("f.py:needs", needs, {})
    path = "jaxrl_llm.rewards.exact_answer:exact_answer"
    function, info = load_bound(path, {"extract": "whole"})
    assert not info.isolated and function("2", "2")["score"] == 1.0
    assert load_bound("jaxrl_llm.rewards.format:format_match", {"pattern": "a"})[1].isolated


def test_calls_follow_trl_and_verl():
    chat = [{"role": "user", "content": "1+1="}]
    prompts = [
        make_prompt(columns={"answer": "2", "prompt": "hidden"}),
        make_prompt(messages=tuple(chat), columns={"extra_info": {"index": 7}}),
    ]
    completions = [make_completion("2"), make_completion("3", (5,))]
    fields = batch_call(prompts, completions, TrainerState(global_step=1, max_steps=2)).fields
    assert fields["prompts"] == ["1+1=", chat]
    assert fields["completions"] == ["2", [{"role": "assistant", "content": "3"}]]
    assert fields["completion_ids"] == [[1, 2], [5]]
    assert fields["answer"] == ["2", None] and "prompt" not in fields
    assert sample_call(prompts[0], completions[0]).fields["extra_info"]["answer"] == "2"
    assert sample_call(prompts[1], completions[1]).fields == {
        "data_source": "default",
        "solution_str": "3",
        "ground_truth": "2",
        "extra_info": {"index": 7},
    }


def test_manager_weighs_builtin_functions():
    functions = [
        Reference("jaxrl_llm.rewards.exact_answer:exact_answer"),
        Reference("jaxrl_llm.rewards.overlong:overlong_penalty", {"max_length": 4, "buffer": 2}),
        Reference("jaxrl_llm.rewards.exact_answer:exact_answer", {"extract": "whole"}),
    ]
    prompts = [make_prompt()] * 3
    completions = [make_completion("2"), make_completion("=2", (1, 2, 3)), make_completion("x")]
    with RewardManager(functions, weights=[1.0, 0.1, 2.0]) as manager:
        result = manager.score(prompts, completions, step=1)
        assert manager.score([], [], step=2).scores.shape == (0,)
    assert result.scores.dtype == np.float32
    np.testing.assert_array_equal(result.scores, np.float32([3.0, 1.0 - np.float32(0.05), 0.0]))
    np.testing.assert_array_equal(result.parts["overlong_penalty"], [0.0, -0.5, 0.0])
    np.testing.assert_array_equal(result.parts["exact_answer_2"], [1.0, 0.0, 0.0])
    assert result.metrics["rewards/exact_answer/mean"] == pytest.approx(2 / 3)
    assert result.metrics["rewards/exact_answer/std"] == pytest.approx(math.sqrt(1 / 3))
    assert result.metrics["rewards/failures"] == 0.0 and result.failures == []
    assert result.extras[2] == {
        "exact_answer/reason": "no number in the completion",
        "exact_answer_2/reason": "answered 'x', not '2'",
    }


def test_manager_reports_a_row_without_ground_truth():
    functions = [Reference("jaxrl_llm.rewards.exact_answer:exact_answer")]
    with RewardManager(functions, failure_value=-1.0) as manager:
        result = manager.score([make_prompt(ground_truth=None)], [make_completion()], step=1)
    assert result.scores.tolist() == [-1.0]
    assert result.failures[0].kind == "exception"
    assert "no ground truth" in result.failures[0].describe()


def test_manager_refuses_bad_arguments():
    exact = Reference("jaxrl_llm.rewards.exact_answer:exact_answer")
    with pytest.raises(ValueError, match="2 reward weights for 1"):
        RewardManager([exact], weights=[1.0, 2.0])
    with pytest.raises(ValueError, match="at least one"):
        RewardManager([])
    with pytest.raises(ValueError, match="Did you mean 'exact_answer'"):
        RewardManager([Reference("jaxrl_llm.rewards.exact_answer:exact_answr")])
    with RewardManager([exact]) as manager, pytest.raises(ValueError, match="1 prompts for 2"):
        manager.score([make_prompt()], [make_completion()] * 2, step=1)
