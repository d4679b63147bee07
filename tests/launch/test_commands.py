"""The console command, and that each model flag means the same thing."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from jaxrl_llm.checkpoint.layout import find_model_path
from jaxrl_llm.config import Config, ConfigError, load_config
from jaxrl_llm.launch.commands import COMMANDS
from jaxrl_llm.trainer.progress import Summary, Totals, summary_lines

ROOT = Path(__file__).parents[2]


def jaxrl(*words: str) -> subprocess.CompletedProcess[str]:
    code = "from jaxrl_llm.launch.commands import main; main()"
    return subprocess.run(
        [sys.executable, "-c", code, *words], cwd=ROOT, capture_output=True, text=True, timeout=60
    )


def test_the_wheel_has_the_command():
    """Fault 19."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"jaxrl": "jaxrl_llm.launch.commands:main"}


def test_help_lists_the_commands_and_their_flags():
    result = jaxrl()
    assert result.returncode == 0
    assert all(f"jaxrl {name} " in result.stdout for name in COMMANDS)
    assert "--devices=N" in jaxrl("train", "--help").stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["trian"], "there is no command trian; did you mean 'train'"),
        (["train", "--config=grpo", "--config.sed=1"], "did you mean 'config.seed'"),
        (["train", "--config=grppo"], "did you mean 'grpo'"),
        (["export", "--checkpoint=run", "--output=o"], "unknown flag --checkpoint"),
        (["generate", "--model=nowhere", "--prompt=a"], "there is no model nowhere"),
    ],
)
def test_a_mistake_is_one_message(words, message):
    result = jaxrl(*words)
    assert result.returncode != 0 and message in result.stderr
    assert "Traceback" not in result.stderr


def test_the_command_that_a_run_ends_with_is_one(tmp_path):
    summary = Summary(
        run_dir=tmp_path,
        step=3,
        totals=Totals(),
        seconds=1.0,
        interrupted=False,
        checkpoint=tmp_path / "checkpoints" / "global_step_3",
    )
    lines = [line for line in summary_lines(summary, Config()) if " jaxrl " in line]
    (words,) = (line.split(" jaxrl ")[1].split() for line in lines)
    assert words[0] == "export"
    # Its flags are known: what is missing here is the checkpoint.
    assert f"there is no checkpoint {summary.checkpoint}" in jaxrl(*words).stderr


def test_a_runs_folder_is_a_model(tmp_path):
    """Fault 18: config.actor.path takes what --model takes."""
    for step in (2, 10):
        folder = tmp_path / "run" / "checkpoints" / f"global_step_{step}"
        (folder / "loop").mkdir(parents=True)
        (folder / "_CHECKPOINT_METADATA").touch()
    (tmp_path / "run" / "config.json").write_text("{}")  # the run's own, of no model
    assert find_model_path(str(tmp_path / "run")).checkpoint == folder
    assert find_model_path(str(folder)).checkpoint == folder
    assert find_model_path("owner/name").checkpoint is None
    load_config("sft", [("actor.path", str(tmp_path / "run")), ("mesh.tensor", "2")])
    (tmp_path / "empty" / "checkpoints").mkdir(parents=True)
    with pytest.raises(ConfigError, match="holds no checkpoint"):
        find_model_path(str(tmp_path / "empty"))
