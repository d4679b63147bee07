"""Our environments as JAX functions of tokens, for the character tokenizer.

Each answers as the Python class that `host` names. `docs/add-an-environment.md` shows one of yours.

Shape letters: T tokens of a turn, O ids of an observation, S cells of a maze.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxrl_llm.agents.calculator import MOST_DIGITS, IntegerCalculator
from jaxrl_llm.agents.games import HINTS, MOVES, Guess, Hint, Maze
from jaxrl_llm.generation.in_graph import TokenStep
from jaxrl_llm.tokenizer import CharTokenizer

DIGITS = "0123456789"
OTHER = 10  # class of a character that has no other


def joined(*parts: tuple[jax.Array, Any]) -> tuple[jax.Array, Any]:
    """Ids one after the other, padded, and their number. A part is padded ids and their number."""
    ids = jnp.zeros((sum(part.shape[0] for part, _ in parts),), jnp.int32)
    length = jnp.int32(0)
    for part, number in parts:  # each part overwrites the padding of the one before
        ids = lax.dynamic_update_slice(ids, part.astype(jnp.int32), (length,))
        length += number
    return ids, length


def table(tokenizer: CharTokenizer, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """The ids of texts, padded to the longest, and their numbers."""
    ids = [tokenizer.encode(text) for text in texts]
    lengths = np.array([len(own) for own in ids], np.int32)
    rows = np.zeros((len(ids), max(1, lengths.max())), np.int32)
    for row, own in zip(rows, ids, strict=True):
        row[: len(own)] = own
    return rows, lengths


class Characters:
    """The class of each id: its digit, OTHER, or OTHER + 1 + i for character i of `special`.

    Ids without a text, such as the end id, have the class -1.
    """

    def __init__(self, tokenizer: CharTokenizer, special: str = "") -> None:
        texts = [tokenizer.decode([i]) for i in range(tokenizer.vocab_size)]
        known = DIGITS + "\0" + special
        self._of = np.array([known.index(t) if t in known else OTHER for t in texts], np.int32)
        self._of[[not text for text in texts]] = -1

    def __call__(self, ids: jax.Array) -> jax.Array:
        """The classes of ids. An id outside of the tokenizer, such as -1, has no text."""
        inside = (ids >= 0) & (ids < len(self._of))
        return jnp.where(inside, jnp.asarray(self._of)[jnp.clip(ids, 0, len(self._of) - 1)], -1)


class Run(NamedTuple):
    """Runs of digits in a text."""

    value: jax.Array  # value of all digits, as one number; wrong above nine digits
    digits: jax.Array  # number of digits
    runs: jax.Array
    inside: jax.Array  # the last character was a digit


def digits_of(classes_T: jax.Array) -> Run:
    """The runs of digits in a turn."""

    def read(run: Run, character: jax.Array) -> tuple[Run, None]:
        is_digit = (character >= 0) & (character < OTHER)
        after = Run(
            value=jnp.where(is_digit, 10 * run.value + character, run.value),
            digits=run.digits + is_digit,
            runs=run.runs + (is_digit & ~run.inside),
            inside=is_digit,
        )
        return jax.tree.map(lambda new, old: jnp.where(character < 0, old, new), after, run), None

    none = Run(jnp.int32(0), jnp.int32(0), jnp.int32(0), jnp.bool_(False))
    return lax.scan(read, none, classes_T)[0]


class TokenGuess:
    """`Guess` in the generation program."""

    host = Guess
    stop = Guess.stop
    row_size = 1

    def __init__(
        self,
        tokenizer: CharTokenizer,
        *,
        low: int = 1,
        high: int = 31,
        turns: int = 6,
        hint: Hint = "word",
    ) -> None:
        self._low, self._high, self._turns = low, high, turns
        self._hint: Hint = hint
        self._tokenizer = tokenizer
        self._characters = Characters(tokenizer)
        self._hints = table(tokenizer, ("-", "\n") if hint == "range" else HINTS[hint])
        self._digit_ids = np.array(tokenizer.encode(DIGITS), np.int32)

    def begin(self, ground_truth: Any = None, group_seed: int = 0) -> tuple[list[int], list[int]]:
        """The number, and its range if hints are ranges."""
        game = Guess(low=self._low, high=self._high, turns=self._turns, hint=self._hint)
        opening = game.reset(ground_truth, group_seed)
        return self._tokenizer.encode(opening or ""), [game.secret]

    def init(self, numbers: jax.Array) -> dict[str, jax.Array]:
        """The number, and what the hints say of it."""
        first, last, left = (jnp.int32(x) for x in (self._low, self._high, self._turns))
        return {"secret": numbers[0], "from": first, "to": last, "left": left}

    def step_tokens(
        self, state: dict[str, jax.Array], ids: jax.Array, length: jax.Array
    ) -> TokenStep:
        """Compare a guess: the only run of at most nine digits in the turn."""
        run, secret = digits_of(self._characters(ids)), state["secret"]
        is_number = (run.runs == 1) & (run.digits <= 9)
        is_right = is_number & (run.value == secret)
        is_legal = is_number & (self._low <= run.value) & (run.value <= self._high)
        is_higher, is_lower = is_legal & (run.value < secret), is_legal & (run.value > secret)
        first = jnp.where(is_higher, jnp.maximum(state["from"], run.value + 1), state["from"])
        last = jnp.where(is_lower, jnp.minimum(state["to"], run.value - 1), state["to"])
        hints, lengths = map(jnp.asarray, self._hints)
        if self._hint == "range":
            dash, end = hints
            observation = jnp.concatenate([self._padded(first), dash, self._padded(last), end])
            observed = observation.shape[0]
        else:
            which = jnp.where(is_higher, 1, jnp.where(is_lower, 2, 0))
            observation, observed = hints[which], lengths[which]
        left = state["left"] - 1
        return TokenStep(
            state={"secret": secret, "from": first, "to": last, "left": left},
            observation=observation,
            length=observed,
            reward=is_right.astype(jnp.float32),
            done=is_right | (left == 0),
            key=first * (self._high + 1) + last,
        )

    def _padded(self, number: jax.Array) -> jax.Array:
        """The digits of a number, with zeros before it."""
        powers = np.array([10**i for i in reversed(range(len(str(self._high))))])
        return jnp.asarray(self._digit_ids)[number // powers % 10]


class TokenMaze:
    """`Maze` in the generation program."""

    host = Maze
    stop = Maze.stop

    def __init__(
        self, tokenizer: CharTokenizer, *, size: int = 5, walls: float = 0.0, turns: int = 20
    ) -> None:
        self._size, self._walls, self._turns = size, walls, turns
        self._tokenizer = tokenizer
        self.row_size = 2 + size * size
        self._characters = Characters(tokenizer, "".join(MOVES))
        names = [f"{chr(ord('a') + i % size)}{i // size + 1}" for i in range(size * size)]
        open_moves = ["".join(m for i, m in enumerate(MOVES) if 1 << i & n) for n in range(16)]
        self._texts = [
            table(tokenizer, [before + text + after for text in texts])
            for before, texts, after in (
                ("\n", names, ">"),
                ("", names, " "),
                ("", open_moves, "\n"),
            )
        ]

    def begin(self, ground_truth: Any = None, group_seed: int = 0) -> tuple[list[int], list[int]]:
        """The start, the goal, and the moves that are open in each cell, as bits."""
        maze = Maze(size=self._size, walls=self._walls, turns=self._turns)
        return self._tokenizer.encode(maze.reset(ground_truth, group_seed)), maze.numbers

    def init(self, numbers: jax.Array) -> dict[str, jax.Array]:
        """The cell, and what does not change."""
        state = {"cell": numbers[0], "goal": numbers[1], "open": numbers[2:]}
        return state | {"left": jnp.int32(self._turns)}

    def step_tokens(
        self, state: dict[str, jax.Array], ids: jax.Array, length: jax.Array
    ) -> TokenStep:
        """Move: the first of the four letters in the turn."""
        move_T = self._characters(ids) - (OTHER + 1)
        move = jnp.maximum(move_T[jnp.argmax(move_T >= 0)], 0)
        cell, goal = state["cell"], state["goal"]
        goes = jnp.any(move_T >= 0) & ((state["open"][cell] >> move) & 1 == 1)
        steps = jnp.asarray([right + self._size * down for right, down in MOVES.values()])
        cell = jnp.where(goes, cell + steps[move], cell)
        left, has_arrived = state["left"] - 1, cell == goal
        which = (cell, goal, state["open"][cell])
        parts = [
            (jnp.asarray(rows)[i], jnp.asarray(lengths)[i])
            for (rows, lengths), i in zip(self._texts, which, strict=True)
        ]
        observation, length = joined(*parts)
        return TokenStep(
            state=state | {"cell": cell, "left": left},
            observation=observation,
            length=length,
            reward=has_arrived.astype(jnp.float32),
            done=has_arrived | (left == 0),
        )


class TokenCalculator:
    """`IntegerCalculator` in the generation program."""

    host = IntegerCalculator
    stop = IntegerCalculator.stop
    row_size = 2

    def __init__(self, tokenizer: CharTokenizer, *, score: float = 1.0) -> None:
        self._score, self._signs = score, "+-*"
        self._characters = Characters(tokenizer, "+-*[] \n")
        self._words = table(tokenizer, ["=", "=error", "-", "\n"])
        self._digit_ids = np.array(tokenizer.encode(DIGITS), np.int32)

    def begin(self, ground_truth: Any = None) -> tuple[list[int], list[int]]:
        """Whether the row has a right answer, and the answer."""
        if ground_truth is None:
            return [], [0, 0]
        return [], [1, int(ground_truth)]

    def init(self, numbers: jax.Array) -> dict[str, jax.Array]:
        """The right answer."""
        return {"has_truth": numbers[0], "truth": numbers[1]}

    def step_tokens(
        self, state: dict[str, jax.Array], ids: jax.Array, length: jax.Array
    ) -> TokenStep:
        """Compute a call, or grade an answer."""
        classes_T = self._characters(ids)
        place_T = jnp.arange(classes_T.shape[0])
        plus, minus, times, opening, closing, blank = (OTHER + 1 + i for i in range(6))
        # The text alone, without blanks around it: other ids go to the end.
        inner_T = (classes_T >= 0) & (classes_T < blank)
        first, end = jnp.argmax(inner_T), jnp.max(jnp.where(inner_T, place_T + 1, 0))
        counts_T = (classes_T >= 0) & (place_T >= first) & (place_T < end)
        text_T = classes_T[jnp.argsort(~counts_T, stable=True)]
        size = jnp.sum(counts_T)
        inside_T = place_T < size
        is_digit_T = inside_T & (text_T >= 0) & (text_T < OTHER)
        last = jnp.max(jnp.where(inside_T, place_T, -1))
        is_call = (text_T[jnp.maximum(last, 0)] == closing) & (size > 0)

        def number(first: Any, end: Any) -> tuple[jax.Array, jax.Array]:
            """The digits in a range as a number, and how many there are."""
            in_range_T = is_digit_T & (place_T >= first) & (place_T < end)
            run = digits_of(jnp.where(in_range_T, text_T, -1))
            return run.value, run.digits

        is_sign_T = inside_T & ((text_T == plus) | (text_T == minus) | (text_T == times))
        sign = jnp.argmax(is_sign_T)
        a, digits_a = number(1, sign)
        b, digits_b = number(sign + 1, last)
        is_right_size = (digits_a > 0) & (digits_a <= MOST_DIGITS)
        is_right_size &= (digits_b > 0) & (digits_b <= MOST_DIGITS)
        is_valid = jnp.any(is_sign_T) & (text_T[0] == opening) & is_right_size
        is_valid &= digits_a + digits_b + 3 == size
        operator = text_T[sign]
        value = jnp.where(operator == plus, a + b, jnp.where(operator == minus, a - b, a * b))
        value = jnp.where(is_valid, value, 0)
        observation, observed = self._shown(value, is_valid)
        negative = (text_T[0] == minus) & (size > 0)
        answer, digits = number(negative, size)
        is_answer = (digits > 0) & (digits <= 9) & (digits + negative == size)
        answer = jnp.where(negative, -answer, answer)
        is_right = ~is_call & is_answer & (answer == state["truth"]) & (state["has_truth"] == 1)
        return TokenStep(
            state=state,
            observation=observation,
            length=observed,
            reward=jnp.where(is_right, jnp.float32(self._score), 0.0),
            done=~is_call,
        )

    def _shown(self, value: jax.Array, is_valid: jax.Array) -> tuple[jax.Array, Any]:
        """`=VALUE` or `=error`, and a new line."""
        most = 2 * MOST_DIGITS
        digits = (jnp.abs(value) // np.array([10**i for i in reversed(range(most))])) % 10
        number = jnp.where(jnp.any(digits > 0), most - jnp.argmax(digits > 0), 1)
        shown = jnp.roll(jnp.asarray(self._digit_ids)[digits], number)  # the last ones come first
        words, lengths = map(jnp.asarray, self._words)
        word = jnp.where(is_valid, 0, 1)
        return joined(
            (words[word], lengths[word]),
            (words[2], is_valid & (value < 0)),
            (shown, jnp.where(is_valid, number, 0)),
            (words[3], lengths[3]),
        )
