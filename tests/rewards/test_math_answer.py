r"""The grader of \boxed{} answers: cases worked out by hand, and texts that take too long."""

import math
import subprocess
import sys
from dataclasses import replace

import pytest

pytest.importorskip("math_verify")
from jaxrl_llm.config import MathAnswer
from jaxrl_llm.rewards.manager import RewardManager
from jaxrl_llm.rewards.math_answer import last_box, math_answer
from jaxrl_llm.types import Completion, Prompt


@pytest.mark.parametrize(
    ("text", "box"),
    [
        (r"so \boxed{18}.", "18"),
        (r"\boxed{1} no, \boxed {\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\fbox{7} and \boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\boxed{3}}", "3"),
        (r"\boxed{4} then \boxed{5", "4"),  # the length limit has cut the last one
        (r"\boxed 5 and {6}", "5"),
        (r"$\boxed -12.5$.", "-12.5"),
        ("no box", None),
        (r"\boxed{" * 20_000, None),
    ],
)
def test_last_box(text, box):
    assert last_box(text) == box


@pytest.mark.parametrize(
    ("answer", "truth"),
    [
        ("18", "18"),
        ("18.0", 18),
        (r"\frac{1}{2}", "0.5"),
        (r"\frac12", r"\boxed{1/2}"),
        ("x = 2", "$2$"),
        ("1,234", "1234"),
        (r"\{2, 1\}", r"\{1, 2\}"),
        ("x^2 + 2x + 1", "(x + 1)^2"),
        (r"3\sqrt{2}", r"\sqrt{18}"),
        (r"18\text{ dollars}", "18"),
        (r"\text{Evelyn}", r"\text{Evelyn}"),
    ],
)
def test_equal_answers(answer, truth):
    assert math_answer(rf"Thus \boxed{{{answer}}}.", truth)["score"] == 1.0


@pytest.mark.parametrize("answer", ["17", r"\frac{1}{3}", "(1, 3)", "", "__import__('os')"])
def test_wrong_answers(answer):
    found = math_answer(rf"\boxed{{{answer}}}", "18")
    assert found["score"] == 0.0 and "not '18'" in found["reason"]


def test_votes_of_equal_answers_are_equal():
    preds = {math_answer(rf"\boxed{{{x}}}", "1")["pred"] for x in ("0.5", r"\frac{1}{2}", "1/2")}
    assert preds == {"1/2"}


@pytest.mark.parametrize(
    "answers, pred",
    [
        (
            (r"\frac{3}{2}", "1.5", "1.50", "x = 1.5", r"x=\frac32", r"150\%", r"\frac{4.5}{3}"),
            "3/2",
        ),
        (("10", "10.0", r"10.00\text{ cm}", "5 + 5"), "10"),
        ((r"-\frac{1}{10}", "-0.1", "\u22120.10"), "-1/10"),
        (("9^{9^{9}}",), "9**(9**9)"),
        ((r"\text{A}", "A"), "a"),
    ],
)
def test_equal_numbers_have_one_vote(answers, pred):
    assert {math_answer(rf"\boxed{{{x}}}", "1")["pred"] for x in answers} == {pred}


def test_what_cannot_be_graded():
    assert "no whole" in math_answer("the answer is 18", "18")["reason"]
    assert "characters" in math_answer(rf"\boxed{{{'1+' * 1500}1}}", "18")["reason"]
    with pytest.raises(ValueError, match="no ground truth"):
        math_answer(r"\boxed{1}", None)


def test_a_huge_power_takes_its_time_and_no_more():
    found = math_answer(r"\boxed{10^{10^{10}}}", "1", seconds=1)
    assert math.isnan(found["score"]) and found["reason"] == "comparing with '1' takes over 1 s"


@pytest.mark.parametrize("truth", [r"\frac{", "", "$$", r"3 \le"])
def test_a_ground_truth_that_is_no_mathematics_is_a_failure(truth):
    found = math_answer(r"\boxed{2}", truth)
    assert math.isnan(found["score"]) and "cannot be read as mathematics" in found["reason"]


def test_an_equal_text_is_right_without_mathematics():
    assert math_answer(r"\boxed{3 \le}", r"3 \le")["score"] == 1.0


def test_it_runs_in_the_pool():
    prompt = Prompt(token_ids=(1,), text="1/2=", ground_truth="0.5")
    texts = (r"\boxed{\frac{1}{2}}", r"\boxed{2}")
    answers = [Completion(tokens=(2,), text=t, logprobs=(0.0,), finished=True) for t in texts]
    with RewardManager([MathAnswer(score=2.0)], num_workers=1) as manager:
        result = manager.score([prompt] * 2, answers, step=1)
        failed = manager.score([replace(prompt, ground_truth=r"\frac{")], answers[1:], step=2)
    assert result.scores.tolist() == [2.0, 0.0] and not result.failures
    assert result.extras[1]["math_answer/pred"] == "2"
    assert "cannot be read as mathematics" in failed.failures[0].message
    assert failed.metrics["rewards/math_answer/failures"] == 1


def test_a_missing_package_is_named_before_the_run():
    code = (
        "import sys; sys.modules['math_verify'] = None\n"
        "from jaxrl_llm.rewards.math_answer import prepare\n"
        "try: prepare(seconds=5)\n"
        "except ValueError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install math-verify" in done.stdout
