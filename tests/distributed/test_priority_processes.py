"""A run that draws prompts by priority: two processes draw what one does."""

import sys
from pathlib import Path

import pytest
from tiny_run import REPOSITORY, TinyRun

LAUNCH = [
    *(sys.executable, "-m", "jaxrl_llm.launch.local", "--processes=2", "--"),
    str(REPOSITORY / "scripts" / "train.py"),
]
FLAGS = (
    "--config.total_steps=6",
    "--config.data.train_tasks.0.size=24",
    "--config.data.priority=jaxrl_llm.data.priority:failure_rate",
)


@pytest.mark.slow
def test_two_processes_draw_the_prompts_of_one(tmp_path: Path) -> None:
    one, two = TinyRun(tmp_path / "one", *FLAGS), TinyRun(tmp_path / "two", *FLAGS)
    one.finish()
    two.finish(launcher=LAUNCH)
    expected, found = one.samples("train"), two.samples("train")
    assert found.keys() == expected.keys()
    assert len({sample["prompt"] for sample in found.values()}) == 24
    for key, sample in expected.items():
        assert (found[key]["prompt"], found[key]["score"]) == (sample["prompt"], sample["score"])
    assert drawn_by(two) == drawn_by(one) and len(drawn_by(one)[6]) == 4


def drawn_by(run: TinyRun) -> dict[int, dict[str, float]]:
    """The metrics of the draws, by step."""
    metrics = run.metrics()
    return {
        step: {name: value for name, value in metrics[step].items() if name.startswith("data/")}
        for step in range(1, 7)
    }
