"""Environments of JAX functions answer as their Python classes do, whatever a model writes."""

from random import Random

import jax
import numpy as np
import pytest

from jaxrl_llm.agents.environments import taken_columns
from jaxrl_llm.agents.games import Maze
from jaxrl_llm.agents.styles import PlainStyle
from jaxrl_llm.agents.token_environments import TokenCalculator, TokenGuess, TokenMaze
from jaxrl_llm.tokenizer import CharTokenizer

CHAR = CharTokenizer()
WIDTH = 12  # tokens of a turn
NO_TEXT = (CHAR.pad_id, CHAR.vocab_size + 3)  # ids that a model may sample, without a text


def turn(draw, environment, pieces):
    """The ids of a turn that a model could have sampled."""
    stops = PlainStyle(CHAR, environment.stop).stop_ids
    text = "".join(draw.choice(pieces) for _ in range(draw.randrange(5)))
    ids = [i for i in CHAR.encode(text) if i not in stops][: WIDTH - 2]
    if draw.random() < 0.2:
        ids.insert(draw.randrange(len(ids) + 1), draw.choice(NO_TEXT))
    return [*ids, draw.choice(stops)]


def play(environment, draw, pieces, answers, row):
    """Play some turns in both forms, and compare each answer."""
    columns = {"ground_truth": row, "group_seed": draw.randrange(99), "seed": 0}
    opening, numbers = environment.begin(**taken_columns(environment.begin, columns))
    state = environment.init(np.array(numbers, np.int32))
    host = environment.host(**answers)
    begun = host.reset(**taken_columns(host.reset, columns))
    assert CHAR.decode(opening) == (begun or "")
    step, keys, seen = jax.jit(environment.step_tokens), {}, []
    for _ in range(30):
        ids = turn(draw, environment, pieces)
        padded = np.array(ids + [-1] * (WIDTH - len(ids)), np.int32)
        mine, expected = step(state, padded, np.int32(len(ids))), host.step(CHAR.decode(ids))
        text = CHAR.decode(np.asarray(mine.observation)[: int(mine.length)].tolist())
        seen.append((CHAR.decode(ids), text, float(mine.reward), bool(mine.done)))
        assert float(mine.reward) == (expected.reward or 0.0), seen
        assert bool(mine.done) == expected.done, seen
        if expected.done:
            return seen
        assert text == expected.observation, seen
        if mine.key is not None:  # equal keys for equal states
            assert keys.setdefault(int(mine.key), expected.info["state"]) == expected.info["state"]
        state = mine.state
    return seen


DIGITS = [*"0123456789", "16", "7", "31", "+", " ", "a"]
CALLS = [
    "[37*48",
    "[7+",
    "[",
    "12",
    "-",
    "*",
    "9",
    "0",
    "0000",
    "]",
    "99999",
    " ",
    "\n",
    "x",
    "[9999*9999",
]


@pytest.mark.parametrize(
    ("kind", "settings", "pieces", "rows"),
    [
        (TokenGuess, {}, DIGITS, (20, 1, None)),
        (TokenGuess, {"low": 0, "high": 5, "turns": 20, "hint": "sign"}, DIGITS, (3, None)),
        (TokenGuess, {"hint": "range"}, DIGITS, (20, 1, None)),
        (TokenMaze, {}, ["U", "x", "L", "D"], (0, 7, None)),
        (TokenMaze, {"size": 11, "walls": 0.8, "turns": 25}, ["a", "b"], (1, 2, None)),
        (TokenCalculator, {"score": 0.5}, CALLS, (1776, -3, 0, None)),
    ],
)
def test_every_answer_is_that_of_the_python_class(kind, settings, pieces, rows):
    environment, seen = kind(CHAR, **settings), []
    for seed in range(40):
        draw = Random(seed)
        seen += play(environment, draw, pieces, settings, draw.choice(rows))
    assert len(seen) > 50 and len({text for _, text, _, _ in seen}) >= 3


@pytest.mark.parametrize(
    ("text", "observation"),
    [
        *(("[37*48]", "=1776\n"), ("[3-48]", "=-45\n"), ("[0007*10]", "=70\n"), ("[5-5]", "=0\n")),
        *(("[9999*9999]", "=99980001\n"), ("[1*2*3]", "=error\n"), ("[12345+1]", "=error\n")),
        *(("a[1+2]", "=error\n"), ("]", "=error\n"), ("[+1]", "=error\n"), ("[1+]", "=error\n")),
    ],
)
def test_calls_of_the_calculator(text, observation):
    environment, ids = TokenCalculator(CHAR), CHAR.encode(text)
    padded = np.array(ids + [-1] * (WIDTH - len(ids)), np.int32)
    state = environment.init(np.array([0, 0], np.int32))
    step = environment.step_tokens(state, padded, np.int32(len(ids)))
    assert CHAR.decode(np.asarray(step.observation)[: int(step.length)].tolist()) == observation


@pytest.mark.parametrize(
    ("truth", "text", "reward"),
    [(1776, "1776", 1.0), (-3, "-3", 1.0), (3, "-3", 0.0), (0, "-", 0.0), (12, "12x", 0.0)],
)
def test_answers_of_the_calculator(truth, text, reward):
    environment, ids = TokenCalculator(CHAR), [*CHAR.encode(text), CHAR.eos_id]
    padded = np.array(ids + [-1] * (WIDTH - len(ids)), np.int32)
    state = environment.init(np.array([1, truth], np.int32))
    step = environment.step_tokens(state, padded, np.int32(len(ids)))
    assert bool(step.done) and float(step.reward) == reward
    host = environment.host()
    host.reset(str(truth))
    assert host.step(text).reward == reward


def test_the_numbers_of_a_maze_have_its_walls():
    maze = Maze(size=5, walls=0.5)
    maze.reset(3)
    cell, goal, *bits = maze.numbers
    assert cell != goal and len(bits) == 25
    bits = np.array(bits).reshape(5, 5)
    up, down, left, right = ((bits >> i) & 1 for i in range(4))
    assert not up[0].any() and not left[:, 0].any()
    assert (up[1:] == down[:-1]).all() and (left[:, 1:] == right[:, :-1]).all()
