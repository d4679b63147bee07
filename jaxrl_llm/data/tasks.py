"""Procedural tasks: problems by index, with the right answer, and a split without leaks.

A hash of a problem's text decides whether it is held out. The task's settings, seed and size do not
matter, so no text is both a training and a held-out problem, also across two configurations.
(`2+7=` and `7+2=` are two texts: one may be held out and the other not.)

`task_rows` gives problems with their answers, `task_pairs` pairs of a right and a wrong answer.
"""

import hashlib
import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from random import Random
from typing import Any

from jaxrl_llm.images import MARK

HELD_OUT_SHARE = 10  # one problem in this many is held out
NUM_GAMES = 10_000  # games of a kind, by number
MAX_WHOLE_SPACE = 200_000  # problems; a larger space needs a size
# A problem gives one pair for each entry. Answers of the right form are more frequent than broken
# ones, because these are the mistakes of a policy that knows the format.
WRONG_ANSWERS = (
    "near",
    "near",
    "near",
    "other_problem",
    "other_problem",
    "malformed",
    "too_long",
    "empty",
)


@dataclass(frozen=True)
class Problem:
    """A character model continues `plain`. A chat model is asked `question`."""

    plain: str
    question: str
    answer: str
    demonstration: str = ""  # an answer of several turns, observations among them
    image: Callable[[], bytes] | None = None  # draws the image of the prompt, a PNG file


@dataclass(frozen=True)
class ProblemSpace:
    """All problems of a task. `problem(i)` gives a distinct text for each i in [0, size)."""

    name: str
    size: int
    problem: Callable[[int], Problem]


def chain_sum(*, num_terms: int = 3, num_digits: int = 1, operators: str = "+-") -> ProblemSpace:
    """Sums and differences of several terms, as in reasoning-gym's chain_sum: `7+2-5=`.

    Terms have exactly num_digits digits and no leading zero (one digit: 0 to 9). 2 terms of 1 digit
    give 200 problems, 3 terms 4,000. With operators="+" these are 100 and 1,000.
    """
    first, count = _numbers(num_digits)

    def problem(index: int) -> Problem:
        index, term = divmod(index, count)
        total = first + term
        text = str(total)
        for _ in range(num_terms - 1):
            index, operator = divmod(index, len(operators))
            index, term = divmod(index, count)
            term += first
            total += term if operators[operator] == "+" else -term
            text += f" {operators[operator]} {term}"
        question = f"State the final answer to the following arithmetic problem: {text} ="
        return Problem(text.replace(" ", "") + "=", question, str(total))

    size = count**num_terms * len(operators) ** (num_terms - 1)
    return ProblemSpace(f"chain_sum_{num_terms}x{num_digits}", size, problem)


def products(*, first_digits: int = 1, second_digits: int = 1) -> ProblemSpace:
    """Products of two numbers with the given digits: `12*7=`."""
    first_low, first_count = _numbers(first_digits)
    second_low, second_count = _numbers(second_digits)

    def problem(index: int) -> Problem:
        high, low = divmod(index, second_count)
        a, b = first_low + high, second_low + low
        question = f"State the final answer to the following arithmetic problem: {a} * {b} ="
        return Problem(f"{a}*{b}=", question, str(a * b))

    name = f"products_{first_digits}x{second_digits}"
    return ProblemSpace(name, first_count * second_count, problem)


def spell_backward(*, num_letters: int = 4) -> ProblemSpace:
    """Reversing a string of lower-case letters: `abcd=` gives `dcba`."""

    def problem(index: int) -> Problem:
        word = ""
        for _ in range(num_letters):
            index, letter = divmod(index, 26)
            word += chr(ord("a") + letter)
        question = f'Spell "{word}" backward. Answer with the letters only.'
        return Problem(f"{word}=", question, word[::-1])

    return ProblemSpace(f"spell_backward_{num_letters}", 26**num_letters, problem)


def calculator_calls(*, first_digits: int = 2, second_digits: int = 2) -> ProblemSpace:
    """Products, with demonstrations for the environment `calculator`: a call, then its result."""
    space = products(first_digits=first_digits, second_digits=second_digits)

    def problem(index: int) -> Problem:
        found = space.problem(index)
        call = f"[{found.plain.removesuffix('=')}]"
        return replace(found, demonstration=f"{call}={found.answer}\n{found.answer}")

    return ProblemSpace(f"calculator_{first_digits}x{second_digits}", space.size, problem)


