"""Processes below this one: which there are, what they take, and how all of them end. Linux only.

It imports the standard library alone, since workers and first processes of sandboxes use it.
"""

import ctypes
import os
import resource
import signal
import time
from contextlib import suppress

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER = 1, 4, 36

libc = ctypes.CDLL(None, use_errno=True)


def end_with_parent(parent: int) -> None:
    """Have the kernel kill this process when `parent`, the thread that forked it, ends."""
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def adopt_orphans() -> None:
    """Become the parent of all processes below this one whose own parents have ended."""
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def children(pid: int) -> list[int]:
    """The processes whose parent is `pid`."""
    pids: list[int] = []
    with suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with suppress(OSError), open(f"/proc/{pid}/task/{thread}/children") as file:
                pids += map(int, file.read().split())
    return pids


def descendants(pid: int) -> list[int]:
    """All processes below `pid`."""
    direct = children(pid)
    return direct + [below for child in direct for below in descendants(child)]


def memory_above(pids: list[int], limit: int) -> bool:
    """True if processes together hold more than `limit` bytes. Shared memory counts once."""
    # The second question is slower.
    return sum(map(_resident, pids)) > limit and sum(map(_proportional, pids)) > limit


def _resident(pid: int) -> int:
    """Bytes in memory, with what is shared counted in each process."""
    try:
        with open(f"/proc/{pid}/statm") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except OSError:
        return 0


def _proportional(pid: int) -> int:
    """Bytes in memory, with what is shared divided by the number of processes that share it."""
    try:
        with open(f"/proc/{pid}/smaps_rollup") as file:
            return next(int(line.split()[1]) << 10 for line in file if line.startswith("Pss:"))
    except (OSError, StopIteration):
        return 0


def end_all() -> None:
    """Kill and collect every process below this one. Requires: `adopt_orphans` was called."""
    while True:
        for pid in descendants(os.getpid()):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(1e-3)


def signal_name(number: int) -> str:
    """A signal's name; a number for one that has none."""
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


def lower_limit(kind: int, value: int) -> None:
    """Set a resource limit for good, at most the present one."""
    _, hard = resource.getrlimit(kind)
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (value, value))
