"""What a run says of itself when it starts, and when its warm-up ends early."""

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tiny_run import TinyRun

from jaxrl_llm import config as c
from jaxrl_llm.observability.trace import last_user_turn
from jaxrl_llm.trainer.output import grader_text
from jaxrl_llm.trainer.training import Training
from jaxrl_llm.types import Prompt


def test_the_grader_of_held_out_answers_is_named():
    rewards = c.RewardConfig(functions=(c.GSM8K(), c.Custom(path="my.py:f")), weights=(1.0, 0.5))
    config = c.Config(reward=rewards)
    assert grader_text(config) == "1 * gsm8k + 0.5 * my.py:f, as in training"
    given = replace(config, validation=c.ValidationConfig(grader=c.ExactAnswer(), graders=(
        c.SourceGrader(source="math", grader=c.MathAnswer()),
    )))  # fmt: skip
    assert grader_text(given).startswith("exact_answer (--config.validation.grader=null takes")
    assert grader_text(given).endswith("; math: math_answer")
    assert (
        grader_text(c.Config(reward=c.RewardConfig(model=c.RewardModelConfig()))) == "exact_answer"
    )


def test_the_last_turn_of_the_user_is_shown():
    turns = ({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"})
    later = (*turns, {"role": "user", "content": "c"}, {"role": "tool", "content": "d"})
    for messages, expected in ((None, "<u>text"), (turns, "a"), (later, "c")):
        prompt = Prompt(token_ids=(1,), text="<u>text", messages=messages)
        assert last_user_turn(prompt) == expected


def test_a_run_says_what_it_is(ppo_run: TinyRun):
    found = json.loads((ppo_run.run_dir / "about.json").read_text())
    log = (ppo_run.folder / "log.txt").read_text().splitlines()
    assert log.index("start: importing jax") < log.index(f"run       {found['run']}")
    assert found["run"] == f"{ppo_run.run_dir}, new, 12 steps"
    assert found["data"] == "64 training rows, 16 held out"
    assert found["reward"].endswith("reward.py:digits")
    assert found["devices"] == "1 x cpu"
    assert "actor llama, " in found["model"] and "critic llama, " in found["model"]
    first = next(i for i, line in enumerate(log) if line.startswith("step 1/"))
    samples = [line for line in log[:first] if line.startswith("  sample")]
    assert len(samples) == 4 and all(" | truth " in line for line in samples)


@pytest.mark.parametrize(("step", "accuracy", "ends"), [(90, 0.43, True), (80, 0.41, False)])
def test_a_warm_up_says_that_it_is_good_enough(step, accuracy, ends):
    said = []
    evaluation = SimpleNamespace(run=lambda states, step: {"sft/eval_accuracy": accuracy})
    nothing = SimpleNamespace(enter=lambda *_: None)
    training = SimpleNamespace(
        step=step,
        total_steps=300,
        validate_first=True,
        evaluations=[evaluation],
        states={},
        listeners=[],
        is_best=None,
        target=("sft/eval_accuracy", 0.42),
        what="sft step",
        stopped=False,
        watch=nothing,
        output=SimpleNamespace(stage=lambda *_: None, message=said.append),
    )
    Training.validate(cast(Any, training))
    assert training.stopped == ends
    line = "sft step 90 of 300 is the last: sft/eval_accuracy 0.43 reached stop_at=0.42"
    assert said == [line] * ends
