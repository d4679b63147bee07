"""Configs of agents: their plans are sound, and a whole run learns."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from in_process import run_here

from jaxrl_llm.config import load_config
from jaxrl_llm.launch.main import run

REPOSITORY = Path(__file__).parents[2]


def accuracies(folder: Path) -> list[float]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [x for row in rows for name, x in row.items() if name.endswith("/acc/mean@1")]


@pytest.mark.parametrize("config", ["agent"])
def test_the_plan_is_sound(config, tmp_path):
    flags = [f"--config={REPOSITORY}/configs/{config}.py", "--dry_run", "--show=1"]
    done = run_here(lambda: run("train", [*flags, f"--config.run_dir={tmp_path}"]), flags)
    assert done.returncode == 0, done.stderr
    assert load_config(f"{REPOSITORY}/configs/{config}.py").name == config
    assert "gen (on the host)" in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("config", "reached"), [("agent", 0.95)])
def test_a_whole_run_learns(config, reached, tmp_path):
    flags = [f"--config=configs/{config}.py", f"--config.run_dir={tmp_path}"]
    command = [sys.executable, "scripts/train.py", *flags]
    subprocess.run(command, cwd=REPOSITORY, check=True, stdin=subprocess.DEVNULL)
    assert accuracies(tmp_path)[-1] >= reached
