"""Arithmetic: as a tool, and as an environment whose calls are text in brackets."""

import ast
import operator
import re
from collections.abc import Callable
from typing import Any

from jaxrl_llm.agents.environments import Step
from jaxrl_llm.rewards.exact_answer import last_number, truth_text

MOST_CHARACTERS = 200  # most characters of an expression
MOST_BITS = 4096  # most bits of a number, so that no power takes long
MOST_DIGITS = 4  # digits of a number of `IntegerCalculator`
CALL = re.compile(r"\[([^\[\]]*)\]\s*$")
INTEGER_CALL = re.compile(r"\[(\d{1,4})([-+*])(\d{1,4})\]")
SIGNS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
OPERATORS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}


def calculator(expression: str) -> str:
    """Compute the value of an arithmetic expression, such as (3 + 4) * 12.

    Args:
        expression: Numbers, parentheses and the operators + - * / // % **.
    """
    if len(expression) > MOST_CHARACTERS:
        raise ValueError(f"the expression has more than {MOST_CHARACTERS} characters")
    value = _value(ast.parse(expression.strip().replace("^", "**"), mode="eval").body)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return str(value) if isinstance(value, int) else f"{value:.10g}"


def _value(node: ast.expr) -> int | float:
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        value = _value(node.operand)
        return -value if isinstance(node.op, ast.USub) else value
    if not isinstance(node, ast.BinOp) or type(node.op) not in OPERATORS:
        raise ValueError("expected numbers, parentheses and + - * / // % **")
    left, right = _value(node.left), _value(node.right)
    if isinstance(node.op, ast.Pow) and _bits(left) * abs(right) > MOST_BITS:
        raise ValueError("the power is too large")
    result = OPERATORS[type(node.op)](left, right)
    if not isinstance(result, int | float) or _bits(result) > MOST_BITS:
        raise ValueError("the number is too large")
    return result


def _bits(value: int | float) -> int:
    return value.bit_length() if isinstance(value, int) else 64


class Calculator:
    """A turn that ends with `[37*48]` gets `=1776`. Another turn is the answer, by its last number.

    Without a ground truth in the row, reward functions grade the answer.
    """

    stop = ("]",)

    def __init__(self, *, score: float = 1.0) -> None:
        self._score = score
        self._truth: Any = None

    def reset(self, ground_truth: Any = None) -> None:
        """Keep the right answer."""
        self._truth = ground_truth

    def step(self, action: str) -> Step:
        """Compute, or grade the answer."""
        call = CALL.search(action)
        if call is not None:
            try:
                return Step(f"={calculator(call[1])}\n")
            except (ValueError, SyntaxError, ArithmeticError, RecursionError, MemoryError):
                return Step("=error\n", info={"error": True})
        if self._truth is None:
            return Step(done=True)
        right = last_number(action) == last_number(truth_text(self._truth, "calculator"))
        return Step(reward=self._score if right else 0.0, done=True)


class IntegerCalculator:
    """`Calculator` for calls of two numbers of at most four digits, `[37*48]`, with + - or *.

    Another turn is an answer, and right if it is the number of the ground truth and nothing else.
    """

    stop = ("]",)

    def __init__(self, *, score: float = 1.0) -> None:
        self._score = score
        self._truth: int | None = None

    def reset(self, ground_truth: Any = None) -> None:
        """Keep the right answer."""
        self._truth = None if ground_truth is None else int(ground_truth)

    def step(self, action: str) -> Step:
        """Compute, or grade the answer."""
        action = action.strip()
        if action.endswith("]"):
            call = INTEGER_CALL.fullmatch(action)
            value = SIGNS[call[2]](int(call[1]), int(call[3])) if call else "error"
            return Step(f"={value}\n")
        right = re.fullmatch(r"-?\d{1,9}", action) is not None and int(action) == self._truth
        return Step(reward=self._score if right else 0.0, done=True)
