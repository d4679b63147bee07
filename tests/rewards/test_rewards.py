"""Graders against cases worked out by hand; loading and combining reward functions."""

import json
import math
import re
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxrl_llm.config import Code, ExactAnswer, MathAnswer
from jaxrl_llm.observability.names import is_reserved
from jaxrl_llm.references import load as load_function
from jaxrl_llm.rewards.calling import TrainerState, as_number, batch_call, plain, sample_call
from jaxrl_llm.rewards.exact_answer import exact_answer, last_number
from jaxrl_llm.rewards.format import format_match
from jaxrl_llm.rewards.gsm8k import gsm8k
from jaxrl_llm.rewards.length import length_range
from jaxrl_llm.rewards.loading import inspect_function, load_bound
from jaxrl_llm.rewards.manager import RewardManager, refuse_unreadable
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
        ("it is .5", 0.5),
        ("see v1.2.3", 3),
        ("so it is...3", 3),
        ("x = \u22124", -4),
        ("2e3 or 1e-2", 0.01),
        ("2x", 2),
    ],
)
def test_last_number(text, number):
    assert last_number(text) == (number if number is None else Decimal(str(number)))


@pytest.mark.parametrize(
    ("truth", "text"), [(4.0, "4"), (1e-5, "0.00001"), (1e22, "1" + "0" * 22), (-0.0, "0")]
)
def test_a_right_answer_that_is_a_number_is_written_in_digits(truth, text):
    for extract in ("whole", "last_number"):
        assert exact_answer(text, truth, extract=extract)["score"] == 1.0
        assert exact_answer("22" if truth else "5", truth, extract=extract)["score"] == 0.0
    assert gsm8k(f"#### {text}", truth)["score"] == 1.0


def test_exact_answer():
    assert exact_answer("= 12", "12")["score"] == 1.0
    assert exact_answer("= 12", 12)["score"] == 1.0
    wrong = {"score": 0.0, "pred": "13", "reason": "answered '13', not '12'"}
    assert exact_answer("12 or 13", "12") == wrong
    # One answer, however it is written: the vote of maj@n counts texts.
    same = [exact_answer(f"= {text}", "12")["pred"] for text in ("1,200", "1200.0", "01200")]
    assert same == ["1200"] * 3
    assert [exact_answer(x, "1")["pred"] for x in ("-0.50", "0.0", "-0", "3.05")] == [
        "-0.5", "0", "0", "3.05",
    ]  # fmt: skip
    assert exact_answer("", "12") == {"score": 0.0, "reason": "no number in the completion"}
    assert exact_answer(" yes\n", "yes", extract="whole")["score"] == 1.0
    assert exact_answer("12 ", "12", extract="whole", score=0.5)["score"] == 0.5
    assert exact_answer("= 12", "12", extract="whole")["score"] == 0.0
    with pytest.raises(ValueError, match="no ground truth"):
        exact_answer("1", None)
    with pytest.raises(ValueError, match="extract='whole'"):
        exact_answer("1", "yes")


@pytest.mark.parametrize("truth", ["3/4", r"\frac{3}{4}", "12:30", "(1, 2)", "2^{10}", "x^2 + 4"])
def test_the_last_of_several_numbers_is_no_right_answer(truth):
    with pytest.raises(ValueError, match="several numbers.*math_answer"):
        exact_answer("1/4", truth)


@pytest.mark.parametrize(
    "truth", ["1,234", "$ 1234", "1.234e3", "5 + 1 = 6 #### 1234", "12 and 1234"]
)
def test_a_number_with_words_before_it_is_one(truth):
    assert exact_answer("1234", truth)["score"] == 1.0


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


def test_gsm8k_takes_the_solutions_of_its_data_set():
    solution = "She has 48/2 = <<48/2=24>>24 clips.\n#### 1,024"
    assert gsm8k("#### 1,024", solution)["score"] == 1.0
    assert gsm8k("#### 24", solution)["score"] == 0.0
    with pytest.raises(ValueError, match="no ground truth: gsm8k needs one in every row"):
        gsm8k("#### 24", None)


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
    with pytest.raises(ValueError, match=r"has no 'brevty'; did you mean 'brevity'"):
        load_function(f"{file}:brevty")
    with pytest.raises(
        ValueError, match=r"no file .*my_reward\.py; did you mean .*my_rewards\.py'"
    ):
        load_function(f"{tmp_path}/my_reward.py:brevity")
    with pytest.raises(ValueError, match="'my_file.py:name' or 'package.module:name'"):
        load_function(str(file))
    with pytest.raises(ValueError, match="no_such_package"):
        load_function("no_such_package.module:fn")
    broken = tmp_path / "broken.py"
    broken.write_text("1 / 0\n")
    with pytest.raises(ValueError, match=r"broken\.py, line 1: ZeroDivisionError"):
        load_function(f"{broken}:fn")


