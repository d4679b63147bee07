"""A job under a real Slurm of two nodes is ended, queued again, and has the bits of a whole run."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from slurm_cluster import PREEMPTED, Slurm, missing_programs, slurm_cluster
from tiny_run import REPOSITORY, TOTAL_STEPS, TinyRun, assert_same_bits

SCRIPT = str(REPOSITORY / "scripts" / "slurm" / "train.sbatch")
PROCESSES = [sys.executable, "-m", "jaxrl_llm.launch.local", "--processes=2", "--"]
STOPPED_IN = 5

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(missing_programs()), reason=f"no {', '.join(missing_programs())}"),
]


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with slurm_cluster(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    """A run of two processes that nothing stopped."""
    run = TinyRun(tmp_path_factory.mktemp("whole"))
    run.finish(launcher=[*PROCESSES, str(REPOSITORY / "scripts" / "train.py")])
    return run


def submit(slurm: Slurm, log: Path, *flags: str) -> str:
    """The number of a job of two tasks without GPUs."""
    options = ("--parsable", "--gpus-per-node=0", "--job-name=tiny", f"--output={log}")
    path = f"--chdir={REPOSITORY}"
    return slurm("sbatch", *options, path, SCRIPT, *flags)


@pytest.mark.parametrize("how", ["preempted", "signalled"])
def test_a_job_that_is_ended_goes_on_with_the_same_bits(
    slurm: Slurm, whole: TinyRun, tmp_path: Path, how: str
) -> None:
    run, log = TinyRun(tmp_path), tmp_path / "job.log"
    run.pause_at(STOPPED_IN)
    job = submit(slurm, log, *run.arguments)
    slurm.wait(run.paused, f"step {STOPPED_IN}")
    if how == "preempted":
        options = ("--partition", PREEMPTED, "--nodes=2", "--exclusive", "--output=/dev/null")
        slurm("sbatch", *options, "--wrap=true")
        slurm.wait(lambda: slurm.job(job)["PreemptTime"] != "None", "preemption")
    else:  # what `--signal=USR1@600` sends before the time limit
        slurm("scancel", "--signal=USR1", job)
    time.sleep(1)
    run.unpause()
    slurm.wait(lambda: slurm.job(job)["Restarts"] == "1", "queued again")
    slurm.wait(lambda: slurm.job(job)["JobState"] == "PENDING", "waits")
    slurm("scontrol", "update", f"JobId={job}", "StartTime=now")  # Slurm waits two minutes
    slurm.wait(lambda: slurm.job(job)["JobState"] == "COMPLETED", "end")

    text = log.read_text()
    assert f"resumed from {run.step_path(STOPPED_IN)}" in text
    assert f"job {job} is queued again" in text
    assert run.metrics() == whole.metrics()
    assert run.samples("train") == whole.samples("train")
    assert_same_bits(run.weights(TOTAL_STEPS), whole.weights(TOTAL_STEPS))


def test_a_killed_task_starts_again_in_the_same_job(
    slurm: Slurm, whole: TinyRun, tmp_path: Path
) -> None:
    run, log = TinyRun(tmp_path), tmp_path / "job.log"
    run.pause_at(STOPPED_IN)
    job = submit(slurm, log, *run.arguments)
    slurm.wait(run.paused, f"step {STOPPED_IN}")
    os.kill(task(1, run), signal.SIGKILL)
    run.unpause()
    slurm.wait(lambda: slurm.job(job)["JobState"] == "COMPLETED", "end")
    text = log.read_text()
    assert "exit code 137; restart 1 of 3" in text
    assert f"resumed from {run.step_path(STOPPED_IN - 1)}" in text
    assert slurm.job(job)["Restarts"] == "0"
    assert run.metrics() == whole.metrics()
    assert_same_bits(run.weights(TOTAL_STEPS), whole.weights(TOTAL_STEPS))


def task(number: int, run: TinyRun) -> int:
    """The process of a task of the job that works on `run`."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            command = (folder / "cmdline").read_text()
            environment = (folder / "environ").read_text().split("\0")
            if "train.py\0" in command and str(run.run_dir) in command and "srun" not in command:
                if f"SLURM_PROCID={number}" in environment and "bash" not in command:
                    return int(folder.name)
    raise AssertionError(f"no task {number}")


def test_a_job_with_a_mistake_fails_and_is_not_queued_again(slurm: Slurm, tmp_path: Path) -> None:
    log = tmp_path / "job.log"
    job = submit(slurm, log, "--config=configs/ppo.py", "--config.total_stepz=3")
    slurm.wait(lambda: slurm.job(job)["JobState"] == "FAILED", "failure")
    assert slurm.job(job)["ExitCode"] == "2:0"
    assert slurm.job(job)["Restarts"] == "0"
    assert "did you mean 'config.total_steps'?" in log.read_text()


def test_a_job_has_a_run_folder_of_its_own(slurm: Slurm, tmp_path: Path) -> None:
    """Another job with the same config must not go on with this one's run."""
    log = tmp_path / "job.log"
    flags = ("--config=configs/ppo.py", "--config.total_steps=1", "--config.warmup.steps=0")
    script = Path(SCRIPT).read_text().replace("python -u scripts/train.py", "echo")
    copy = tmp_path / "train.sbatch"
    copy.write_text(script)
    options = ("--parsable", "--wait", "--gpus-per-node=0", f"--output={log}")
    job = slurm("sbatch", *options, str(copy), *flags)
    assert f"--config.run_dir=runs/jaxrl-{job}" in log.read_text()


def test_the_script_is_sound() -> None:
    subprocess.run(["bash", "-n", SCRIPT], check=True)
