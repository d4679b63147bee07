"""The settings of our tools and environments: docs/agents.md.

The classes and functions of `agents/` have the same keyword-only parameters and defaults; a test
compares.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from annotated_types import Ge, Le
from pydantic import BeforeValidator

from jaxrl_llm.config.graders import ExactAnswer, RewardFunction
from jaxrl_llm.typed_records.bounds import Count, Fraction, Many, Seconds, UpTo, Whole
from jaxrl_llm.typed_records.python_objects import GIVEN, GIVEN_CLASS, Given
from jaxrl_llm.typed_records.record import Custom, Kind, kinds_of, one_of, records_in


class Tool(Kind):
    """A tool of ours."""


class CalculatorTool(Tool, kind="calculator"):
    """The value of an arithmetic expression."""


class PythonTool(Tool, kind="python"):
    """The output of a Python program, run in a sandbox."""

    seconds: Seconds = 5.0  # seconds of a program
    memory_mb: Count = 512  # memory of a program, MB
    limits_only: bool = False  # without namespaces: for machines that forbid them


class Environment(Kind):
    """An environment of ours."""


class Calculator(Environment, kind="calculator"):
    """Calls in text: `[37*48]` is answered with its value. The last number is the answer."""

    score: float = 1.0  # reward of a right answer


class IntegerCalculator(Environment, kind="integer_calculator"):
    """Calls in text of two integers: `[37*48]` is answered with its value."""

    score: float = 1.0  # reward of a right answer


class Guess(Environment, kind="guess"):
    """A number to guess from hints: higher or lower."""

    low: Annotated[Whole, UpTo("high", itself=False)] = 1  # smallest number
    high: Count = 31  # largest number
    turns: Count = 6  # guesses
    # Answer to a wrong guess: higher or lower, > or <, or the range that is left.
    hint: Literal["word", "sign", "range"] = "word"


class Maze(Environment, kind="maze"):
    """A way to a goal on a square of cells, one move a turn."""

    size: Annotated[int, Ge(2), Le(26)] = 5  # cells of a side
    walls: Fraction = 0.0  # share of the walls that may stand; every cell can be reached
    turns: Count = 20  # moves


class Retry(Environment, kind="retry"):
    """A verifier that asks again after a wrong answer. Rewards are changes of the score."""

    grader: RewardFunction = ExactAnswer()  # reward function of an answer
    attempts: Annotated[int, Ge(2), Le(1024)] = 2  # answers
    message: str = "Wrong. Try again."  # answer of the verifier to a wrong answer
    enough: float = 1.0  # score from which an answer is right


class CodeEnvironment(Environment, kind="code"):
    """Python blocks of an answer are run in a sandbox, and their output is the observation."""

    seconds: Seconds = 5.0  # seconds of a program
    memory_mb: Count = 512  # memory of a program, MB
    limits_only: bool = False  # without namespaces: for machines that forbid them


def _one_or_many(value: Any) -> Any:
    """One environment, as a record, a class or a dict, is a list of one."""
    return (value,) if isinstance(value, Kind | type | Mapping) else value


class Command(Kind, kind="command"):
    """A program of yours as a command line, run without a shell."""

    line: str  # command line; its environment has OPENAI_BASE_URL and OPENAI_API_KEY


def _as_command(value: Any) -> Any:
    """A text with blanks is a command line."""
    is_line = isinstance(value, str) and " " in value.strip()
    return {"kind": "command", "line": value} if is_line else value


TOOLS, ENVIRONMENTS = kinds_of(Tool), kinds_of(Environment)
ToolSettings = Annotated[Tool | Custom, one_of(*TOOLS, Custom, Given), GIVEN]
EnvironmentSettings = Annotated[
    Environment | Custom, one_of(*ENVIRONMENTS, Custom, Given), GIVEN_CLASS
]
Environments = Annotated[Many[EnvironmentSettings], BeforeValidator(_one_or_many)]
ProgramSettings = Annotated[
    Command | Custom, one_of(Command, Custom, Given), GIVEN, BeforeValidator(_as_command)
]
__all__ = records_in(  # pyright: ignore
    __name__, "TOOLS", "ENVIRONMENTS", "ToolSettings", "Environments",
    "ProgramSettings",
)  # fmt: skip
