"""Several processes on this machine: output, exit codes, signals."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
from in_process import launch_here

from jaxrl_llm.launch import process_group
from jaxrl_llm.launch.local import process_environments
from jaxrl_llm.supervision.signals import STOP_SIGNALS

LAUNCH = [sys.executable, "-m", "jaxrl_llm.launch.local"]
# Becomes another program that receives a signal: a shell starts what runs in the background with
# some of them ignored.
RECEIVING = """
import os, signal, sys
signal.signal(int(sys.argv[1]), signal.SIG_DFL)
os.execv(sys.argv[2], sys.argv[2:])
"""


def write(folder: Path, source: str) -> str:
    script = folder / "program.py"
    script.write_text(source)
    return str(script)


def launch(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [*LAUNCH, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_output_carries_the_rank(tmp_path):
    script = write(
        tmp_path,
        "import os, sys\n"
        "print('of', os.environ['JAXRL_NUM_PROCESSES'], sys.argv[1])\n"
        "print('aside', file=sys.stderr)\n",
    )
    result = launch("--processes=2", "--", script, "--flag=x")
    assert result.returncode == 0
    assert sorted(result.stdout.splitlines()) == ["[0] of 2 --flag=x", "[1] of 2 --flag=x"]
    assert sorted(result.stderr.splitlines()) == ["[0] aside", "[1] aside"]


def test_the_processes_go_on_when_the_reader_of_their_output_has_ended(tmp_path):
    """As in `... | head -1`. A pipe that nobody empties would hold them up for ever."""
    script = write(
        tmp_path,
        "from pathlib import Path\n"
        "for i in range(20_000): print('a line that is long enough', i)\n"
        "Path('done').touch()\n",
    )
    command = [*LAUNCH, "--processes=1", "--", script]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=tmp_path) as process:
        assert process.stdout is not None and process.stdout.readline()
        process.stdout.close()
        try:
            assert process.wait(60) == 0
        finally:
            process.kill()
    assert (tmp_path / "done").exists()


def test_a_mistake_that_one_process_alone_finds_ends_all(tmp_path):
    """jax would wait five minutes for the others, which wait for this one."""
    script = write(
        tmp_path,
        "from jaxrl_llm.config import ConfigError\n"
        "from jaxrl_llm.launch import exits, main, runtime\n"
        "exits.TOGETHER_S = 0.5\n"
        "def work(_):\n"
        "    runtime.prepare(); runtime.join_processes()\n"
        "    from jaxrl_llm.distributed.multihost import barrier, is_main\n"
        "    if is_main(): raise ConfigError('no such tracker')\n"
        "    barrier('never')\n"
        "main.run(work)\n",
    )
    result = launch_here("--processes=2", "--restarts=2", "--", script)
    assert result.returncode == 2 and "[0] error: no such tracker" in result.stderr


def test_a_negative_number_of_devices_is_refused():
    result = launch_here("--processes=1", "--devices-per-process=-1", "--", __file__)
    assert result.returncode == 2
    assert "--devices-per-process: -1: must be 1 or more" in result.stderr


def test_one_failure_ends_the_group(tmp_path):
    script = write(
        tmp_path,
        "import os, sys, time\n"
        "if os.environ['JAXRL_PROCESS_ID'] == '1':\n"
        "    sys.exit(7)\n"
        "time.sleep(60)\n",
    )
    start = time.monotonic()
    assert launch_here("--processes=3", "--", script).returncode == 7
    assert time.monotonic() - start < 30


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_signals_reach_every_process(tmp_path, number):
    script = write(
        tmp_path,
        "import signal, sys, time\n"
        "def end(number, frame):\n"
        "    print('saved', number, flush=True)\n"
        "    sys.exit(0)\n"
        "for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):\n"
        "    signal.signal(number, end)\n"
        "print('ready', flush=True)\n"
        "time.sleep(60)\n",
    )
    command = [sys.executable, "-c", RECEIVING, str(int(number)), *LAUNCH, "--processes=2"]
    command += ["--", script]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert sorted(process.stdout.readline() for _ in range(2)) == ["[0] ready\n", "[1] ready\n"]
        process.send_signal(number)
        rest = process.stdout.read()
    assert sorted(rest.splitlines()) == [f"[0] saved {int(number)}", f"[1] saved {int(number)}"]
    assert process.returncode == 0


def test_killed_launcher_leaves_nothing_behind(tmp_path):
    script = write(tmp_path, "import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(60)\n")
    command = [*LAUNCH, "--processes=1", "--", script]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline().split()[1])
        process.kill()
    deadline = time.monotonic() + 20
    while Path(f"/proc/{child}/cmdline").exists() and time.monotonic() < deadline:
        if not Path(f"/proc/{child}/cmdline").read_bytes():
            return  # dead, and not yet collected by init
        time.sleep(0.05)
    assert time.monotonic() < deadline


def test_mistakes_have_one_message(tmp_path):
    for arguments, message in [
        (["--processes=2"], "the program is missing"),
        (["--processes=0", "--", "x"], "must be 1 or more"),
    ]:
        result = launch_here(*arguments)
        assert result.returncode == 2
        assert message in result.stderr
        assert "Traceback" not in result.stderr


def test_gpus_are_shared_out():
    gpus = ["0", "1", "2", "3"]
    environments = process_environments(2, 0, {}, gpus)
    assert [e["CUDA_VISIBLE_DEVICES"] for e in environments] == ["0,1", "2,3"]
    assert "JAX_NUM_CPU_DEVICES" not in environments[0]
    with pytest.raises(ValueError, match="--processes=2"):
        process_environments(4, 2, {}, gpus)
    on_cpu = process_environments(4, 2, {"JAX_PLATFORMS": "cpu"}, gpus)
    assert [e["JAX_NUM_CPU_DEVICES"] for e in on_cpu] == ["2"] * 4


COUNTED = """
import os, sys, time
from pathlib import Path

