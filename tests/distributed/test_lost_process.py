"""A process is lost for good: the launcher goes on with those that are left, on another mesh."""

import os
import re
import signal
import sys
from pathlib import Path

import pytest
from in_process import launch_here
from tiny_run import REPOSITORY, TinyRun, assert_same_bits

from jaxrl_llm.launch.process_group import Members

LOCAL = [sys.executable, "-m", "jaxrl_llm.launch.local", "--devices-per-process=2"]
TRAIN = str(REPOSITORY / "scripts" / "train.py")
LOST = 2
SHORT = ("--config.algorithm=grpo", "--config.warmup=null", "--config.total_steps=4")
# Dies as a machine does that fails at every start. A process is known by its first rank.
DYING = """
import os, runpy, signal, sys
from pathlib import Path
folder = Path(__file__).parent
lost = os.environ["JAXRL_NUM_PROCESSES"] == "4" and os.environ["JAXRL_PROCESS_ID"] == "2"
if lost:
    (folder / "pid").write_text(str(os.getpid()))
if lost and (folder / "lost").exists():
    os.kill(os.getpid(), signal.SIGKILL)
sys.argv[0] = TRAIN
runpy.run_path(TRAIN, run_name="__main__")
"""


@pytest.mark.slow
def test_a_run_that_loses_a_process_ends_as_one_that_was_moved_by_hand(tmp_path: Path) -> None:
    """Three processes of two devices do not divide the batch of 32 samples: two go on."""
    run, moved = (TinyRun(tmp_path / name, *SHORT) for name in ("left", "moved"))
    program = run.folder / "dying.py"
    program.write_text(DYING.replace("TRAIN", repr(TRAIN)))
    four = [*LOCAL, "--processes=4", "--min-processes=2", "--restarts=2", "--", str(program)]
    run.pause_at(3)
    with run.process("--config.mesh.fsdp=8", launcher=four) as process:
        run.wait_for(lambda: run.paused() and run.step_path(2).exists(), process)
        (run.folder / "lost").touch()
        os.kill(int((run.folder / "pid").read_text()), signal.SIGKILL)
        run.unpause()
        assert process.wait(300) == 0, (run.folder / "log.txt").read_text()
    output = (run.folder / "log.txt").read_text()
    assert "process 2 is lost: the run goes on with 3 processes" in output
    assert "no layout of 6 devices holds this run" in output
    assert "no mesh of so many processes: it goes on with 2" in output
    assert f"resumed from {run.step_path(2)}" in output
    chosen = re.search(r"chosen .*: (--config.mesh.*)", output)
    assert chosen is not None

    moved.pause_at(3)
    flags = "--config.mesh.fsdp=8"
    with moved.process(flags, launcher=[*LOCAL, "--processes=4", "--", TRAIN]) as process:
        moved.wait_for(lambda: moved.paused() and moved.step_path(2).exists(), process)
        os.killpg(process.pid, signal.SIGKILL)
    moved.unpause()
    moved.finish(*chosen[1].split(), launcher=[*LOCAL, "--processes=2", "--", TRAIN])
    assert list(run.metrics()) == [0, 1, 2, 3, 4]
    assert run.metrics() == moved.metrics()
    assert_same_bits(run.weights(4), moved.weights(4))


FAILING = """
import os, sys
print("of", os.environ["JAXRL_NUM_PROCESSES"], os.environ.get("JAXRL_FEWER_PROCESSES", "0"))
if os.environ["JAXRL_PROCESS_ID"] == "1" and os.environ["JAXRL_NUM_PROCESSES"] != "2":
    sys.exit(CODE)
"""


def launch(folder: Path, code: str, *flags: str):
    script = folder / "program.py"
    script.write_text(FAILING.replace("CODE", code))
    return launch_here("--processes=3", *flags, "--", str(script))


def test_a_process_that_keeps_failing_is_left_out_only_where_that_is_allowed(tmp_path):
    ended = launch(tmp_path, "7", "--restarts=2")
    assert ended.returncode == 7 and "is lost" not in ended.stderr
    ended = launch(tmp_path, "7", "--restarts=2", "--min-processes=2")
    assert ended.returncode == 0
    assert "process 1 is lost: the run goes on with 2 processes" in ended.stderr
    assert "[0] of 2 1" in ended.stdout and "[0] of 3 0" in ended.stdout


def test_a_start_without_a_mesh_goes_on_with_fewer_processes_and_costs_no_restart(tmp_path):
    ended = launch(tmp_path, "76", "--min-processes=2")
    assert ended.returncode == 0 and "it goes on with 2" in ended.stderr
    assert launch(tmp_path, "76").returncode == 76


def test_a_spare_process_takes_the_place_of_a_lost_one():
    members = Members(numbers=[0, 1, 2, 3], least=2)
    assert members.environment == {"JAXRL_NUM_PROCESSES": "4"}
    assert members.lose(1) and members.spare_one()
    assert members.numbers == [0, 2]
    assert members.lose(0) and members.numbers == [2, 3]
    assert members.environment == {"JAXRL_NUM_PROCESSES": "2", "JAXRL_FEWER_PROCESSES": "1"}
    assert not members.lose(2) and not members.spare_one()
    assert members.numbers == [2, 3]
