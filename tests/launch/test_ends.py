"""How a command ends: exit codes, Ctrl-C while it imports, a reader that ends before it."""

import os
import pty
import signal
import subprocess
import sys

import numpy as np
import pytest

from jaxrl_llm.algorithms.aggregation import aggregation
from jaxrl_llm.config import ConfigError
from jaxrl_llm.launch import exits, interrupts
from jaxrl_llm.launch.exits import UNREAD
from jaxrl_llm.launch.main import run
from jaxrl_llm.learner.losses import NONFINITE
from jaxrl_llm.supervision.nonfinite import check_gradients


@pytest.fixture(autouse=True)
def this_process_goes_on(monkeypatch):
    monkeypatch.setattr(exits, "leave", sys.exit)
    monkeypatch.setattr(exits, "end_in_time", sys.exit)


def ended(work, capsys, *argv: str) -> tuple[int, str]:
    with pytest.raises(SystemExit) as caught:
        run(work, argv)
    return caught.value.code, capsys.readouterr().err


def test_exit_codes(capsys):
    assert ended(lambda argv: None, capsys) == (0, "")
    assert ended(lambda argv: len(argv), capsys, "a", "b", "c") == (3, "")

    def mistake(argv):
        raise ConfigError("write 3")

    assert ended(mistake, capsys) == (2, "error: write 3\n")

    def interrupted(argv):
        raise KeyboardInterrupt

    assert ended(interrupted, capsys) == (130, "interrupted\n")


def test_our_own_value_errors_need_no_traceback(capsys):
    code, message = ended(lambda argv: aggregation("token-mean", scale=5), capsys)
    assert code == 2
    assert "error: a loss scale of 5 with" in message


def test_other_value_errors_keep_their_traceback(capsys):
    code, message = ended(lambda argv: np.zeros(3).reshape(2).size, capsys)
    assert code == 1 and "Traceback" in message and "reshape" in message
    code, message = ended(bug, capsys)
    assert code == 1 and "Traceback" in message and "a bug" in message


def test_numbers_that_are_not_finite_are_one_sentence_and_not_repeated(capsys):
    """A launcher repeats what ends with code 1, and the same step fails again."""

    def trained(argv):
        flags = np.array([False, True])
        check_gradients({"actor/" + NONFINITE: flags}, {"actor": {"a": 0, "b": 0}}, 3)

    code, message = ended(trained, capsys)
    assert code == 2 and message.count("\n") == 1
    assert "step 3: the gradient of the actor is not finite in b" in message


WAITING = """
import sys, threading
from jaxrl_llm.launch import exits, main

def work(arguments):
    threading.Thread(target=threading.Event().wait).start()
    if arguments:
        raise RuntimeError(arguments[0])

exits.END_S = 0.5
main.run(work)
"""


