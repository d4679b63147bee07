"""Reward for an answer that equals the ground truth."""

import re
from collections.abc import Mapping, Sequence, Set
from decimal import Decimal
from typing import Any, Literal

from jaxrl_llm.references import shown

# A minus after a digit is a subtraction, not a sign: the last number of "5-3" is 3. It may be the
# sign of mathematics, U+2212. A point that follows a letter, a digit or a point begins no number.
NUMBER = re.compile(
    r"(?:(?<![0-9])[-\u2212])?"
    r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?|(?<![\w.])\.[0-9]+)"
    r"(?:[eE][-+]?[0-9]{1,3}(?!\w))?"
)
# A ground truth with a word or a mark, "She has 12" or "#### 12", may have other numbers before its
# last one. Names that LaTeX gives, such as \frac, are no words.
WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2}|#")


def last_number(text: str) -> Decimal | None:
    """The last number in `text` without thousands commas; None if there is none."""
    numbers = NUMBER.findall(text)
    return Decimal(numbers[-1].replace(",", "").replace("\u2212", "-")) if numbers else None


def truth_text(ground_truth: Any, grader: str) -> str:
    """A right answer as text; a number in digits, such as 4 for 4.0 and 0.00001 for 1e-05.

    Raises: ValueError for a row without one, and for one that is a list or a map.
    """
    if ground_truth is None:
        raise ValueError(f"the row has no ground truth: {grader} needs one in every row")
    if isinstance(ground_truth, Mapping | Sequence | Set) and not isinstance(ground_truth, str):
        raise ValueError(
            f"the ground truth {shown(ground_truth)} is a {type(ground_truth).__name__}: {grader} "
            "compares with a text or a number"
        )
    if isinstance(ground_truth, float | Decimal):  # parquet has 4.0 in columns with nulls
        number = Decimal(str(ground_truth))
        return f"{number.normalize():f}" if number else "0"
    return str(ground_truth).strip()


def exact_answer(
    solution_str: str,
    ground_truth: Any,
    *,
    extract: Literal["whole", "last_number"] = "last_number",
    score: float = 1.0,
) -> dict[str, Any]:
    """`score` if the answer of the completion equals `ground_truth`, else 0 and the reason.

    `pred` is the answer that was read; validation votes with it (`maj@n`).

    extract="whole" compares the stripped completion as text. "last_number" compares the last number
    in it by value, so "= 12", "12.0" and "1.2e1" all answer 12. Raises ValueError for a row without
    ground truth, or for "last_number" with one that has no number, or that several numbers make up.
    """
    expected = truth_text(ground_truth, "exact_answer")
    if extract == "whole":
        answer = solution_str.strip()
        return _result(answer == expected, answer, expected, score)
    if extract != "last_number":
        raise ValueError(f"extract={extract!r}: choose 'whole' or 'last_number'")
    number = last_number(expected)
    if number is None:
        raise ValueError(f"the ground truth {expected!r} has no number: use extract='whole'")
    if len(NUMBER.findall(expected)) > 1 and not WORD.search(expected):
        raise ValueError(
            f"the ground truth {expected!r} has several numbers, and extract='last_number' would "
            "compare the last one alone: use math_answer, or extract='whole'"
        )
    answer = last_number(solution_str)
    if answer is None:
        return {"score": 0.0, "reason": "no number in the completion"}
    return _result(answer == number, _as_text(answer), expected, score)


def _as_text(number: Decimal) -> str:
    """The same text for equal numbers: 12 for 12.0. Validation counts texts."""
    text = f"{number:f}"
    text = text.rstrip("0").rstrip(".") if "." in text else text
    return text if number else "0"


def _result(correct: bool, answer: str, expected: str, score: float) -> dict[str, Any]:
    if correct:
        return {"score": score, "pred": answer}
    reason = f"answered {answer[:40]!r}, not {expected[:40]!r}"
    return {"score": 0.0, "pred": answer, "reason": reason}