if os.environ["JAXRL_PROCESS_ID"] == "0":
    count = Path(sys.argv[1])
    starts = int(count.read_text()) + 1 if count.exists() else 1
    count.write_text(str(starts))
    print("port", os.environ["JAXRL_COORDINATOR"])
    print(f"step {starts if 'moves' in sys.argv else 7}/99 | reward 1")
    sys.exit(0 if starts == 3 and "ends" in sys.argv else int(sys.argv[2]))
time.sleep(0.5)
"""


def starts(tmp_path: Path, *words: str, restarts: int) -> tuple[int, int, str]:
    """Exit code, number of starts, and stderr of a program that fails."""
    count = tmp_path / "count"
    result = launch_here(
        "--processes=2",
        f"--restarts={restarts}",
        "--",
        write(tmp_path, COUNTED),
        str(count),
        *words,
    )
    return result.returncode, int(count.read_text()), result.stderr


def test_a_failed_group_is_started_again(tmp_path: Path) -> None:
    code, number, errors = starts(tmp_path, "9", "moves", "ends", restarts=5)
    assert (code, number) == (0, 3)
    assert errors.splitlines() == [
        "exit code 9; restart 1 of 5 in 1 s",
        "exit code 9; restart 2 of 5 in 1 s",
    ]


def test_restarts_have_a_limit(tmp_path: Path) -> None:
    assert starts(tmp_path, "9", "moves", restarts=1)[:2] == (9, 2)


@pytest.mark.parametrize("code", [2, 3, 130])
def test_a_mistake_an_alarm_and_a_stop_are_not_started_again(tmp_path: Path, code: int) -> None:
    assert starts(tmp_path, str(code), restarts=3)[:2] == (code, 1)


def test_a_step_that_always_fails_is_given_up(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(process_group, "WAIT_S", 0.01)
    code, number, errors = starts(tmp_path, "9", restarts=99)
    assert (code, number) == (9, process_group.SAME_STEP)
    assert "not started again: it failed 5 times in step 8" in errors
