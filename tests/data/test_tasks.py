"""Procedural tasks: right answers, bijective order, and a split that cannot leak."""

import re
from copy import deepcopy

import pytest

from jaxrl_llm.agents.calculator import Calculator
from jaxrl_llm.agents.games import Guess, Maze
from jaxrl_llm.data.tasks import (
    WRONG_ANSWERS,
    Problem,
    ProblemSpace,
    is_held_out,
    problem_space,
    task_pairs,
    task_rows,
    wrong_answers,
)

HELD_OUT_SUMS = "7+1= 0+2= 6+2= 0+4= 4+5= 5+5= 9+5= 6+6= 0+9= 3+9=".split()
CONFIGURATIONS = [
    ("chain_sum", {"num_terms": 2}),
    ("chain_sum", {}),
    ("chain_sum", {"num_terms": 3, "operators": "+"}),
    ("chain_sum", {"num_terms": 2, "num_digits": 2}),
    ("products", {}),
    ("products", {"first_digits": 2}),
    ("spell_backward", {"num_letters": 3}),
    ("calculator_calls", {"first_digits": 1}),
    ("guess_games", {}),
    ("maze_games", {}),
]


@pytest.mark.parametrize(
    "name, settings, size",
    [
        ("chain_sum", {"num_terms": 2}, 200),
        ("chain_sum", {}, 4000),
        ("chain_sum", {"operators": "+"}, 1000),
        ("chain_sum", {"num_terms": 2, "num_digits": 2}, 90 * 90 * 2),
        ("products", {}, 100),
        ("products", {"first_digits": 2, "second_digits": 1}, 900),
        ("spell_backward", {"num_letters": 2}, 676),
    ],
)
def test_every_index_is_another_problem(name, settings, size):
    space = problem_space(name, settings)
    assert space.size == size
    assert len({space.problem(i).plain for i in range(size)}) == size


@pytest.mark.parametrize("name, settings", CONFIGURATIONS)
def test_answers_are_right(name, settings):
    space = problem_space(name, settings)
    for i in range(0, space.size, 7):
        problem = space.problem(i)
        body = problem.plain.removesuffix("=")
        if name == "spell_backward":
            assert problem.answer == body[::-1] and f'"{body}"' in problem.question
        elif not name.endswith("games"):
            assert re.fullmatch(r"\d+([-+*]\d+)+=", problem.plain)
            assert not re.search(r"\b0\d", body)
            assert problem.answer == str(eval(body))
            assert eval(re.sub(r"[^-+*\d]", "", problem.question)) == eval(body)


def test_rows_by_hand():
    space = problem_space("chain_sum", {"num_terms": 3, "operators": "+"})
    assert space.problem(7 + 10 * 2 + 100 * 5).plain == "7+2+5="
    row = next(
        r
        for split in ("train", "held_out")
        for r in task_rows("products", split=split)
        if r["prompt"] == "3*4="
    )
    assert (row["completion"], row["ground_truth"], row["data_source"]) == (
        "12",
        "12",
        "products_1x1",
    )
    chat = task_rows("chain_sum", split="train", prompt_style="chat", size=1)[0]
    (message,) = chat["prompt"]
    assert message["role"] == "user"
    assert re.fullmatch(
        r"State the final answer .* problem: \d [-+] \d [-+] \d =", message["content"]
    )
    assert chat["completion"] == [{"role": "assistant", "content": chat["ground_truth"]}]


@pytest.mark.parametrize("name, settings", CONFIGURATIONS)
def test_train_and_held_out_share_nothing_and_cover_everything(name, settings):
    space = problem_space(name, settings)
    train = [row["prompt"] for row in task_rows(name, split="train", settings=settings)]
    held_out = [row["prompt"] for row in task_rows(name, split="held_out", settings=settings)]
    assert not set(train) & set(held_out)
    assert len(set(train)) + len(set(held_out)) == len(train) + len(held_out) == space.size
    assert 0.05 < len(held_out) / space.size < 0.15


def test_the_split_does_not_depend_on_settings_seed_or_size():
    held_out = {
        row["prompt"]
        for seed in (0, 1)
        for size in (0, 20)
        for operators in ("+", "+-")
        for row in task_rows(
            "chain_sum", split="held_out", seed=seed, size=size, settings={"operators": operators}
        )
    }
    train = {
        row["prompt"]
        for seed in (0, 5)
        for operators in ("+", "-", "+-")
        for row in task_rows(
            "chain_sum", split="train", seed=seed, settings={"operators": operators}
        )
    }
    assert not held_out & train


def test_the_split_of_a_problem_never_changes():
    """A saved run's held-out problems must stay held out in later versions."""
    space = problem_space("chain_sum", {"num_terms": 2, "operators": "+"})
    problems = [space.problem(i) for i in range(space.size)]
    held_out = [problem.plain for problem in problems if is_held_out(problem)]
    assert held_out == HELD_OUT_SUMS


def test_size_draws_from_the_front_of_one_order():
    few = task_rows("chain_sum", split="train", size=5)
    many = task_rows("chain_sum", split="train", size=50)
    assert [r["prompt"] for r in few] == [r["prompt"] for r in many[:5]]
    other = task_rows("chain_sum", split="train", size=50, seed=1)
    assert [r["prompt"] for r in other] != [r["prompt"] for r in many]
    assert task_rows("chain_sum", split="train", size=50) == many


