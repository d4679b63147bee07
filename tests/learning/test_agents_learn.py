"""Configs of agents: their plans are sound, a short run improves, and a whole one learns."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from in_process import run_here

from jaxrl_llm.config import load_config
from jaxrl_llm.launch.main import run

REPOSITORY = Path(__file__).parents[2]


# Two layers and half of the samples, so that a run takes a minute of CPU time.
SHORT = """
--config.actor.hf_config.num_hidden_layers=2 --config.warmup.stop_at=0.3 --config.total_steps=20
--config.data.train_batch_size=16 --config.validation.every=0 --config.save_every=0
--config.actor.optimizer.learning_rate=1e-3 --config.actor.optimizer.warmup_steps=2
"""
# Mazes of 3 x 3 cells and 8 moves, and a shorter warm-up.
SHORT_MAZE = """
--config.rollout.environment.0.size=3 --config.rollout.environment.0.turns=8
--config.data.train_tasks.0.side=3 --config.data.train_tasks.0.turns=8
--config.data.val_tasks.0.side=3 --config.data.val_tasks.0.turns=8
--config.data.max_response_length=100 --config.warmup.steps=100 --config.total_steps=30
--config.validation.every=0 --config.save_every=0
"""


def accuracies(folder: Path) -> list[float]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [x for row in rows for name, x in row.items() if name.endswith("/acc/mean@1")]


@pytest.mark.parametrize(
    ("config", "stage"),
    [("agent", "gen (on the host)"), ("maze", "gen+reward+kl+adv+update_actor (compiled)")],
)
def test_the_plan_is_sound(config, stage, tmp_path):
    flags = [f"--config={REPOSITORY}/configs/{config}.py", "--dry_run", "--show=1"]
    done = run_here(lambda: run("train", [*flags, f"--config.run_dir={tmp_path}"]), flags)
    assert done.returncode == 0, done.stderr
    assert load_config(f"{REPOSITORY}/configs/{config}.py").name == config
    assert stage in done.stdout


@pytest.mark.nightly
@pytest.mark.parametrize(("config", "changes"), [("agent", SHORT), ("maze", SHORT_MAZE)])
def test_a_short_run_improves(config, changes, tmp_path):
    flags = [f"--config={REPOSITORY}/configs/{config}.py", f"--config.run_dir={tmp_path}"]
    flags += changes.split()
    done = run_here(lambda: run("train", flags), flags)
    assert done.returncode == 0, done.stderr
    before, after = accuracies(tmp_path)
    assert 0.3 <= before < 0.95 and after > before + 0.04


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("config", "reached"), [("agent", 0.95)])
def test_a_whole_run_learns(config, reached, tmp_path):
    flags = [f"--config=configs/{config}.py", f"--config.run_dir={tmp_path}"]
    command = [sys.executable, "scripts/train.py", *flags]
    subprocess.run(command, cwd=REPOSITORY, check=True, stdin=subprocess.DEVNULL)
    assert accuracies(tmp_path)[-1] >= reached