def count_dots(*, most: int = 6, pixels: int = 48, space: int = 4000) -> ProblemSpace:
    """Images of 1 to `most` dots, which do not touch, to be counted."""

    def problem(index: int) -> Problem:
        draw = Random(f"dots {index} {most} {pixels}")
        number, radius = draw.randint(1, most), pixels // 12
        colour = tuple(draw.randint(0, 120) for _ in range(3))
        dots: list[tuple[int, int]] = []
        while len(dots) < number:
            x, y = (draw.randint(radius, pixels - 1 - radius) for _ in range(2))
            if all((x - a) ** 2 + (y - b) ** 2 > (2 * radius + 2) ** 2 for a, b in dots):
                dots.append((x, y))
        question = f"{MARK}Picture {index}: how many dots are there? Answer with the number only."
        image = partial(_drawn_dots, pixels, radius, colour, dots)
        return Problem(f"{MARK}{index}=", question, str(number), image=image)

    return ProblemSpace(f"count_dots_{most}", space, problem)


def _drawn_dots(
    size: int, radius: int, colour: tuple[int, ...], dots: Sequence[tuple[int, int]]
) -> bytes:
    """A light image with dots of one colour, as a PNG file."""
    from PIL import Image, ImageDraw  # pyright: ignore[reportMissingImports]

    image = Image.new("RGB", (size, size), (235, 235, 235))
    canvas = ImageDraw.Draw(image)
    for x, y in dots:
        canvas.ellipse((x - radius, y - radius, x + radius, y + radius), fill=colour)
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def guess_games(
    *, low: int = 1, high: int = 31, turns: int = 6, heeds: float = 0.0, hint: str = "word"
) -> ProblemSpace:
    """Numbers for the environment `guess`, with demonstrations.

    A share of their guesses heeds the hints: such a guess is drawn from the numbers that may be
    right. The others are drawn from all numbers. All guesses have equally many digits.
    """
    width = len(str(high))
    hints = {"word": ("higher\n", "lower\n"), "sign": (">", "<"), "range": ("", "")}[hint]

    def problem(index: int) -> Problem:
        draw = Random(f"guess {index}")
        secret = draw.randint(low, high)
        left = f"{low:0{width}}-{high:0{width}}\n"
        game = left if hint == "range" else ""
        first, last = low, high  # where the number is, by the hints
        for turn in range(turns):
            heed = heeds > 0 and draw.random() < heeds
            guess = draw.randint(first, last) if heed else draw.randint(low, high)
            if guess < secret:
                first = max(first, guess + 1)
            elif guess > secret:
                last = min(last, guess - 1)
            game += f"{guess:0{width}}\n"
            if guess == secret or turn == turns - 1:
                break
            game += hints[guess > secret]
            if hint == "range":
                game += f"{first:0{width}}-{last:0{width}}\n"
        question = f"Game {index}: guess a number from {low} to {high}. Write one number a turn."
        return Problem(f"#{index}\n", question, str(secret), game)

    return ProblemSpace(f"guess_{low}to{high}", NUM_GAMES, problem)


def maze_games(*, side: int = 5, turns: int = 20) -> ProblemSpace:
    """Mazes without walls for the environment `maze`, with demonstrations that walk at random."""

    def problem(index: int) -> Problem:
        draw = Random(str(index))  # as the environment draws them
        cells = [(x, y) for y in range(side) for x in range(side)]
        (x, y), goal = draw.sample(cells, 2)
        walk = ""
        for _ in range(turns):
            ways = {"U": (x, y - 1), "D": (x, y + 1), "L": (x - 1, y), "R": (x + 1, y)}
            ways = {move: cell for move, cell in ways.items() if cell in cells}
            walk += f"{_cell(x, y)}>{_cell(*goal)} {''.join(ways)}\n"
            move = draw.choice(list(ways))
            walk += move
            x, y = ways[move]
            if (x, y) == goal:
                break
            walk += "\n"
        walk = walk.removesuffix("\n")
        question = f"Maze {index}: walk to the goal. Write one move a turn: U, D, L or R."
        return Problem(f"#{index}\n", question, str(index), walk)

    return ProblemSpace(f"maze_{side}x{side}", NUM_GAMES, problem)


def _cell(x: int, y: int) -> str:
    return f"{chr(ord('a') + x)}{y + 1}"


