"""The processes of one run, which start and end together and are started again.

launch/local.py and launch/ray.py say where the processes run. This file says what follows from
their output, their exit codes and the signals that the launcher gets.
"""

import argparse
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import IO, Protocol

from jaxrl_llm.launch.exits import ALARMED, INTERRUPTED, NO_LAYOUT, USER_ERROR
from jaxrl_llm.launch.runtime import COORDINATOR, FEWER, NUM_PROCESSES
from jaxrl_llm.supervision.deadline import STARTED
from jaxrl_llm.supervision.signals import STOP_SIGNALS, leave_closed_terminals, send_to_null

GRACE_S = 10.0  # after a failure: time for the other processes to end before they are killed
POLL_S = 0.05
WAIT_S = 1.0  # before a restart; twice as long after each failure in a row after the same step
SAME_STEP = 5  # so many of these, and the step is the cause
STEP = re.compile(rb"step (\d+)/")  # begins the line of a step

# Becomes the program, which then dies with the process that started it. Linux alone can do this.
# prctl(1, n), PR_SET_PDEATHSIG, sends signal n to a process whose parent thread has ended.
# A process of Ray blocks SIGINT, and a child would inherit that.
_WITH_PARENT = """
import ctypes, os, signal, sys
signal.pthread_sigmask(signal.SIG_SETMASK, [])
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() != int(sys.argv[1]):
    sys.exit("the launcher has ended")
os.execv(sys.argv[2], sys.argv[2:])
"""


class ProcessGroup(Protocol):
    """The processes of one start, in the order of their ranks."""

    def codes(self) -> list[int | None]:
        """Their exit codes: None while one runs, -n for one that signal n ended."""
        ...

    def signal(self, number: int) -> None:
        """Send a signal to each process that runs and to its children."""
        ...

    def close(self) -> None:
        """Kill what still runs, and print the last lines."""
        ...


class NotStarted(RuntimeError):
    """The processes could not be started; the message says why, `code` is the exit code."""

    def __init__(self, message: str, code: int = 1) -> None:
        super().__init__(message)
        self.code = code


class Output:
    """Prints the lines of all processes with their ranks; `step` is the last one reported."""

    def __init__(self) -> None:
        self.step: int | None = None
        self._lock = threading.Lock()

    def line(self, rank: int, text: bytes, is_error: bool) -> None:
        """Print a line that process `rank` wrote to its stdout, or to its stderr."""
        target = sys.stderr if is_error else sys.stdout
        with self._lock:
            if step_line := STEP.match(text):
                self.step = int(step_line[1])
            try:
                target.write(f"[{rank}] {text.decode(errors='replace').rstrip()}\n")
                target.flush()
            except OSError:  # who read the output has ended: the processes go on without
                send_to_null(target.fileno())


Start = Callable[
    [Output, Sequence[int]], ProcessGroup
]  # the second are the signals received so far


@dataclass(kw_only=True)
class Members:
    """The processes that take part, by their numbers in the first start."""

    numbers: list[int]
    least: int  # fewest processes that the run goes on with
    by_failures: bool = True  # a process that keeps failing is lost
    _spare: list[int] = field(default_factory=list)  # processes that no mesh had a use for
    _lost: bool = False

    @property
    def environment(self) -> dict[str, str]:
        """Variables that all of them get, in addition to the first start's."""
        fewer = {FEWER: "1"} if self._lost else {}
        return {NUM_PROCESSES: str(len(self.numbers)), **fewer}

    def lose(self, number: int) -> bool:
        """Leave out a lost process, and take a spare one; False where too few would be left."""
        left = [each for each in self.numbers if each != number] + self._spare[:1]
        if len(left) < self.least:
            return False
        self.numbers, self._spare, self._lost = sorted(left), self._spare[1:], True
        return True

    def spare_one(self) -> bool:
        """Go on with one process fewer; False where too few would be left."""
        if len(self.numbers) <= self.least:
            return False
        self._spare.append(self.numbers.pop())
        return True


def read_arguments(
    parser: argparse.ArgumentParser, argv: Sequence[str] | None
) -> argparse.Namespace:
    """The flags of `parser`, with `restarts` and `command`, the program and its arguments."""
    parser.add_argument("--restarts", type=int, default=0, help="after a failure, at most so many")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="-- script.py and its arguments")
    arguments = parser.parse_args(argv)
    if arguments.command[:1] == ["--"]:
        del arguments.command[0]
    if not arguments.command:
        parser.error("the program is missing: … -- scripts/train.py --config=…")
    return arguments


def run_again(start: Start, restarts: int, members: Members) -> int:
    """Run the processes that `start` starts, again after a failure; returns the last exit code.

    It is not started again after a mistake of the user, after a signal that asked it to end, or
    after `restarts` times. SAME_STEP failures in a row after the same step also end it.

    A process that fails first in two starts in a row, in the second before a step, is lost. The run
    goes on without it, if `members` allows so few. It goes on with one fewer where those left have
    no mesh.
    """
    os.environ.setdefault(STARTED, str(time.time()))  # the processes count from it
    failed_after: list[int | None] = []
    failed: int | None = None
    with _stop_signals() as received:
        while True:
            output = Output()
            before, (code, rank) = failed, _run(start, output, received)
            if code == NO_LAYOUT and not received and members.spare_one():
                _say(f"no mesh of so many processes: it goes on with {len(members.numbers)}")
                failed = None
                continue
            failed = None if rank is None else members.numbers[rank]
            failed_after.append(output.step)
            tries = len(failed_after)
            ends = code in (0, USER_ERROR, ALARMED, INTERRUPTED, NO_LAYOUT)
            if ends or received or tries > restarts:
                return code
            if failed is not None and failed == before and output.step is None:
                if members.by_failures and members.lose(failed):
                    left = len(members.numbers)
                    _say(f"process {failed} is lost: the run goes on with {left} processes")
            same = _failures_in_a_row(failed_after)
            if same == SAME_STEP:
                where = "its first step" if output.step is None else f"step {output.step + 1}"
                _say(f"not started again: it failed {same} times in {where}")
                return code
            wait_s = WAIT_S * 2 ** (same - 1)
            _say(f"exit code {code}; restart {tries} of {restarts} in {wait_s:g} s")
            _sleep(wait_s, received)
            if received:
                return INTERRUPTED


