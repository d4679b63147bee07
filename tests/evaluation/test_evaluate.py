"""Held-out metrics by hand: means, best and majority over the samples of a prompt."""

import json
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from tiny_iteration import open_iteration, tiny_config

from jaxrl_llm import config as c
from jaxrl_llm.evaluation import evaluate
from jaxrl_llm.evaluation.evaluate import accuracy_metrics, open_validator
from jaxrl_llm.evaluation.evaluation_report import all_answers, table
from jaxrl_llm.tokenizer import load_tokenizer
from jaxrl_llm.types import Completion, Prompt

# Two prompts of one source and one of another, four samples each.
SOURCES = ["a"] * 8 + ["b"] * 4
GRADES = np.array([1, 0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 1], np.float32)
ANSWERS = ["3", "5", "5", "5", "7", "7", "7", "2", "1", "1", "1", "4"]


def test_mean_and_best_of_each_source():
    found = accuracy_metrics(SOURCES, GRADES, 4)
    assert found == {
        "val-core/a/acc/mean@4": 0.5,
        "val-core/a/reward/mean@4": 0.5,
        "val-core/a/acc/best@4/mean": 1.0,
        "val-core/b/acc/mean@4": 0.25,
        "val-core/b/reward/mean@4": 0.25,
        "val-core/b/acc/best@4/mean": 1.0,
    }
    assert accuracy_metrics(SOURCES, GRADES, 1).keys() == {
        "val-core/a/acc/mean@1",
        "val-core/a/reward/mean@1",
        "val-core/b/acc/mean@1",
        "val-core/b/reward/mean@1",
    }


def test_the_most_frequent_answer_decides():
    """Of four samples three agree: a draw has another majority about once in four times."""
    found = accuracy_metrics(SOURCES, GRADES, 4, ANSWERS)
    wrong, right = found["val-core/b/acc/maj@4/mean"], found["val-core/a/acc/maj@4/mean"]
    assert 0 < wrong < 0.35
    np.testing.assert_allclose(right, (wrong + (1 - wrong)) / 2, atol=0.1)


def test_a_prompt_with_a_sample_without_an_answer_has_no_vote():
    answers = [None, *ANSWERS[1:]]
    found = accuracy_metrics(SOURCES, GRADES, 4, answers)
    assert found["val-core/a/acc/maj@4/mean"] > 0.6  # of the second prompt alone
    alone = accuracy_metrics(["b"] * 4, GRADES[8:], 4, [None] * 4)
    assert "val-core/b/acc/maj@4/mean" not in alone


