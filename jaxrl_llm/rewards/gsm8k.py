"""The GSM8K reward with the rules of verl's `utils/reward_score/gsm8k.py`."""

import re
from typing import Any, Literal

from jaxrl_llm.rewards.exact_answer import truth_text

MARK = "####"  # before the answer
TAIL = 300  # characters at the end: verl reads no more


def extract_answer(solution_str: str, method: str) -> str | None:
    """The answer as text, or None.

    strict: the number after the last "#### ", without commas. flexible: the last run of digits,
    dots and commas, unchanged (verl keeps its commas).
    """
    tail = solution_str[-TAIL:]
    if method == "strict":
        answers = re.findall(r"#### (-?[0-9.,]+)", tail)
        return answers[-1].replace(",", "") if answers else None
    runs = re.findall(r"(-?[0-9.,]+)", tail)
    numbers = [text for text in runs if text not in ("", ".")]
    # If every run is a lone dot, verl takes the first one: a wrong answer, but an answer.
    return (numbers or runs[:1] or [None])[-1]


def gsm8k(
    solution_str: str,
    ground_truth: Any,
    *,
    method: Literal["strict", "flexible"] = "strict",
    format_score: float = 0.0,
    score: float = 1.0,
) -> dict[str, Any]:
    """`score` for the right answer, `format_score` for a wrong one, 0 without an answer.

    Answers are compared as text, as in verl: "18." is not "18". `ground_truth` is the number after
    "#### " in the data set, without commas, or the whole solution of the data set. Raises
    ValueError for a row without ground truth.
    """
    if method not in ("strict", "flexible"):
        raise ValueError(f"method={method!r}: choose 'strict' or 'flexible'")
    expected = truth_text(ground_truth, "gsm8k")
    if MARK in expected:  # as openai/gsm8k writes it
        expected = expected.rpartition(MARK)[2].strip().replace(",", "")
    answer = extract_answer(solution_str, method)
    if answer is None:
        looked_for = "'#### <number>'" if method == "strict" else "number"
        return {"score": 0.0, "reason": f"no {looked_for} in the last {TAIL} characters"}
    if answer == expected:
        return {"score": score}
    return {"score": format_score, "reason": f"answered {answer!r}, not {expected!r}"}
