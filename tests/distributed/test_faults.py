"""One process of several fails in every way: the run ends or goes on by itself, and says who."""

import sys
import time
from pathlib import Path

import pytest
from in_process import launch_here
from tiny_run import REPOSITORY, TinyRun, assert_same_bits

from jaxrl_llm.supervision.starts import read_starts
from jaxrl_llm.supervision.watchdog import STALLED

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
from jaxrl_llm.supervision.starts import Starts
from jaxrl_llm.supervision.watchdog import open_watch

prepare()
join_processes()
settings = WatchdogConfig(floor_minutes=2 / 60)
with open_watch(settings, Path(sys.argv[1]), os._exit) as watch:
    if multihost.is_main():
        starts = Starts(folder=Path(sys.argv[1]))
        starts.begin(step=0, config_text="{}", changed={}, devices="", undone=[])
        watch.note_end = starts.end
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
    found = launch_here("--processes=2", "--", str(program), str(tmp_path))
    assert found.returncode == STALLED, found.stderr
    assert time.monotonic() - started < 30
    assert "process 1 lags: it is in step 4, stage grade" in found.stderr
    for process, where in ((0, "in barrier"), (1, 'program.py", line 21 in <module>')):
        stacks = (tmp_path / f"stacks-{process}.txt").read_text()
        assert where in stacks and where in found.stderr
    assert "process 0 lags" not in found.stderr
    (start,) = read_starts(tmp_path)
    assert start["end"].startswith("ended by the watchdog: process ") and start["end_step"] == 3


COORDINATOR = 0
# (fault, what the output has, in words of ours); FAULTY stands for the process that fails
FAULTS = [
    ("killed", "exit code 137; restart 1"),
    ("stopped", "process FAULTY lags: it has not run for"),
    ("segfault", "Fatal Python error: Segmentation fault"),
    ("abort", "Fatal Python error: Aborted"),
    ("exception", "RuntimeError: a fault that a test made"),
    ("hung", "process FAULTY lags: it is in step 7"),
    ("lock held", "process FAULTY lags: it has not run for"),
    ("hung reward", "process FAULTY lags: it is in step 7, stage"),
    ("slow", ""),  # goes on
    ("killed in a save", "exit code 137; restart 1"),
]


def launcher(processes: int, *flags: str) -> list[str]:
    return [*LAUNCH, f"--processes={processes}", *flags, "--"]


@pytest.fixture(scope="module", params=[2, 4], ids=["two", "four"])
def whole(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[int, TinyRun]:
    """The number of processes, and their run without a fault."""
    processes: int = request.param
    run = TinyRun(tmp_path_factory.mktemp("whole"), f"--config.total_steps={STEPS}")
    run.finish(launcher=[*launcher(processes), TRAIN])
    return processes, run


def faulty_run(folder: Path, fault: str, process: int, processes: int) -> tuple[TinyRun, str]:
    """A run in which a process fails at STEP, to its end; its output.

    Prints the seconds from the fault until all processes had ended.
    """
    limit = "--config.watchdog.floor_minutes=0.25"
    run = TinyRun(folder, f"--config.total_steps={STEPS}", limit)
    # In step 6 a checkpoint is saved, in step 7 none.
    step = STEP - 1 if fault == "killed in a save" else STEP
    command = launcher(processes, "--restarts=2")
    command += [FAULTY, fault, str(process), str(step), str(folder), TRAIN]
    log, seconds = folder / "log.txt", 0.0
    with run.process(launcher=command) as started:
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
@pytest.mark.parametrize(("fault", "text"), FAULTS)
def test_a_fault_in_one_of_several(
    whole: tuple[int, TinyRun], tmp_path: Path, fault: str, text: str
) -> None:
    processes, _ = whole
    faulty = processes // 2
    run, output = faulty_run(tmp_path, fault, faulty, processes)
    assert text.replace("FAULTY", str(faulty)) in output
    assert output.count("; restart ") == (0 if fault == "slow" else 1), output
    (first, *_), watched = read_starts(run.run_dir), text.startswith("process FAULTY lags")
    assert first.get("end", "").startswith("ended by the watchdog: ") == watched
    has_the_bits(run, whole)


@pytest.mark.slow
def test_a_lost_coordinator(whole: tuple[int, TinyRun], tmp_path: Path) -> None:
    run, output = faulty_run(tmp_path, "killed", COORDINATOR, whole[0])
    assert output.count("exit code 137; restart 1") == 1
    has_the_bits(run, whole)


def has_the_bits(run: TinyRun, whole: tuple[int, TinyRun]) -> None:
    assert run.metrics() == whole[1].metrics()
    assert_same_bits(run.weights(STEPS), whole[1].weights(STEPS))
