r"""The grader of \boxed{} answers on pairs of a right answer and another one, worked out by hand.

`cases/math.jsonl` says of each pair whether the two are equal: exact numbers exactly, decimals of
other numbers up to rounding, words as text, and no other unit, base or equation.
"""

import json
from pathlib import Path

import pytest

pytest.importorskip("math_verify")
from jaxrl_llm.rewards.math_answer import math_answer

CASES = [json.loads(line) for line in open(Path(__file__).with_name("cases") / "math.jsonl")]


def test_there_are_enough_of_both_kinds():
    assert sum(case["equal"] for case in CASES) >= 100
    assert sum(not case["equal"] for case in CASES) >= 100


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['truth']} {case['answer']}")
def test_case(case):
    score = math_answer(rf"so $\boxed{{{case['answer']}}}$", case["truth"])["score"]
    assert score == float(case["equal"])
