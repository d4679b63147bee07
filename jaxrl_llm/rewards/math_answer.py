r"""Reward for a mathematical answer in \boxed{}, compared by value with math-verify.

Text of a model is parsed as LaTeX by a grammar; nothing in it is evaluated as Python.
"""

import math
import re
from importlib.util import find_spec
from itertools import product
from typing import Any

from jaxrl_llm.rewards.exact_answer import truth_text

RUNS_IN_POOL = True  # a comparison can take seconds, and a huge power can only be killed
BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
MOST_CHARACTERS = 2_000  # longest answer that is read
MOST_BOXES = 64  # most boxes that are tried, from the end
FARTHEST = 2 * MOST_CHARACTERS  # a box that is still open there is not closed


class NotGradedError(Exception):
    """Why it is not known whether an answer is right."""


def math_answer(
    solution_str: str, ground_truth: Any, *, score: float = 1.0, seconds: int = 5
) -> dict[str, Any]:
    r"""`score` if the last \boxed{} equals `ground_truth` as mathematics, else 0 and the reason.

    `\frac{1}{2}` equals `0.5`, `x = 2` equals `2`, `\{2, 1\}` equals `\{1, 2\}`. The ground truth
    is LaTeX or a number, with or without \boxed{}. `pred` is the answer in a form in which equal
    numbers are equal texts; validation votes with it. Each of parsing and comparing may take
    `seconds`. The score is NaN, a counted failure, where that is not enough. It is NaN too where
    the ground truth is no mathematics and the answer has another text. Raises ValueError for a row
    without ground truth.
    """
    expected = _expected(ground_truth)
    answer = last_box(solution_str)
    if answer is None:
        return {"score": 0.0, "reason": "no whole \\boxed{} in the completion"}
    if len(answer) > MOST_CHARACTERS:
        return {"score": 0.0, "reason": f"the answer has {len(answer)} characters"}
    pred = answer
    try:
        given = _parse(answer, seconds, "the answer")
        pred = _as_text(given[0])[:MOST_CHARACTERS] if given else answer
        if answer == expected or _equal(expected, given, seconds):
            return {"score": score, "pred": pred}
    except NotGradedError as error:
        return {"score": math.nan, "pred": pred, "reason": str(error)}
    reason = f"answered {answer[:40]!r}, not {expected[:40]!r}"
    return {"score": 0.0, "pred": pred, "reason": reason}


def prepare(**_: Any) -> None:
    """Before a run: whether math-verify is there. Raises ValueError."""
    if find_spec("math_verify") is None:
        raise ValueError(
            "the grader math_answer needs the package math-verify: pip install 'jaxrl_llm[math]'"
        )


def read_truth(ground_truth: Any) -> str:
    """Before a run: the right answer of a row as text. Raises ValueError for none."""
    expected = _expected(ground_truth)
    if not expected.strip():
        raise ValueError(f"the ground truth {ground_truth!r} has no answer for math_answer")
    return expected


def _expected(ground_truth: Any) -> str:
    truth = truth_text(ground_truth, "math_answer")
    return last_box(truth) or truth.strip("$")


def last_box(text: str) -> str | None:
    r"""The text in the last \boxed{...} whose brace is closed; None without one."""
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


def _parse(answer: str, seconds: int, what: str) -> list[Any]:
    """The expression, then its text; only the text, or nothing, for what cannot be read.

    Raises NotGradedError when it takes too long.
    """
    from math_verify import LatexExtractionConfig, parse  # pyright: ignore[reportMissingImports]
    from math_verify.errors import TimeoutException  # pyright: ignore[reportMissingImports]

    latex = [LatexExtractionConfig(boxed_match_priority=0)]
    boxed = f"\\boxed{{{answer}}}"
    try:
        return parse(boxed, extraction_config=latex, parsing_timeout=seconds, raise_on_error=True)
    except TimeoutException:
        raise NotGradedError(f"reading {what} {answer[:40]!r} takes over {seconds} s") from None
    except Exception:  # math-verify and sympy raise whatever they like over text of a model
        return []


def _as_text(form: Any) -> str:
    """Equal numbers as equal texts: 3/2 for 1.5, for x = 1.5 and for 150%."""
    import sympy  # pyright: ignore[reportMissingImports]

    if isinstance(form, sympy.Equality) and isinstance(form.lhs, sympy.Symbol):
        form = form.rhs
    # Powers may be of any size and are not computed.
    if all(
        isinstance(part, sympy.Number | sympy.Add | sympy.Mul | sympy.UnevaluatedExpr)
        or (isinstance(part, sympy.Pow) and part.exp == -1)
        for part in sympy.preorder_traversal(form)
    ):
        decimals = {number: sympy.Rational(str(number)) for number in form.atoms(sympy.Float)}
        form = form.xreplace(decimals).doit()
    return str(form)


def _equal(truth: str, given: list[Any], seconds: int) -> bool:
    """Raises NotGradedError when that is not known."""
    from math_verify import verify  # pyright: ignore[reportMissingImports]
    from math_verify.errors import TimeoutException  # pyright: ignore[reportMissingImports]

    expected = _parse(truth, seconds, "the ground truth")
    if all(isinstance(form, str) for form in expected):
        raise NotGradedError(f"the ground truth {truth[:40]!r} cannot be read as mathematics")
    late = False
    for pair in product(expected, given):
        try:
            if verify(*pair, timeout_seconds=seconds, raise_on_error=True):
                return True
        except TimeoutException:
            late = True
        except Exception:  # such as for things that have no order: they are not equal
            continue
    if late:
        raise NotGradedError(f"comparing with {truth[:40]!r} takes over {seconds} s")
    return False
