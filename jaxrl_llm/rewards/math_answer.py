r"""Reward for a mathematical answer in \boxed{}, compared by value with math-verify.

Text of a model is parsed as LaTeX by a grammar; nothing in it is evaluated as Python.
"""

import re
from importlib.util import find_spec
from typing import Any

RUNS_IN_POOL = True  # a comparison can take seconds, and a huge power can only be killed
BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
MOST_CHARACTERS = 2_000  # of an answer: no true one is longer
MOST_BOXES = 64  # that are looked at, from the end
FARTHEST = 2 * MOST_CHARACTERS  # a box that is still open there is not closed


def math_answer(
    solution_str: str, ground_truth: Any, *, score: float = 1.0, seconds: int = 5
) -> dict[str, Any]:
    r"""`score` if the last \boxed{} equals `ground_truth` as mathematics, else 0 and the reason.

    `\frac{1}{2}` equals `0.5`, `x = 2` equals `2`, `\{2, 1\}` equals `\{1, 2\}`. The ground truth
    is LaTeX or a number, with or without \boxed{}. `pred` is the answer in a form in which equal
    numbers are equal texts; validation votes with it. Each of parsing and comparing may take
    `seconds`. Raises ValueError for a row without ground truth.
    """
    if ground_truth is None:
        raise ValueError("the row has no ground truth: math_answer needs one in every row")
    expected = last_box(str(ground_truth)) or str(ground_truth).strip().strip("$")
    answer = last_box(solution_str)
    if answer is None:
        return {"score": 0.0, "reason": "no whole \\boxed{} in the completion"}
    if len(answer) > MOST_CHARACTERS:
        return {"score": 0.0, "reason": f"the answer has {len(answer)} characters"}
    given = _parse(answer, seconds)
    pred = str(given[0])[:MOST_CHARACTERS] if given else answer
    if answer == expected or (given and _equal(_parse(expected, seconds), given, seconds)):
        return {"score": score, "pred": pred}
    reason = f"answered {answer[:40]!r}, not {expected[:40]!r}"
    return {"score": 0.0, "pred": pred, "reason": reason}


def prepare(**_: Any) -> None:
    """Before a run: whether math-verify is there. Raises ValueError."""
    if find_spec("math_verify") is None:
        raise ValueError(
            "the grader math_answer needs the package math-verify: pip install 'jaxrl_llm[math]'"
        )


def last_box(text: str) -> str | None:
    r"""What stands in the last \boxed{...} whose brace is closed; None without one."""
    for match in reversed([*BOX.finditer(text)][-MOST_BOXES:]):
        closed = _closing(text, match.end() - 1)
        if closed is not None:
            return text[match.end() : closed].strip()
    return None


def _closing(text: str, opened: int) -> int | None:
    """The brace that closes the one at `opened`; an escaped brace is text."""
    depth, i = 0, opened
    while i < min(len(text), opened + FARTHEST):
        if text[i] == "\\":
            i += 1
        elif text[i] in "{}":
            depth += 1 if text[i] == "{" else -1
            if depth == 0:
                return i
        i += 1
    return None


def _parse(answer: str, seconds: int) -> list[Any]:
    """The expression, then its text; empty for what cannot be read in time."""
    from math_verify import LatexExtractionConfig, parse

    latex = [LatexExtractionConfig(boxed_match_priority=0)]
    return parse(f"\\boxed{{{answer}}}", extraction_config=latex, parsing_timeout=seconds)


def _equal(expected: list[Any], given: list[Any], seconds: int) -> bool:
    from math_verify import verify

    return bool(expected) and verify(expected, given, timeout_seconds=seconds)
