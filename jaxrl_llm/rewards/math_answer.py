r"""Reward for a mathematical answer in \boxed{}.

Exact numbers compare exactly, words as text, units and bases by name. All else is compared with
math-verify, which parses text of a model by a grammar; nothing in it is evaluated as Python.
"""

import math
import re
from importlib.util import find_spec
from itertools import product
from typing import Any

from jaxrl_llm.rewards.exact_answer import truth_text
from jaxrl_llm.rewards.exact_numbers import cleaned, read_number, split_base, split_unit

RUNS_IN_POOL = True  # a comparison can take seconds, and a huge power can only be killed
BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
BARE_BOX = re.compile(r"\\(?:boxed|fbox)\s+(-?(?:\\[a-z]?frac\d\d|[^\s\\{}$]+))")
MOST_CHARACTERS = 2_000  # longest answer that is read
MOST_BOXES = 64  # most boxes that are tried, from the end
FARTHEST = 2 * MOST_CHARACTERS  # a box that is still open there is not closed
ROUNDING = 2e-6  # relative; decimals that stand for other numbers
EXACT = 1e-30  # relative; numbers without decimals, computed with 50 digits
FUNCTIONS = {"sin", "cos", "tan", "cot", "sec", "csc", "log", "ln", "exp", "lim", "max", "min",
             "arcsin", "arccos", "arctan", "sqrt", "pi", "inf", "infinity"}  # fmt: skip
# The left side of an equation that only names its right side: x, x_1, f(x), AB, \angle ABC.
NAME = re.compile(
    r"\\?[A-Za-z]+'?(?:\s*_\s*\{?\w+\}?)?(?:\s*\([\w, ]*\))?|\\(?:angle|overline|triangle|text|vec)"
    r"\s*\{?[A-Za-z\s]+\}?"
)

ALTERNATIVE = re.compile(r",?\s*\\(?:text|mathrm|mbox|textrm)\s*\{\s*(?:or|and)\s*\}")
ORDER = re.compile(r"[<>]|\\[gl]eq?(?![a-z])")  # a list of conditions is no list of values


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
        pred = _vote(answer, seconds)
        if answer == expected or equal(expected, answer, seconds):
            return {"score": score, "pred": pred}
    except NotGradedError as error:
        return {"score": math.nan, "pred": pred, "reason": str(error)}
    reason = f"answered {answer[:40]!r}, not {expected[:40]!r}"
    return {"score": 0.0, "pred": pred, "reason": reason}


