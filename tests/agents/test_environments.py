"""The environments of the package, with a table of turns in place of a model."""

import dataclasses
import textwrap

import pytest
from agents.conversing import (
    ASKED,
    CHAR,
    close_drivers,
    one,
    open_chat,
    run,
    shown,
)
from agents.fake_engine import sample_of


@pytest.fixture(scope="module", autouse=True)
def closing():
    yield
    close_drivers()


def test_the_calculator_with_characters():
    trajectory = one(
        *(CHAR, "37*48=", ["[37*48]", "1776"], {"ground_truth": "1776"}), environment="calculator"
    )
    assert shown(CHAR, trajectory) == "⟦[37*48]⟧=1776\n⟦1776<|eos|>⟧"
    assert trajectory.stop_reason == "env_done" and trajectory.reward == 1.0
    assert [(t.start, t.end, t.reward) for t in trajectory.turns] == [(0, 7, None), (13, 18, 1.0)]
    assert trajectory.mask == (*[1] * 7, *[0] * 6, *[1] * 5)
    assert [p < 0 for p in trajectory.logprobs] == [bool(m) for m in trajectory.mask]
    assert trajectory.prompt_ids == tuple(CHAR.encode("37*48="))
    assert [m["role"] for m in trajectory.messages] == ["assistant", "user", "assistant"]


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        *(("2+3*4", "14"), ("(2+3)*4", "20"), ("7/2", "3.5"), ("8/2", "4"), ("2^10", "1024")),
        *(("1/0", "error"), ("9**9**9", "error"), ("a+1", "error"), ("1+", "error")),
        ("__import__('os')", "error"),
    ],
)
def test_what_the_calculator_computes(expression, value):
    trajectory = one(CHAR, "?", [f"[{expression}]", "0"], environment="calculator")
    assert shown(CHAR, trajectory).split("⟧")[1].startswith(f"={value}\n")
    assert trajectory.reward is None  # no ground truth


def test_guessing():
    turns = ["16\n", "99\n", "24\n", "20\n"]
    trajectory = one(CHAR, "guess:\n", turns, {"ground_truth": 20}, environment="guess")
    assert shown(CHAR, trajectory) == "⟦16\n⟧higher\n⟦99\n⟧?\n⟦24\n⟧lower\n⟦20\n⟧"
    assert (trajectory.stop_reason, trajectory.reward) == ("env_done", 1.0)
    lost = one(CHAR, "guess:\n", ["1\n"] * 9, {"ground_truth": 20}, environment="guess")
    assert (len(lost.turns), lost.stop_reason, lost.reward) == (6, "env_done", 0.0)


def test_samples_of_a_prompt_guess_the_same_number():
    samples = [sample_of(CHAR, i, "guess:\n", ["16\n"] * 6) for i in range(40)]
    hints = [t.messages[1]["content"] for t in run(CHAR, samples, environment="guess")
             if len(t.messages) > 1]  # fmt: skip
    trajectories = run(CHAR, samples, environment="guess")
    assert all(a.response_ids == b.response_ids for a, b in zip(trajectories[::2],
               trajectories[1::2], strict=True))  # fmt: skip
    assert len(set(hints)) == 2


def test_a_maze():
    """The way is read from the observations: right moves reach the goal."""
    trajectory = one(CHAR, "maze:\n", ["U"] * 30, {"ground_truth": 5}, environment="maze")
    first = CHAR.decode(trajectory.prompt_ids).splitlines()[1]
    here, goal = first.split()[0].split(">")
    right, down = ord(goal[0]) - ord(here[0]), int(goal[1]) - int(here[1])
    moves = ("R" if right > 0 else "L") * abs(right) + ("D" if down > 0 else "U") * abs(down)
    won = one(CHAR, "maze:\n", [*moves], {"ground_truth": 5}, environment="maze")
    assert (won.reward, won.stop_reason, len(won.turns)) == (1.0, "env_done", len(moves))
    closed = one(
        CHAR, "maze:\n", ["U"] * 30, environment={"kind": "maze", "walls": 1.0, "turns": 4}
    )
    assert (closed.reward, len(closed.turns)) == (0.0, 4)


def test_walls_leave_every_cell_in_reach():
    from jaxrl_llm.agents.games import Maze

    for number in range(20):
        maze = Maze(walls=1.0)
        maze.reset(ground_truth=number)
        seen, todo = set(), [maze._cell]
        while todo:
            maze._cell = todo.pop()
            if maze._cell not in seen:
                seen.add(maze._cell)
                todo += maze._open(maze._cell).values()
        assert len(seen) == 25 and len(maze._closed) == 2 * 16


def test_a_second_chance():
    turns = ["I say 41", "Then 42"]
    trajectory = one(CHAR, "17+25=", turns, {"ground_truth": 42}, environment="retry")
    assert shown(CHAR, trajectory) == "⟦I say 41<|eos|>⟧Wrong. Try again.⟦Then 42<|eos|>⟧"
    assert [t.reward for t in trajectory.turns] == [0.0, 1.0]
    right = one(CHAR, "17+25=", turns[1:], {"ground_truth": 42}, environment="retry")
    assert [t.reward for t in right.turns] == [1.0]
    gone = one(CHAR, "17+25=", turns, environment="retry")  # no ground truth: the grader fails
    assert (gone.stop_reason, gone.failed, gone.num_retries) == ("failed", True, 1)
    assert "no ground truth" in gone.failure


def test_code_in_the_sandbox():
    source = "```python\nprint(6 * 7)\n```"
    trajectory = one(open_chat(), ASKED, [source, "42"], environment="code")
    assert (trajectory.stop_reason, trajectory.reward) == ("env_done", None)
    assert trajectory.messages[2]["content"] == "42\n"


def test_settings_of_classes_equal_the_config():
    import inspect

    from jaxrl_llm.agents.setup import ENVIRONMENTS, TOOLS

    for record, ours in {**TOOLS, **ENVIRONMENTS}.items():
        parameters = inspect.signature(ours).parameters.values()
        own = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
        fields = {f.name: f.default for f in dataclasses.fields(record)}
        own.pop("grader", None), fields.pop("grader", None)
        assert own == fields, textwrap.shorten(str(record), 80)
