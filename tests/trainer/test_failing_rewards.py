"""A reward function that always fails ends the run; one that fails for a while does not."""

from pathlib import Path

from tiny_run import TOTAL_STEPS, TinyRun

FAILING = """
def digits(completions, trainer_state):
    if trainer_state.global_step in {steps}:
        raise RuntimeError("no grader")
    return [sum(c.isdigit() for c in text) / 4 for text in completions]
"""


def run_with(folder: Path, steps: list[int]) -> TinyRun:
    run = TinyRun(folder)
    (folder / "reward.py").write_text(FAILING.format(steps=steps))
    return run


def test_rewards_that_always_fail_end_the_run(tmp_path: Path) -> None:
    run = run_with(tmp_path, [2, 3, 5, 6, 7])  # two in a row are let pass
    output = run.finish(code=2)
    assert "error: every reward of steps 5 to 7 failed, so nothing is learned" in output
    assert "exception: RuntimeError: no grader" in output
    assert run.saved_steps()[-1] == 6
    run_with(tmp_path, [])
    assert f"resumed from {run.step_path(6)}" in run.finish()
    assert run.saved_steps()[-1] == TOTAL_STEPS