def test_training_rows_start_over_and_held_out_rows_do_not():
    settings = {"num_terms": 2, "operators": "+"}
    once = task_rows("chain_sum", split="train", settings=settings)
    twice = task_rows("chain_sum", split="train", settings=settings, size=2 * len(once) + 1)
    assert twice == once + once + once[:1]
    with pytest.raises(ValueError, match="held-out problems, not 90: lower size"):
        task_rows("chain_sum", split="held_out", settings=settings, size=90)


def test_huge_spaces_are_drawn_without_being_listed():
    settings = {"num_terms": 20, "num_digits": 18}
    rows = task_rows("chain_sum", split="train", size=20, settings=settings)
    assert len({row["prompt"] for row in rows}) == 20
    words = task_rows("spell_backward", split="held_out", size=30, settings={"num_letters": 100})
    assert all(row["ground_truth"] == row["prompt"][-2::-1] for row in words)
    with pytest.raises(ValueError, match="set its size"):
        task_rows("chain_sum", split="train", settings=settings)


@pytest.mark.parametrize("name, settings", CONFIGURATIONS)
def test_pairs_are_a_right_and_a_wrong_answer_of_the_same_problems(name, settings):
    seen: dict[str, set[str]] = {}
    for split in ("train", "held_out"):
        rows = task_rows(name, split=split, settings=settings, size=20 if split == "train" else 0)
        pairs = task_pairs(name, split=split, settings=settings, size=20 if split == "train" else 0)
        answers = {row["prompt"]: row["ground_truth"] for row in rows}
        assert len(pairs) == len(WRONG_ANSWERS) * len(rows)
        assert all(pair["chosen"] == answers[pair["prompt"]] for pair in pairs)
        assert all(pair["rejected"] != pair["chosen"] for pair in pairs)
        seen[split] = {pair["prompt"] for pair in pairs}
    assert not seen["train"] & seen["held_out"]


def test_kinds_of_wrong_answers():
    pairs = task_pairs("chain_sum", split="train", size=200)
    by_kind: dict[str, list[tuple[str, str]]] = {}
    for pair in pairs:
        kind = pair["extra_info"]["wrong"]
        by_kind.setdefault(kind, []).append((pair["chosen"], pair["rejected"]))
    assert set(by_kind) == set(WRONG_ANSWERS)
    distances = [abs(int(right) - int(wrong)) for right, wrong in by_kind["near"]]
    assert max(distances) <= 4 and distances.count(1) > len(distances) / 3
    assert all(-18 <= int(wrong) <= 27 for _, wrong in by_kind["other_problem"])
    assert all(right.strip("-") in wrong for right, wrong in by_kind["malformed"])
    assert all(wrong.startswith(right) for right, wrong in by_kind["too_long"])
    assert all(wrong == "" for _, wrong in by_kind["empty"])


def test_pairs_do_not_depend_on_size_seed_or_run():
    few = task_pairs("chain_sum", split="held_out", size=3)
    assert few == task_pairs("chain_sum", split="held_out")[: len(few)]
    other = task_pairs("chain_sum", split="held_out", seed=7)
    assert sorted(map(pair_key, other)) == sorted(
        map(pair_key, task_pairs("chain_sum", split="held_out"))
    )
    chat = task_pairs("chain_sum", split="held_out", size=3, prompt_style="chat")
    assert [pair["rejected"][0]["content"] for pair in chat] == [p["rejected"] for p in few]
    # Written down, so that a saved reward model's held-out pairs stay what they were.
    assert [(p["prompt"], p["chosen"], p["rejected"]) for p in few[:3]] == [
        ("2+8+1=", "11", "15"),
        ("2+8+1=", "11", "10"),
        ("2+8+1=", "11", "12"),
    ]


def pair_key(pair: dict) -> tuple[str, str, str]:
    return pair["prompt"], pair["rejected"], pair["extra_info"]["wrong"]


@pytest.mark.parametrize(
    ("name", "settings", "environment", "action", "wins"),
    [
        ("calculator_calls", {}, Calculator(), r"\[\S+\]|\d+$", 1.0),
        ("guess_games", {}, Guess(), r"\d+\n", 1 - (30 / 31) ** 6),
        ("guess_games", {"hint": "sign", "heeds": 1.0}, Guess(hint="sign"), r"\d+\n", 0.718),
        ("guess_games", {"hint": "range"}, Guess(hint="range"), r"\b\d+\n(?<!-..\n)", 0.18),
        ("maze_games", {}, Maze(), r"(?<=\n)[UDLR](?=\n|$)", 0.403),
    ],
)
def test_demonstrations_have_what_the_environment_answers(
    name, settings, environment, action, wins
):
    """The environment of the row gives the same observations, and wins are as frequent."""
    won, rows = 0.0, task_rows(name, split="train", size=2000, settings=settings)
    for row in rows:
        game, done = deepcopy(environment), False
        played = game.reset(ground_truth=row["ground_truth"]) or ""
        for sampled in re.findall(action, row["completion"]):
            assert not done
            step = game.step(sampled)
            done, won = step.done, won + (step.reward or 0.0)
            played += sampled + ("" if done else str(step.observation))
        assert done and played == row["completion"]
    assert won / len(rows) == pytest.approx(wins, abs=0.04)


def test_pairs_of_a_space_with_one_answer():
    """A problem whose answer every other shares still gets a wrong one."""
    space = ProblemSpace("constant", 10, lambda i: Problem(f"{i}*0=", f"What is {i} * 0?", "0"))
    assert "0" not in wrong_answers(space.problem(3), space)
