"""The parent of a worker process: sets its limits, passes its output on, and ends all it started.

Started by `pool.py` in a process of its own. It runs no code of a user, so it ends a worker that
holds the interpreter lock, or whose trainer was killed. As a "child subreaper" it inherits
processes whose parents have ended, so none of them outlives the worker.
"""

import os
import resource
import select
import signal
import socket
import sys
import time
from contextlib import suppress
from typing import Any, NoReturn

from jaxrl_llm.sandbox import processes

PAUSE = 0.2  # seconds between looks at the processes
OUTPUT_WINDOW = 60.0  # seconds to which the limit of output refers
EXCESS = 121  # the exit code of a worker that was ended for taking too much
OOM_SCORE = 500  # the kernel ends a worker before the trainer when memory is short


def main(settings: dict[str, Any]) -> NoReturn:
    """Start the worker, watch over it, end what is left of it, and end as it ended."""
    processes.adopt_orphans()
    wakeup, notify = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    output, theirs = os.pipe2(os.O_CLOEXEC)
    worker = os.fork()
    if worker == 0:
        _become_worker(settings, theirs)
    signal.set_wakeup_fd(notify)
    os.close(theirs)
    os.close(settings["socket"])
    status = _watch(worker, wakeup, _Output(output, settings["output_bytes"]), settings)
    processes.end_all()
    _end_as(status)


# ------------------------------------------------------------------------- the worker's side


def _become_worker(settings: dict[str, Any], output: int) -> NoReturn:
    """In the child: its own session, limits and output; then the requests."""
    keeper = os.getppid()
    os.setsid()  # Ctrl-C is the trainer's to handle
    processes.end_with_parent(keeper)
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    _limit(settings)
    sys.stdout = open(1, "w", buffering=1, closefd=False, errors="backslashreplace")
    from jaxrl_llm.rewards.workers import wire, worker

    os.set_inheritable(settings["socket"], False)  # not for what a user function starts
    with suppress(EOFError, BrokenPipeError):
        worker.serve(wire.Channel(socket.socket(fileno=settings["socket"])))
    os._exit(0)


def _limit(settings: dict[str, Any]) -> None:
    """Limits that the kernel enforces at once. The keeper watches the sums over all processes."""
    for kind, value in (
        (resource.RLIMIT_DATA, settings["memory_bytes"]),
        (resource.RLIMIT_FSIZE, settings["file_bytes"]),
        (resource.RLIMIT_CORE, 0),
    ):
        processes.lower_limit(kind, value)
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write(str(OOM_SCORE))


# ------------------------------------------------------------------------- the keeper's side


def _watch(worker: int, wakeup: int, output: "_Output", settings: dict[str, Any]) -> int:
    """Until the worker has ended, or has to end: its status as `os.waitpid` gives it."""
    looked = time.monotonic()
    while True:
        ready, _, _ = select.select([wakeup, *output.open], [], [], PAUSE)
        if wakeup in ready and signal.SIGTERM in os.read(wakeup, 4096):
            return signal.SIGKILL
        if output.open and output.open[0] in ready:
            output.pass_on()
        status = _reap(worker)
        if status is not None:
            output.pass_on_rest()
            return status
        if time.monotonic() - looked < PAUSE:
            continue
        looked = time.monotonic()
        if os.getppid() != settings["trainer"]:
            return signal.SIGKILL
        excess = _excess(settings)
        if excess:
            output.note(excess)
            return EXCESS << 8


def _reap(worker: int) -> int | None:
    """Collect processes that have ended. The worker's status, once that is one of them."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return 1 << 8
        if pid == worker:
            return status
        if pid == 0:
            return None


def _excess(settings: dict[str, Any]) -> str:
    """Which limit the processes together have passed, or nothing."""
    pids = processes.descendants(os.getpid())
    if len(pids) > settings["processes"]:
        return f"it started more than {settings['processes']} processes"
    limit = settings["memory_bytes"]
    if processes.memory_above(pids, limit):
        return f"it took more than {limit / 1e9:g} GB of memory"
    return ""


def _end_as(status: int) -> NoReturn:
    """End with the exit code or the signal of `status`, so that the trainer sees it."""
    number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    if number:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.WEXITSTATUS(status))


class _Output:
    """What the worker prints: passed on up to a limit of bytes in each window, then dropped."""

    def __init__(self, source: int, limit: int) -> None:
        os.set_blocking(source, False)
        self.open = [source]  # empty once all writers have closed it
        self._limit = limit
        self._since = time.monotonic()
        self._passed = 0

    def pass_on(self) -> bool:
        """Pass one part on. Returns: whether there was one."""
        try:
            part = os.read(self.open[0], 2**16)
        except BlockingIOError:
            return False
        if not part:
            self.open = []
            return False
        if time.monotonic() - self._since > OUTPUT_WINDOW:
            self._since, self._passed = time.monotonic(), 0
        room = self._limit - self._passed
        if 0 < room < len(part):
            self._write(part[:room])
            self.note(f"it printed over {self._limit} bytes in a minute; the rest is dropped")
        elif room > 0:
            self._write(part)
        self._passed += len(part)
        return True

    def pass_on_rest(self) -> None:
        """Pass on what was printed and not yet read, without waiting for more."""
        parts = 0
        while self.open and parts < 64 and self.pass_on():
            parts += 1

    def note(self, what: str) -> None:
        """A line of our own."""
        self._write(f"\nreward worker: {what}\n".encode())

    def _write(self, part: bytes) -> None:
        with suppress(OSError):  # the trainer's output may be gone
            os.write(1, part)