def _failures_in_a_row(failed_after: Sequence[int | None]) -> int:
    """Count the last failures in a row that came after the same step."""
    others = (n for n, step in enumerate(reversed(failed_after)) if step != failed_after[-1])
    return next(others, len(failed_after))


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def _sleep(seconds: float, received: Sequence[int]) -> None:
    """Sleep, or until a signal came."""
    until = time.monotonic() + seconds
    while time.monotonic() < until and not received:
        time.sleep(POLL_S)


@contextmanager
def _stop_signals() -> Iterator[list[int]]:
    """Collects the numbers of STOP_SIGNALS that arrive inside the block."""
    received: list[int] = []
    terminals = [fd for fd in (1, 2) if os.isatty(fd)]

    def keep(number: int, _: FrameType | None) -> None:
        leave_closed_terminals(terminals)
        received.append(number)

    ignored = [s for s in STOP_SIGNALS if signal.getsignal(s) == signal.SIG_IGN]  # nohup
    previous = {s: signal.signal(s, keep) for s in STOP_SIGNALS if s not in ignored}
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _run(start: Start, output: Output, received: Sequence[int]) -> tuple[int, int | None]:
    """Run the processes once; returns 0, or the exit code and the rank of the first failure.

    A process that signal n ended counts as 128 + n, as in a shell.
    """
    try:
        group = start(output, received)
    except NotStarted as error:
        _say(str(error))
        return INTERRUPTED if received else error.code, None
    try:
        code, rank = _wait(group, received)
    finally:
        group.close()
    return code if code >= 0 else 128 - code, rank


def _wait(group: ProcessGroup, received: Sequence[int]) -> tuple[int, int | None]:
    """Wait for all processes. After the first failure, end the others and return its code and rank.

    Of several that failed at once, the first is one that was killed: the others lost it. A signal
    that the launcher gets is passed on to all; a second one kills them.
    """
    first_failure = passed_on = 0
    rank: int | None = None
    deadline = float("inf")
    while True:
        for number in received[passed_on:]:
            group.signal(signal.SIGKILL if passed_on else number)
            passed_on += 1
        codes = group.codes()
        if not first_failure and any(codes):
            killed = -signal.SIGKILL in codes
            first_failure = -signal.SIGKILL if killed else next(code for code in codes if code)
            rank = codes.index(first_failure)
            if not received:  # after a signal the others are already ending and may be saving
                group.signal(signal.SIGTERM)
                deadline = time.monotonic() + GRACE_S
        if None not in codes:
            return first_failure, rank
        if time.monotonic() > deadline:
            group.signal(signal.SIGKILL)
        time.sleep(POLL_S)


# ------------------------------------------------------------------------- one process


def shared_environment(
    environment: Mapping[str, str], coordinator: str, processes: int
) -> dict[str, str]:
    """`environment` for all processes of a group whose process 0 listens at `coordinator`."""
    # A number of CPU devices in XLA_FLAGS would override ours.
    flags = environment.get("XLA_FLAGS", "")
    flags = re.sub(r"--xla_force_host_platform_device_count=\S+", "", flags).strip()
    return {
        **environment,
        "XLA_FLAGS": flags,
        COORDINATOR: coordinator,
        NUM_PROCESSES: str(processes),
        "PYTHONUNBUFFERED": "1",
    }


def free_port(host: str = "127.0.0.1") -> int:
    """A TCP port that is free now on the interface with the address `host`."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]


def start_process(
    arguments: Sequence[str], environment: Mapping[str, str], folder: Path | None = None
) -> "subprocess.Popen[bytes]":
    """Start Python with `arguments`, in a process group of its own.

    Guarantees: on Linux it is killed when the thread that calls this ends. A launcher that is
        killed leaves no process behind.
    """
    command = [sys.executable, *arguments]
    if sys.platform == "linux":
        command = [sys.executable, "-c", _WITH_PARENT, str(os.getpid()), *command]
    return subprocess.Popen(
        command,
        env=environment,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C arrives once, through the launcher
    )


def signal_process(process: "subprocess.Popen[bytes]", number: int) -> None:
    """Send a signal to the group of a process, if the process still runs."""
    if process.poll() is None:
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            pass  # it ended between the two calls


def read_lines(
    process: "subprocess.Popen[bytes]", take: Callable[[bytes, bool], None]
) -> list[threading.Thread]:
    """Threads that call take(line, is_error) for each line; they end after the last line."""

    def read(source: IO[bytes], is_error: bool) -> None:
        for line in source:
            take(line, is_error)

    assert process.stdout is not None and process.stderr is not None
    sources = ((process.stdout, False), (process.stderr, True))
    readers = [threading.Thread(target=read, args=source) for source in sources]
    for reader in readers:
        reader.start()
    return readers
