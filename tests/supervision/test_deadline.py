"""A run saves and ends before a time."""

import subprocess
import sys
import time

import pytest
from tiny_run import REPOSITORY, TinyRun

from jaxrl_llm.config import ConfigError, load_config
from jaxrl_llm.supervision.deadline import MARGIN_S, STARTED, Deadline, read_deadline, start_time
from jaxrl_llm.supervision.listener import Wish
from jaxrl_llm.typed_records.bounds import end_time


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("+3h50m", 1000 + 3 * 3600 + 50 * 60),
        ("+1d2s", 1000 + 86402),
        ("1764090000", 1764090000),
        ("1970-01-01T01:00:00Z", 3600),
        ("1970-01-01T01:00:00+01:00", 0),
    ],
)
def test_times_as_users_write_them(text, expected):
    assert end_time(text, 1000.0) == expected


@pytest.mark.parametrize("text", ["+", "+3", "3h", "tomorrow", "12345", "+3h50", "2026-13-01"])
def test_other_texts_are_refused_before_jax_is_imported(text):
    with pytest.raises(ConfigError, match=r"save_by=.*expected a time such as"):
        load_config("ppo", [("checkpoint.save_by", text)])


def test_a_time_that_has_passed_is_refused():
    with pytest.raises(ConfigError, match="has passed; give a later time"):
        read_deadline("2020-01-01T00:00:00Z")
    assert read_deadline("") == float("inf")


def test_a_restart_does_not_move_the_end(monkeypatch):
    assert start_time({STARTED: "1000.5"}) == 1000.5
    assert abs(start_time({}) - time.time()) < 60
    monkeypatch.setenv(STARTED, str(time.time() - 3600))
    with pytest.raises(ConfigError, match="has passed"):
        read_deadline("+50m")


def test_the_longest_step_and_save_are_reserved():
    now, said = [0.0], []
    deadline = Deadline(
        at=100.0 + MARGIN_S, save_s=lambda: 15.0, message=said.append, clock=lambda: now[0]
    )
    stops = []
    for seconds in (30.0, 5.0, 20.0, 0.0, 1.0):  # boundaries at 30, 35, 55, 55, 56
        now[0] += seconds
        stops.append(deadline.reported(1, {}) == Wish.STOP)
    assert stops == [False, False, False, False, True]  # 56 + 30 + 15 are more than 100
    assert "save_by is in 54 s, and a step takes up to 30 s, a save 15 s" in said[0]


@pytest.mark.slow
def test_two_processes_save_the_same_step_and_end(tmp_path):
    """Of more steps than the time has room for; the same command goes on."""
    run = TinyRun(tmp_path, "--config.total_steps=100000", "--config.save_every=0")
    launcher = [sys.executable, "-m", "jaxrl_llm.launch.local", "--processes=2", "--restarts=3"]
    train = str(REPOSITORY / "scripts" / "train.py")
    started = time.monotonic()
    output = run.finish(
        "--config.checkpoint.save_by=+32s", launcher=[*launcher, "--", train], code=130
    )
    assert time.monotonic() - started < 40
    assert "a save" in output and "the run saves and ends" in output
    (saved,) = [step for step in run.saved_steps() if step]
    assert saved == max(run.metrics())
    assert "; restart" not in output


def test_the_slurm_script_passes_the_end_of_the_job(tmp_path):
    script = (REPOSITORY / "scripts" / "slurm" / "train.sbatch").read_text()
    (tmp_path / "job.sh").write_text(script.replace("srun", "echo"))
    command = ["bash", str(tmp_path / "job.sh"), "--config=ppo"]
    environment = {"SLURM_JOB_NAME": "a", "SLURM_JOB_ID": "7", "PATH": "/usr/bin:/bin"}
    for more, expected in (({"SLURM_JOB_END_TIME": "1764090000"}, True), ({}, False)):
        found = subprocess.run(
            command,
            env=environment | more,
            capture_output=True,
            text=True,
            check=True,
            cwd=tmp_path,
        )
        assert ("--config.checkpoint.save_by=1764090000" in found.stdout) == expected
