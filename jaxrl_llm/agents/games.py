"""Two small games in text: a number to guess, and a way through a maze."""

import re
from random import Random
from typing import Any, Literal

from jaxrl_llm.agents.environments import Step

MOVES = {"U": (0, -1), "D": (0, 1), "L": (-1, 0), "R": (1, 0)}
Cell = tuple[int, int]  # column and row, from the top left
Hint = Literal["word", "sign", "range"]
# Hints to a guess that is no number of the game, that is too low, that is too high.
HINTS = {"word": ("?\n", "higher\n", "lower\n"), "sign": ("?", ">", "<")}


class Guess:
    """Guess a number. Each turn is a guess, answered with a hint.

    A hint is a word, `higher` or `lower`, a sign, `>` or `<`, or the range that is left, as in
    `09-15`. The number is the row's `ground_truth`, else drawn with `group_seed`.
    """

    stop = ("\n",)

    def __init__(
        self, *, low: int = 1, high: int = 31, turns: int = 6, hint: Hint = "word"
    ) -> None:
        self._low, self._high, self._left, self._hint = low, high, turns, hint
        self._secret = low
        self._from, self._to = low, high  # where the number is, by the hints

    def reset(self, ground_truth: Any = None, group_seed: int = 0) -> str | None:
        """Choose the number. The range is shown if hints are ranges."""
        if ground_truth is None:
            self._secret = Random(group_seed).randint(self._low, self._high)
        else:
            self._secret = int(ground_truth)
        return self._range() if self._hint == "range" else None

    @property
    def secret(self) -> int:
        """The number."""
        return self._secret

    def step(self, action: str) -> Step:
        """Compare a guess."""
        self._left -= 1
        number = re.fullmatch(r"\D*(\d{1,9})\D*", action)
        if number is not None and int(number[1]) == self._secret:
            return Step(reward=1.0, done=True)
        which = 0
        if number is not None and self._low <= int(number[1]) <= self._high:
            if int(number[1]) < self._secret:
                which, self._from = 1, max(self._from, int(number[1]) + 1)
            else:
                which, self._to = 2, min(self._to, int(number[1]) - 1)
        hint = self._range() if self._hint == "range" else HINTS[self._hint][which]
        info = {"legal": which > 0, "state": f"{self._from} to {self._to}"}
        return Step(hint, reward=0.0, done=not self._left, info=info)

    def _range(self) -> str:
        width = len(str(self._high))
        return f"{self._from:0{width}}-{self._to:0{width}}\n"


class Maze:
    """Walk to a goal, one move a turn: U, D, L or R. A wall stops a move.

    Each observation has the cell, the goal and the moves that are open, as in `b3>e5 UDL`. The maze
    is drawn with the row's `ground_truth`, else with `group_seed`.
    """

    stop = tuple(MOVES)

    def __init__(self, *, size: int = 5, walls: float = 0.0, turns: int = 20) -> None:
        self._size, self._walls, self._left = size, walls, turns
        self._cell: Cell = (0, 0)
        self._goal: Cell = (0, 0)
        self._closed: set[tuple[Cell, Cell]] = set()

    def reset(self, ground_truth: Any = None, group_seed: int = 0) -> str:
        """Draw the maze, the start and the goal."""
        random = Random(group_seed if ground_truth is None else str(ground_truth))
        cells = [(x, y) for y in range(self._size) for x in range(self._size)]
        self._cell, self._goal = random.sample(cells, 2)
        self._closed = _closed(cells, random, self._walls)
        return f"{self._shown()}\n"

    @property
    def numbers(self) -> list[int]:
        """The cell, the goal, and the moves that are open in each cell, as bits."""
        cells = [(x, y) for y in range(self._size) for x in range(self._size)]
        ways = [self._open(cell) for cell in cells]
        bits = [sum(1 << i for i, move in enumerate(MOVES) if move in way) for way in ways]
        return [cells.index(self._cell), cells.index(self._goal), *bits]

    def step(self, action: str) -> Step:
        """Move."""
        self._left -= 1
        move = re.search(r"[UDLR]", action)
        if move is not None and (to := self._open(self._cell).get(move[0])) is not None:
            self._cell = to
        arrived = self._cell == self._goal
        done = arrived or not self._left
        return Step(f"\n{self._shown()}\n", reward=float(arrived), done=done)

    def _open(self, here: Cell) -> dict[str, Cell]:
        """The moves that no wall stops."""
        x, y = here
        cells = {move: (x + right, y + down) for move, (right, down) in MOVES.items()}
        inside = range(self._size)
        return {
            move: cell
            for move, cell in cells.items()
            if cell[0] in inside and cell[1] in inside and (here, cell) not in self._closed
        }

    def _shown(self) -> str:
        here, goal = (f"{chr(ord('a') + x)}{y + 1}" for x, y in (self._cell, self._goal))
        return f"{here}>{goal} {''.join(self._open(self._cell))}"


def _closed(cells: list[Cell], random: Random, share: float) -> set[tuple[Cell, Cell]]:
    """Walls, in both directions: a share of those outside of a tree that reaches all cells."""
    rest, edges = set(cells), []
    for x, y in cells:
        edges += [((x, y), cell) for cell in ((x + 1, y), (x, y + 1)) if cell in rest]
    random.shuffle(edges)
    tree = {cell: cell for cell in cells}

    def root(cell: Cell) -> Cell:
        while tree[cell] != cell:
            cell = tree[cell]
        return cell

    spare: list[tuple[Cell, Cell]] = []
    for one, other in edges:
        if root(one) == root(other):
            spare.append((one, other))
        tree[root(one)] = root(other)
    walls = spare[: round(share * len(spare))]
    return {wall for one, other in walls for wall in ((one, other), (other, one))}
