"""A reward function that always fails ends the run; one that fails for a while does not."""

import json
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from tiny_iteration import tiny_config
from tiny_run import TinyRun

from jaxrl_llm import config as c
from jaxrl_llm.distributed.mesh import make_mesh
from jaxrl_llm.tokenizer import load_tokenizer
from jaxrl_llm.trainer.data import open_plan_and_data

FAILING = """
def digits(completions, trainer_state):
    if trainer_state.global_step in {steps}:
        raise RuntimeError("no grader")
    return [sum(c.isdigit() for c in text) / 4 for text in completions]
"""


SMALL = (
    "--config.algorithm=grpo",
    "--config.warmup=null",
    "--config.data.val_tasks=[]",
    "--config.total_steps=8",
)


def run_with(folder: Path, steps: list[int]) -> TinyRun:
    run = TinyRun(folder, *SMALL)
    (folder / "reward.py").write_text(FAILING.format(steps=steps))
    return run


@pytest.mark.nightly
def test_rewards_that_always_fail_end_the_run(tmp_path: Path) -> None:
    run = run_with(tmp_path, [2, 3, 5, 6, 7])  # two in a row are let pass
    output = run.finish_here(code=2)
    assert "error: every reward of steps 5 to 7 failed, so nothing is learned" in output
    assert "exception: RuntimeError: no grader" in output
    assert run.saved_steps()[-1] == 6
    run_with(tmp_path, [])
    assert f"resumed from {run.step_path(6)}" in run.finish_here()
    assert run.saved_steps()[-1] == 8


SOMETIMES = """
def digits(solution_str):
    if len(solution_str) % 3 == 1:
        raise RuntimeError("no grader")
    return 1.0
"""


def test_samples_whose_reward_fails_leave_the_batch(tmp_path: Path) -> None:
    """A score of 0 would lower the mean, in which all others have 1."""
    masked, scored = TinyRun(tmp_path / "mask", *SMALL), TinyRun(tmp_path / "value", *SMALL)
    for run in (masked, scored):
        (run.folder / "reward.py").write_text(SOMETIMES)
    masked.finish_here("--config.total_steps=2")
    scored.finish_here("--config.total_steps=2", "--config.reward.on_failure=value")
    for line in (masked.metrics()[step] for step in (1, 2)):
        assert 0 < line["reward/masked_frac"] < 1 and line["critic/score/mean"] == 1.0
    assert all(
        line["critic/score/mean"] < 1.0 for line in (scored.metrics()[1], scored.metrics()[2])
    )
    assert "reward/masked_frac" not in scored.metrics()[1]
    for run, score in ((masked, None), (scored, 0.0)):
        for sample in run.samples("train").values():
            assert sample["score"] == (score if sample["failures"] else 1.0)


SHORT_FAIL = """
def digits(completions):
    return [1.0 if len(text) == 4 else None for text in completions]
"""


@pytest.mark.nightly
def test_samples_that_failed_or_were_truncated_end_the_run_together(tmp_path: Path) -> None:
    """Neither reason alone holds for all samples of a step."""
    run = TinyRun(tmp_path, *SMALL, "--config.rollout.mask_truncated=true")
    (tmp_path / "reward.py").write_text(SHORT_FAIL)
    output = run.finish_here(code=2)
    assert "error: every sample of steps 1 to 3 was masked, so nothing is learned" in output
    failed = [bool(sample["failures"]) for sample in run.samples("train").values()]
    assert any(failed) and not all(failed)


@pytest.mark.nightly
def test_a_short_run_ends_as_a_longer_one_does(tmp_path: Path) -> None:
    """It has no three steps: all that it has failed."""
    output = run_with(tmp_path, [1, 2]).finish_here("--config.total_steps=2", code=2)
    assert "error: every reward of steps 1 to 2 failed, so nothing is learned" in output


@pytest.mark.nightly
def test_the_best_validation_is_saved_between_the_steps_of_save_every(tmp_path: Path) -> None:
    """Its weights were lost, and the run ended without a best checkpoint."""
    run = TinyRun(
        tmp_path,
        "--config.algorithm=grpo",
        "--config.warmup=null",
        "--config.total_steps=7",
        "--config.save_every=5",
        "--config.validation.every=2",
        "--config.checkpoint.best_metric=''",
        "--config.checkpoint.keep_latest=1",
    )
    run.finish_here()
    scores = {
        step: value
        for step, line in run.metrics().items()
        for name, value in line.items()
        if name.startswith("val-core/") and "/reward/mean@" in name
    }
    best = max(scores, key=lambda step: (scores[step], -step))
    assert set(run.saved_steps()) == {best, 7}


def test_a_column_that_the_config_renames_is_refused_before_the_first_step(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("def asks(completions, answer):\n    return answer\n")
    (tmp_path / "train.jsonl").write_text(json.dumps({"question": "1+1=", "answer": "2"}))
    config = tiny_config(model_reward=False)
    data = replace(
        config.data,
        train_files=(str(tmp_path / "train.jsonl"),),
        columns={"prompt": "question", "ground_truth": "answer"},
    )
    reward = replace(config.reward, functions=(c.Custom(path=f"{tmp_path / 'own.py'}:asks"),))
    model = config.actor.hf_config | {"vocab_size": 96}  # as the tokenizer
    actor = replace(config.actor, hf_config=model)
    config = replace(config, data=data, reward=reward, actor=actor)
    message = "asks for 'answer', which config.data.columns renames to 'ground_truth'"
    with ExitStack() as stack, pytest.raises(ValueError, match=message):
        open_plan_and_data(
            config, load_tokenizer("char"), {"actor": make_mesh()}, tmp_path / "run", stack
        )