# A table, because the names come from config files.
TASKS: dict[str, Callable[..., ProblemSpace]] = {
    "calculator_calls": calculator_calls,
    "chain_sum": chain_sum,
    "count_dots": count_dots,
    "guess_games": guess_games,
    "maze_games": maze_games,
    "products": products,
    "spell_backward": spell_backward,
}


def problem_space(name: str, settings: dict[str, Any] | None = None) -> ProblemSpace:
    """The task of that name."""
    return TASKS[name](**(settings or {}))


def is_held_out(problem: Problem) -> bool:
    """True if a problem is held out. Depends on its text only."""
    digest = hashlib.blake2b(problem.plain.encode(), digest_size=8).digest()
    return int.from_bytes(digest) % HELD_OUT_SHARE == 0


def task_rows(
    name: str,
    *,
    split: str,
    size: int = 0,
    prompt_style: str = "plain",
    seed: int = 0,
    settings: dict[str, Any] | None = None,
) -> list[dict[str, Any]]:
    """Rows of a task: data_source, prompt, completion, ground_truth, extra_info.

    Args:
        split: "train" or "held_out". The two never share a problem.
        size: number of rows, in the order of a seeded permutation of the space; 0 takes every
            problem. Training rows repeat if the space is smaller, to give a small task more
            weight in a mixture. Held-out rows never repeat.
        prompt_style: "plain" gives strings, "chat" lists of messages.

    Raises:
        ValueError: a size that the space does not allow.
    """
    space = problem_space(name, settings)
    problems = _problems(space, split=split, size=size, seed=seed)
    return [_row(problem, space.name, split, i, prompt_style) for i, problem in problems]


def task_pairs(
    name: str,
    *,
    split: str,
    size: int = 0,
    prompt_style: str = "plain",
    seed: int = 0,
    settings: dict[str, Any] | None = None,
) -> list[dict[str, Any]]:
    """Preference rows of a task: data_source, prompt, chosen, rejected, extra_info.

    `task_rows` gives the same problems for the same arguments. Each gives one pair for each kind
    of `WRONG_ANSWERS`. A hash of the problem's text seeds the wrong answers, so a pair does not
    depend on run, split or size. `extra_info["wrong"]` names the kind.

    Raises:
        ValueError: as `task_rows`.
    """
    space = problem_space(name, settings)
    problems = _problems(space, split=split, size=size, seed=seed)
    return [
        _pair(problem, kind, wrong, space.name, split, i, prompt_style)
        for i, problem in problems
        for kind, wrong in zip(WRONG_ANSWERS, wrong_answers(problem, space), strict=True)
    ]


def task_ratings(
    name: str,
    *,
    split: str,
    size: int = 0,
    prompt_style: str = "plain",
    seed: int = 0,
    settings: dict[str, Any] | None = None,
) -> list[dict[str, Any]]:
    """Rated rows of a task: both answers of each pair of `task_pairs`.

    The rating is 1 for the right answer and 0 for the wrong one.
    """
    pairs = task_pairs(
        name, split=split, size=size, prompt_style=prompt_style, seed=seed, settings=settings
    )
    return [
        {
            "data_source": pair["data_source"],
            "prompt": pair["prompt"],
            "completion": pair[answer],
            "rating": rating,
            "extra_info": pair["extra_info"],
        }
        for pair in pairs
        for answer, rating in (("chosen", 1.0), ("rejected", 0.0))
    ]


def wrong_answers(problem: Problem, space: ProblemSpace) -> list[str]:
    """One wrong answer for each kind of `WRONG_ANSWERS`. None equals the right answer."""
    draw = Random(hashlib.blake2b(problem.plain.encode(), digest_size=8).digest())
    wrong = {
        "near": lambda: _near(problem.answer, draw),
        "other_problem": lambda: _of_another(problem, space, draw),
        "malformed": lambda: _malformed(problem.answer, draw),
        "too_long": lambda: problem.answer + _digits_or_letters(problem.answer, draw),
        "empty": lambda: "",
    }
    return [wrong[kind]() for kind in WRONG_ANSWERS]


def _near(answer: str, draw: Random) -> str:
    """A number that is off by one to four, mostly by one. In other text, one letter is changed."""
    if _is_integer(answer):
        return str(int(answer) + draw.choice((-1, 1)) * draw.choice((1, 1, 1, 2, 3, 4)))
    place = draw.randrange(len(answer))
    letters = [c for c in "abcdefghijklmnopqrstuvwxyz" if c != answer[place]]
    return answer[:place] + draw.choice(letters) + answer[place + 1 :]