def prepare(**_: Any) -> None:
    """Before a run: whether math-verify is there. Raises ValueError."""
    if find_spec("math_verify") is None:
        raise ValueError(
            "the grader math_answer needs the package math-verify: pip install math-verify"
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
    r"""The text in the last \boxed{...} whose brace is closed, or behind a \boxed without one."""
    for match in reversed([*BOX.finditer(text)][-MOST_BOXES:]):
        closed = _closing(text, match.end() - 1)
        if closed is not None:
            return text[match.end() : closed].strip()
    bare = BARE_BOX.findall(text[-FARTHEST:])
    return bare[-1].rstrip(".,;:!?)") if bare else None


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


def _verified(truth: str, answer: str, seconds: int) -> bool:
    """Compare with math-verify. Raises NotGradedError when the result is not known."""
    from math_verify import verify  # pyright: ignore[reportMissingImports]
    from math_verify.errors import TimeoutException  # pyright: ignore[reportMissingImports]

    expected = _parse(truth, seconds, "the ground truth")
    if all(isinstance(form, str) for form in expected):
        raise NotGradedError(f"the ground truth {truth[:40]!r} cannot be read as mathematics")
    late = False
    for pair in product(expected, _parse(answer, seconds, "the answer")):
        try:
            same = verify(*pair, timeout_seconds=seconds, raise_on_error=True)
        except TimeoutException:
            late = True
            continue
        except Exception:  # such as for things that have no order: they are not equal
            continue
        numbers = _same_numbers(*pair)
        if same if numbers is None else numbers:
            return True
    if late:
        raise NotGradedError(f"comparing with {truth[:40]!r} takes over {seconds} s")
    return False


def _same_numbers(truth: Any, answer: Any) -> bool | None:
    """Compare two numbers, up to rounding if one has decimals; None for other things.

    math-verify compares six decimals, in which all tiny numbers are equal.
    """
    import sympy  # pyright: ignore[reportMissingImports]

    pair = (truth, answer)
    if not all(isinstance(form, sympy.Expr) and form.is_number and form.is_finite for form in pair):
        return None
    tolerance = ROUNDING if any(form.has(sympy.Float) for form in pair) else EXACT
    values = [sympy.N(form, 50) for form in pair]
    difference = sympy.Abs(values[0] - values[1])
    return bool(difference <= tolerance * max(abs(value) for value in values))


# ------------------------------------------------------------------------- forms


def equal(truth: str, answer: str, seconds: int) -> bool:
    """Compare two answers in LaTeX. Raises NotGradedError when the result is not known."""
    dollars = [r"\$" in text for text in (truth, answer)]
    truth, answer = cleaned(truth), cleaned(answer)
    if truth and truth.replace(" ", "") == answer.replace(" ", ""):
        return True
    options = _option(truth), _option(answer)
    if all(options):
        return options[0] == options[1]
    words = _words(truth), _words(answer)
    if any(words):
        return words[0] == words[1]
    if not ("=" in truth and "=" in answer):
        truth, answer = _without_names(truth), _without_names(answer)
        if "=" in truth or "=" in answer:
            return False
    (truth, unit), (answer, answer_unit) = split_unit(truth), split_unit(answer)
    unit, answer_unit = unit or "dollar" * dollars[0], answer_unit or "dollar" * dollars[1]
    if unit and answer_unit and unit != answer_unit:
        return False
    (digits, base), (answer_digits, answer_base) = split_base(truth), split_base(answer)
    if base or answer_base:
        return (not base or not answer_base or base == answer_base) and digits == answer_digits
    numbers = read_number(truth), read_number(answer)
    if numbers[0] is not None and numbers[1] is not None:
        return numbers[0].equals(numbers[1])
    (bracket, parts), (answer_bracket, answer_parts) = _parts(truth), _parts(answer)
    if len(parts) > 1 and len(answer_parts) > 1 and bracket == answer_bracket:
        return _same_parts(parts, answer_parts, seconds, in_order="{" not in bracket)
    return _verified(truth, answer, seconds)


def _words(text: str) -> str:
    """Words of an answer that has nothing else, in lower case; empty for other answers.

    Two letters may be a product, three are a word.
    """
    inner = re.sub(r"\\(?:text|mathrm|textrm|textbf|textit|mbox)\s*\{([^{}]*)\}", r" \1 ", text)
    plain = " ".join(inner.replace("(", " ").replace(")", " ").split()).strip(" .,;:!")
    if not re.fullmatch(r"[^\W\d_](?:[^\W\d_]|[ ',.-])*", plain):
        return ""
    runs = set(re.findall(r"[^\W\d_]+", plain.lower()))
    is_text = inner != text or any(len(run) > 2 for run in runs)
    return plain.lower() if is_text and not runs & FUNCTIONS else ""


def _option(text: str) -> str:
    """The letter of a choice such as (A), in lower case; empty for others."""
    match = re.fullmatch(r"\(?([A-Za-z])\)?", text)
    return match[1].lower() if match else ""


def _without_name(text: str) -> str:
    """The right side of an equation whose left side is a name or a computation with numbers."""
    left, sign, right = text.partition("=")
    if not sign or "=" in right or re.search(r"[<>!:]$|\\(?:le|ge|ne)q?\s*$", left):
        return text
    left = left.strip()
    if not left or NAME.fullmatch(left) or read_number(left) is not None:
        return right.strip()
    return text


def _without_names(text: str) -> str:
    """A list of values of one name, such as x=2, x=3, without it; others as `_without_name`."""
    parts = _split(ALTERNATIVE.sub(",", text)) or []
    names = {part.partition("=")[0].strip() for part in parts if "=" in part}
    if len(parts) < 2 or len(names) != 1 or ORDER.search(text):
        return _without_name(text)
    return ", ".join(_without_name(part) for part in parts)


def _parts(text: str) -> tuple[str, list[str]]:
    """Brackets and parts of a tuple, interval or set; a list without brackets is a set."""
    opening = next((mark for mark in (r"\{", "(", "[") if text.startswith(mark)), "")
    closing = next((mark for mark in (r"\}", ")", "]") if text.endswith(mark)), "")
    if opening and closing and (opening == r"\{") == (closing == r"\}"):
        parts = _split(text[len(opening) : -len(closing)])
        if parts:
            return opening + closing, parts
    return r"\{\}", _split(text) or []


def _split(text: str) -> list[str] | None:
    """The parts between commas outside of brackets; None where brackets do not match."""
    depth, parts, start = 0, [], 0
    for i, character in enumerate(text):
        depth += (character in "([{") - (character in ")]}")
        if depth < 0:
            return None
        if character in ",;" and depth == 0:
            parts.append(text[start:i])
            start = i + 1
    return [part.strip() for part in (*parts, text[start:])]


def _same_parts(parts: list[str], answers: list[str], seconds: int, *, in_order: bool) -> bool:
    """Compare part by part, or each part with one of the others."""
    if len(parts) != len(answers):
        return False
    if in_order:
        return all(equal(*pair, seconds) for pair in zip(parts, answers, strict=True))
    rest = list(answers)
    for part in parts:
        match = next((i for i, answer in enumerate(rest) if equal(part, answer, seconds)), None)
        if match is None:
            return False
        del rest[match]
    return True


def _vote(answer: str, seconds: int) -> str:
    """Equal numbers as equal texts: 3/2 for 1.5, for x = 1.5 and for 150%."""
    text = cleaned(answer)
    if words := _words(text) or _option(text):
        return words
    body = split_unit(_without_name(text))[0]
    if split_base(body)[1]:
        return body
    if (number := read_number(body)) is not None:
        return number.text
    forms = _parse(text, seconds, "the answer")
    return _as_text(forms[0])[:MOST_CHARACTERS] if forms else answer