def test_a_file_that_was_edited_is_loaded_again(tmp_path):
    """A notebook edits its file between two trainings, and the old function would train on."""
    file = tmp_path / "edited.py"
    file.write_text("class Held: ...\ndef grade(): return 1\n")
    first = load_function(f"{file}:grade")
    held = load_function(f"{file}:Held")
    assert load_function(f"{file}:grade") is first and load_function(f"{file}:Held") is held
    file.write_text("def grade(): return 1 + 1\n")
    assert (first(), load_function(f"{file}:grade")()) == (1, 2)


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
    with pytest.raises(ValueError, match=r"no setting 'scal'; did you mean 'scale'"):
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
        "exact_answer_2/pred": "x",
        "exact_answer_2/reason": "answered 'x', not '2'",
    }


def test_manager_reports_a_row_without_ground_truth():
    functions = [Reference("jaxrl_llm.rewards.exact_answer:exact_answer")]
    with RewardManager(functions, failure_value=-1.0) as manager:
        result = manager.score([make_prompt(ground_truth=None)], [make_completion()], step=1)
    assert result.scores.tolist() == [-1.0]
    assert result.failures[0].kind == "exception"
    assert "no ground truth" in result.failures[0].describe()


def test_the_nearest_name_of_a_grader():
    with pytest.raises(ValueError, match="did you mean 'exact_answer'"):
        RewardManager([Reference("jaxrl_llm.rewards.exact_answer:exact_answr")])


# ------------------------------------------------------------------------- names and odd values


@pytest.fixture
def reward_file(tmp_path):
    """A user's reward function from its source."""

    def write(source: str, name: str = "f", **settings: Any) -> Reference:
        file = tmp_path / "names.py"
        file.write_text(source)
        return Reference(f"{file}:{name}", settings)

    return write


@pytest.mark.parametrize(
    "name",
    [
        "training/global_step",
        "critic/score/mean",
        "val-core/x/acc/mean@1",
        "frac_reward_zero_std",
        "critic",
        "rewards/failures",
        "rewards/f/mean",
        "rewards/model/std",
    ],
)
def test_a_metric_under_a_name_of_the_trainer_is_refused(reward_file, name):
    source = (
        "def f(completions, log_metric):\n"
        f"    log_metric({name!r}, 7)\n"
        "    return [1.0] * len(completions)\n"
    )
    with (
        RewardManager([reward_file(source)]) as manager,
        pytest.raises(ValueError, match=rf"names\.py:f logs the metric '{name}'.*Take another"),
    ):
        manager.score([make_prompt()], [make_completion()], step=1)


def test_a_key_of_a_verl_dict_may_not_replace_a_metric(reward_file):
    function = reward_file("def f(solution_str):\n    return {'score': 1.0, 'failures': 3}\n")
    with (
        RewardManager([function]) as manager,
        pytest.raises(ValueError, match="logs the metric 'rewards/f/failures'"),
    ):
        manager.score([make_prompt()], [make_completion()], step=1)


def test_every_online_metric_that_the_docs_name_is_reserved():
    page = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    online = page[: page.index("## Offline runs")]
    cells = [line.split("|")[1] for line in online.splitlines() if line.startswith("| `")]
    names = [name for cell in cells for name in re.findall("`([^`]+)`", cell)]
    assert len(names) > 60
    # The names under rewards/<function>/ are tested above.
    assert all(is_reserved(n) or n.startswith("rewards/<function>/") for n in names)
    assert not is_reserved("brevity/longest") and not is_reserved("rewards/brevity/words")