@pytest.mark.torch
def test_the_majority_is_verls():
    reason = "pip install -e '.[parity]', and verl as tests/parity/verl_side.py says"
    verl = pytest.importorskip("verl.trainer.ppo.metric_utils", reason=reason)
    uids = [str(i // 4) for i in range(12)]
    infos = {"acc": [float(x) for x in GRADES], "pred": ANSWERS}
    expected = verl.process_validation_metrics(SOURCES, uids, infos)
    found = accuracy_metrics(SOURCES, GRADES, 4, ANSWERS)
    for source in ("a", "b"):
        for name in ("mean@4", "maj@4/mean"):
            theirs = expected[source]["acc"][name]
            np.testing.assert_allclose(found[f"val-core/{source}/acc/{name}"], theirs, rtol=1e-12)


def test_grades_beyond_0_and_1_have_a_mean_reward_next_to_the_accuracy():
    grades = np.float32([3.5, 0.5, 1.0, 0.0, 4.0, -1.0])
    found = accuracy_metrics(["a"] * 4 + ["b"] * 2, grades, 2)
    assert found == {
        "val-core/a/acc/mean@2": 0.5,
        "val-core/a/reward/mean@2": 1.25,
        "val-core/a/acc/best@2/mean": 1.0,
        "val-core/b/acc/mean@2": 0.5,
        "val-core/b/reward/mean@2": 1.5,
        "val-core/b/acc/best@2/mean": 1.0,
    }


def test_of_grades_of_0_and_1_the_mean_reward_is_the_accuracy():
    grades = np.float32([1.0, 0.0, 1.0])
    found = accuracy_metrics(["a"] * 3, grades, 1)
    assert found["val-core/a/reward/mean@1"] == found["val-core/a/acc/mean@1"] == 2 / 3


# ------------------------------------------------------------------------- graders of a run

ROWS = [
    {"prompt": "1+1=", "question": "?", "ground_truth": "2", "data_source": "a"},
    {"prompt": "1+2=", "question": "?", "data_source": "a"},
    {"prompt": "1+3=", "question": "?", "ground_truth": "4", "data_source": "b"},
]


def with_rows(folder: Path, **changes: Any) -> c.Config:
    (folder / "held_out.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    config = tiny_config()
    data = replace(config.data, val_files=(str(folder / "held_out.jsonl"),))
    return replace(config, data=data, validation=replace(config.validation, **changes))


def test_answers_that_could_not_be_graded_are_counted(tmp_path, monkeypatch):
    """The second row has no ground truth."""

    def answers(spec, params, prompts, *_, **__):
        none = jnp.zeros((len(prompts), 5), int)
        logprobs, lengths = none * 0.0, none[:, 0]
        return SimpleNamespace(tokens=none, lengths=lengths, logprobs=logprobs, turns=None)

    monkeypatch.setattr(evaluate, "generate_on_mesh", answers)
    config, role = with_rows(tmp_path), open_iteration(tiny_config()).roles["actor"]
    with ExitStack() as stack:
        validator = open_validator(config, role, load_tokenizer("char"), None, stack)
        found = validator.run({}, 0)
    failures = {name: x for name, x in found.metrics.items() if name.endswith("/failures")}
    assert failures == {"val-aux/a/failures": 1.0, "val-aux/b/failures": 0.0}
    (reason,) = all_answers(found)[1]["failures"]
    assert "no ground truth" in reason and list(found.failures) == [1]
    assert table(found.metrics, found.num_samples, 1).splitlines()[0].endswith("not graded")


@pytest.mark.parametrize(
    ("columns", "changes", "message"),
    [
        (
            {},
            {"graders": (c.SourceGrader(source="aa", grader=c.GSM8K()),)},
            "the source 'aa'.*did you mean 'a'",
        ),
        ({}, {"grader": "asks"}, "asks for 'level'; the rows have"),
        ({"level_2": "question"}, {"grader": "asks"}, "'level'; did you mean 'level_2'"),
    ],
)
def test_graders_that_do_not_fit_are_refused_before_a_model_is_used(
    tmp_path, columns, changes, message
):
    (tmp_path / "own.py").write_text("def asks(completions, level):\n    return level\n")
    if "grader" in changes:
        changes = {"grader": c.Custom(path=f"{tmp_path / 'own.py'}:asks")}
    config = with_rows(tmp_path, **changes)
    config = replace(config, data=replace(config.data, columns=columns))
    with ExitStack() as stack, pytest.raises(ValueError, match=message):
        open_validator(config, None, load_tokenizer("char"), None, stack)  # pyright: ignore


def test_the_rewards_of_a_run_grade_held_out_answers_where_no_grader_is_given(tmp_path):
    (tmp_path / "own.py").write_text(
        "def half(completions):\n    return [0.5] * len(completions)\n"
    )
    functions = (c.ExactAnswer(), c.Custom(path=f"{tmp_path / 'own.py'}:half"))
    reward = c.RewardConfig(functions=functions, weights=(1.0, 4.0))
    prompt = Prompt(token_ids=(1,), text="1+1=", ground_truth="2")
    answers = [
        Completion(tokens=(2,), text=text, logprobs=(0.0,), finished=True) for text in ("2", "3")
    ]
    for grader, expected in ((None, [3.0, 2.0]), (c.ExactAnswer(score=0.25), [0.25, 0.0])):
        config = replace(with_rows(tmp_path, grader=grader), reward=reward, algorithm=c.GRPO())
        with ExitStack() as stack:
            graders = evaluate.open_graders(config, stack)
            assert graders.score([prompt] * 2, answers, 1).scores.tolist() == expected
    config = with_rows(tmp_path)  # a reward model: no function that could grade
    with ExitStack() as stack:
        assert evaluate.open_graders(config, stack).default.names == ("exact_answer",)