@pytest.mark.parametrize(("argument", "code"), [(None, 0), ("a fault", 1)])
def test_no_thread_holds_up_the_end(argument, code):
    """Orbax's threads of a failed save waited for 20 minutes at Python's exit."""
    command = [sys.executable, "-c", WAITING, *([argument] if argument else [])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert done.returncode == code
    assert ("RuntimeError: a fault" in done.stderr) == bool(code)


def bug(argv):
    raise ValueError("a bug, in a file that is not the package's")


def test_help_prints_the_docstring(tmp_path):
    script = tmp_path / "tool.py"
    script.write_text('"""What it does."""\nfrom jaxrl_llm.launch.main import run\nrun(print)\n')
    command = [sys.executable, str(script), "--help"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stdout) == (0, "What it does.\n")


# Ctrl-C when a module is imported, from within a callback whose errors Python drops.
INTERRUPTED_IMPORT = """
import builtins, os, signal, sys
from jaxrl_llm.launch.main import main

signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job of a shell ignores it
plain, last = builtins.__import__, sys.argv.pop(1)

class Dropped:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)

def imported(name, *rest, **named):
    if name == last:
        Dropped()
    return plain(name, *rest, **named)

builtins.__import__ = imported
main()
"""


@pytest.mark.parametrize("module", ["argparse", "jax"])
def test_ctrl_c_while_a_command_imports_is_one_line(module, tmp_path):
    """Before, it was a traceback, or was lost and the run began."""
    words = ["train", "--config=grpo", f"--config.run_dir={tmp_path / 'run'}"]
    command = [sys.executable, "-c", INTERRUPTED_IMPORT, module, *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (130, "interrupted\n")
    assert not (tmp_path / "run").exists()


def test_ctrl_c_in_a_program_waits_for_the_imports():
    """A notebook that was stopped goes on, and half of jax would not work."""
    done = []
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            with interrupts.imports():
                with interrupts.imports():
                    os.kill(os.getpid(), signal.SIGINT)
                done.append("import")
        assert done == ["import"]
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


SUMMARY = """
import sys
from pathlib import Path
from jaxrl_llm.config import Config
from jaxrl_llm.launch.main import run
from jaxrl_llm.trainer.output import RunTotals, Summary, print_summary

def work(arguments):
    sys.stdin.read()
    here = Path("run")
    settings = {"run_dir": here, "step": 1, "seconds": 1.0, "interrupted": False}
    print_summary(Summary(totals=RunTotals(), checkpoint=here, **settings), Config())

run(work)
"""


def test_a_terminal_that_was_closed_does_not_fail_a_finished_run():
    ours, theirs = pty.openpty()
    command = [sys.executable, "-c", SUMMARY]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=theirs) as process:
        os.close(theirs)
        os.close(ours)
        process.communicate(b"", timeout=60)
    assert process.returncode == 0


WRITES = """
import sys
from jaxrl_llm.launch.main import run
from jaxrl_llm.launch.pipes import outlive_readers

def writes(arguments):
    if arguments:
        outlive_readers()
    for _ in range(5000):
        print("x" * 99, flush=True)
        print("y" * 99, file=sys.stderr)
    for file in arguments:
        open(file, "w").close()

run(writes)
"""


@pytest.mark.parametrize("lasts", [False, True])
def test_a_reader_that_ends(lasts, tmp_path):
    """A command ends without a traceback, as `head` expects. A training goes on without it."""
    file = tmp_path / "written"
    command = [sys.executable, "-c", WRITES, *([str(file)] if lasts else [])]
    errors = subprocess.STDOUT if lasts else None
    with open(tmp_path / "stderr", "w+") as stderr:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors or stderr)
        assert process.stdout is not None
        assert process.stdout.readline()
        process.stdout.close()
        assert process.wait(timeout=60) == (0 if lasts else UNREAD)
        stderr.seek(0)
        assert set(stderr.read()) <= set("y\n")
    assert file.exists() == lasts


def test_output_without_a_buffer_stays_so():
    """PYTHONUNBUFFERED is usual in a container, whose log would come late."""
    code = "import sys; from jaxrl_llm.launch.pipes import outlive_readers; outlive_readers()\n"
    code += "print('now'); print('err', file=sys.stderr); sys.stdin.read()"
    command = [sys.executable, "-c", code]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen(command, env=environment, text=True, **pipes) as process:
        assert process.stdout is not None and process.stderr is not None
        assert (process.stdout.readline(), process.stderr.readline()) == ("now\n", "err\n")
        process.communicate("")


def test_another_broken_pipe_keeps_its_traceback(capsys):
    def broken(arguments):
        reading, writing = os.pipe()
        os.close(reading)
        try:
            os.write(writing, b"x")
        finally:
            os.close(writing)

    code, message = ended(broken, capsys)
    assert code == 1 and "BrokenPipeError" in message


CLOSED = """
import os, sys
os.closerange(0, 3)
os.execv(sys.executable, [sys.executable, "-c", *sys.argv[1:]])
"""
REPORTS = """
import os, sys
from jaxrl_llm.launch import main
main._open_standard_streams()
file = open(sys.argv[1], "w")
os.write(2, b"a line of XLA")
print("text", sys.stdin.read())
print(file.fileno() > 2, file=file)
"""


def test_a_command_without_standard_streams(tmp_path):
    """The first file got the number of stderr, and print failed as there was no stdout."""
    file = tmp_path / "written"
    command = [sys.executable, "-c", CLOSED, REPORTS, str(file)]
    assert subprocess.run(command, timeout=60).returncode == 0
    assert file.read_text() == "True\n"