def _of_another(problem: Problem, space: ProblemSpace, draw: Random) -> str:
    """The answer of another problem, or a near answer if 100 problems have the same answer."""
    for _ in range(100):
        answer = space.problem(draw.randrange(space.size)).answer
        if answer != problem.answer:
            return answer
    return _near(problem.answer, draw)


def _malformed(answer: str, draw: Random) -> str:
    """The right answer in a wrong form: with a stray mark or a wrong sign."""
    flipped = answer[1:] if answer.startswith("-") else "-" + answer
    return draw.choice((flipped, "=" + answer, "+" + answer, answer + "=", answer + "."))


def _digits_or_letters(answer: str, draw: Random) -> str:
    """One to three characters that make an answer too long."""
    letters = "0123456789" if _is_integer(answer) else "abcdefghijklmnopqrstuvwxyz"
    return "".join(draw.choice(letters) for _ in range(draw.randint(1, 3)))


def _is_integer(text: str) -> bool:
    return text.removeprefix("-").isdecimal()


def _problems(
    space: ProblemSpace, *, split: str, size: int, seed: int
) -> list[tuple[int, Problem]]:
    """`size` problems of a split, each with its index in the split.

    ValueError for a size that the space does not allow.
    """
    if not size and space.size > MAX_WHOLE_SPACE:
        raise ValueError(f"task {space.name!r} has {space.size:,} problems: set its size")
    problems = list(enumerate(islice(_drawn(space, split, seed), size or None)))
    if not problems:
        raise ValueError(
            f"task {space.name!r} has only {space.size} problems, none of them {split}: "
            "take more terms or digits"
        )
    if len(problems) < size:
        if split == "held_out":
            raise ValueError(
                f"task {space.name!r} has {len(problems)} held-out problems, not {size}: lower "
                "size, or set 0 to take them all"
            )
        problems = [problems[i % len(problems)] for i in range(size)]
    return problems


def _drawn(space: ProblemSpace, split: str, seed: int) -> Iterator[Problem]:
    """The problems of a split, each once, in seeded random order."""
    for i in range(space.size):
        problem = space.problem(_permute(i, space.size, seed))
        if is_held_out(problem) == (split == "held_out"):
            yield problem


def _permute(index: int, size: int, seed: int) -> int:
    """A bijection of [0, size) for any size: a four-round Feistel network with cycle walking.

    Luby and Rackoff (1988). The network permutes a range of a power of 4 below 4 * size. It is
    applied until the result is below `size`, which happens because `index` is.
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = index >> half, index & mask
        for turn in range(4):
            key = f"{seed}/{turn}/{right}".encode()
            noise = int.from_bytes(hashlib.shake_256(key).digest(half // 8 + 1))
            left, right = right, left ^ (noise & mask)
        index = left << half | right
        if index < size:
            return index


def _row(problem: Problem, name: str, split: str, index: int, style: str) -> dict[str, Any]:
    return {
        "data_source": name,
        "prompt": _asked(problem, style),
        "completion": _answered(problem.demonstration or problem.answer, style),
        "ground_truth": problem.answer,
        "extra_info": {"split": split, "index": index},
        **({} if problem.image is None else {"images": [{"bytes": problem.image()}]}),
    }


def _pair(
    problem: Problem, kind: str, wrong: str, name: str, split: str, index: int, style: str
) -> dict[str, Any]:
    return {
        "data_source": name,
        "prompt": _asked(problem, style),
        "chosen": _answered(problem.answer, style),
        "rejected": _answered(wrong, style),
        "extra_info": {"split": split, "index": index, "wrong": kind},
    }


def _asked(problem: Problem, style: str) -> str | list[dict[str, str]]:
    if style == "plain":
        return problem.plain
    return [{"role": "user", "content": problem.question}]


def _answered(answer: str, style: str) -> str | list[dict[str, str]]:
    return answer if style == "plain" else [{"role": "assistant", "content": answer}]


def _numbers(digits: int) -> tuple[int, int]:
    """The smallest number with that many digits, and how many there are. 0 has one digit."""
    return (0, 10) if digits == 1 else (10 ** (digits - 1), 9 * 10 ** (digits - 1))
