"""The settings of procedural tasks, and of priorities by which prompts are drawn.

The functions of `data/tasks.py` and `data/priority.py` have the same keyword-only parameters and
defaults; a test compares.
"""

from typing import Annotated, Any, Literal

from annotated_types import Ge, Le

from jaxrl_llm.typed_records.bounds import Count, Fraction, UpTo, Whole
from jaxrl_llm.typed_records.record import Custom, Kind, fields_of, kinds_of, one_of, records_in

Digits = Annotated[int, Ge(1), Le(18)]


class Priority(Kind):
    """The weight of a prompt in draws, from its earlier scores."""


class FailureRate(Priority, kind="failure_rate"):
    """1 - p, p the success rate; `low` and `high` score a wrong and a right answer."""

    low: Annotated[float, UpTo("high", itself=False)] = 0.0  # score of a wrong answer
    high: float = 1.0  # score of a right answer


class Learnability(FailureRate, kind="learnability"):
    """p (1 - p): largest where half of the answers are right."""


class Spread(Priority, kind="spread"):
    """The variance of the scores of the last group."""


PRIORITIES = kinds_of(Priority)
PrioritySettings = Annotated[Priority | Custom, one_of(*PRIORITIES, Custom)]


class Task(Kind):
    """A procedural task."""

    size: Whole = 0  # number of rows; 0: every problem, at most 200,000

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of the problems."""
        return {name: getattr(self, name) for name in fields_of(self) if name != "size"}


class ChainSum(Task, kind="chain_sum"):
    """Sums and differences in a row: `7+2-5=`."""

    num_terms: Annotated[int, Ge(2), Le(100)] = 3  # terms of a problem
    num_digits: Digits = 1  # digits of each number
    operators: Literal["+", "-", "+-"] = "+-"  # signs between the numbers


class Products(Task, kind="products"):
    """Products of two numbers: `12*7=`."""

    first_digits: Digits = 1  # digits of the first number
    second_digits: Digits = 1  # digits of the second number


class CalculatorCalls(Task, kind="calculator_calls"):
    """Products with demonstrations of a call: `[37*48]=1776`, then the answer."""

    first_digits: Digits = 2  # digits of the first number
    second_digits: Digits = 2  # digits of the second number


class GuessGames(Task, kind="guess_games"):
    """Numbers to guess, with demonstrations that ignore the hints, or heed some."""

    low: Annotated[Whole, UpTo("high", itself=False)] = 1  # smallest number
    high: Count = 31  # largest number
    turns: Count = 6  # guesses of a demonstration
    heeds: Fraction = 0.0  # share of the guesses that heed the hints
    hint: Literal["word", "sign", "range"] = "word"  # hints of the environment


class CountDots(Task, kind="count_dots"):
    """Drawn images of dots to be counted; the model has an image encoder."""

    most: Annotated[int, Ge(1), Le(9)] = 6  # dots of an image
    pixels: Annotated[int, Ge(24), Le(1024)] = 48  # pixels of a side
    space: Count = 4000  # images, by number


class MazeGames(Task, kind="maze_games"):
    """Mazes without walls, with demonstrations that walk at random."""

    side: Annotated[int, Ge(2), Le(26)] = 5  # cells of a side
    turns: Count = 20  # moves of a demonstration


class SpellBackward(Task, kind="spell_backward"):
    """Strings of lower-case letters to be reversed: `abcd=` gives `dcba`."""

    num_letters: Annotated[int, Ge(1), Le(100)] = 4  # letters of a string


TASKS = kinds_of(Task)
TaskSettings = Annotated[Task, one_of(*TASKS)]
__all__ = records_in(  # pyright: ignore
    __name__, "PRIORITIES", "PrioritySettings", "TASKS", "TaskSettings",
)  # fmt: skip