def test_metrics_that_are_not_finite_are_left_out(reward_file, caplog):
    source = (
        "def f(solution_str):\n"
        "    value = float('nan') if solution_str == 'a' else 3.0\n"
        "    return {'score': 1.0, 'depth': value, 'note': 'text', 'more': {'x': [value]}}\n"
        "def g(completions, log_metric):\n"
        "    log_metric('mine/nan', float('nan'))\n"
        "    log_metric('mine/good', 2)\n"
        "    return [0.0] * len(completions)\n"
    )
    functions = [reward_file(source), reward_file(source, "g")]
    with RewardManager(functions) as manager:
        result = manager.score([make_prompt()] * 2, [make_completion(x) for x in "ab"], step=1)
    assert result.failures == []
    assert result.metrics["rewards/f/depth"] == 3.0 and result.metrics["mine/good"] == 2.0
    assert "mine/nan" not in result.metrics and "'mine/nan'" in caplog.text
    assert not any("note" in name or "more" in name for name in result.metrics)
    assert result.extras[0] == {"f/depth": "nan", "f/note": "text", "f/more": {"x": ["nan"]}}
    json.dumps([result.metrics, result.extras], allow_nan=False)


def test_log_metric_of_a_text_names_it(reward_file):
    source = "def f(completions, log_metric):\n    log_metric('mine/x', 'high')\n    return [1.0]\n"
    with RewardManager([reward_file(source)]) as manager:
        result = manager.score([make_prompt()], [make_completion()], step=1)
    assert "could not convert string to float: 'high'" in result.failures[0].message


def test_a_column_does_not_replace_a_setting_or_a_resolved_field(reward_file):
    source = (
        "def f(completions, *, scale=1.0, **columns):\n"
        "    assert columns['ground_truth'] == ['2'] and columns['data_source'] == ['default']\n"
        "    assert columns['level'] == [5]\n"
        "    return [scale]\n"
    )
    raw = {"scale": 100.0, "ground_truth": "raw", "data_source": "raw", "level": 5}
    prompt = make_prompt(columns=raw)
    for settings, expected in (({}, 1.0), ({"scale": 2.0}, 2.0)):
        with RewardManager([reward_file(source, **settings)]) as manager:
            result = manager.score([prompt], [make_completion()], step=1)
        assert result.failures == [] and result.scores.tolist() == [expected]


@pytest.mark.parametrize("extra_info", ["a text", 3, ["x"], {"index": 7}])
def test_extra_info_of_any_type_reaches_the_function(reward_file, extra_info):
    source = "def f(solution_str, extra_info):\n    return {'score': 1, 'seen': repr(extra_info)}\n"
    prompt = make_prompt(columns={"extra_info": extra_info})
    with RewardManager([reward_file(source)]) as manager:
        result = manager.score([prompt], [make_completion()], step=1)
    assert result.failures == [] and result.extras == [{"f/seen": repr(extra_info)}]


@pytest.mark.parametrize(
    ("grader", "truths", "fault"),
    [
        (ExactAnswer(), [None, None], "the row has no ground truth"),
        (ExactAnswer(), ["yes", "no"], "'yes' has no number: use extract='whole'"),
        (
            ExactAnswer(),
            [["5"], {"a": 5}],
            "['5'] is a list: exact_answer compares with a text or a number",
        ),
        (ExactAnswer(), [None, "5"], ""),
        (ExactAnswer(), [5, None], ""),
        (Code(limits_only=True), ["def f(): pass", None], "of a code row is not JSON. Give {"),
        (Code(limits_only=True), [{"inputs": [], "outputs": []}], "the ground truth has no tests"),
        (Code(limits_only=True), [{"tests": "assert f(1)"}], "the ground truth has no tests (Key"),
        (Code(limits_only=True), ["x", {"assert_case": ["assert f(1)"]}], ""),
        (MathAnswer(), [None, ["5"]], "the row has no ground truth: math_answer needs one"),
        (MathAnswer(), [" ", "$$"], "the ground truth ' ' has no answer for math_answer"),
        (MathAnswer(), ["", r"\frac{1}{2}"], ""),
    ],
)
def test_right_answers_that_no_row_can_be_graded_by_are_found_before_a_step(grader, truths, fault):
    name = grader.kind
    with RewardManager([grader]) as manager:
        found = manager.unreadable(truths)
        assert fault in found[name] and bool(fault) == bool(found[name])
        assert manager.unreadable([]) == {}
    refuse_unreadable([found, {name: ""}], "training")  # another process reads one
    if fault:
        with pytest.raises(ValueError, match=f"{name} can grade no row of the training data"):
            refuse_unreadable([found, {}], "training")
