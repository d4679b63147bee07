"""One process of several fails in every way: the run ends or goes on by itself, and says who."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
from tiny_run import REPOSITORY, TinyRun, assert_same_bits

from jaxrl_llm.trainer.watchdog import STALLED

LAUNCH = [sys.executable, "-m", "jaxrl_llm.launch.local"]
FAULTY, TRAIN = str(REPOSITORY / "tests" / "faulty.py"), str(REPOSITORY / "scripts" / "train.py")
STEP, STEPS = 7, 10
MOST_S = 120  # from the fault to the end of all processes

# Two processes that agree on a step; one then stands still. The limit of a stage is 2 s.
PROGRAM = """
import os, sys, time
from pathlib import Path
from jaxrl_llm.config import WatchdogConfig
from jaxrl_llm.distributed import multihost
from jaxrl_llm.launch.runtime import join_processes, prepare
from jaxrl_llm.trainer.watchdog import open_watch

prepare()
join_processes()
settings = WatchdogConfig(floor_minutes=2 / 60)
with open_watch(settings, Path(sys.argv[1]), os._exit) as watch:
    for step in range(1, 5):
        watch.enter("grade", step)
        if step == 4 and os.environ["JAXRL_PROCESS_ID"] == "1":
            time.sleep(1000)
        multihost.barrier("graded")
"""


def test_a_process_that_hangs_is_named_and_all_end(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    started = time.monotonic()
    found = subprocess.run(
        [*LAUNCH, "--processes=2", "--", str(program), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert found.returncode == STALLED, found.stderr
    assert time.monotonic() - started < 30
    assert "process 1 lags: it is in step 4, stage grade" in found.stderr
    for process, where in ((0, "in barrier"), (1, 'program.py", line 16 in <module>')):
        stacks = (tmp_path / f"stacks-{process}.txt").read_text()
        assert where in stacks and where in found.stderr
    assert "process 0 lags" not in found.stderr


# (fault, process, other flags, what the output has, in words of ours)
FAULTS = [
    ("killed", 1, "exit code 137; restart 1"),
    ("killed", 0, "exit code 137; restart 1"),  # the coordinator
    ("stopped", 1, "process 1 lags: it has not run for"),
    ("segfault", 1, "Fatal Python error: Segmentation fault"),
    ("abort", 1, "Fatal Python error: Aborted"),
    ("exception", 1, "RuntimeError: a fault that a test made"),
    ("hung", 1, "process 1 lags: it is in step 7"),
    ("lock held", 1, "process 1 lags: it has not run for"),
    ("hung reward", 1, "process 1 lags: it is in step 7, stage"),
    ("slow", 1, ""),  # goes on
    ("killed in a save", 1, "exit code 137; restart 1"),
]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    """A run of two processes without a fault."""
    run = TinyRun(tmp_path_factory.mktemp("whole"), f"--config.total_steps={STEPS}")
    run.finish(launcher=[*LAUNCH, "--processes=2", "--", TRAIN])
    return run


def faulty_run(folder: Path, fault: str, process: int, processes: int) -> tuple[TinyRun, str]:
    """A run in which a process fails at STEP, to its end; its output.

    Prints the seconds from the fault until all processes had ended.
    """
    limit = "--config.watchdog.floor_minutes=0.25"
    run = TinyRun(folder, f"--config.total_steps={STEPS}", limit)
    # In step 6 a checkpoint is saved, in step 7 none.
    step = STEP - 1 if fault == "killed in a save" else STEP
    launcher = [*LAUNCH, f"--processes={processes}", "--restarts=2", "--"]
    command = [FAULTY, fault, str(process), str(step), str(folder), TRAIN]
    log, seconds = folder / "log.txt", 0.0
    with run.process(launcher=[*launcher, *command]) as started:
        while started.poll() is None:
            if not seconds and "; restart " in log.read_text():
                seconds = time.time() - float((folder / "injected").read_text())
            time.sleep(0.1)
        output = log.read_text()
        assert started.returncode == 0, output
    print(f"\n{fault} in process {process} of {processes}: all had ended after {seconds:.1f} s")
    assert seconds < MOST_S
    return run, output


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "process", "text"), FAULTS)
def test_a_fault_in_one_of_two(
    whole: TinyRun, tmp_path: Path, fault: str, process: int, text: str
) -> None:
    run, output = faulty_run(tmp_path, fault, process, 2)
    assert text in output
    assert output.count("; restart ") == (0 if fault == "slow" else 1), output
    assert run.metrics() == whole.metrics()
    assert_same_bits(run.weights(STEPS), whole.weights(STEPS))


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["killed", "stopped", "exception", "hung reward"])
def test_a_fault_in_one_of_four(tmp_path: Path, fault: str) -> None:
    _, output = faulty_run(tmp_path, fault, 2, 4)
    assert output.count("; restart ") == 1
    assert f"finished at step {STEPS} of {STEPS}" in output
    if fault in ("stopped", "hung reward"):
        assert "process 2 lags" in output
