"""Signals that end a run at the next step's boundary, after saving.

Ctrl-C (SIGINT), SIGTERM, SIGHUP (the terminal was closed) and SIGUSR1 (Slurm's `--signal=USR1@300`)
all ask for the same. A second signal ends the run at once. So does a reward function that still
runs WAIT_S after the request, or a disk that is still full. Each could hold up the end for minutes.
A run that ended at once goes on from its last checkpoint. While a run starts, or compiles programs
before its next step, the first signal ends it at once: nothing is lost.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
WAIT_S = 30.0  # for host work (reward functions) that is under way when the run is asked to end
POLL_S = 0.1
GRACE_S = 1.0  # for the main thread to handle a signal itself
INTERRUPTED = 128 + signal.SIGINT  # the exit code


class EndedAtOnce(KeyboardInterrupt):
    """The run ended inside a step; the step is lost. The message says why."""


_host_work = 0  # number of `host_work` blocks around the main thread


@contextmanager
def host_work() -> Iterator[None]:
    """Marks work of the host, such as reward functions, that a stop request does not wait for.

    In another thread it marks nothing: the main thread marks where it waits for that one.

    The end of a device program is always waited for, because its step can be saved.
    """
    global _host_work
    counts = threading.current_thread() is threading.main_thread()
    _host_work += counts
    try:
        yield
    finally:
        _host_work -= counts


@contextmanager
def stop_requests(
    wait_s: float = WAIT_S,
    *,
    loses_nothing: Callable[[], bool] = lambda: False,
    end_process: Callable[[int], object] | None = None,
) -> Iterator[Callable[[], bool]]:
    """Handle STOP_SIGNALS inside the block; yields a function that says whether one came.

    While `loses_nothing` says so, a signal ends the run at once. Python gives signals to the main
    thread alone, which may be in XLA for minutes; a thread then calls `end_process` (os._exit).
    A SIGHUP that is ignored (nohup) stays ignored. Outside of the main thread nothing is handled.
    Raises: EndedAtOnce inside the block, on a second signal, after `wait_s` seconds of host work,
        and where nothing is lost.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    received: list[str] = []
    overdue, closed = threading.Event(), threading.Event()
    main = threading.get_ident()
    terminals = [fd for fd in (1, 2) if _is_terminal(fd)]
    # The system writes the number of a signal here at once, whatever the main thread does.
    reader, writer = os.pipe()
    os.set_blocking(writer, False)

    def watch() -> None:
        while (number := os.read(reader, 1)[0]) not in handled:
            if not number:
                return  # the block has ended
        came = time.monotonic()
        while not closed.wait(POLL_S):
            waited = time.monotonic() - came
            if end_process is not None and waited > GRACE_S and loses_nothing():
                with suppress(OSError):
                    os.write(2, f"{_at_once(signal.Signals(number).name)}\n".encode())
                end_process(INTERRUPTED)
            if _host_work and waited > wait_s:
                overdue.set()
                # A real signal: only that wakes a main thread that waits for a lock.
                signal.pthread_kill(main, signal.SIGTERM)

    def on_signal(number: int, frame: Any) -> None:
        leave_closed_terminals(terminals)
        if overdue.is_set():
            overdue.clear()
            if _host_work:
                closed.set()
                raise EndedAtOnce(
                    f"ended inside a step: {wait_s:g} s after {received[0]} a reward function "
                    "or a tool was still running, or a save waited for room on the disk; the same "
                    "command goes on from the last checkpoint"
                )
            return
        received.append(signal.Signals(number).name)
        if len(received) > 1 or loses_nothing():
            closed.set()
            raise EndedAtOnce(
                _at_once(received[0])
                if len(received) == 1
                else f"ended inside a step by a second signal ({received[-1]}); the same command "
                "goes on from the last checkpoint"
            )

    handled = [s for s in STOP_SIGNALS if not _is_ignored_hangup(s)]
    previous = {number: signal.signal(number, on_signal) for number in handled}
    wakeup = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    thread = threading.Thread(target=watch, name="stop request", daemon=True)
    thread.start()
    try:
        yield lambda: bool(received)
    finally:
        closed.set()
        signal.set_wakeup_fd(wakeup)
        for number, handler in previous.items():
            signal.signal(number, handler)
        os.write(writer, b"\0")
        thread.join()
        os.close(reader)
        os.close(writer)


def _at_once(name: str) -> str:
    return f"ended by {name} before a step was done that is not saved; the same command goes on"


def leave_closed_terminals(descriptors: list[int]) -> None:
    """Send output to /dev/null where the terminal of a descriptor was closed.

    Otherwise the next progress line would raise an OSError before the run is saved.
    """
    for descriptor in descriptors:
        if not _is_terminal(descriptor):
            send_to_null(descriptor)


def send_to_null(descriptor: int) -> None:
    """Drop everything that is written to the descriptor from now on, without an error."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, descriptor)
    os.close(null)


def _is_terminal(descriptor: int) -> bool:
    try:
        return os.isatty(descriptor)
    except OSError:
        return False


def _is_ignored_hangup(number: signal.Signals) -> bool:
    return number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN
