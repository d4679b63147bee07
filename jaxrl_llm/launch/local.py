"""Several processes of one program on this machine, joined by jax.distributed over loopback.

    python -m jaxrl_llm.launch.local --processes=2 -- scripts/train.py --config=configs/ppo.py

Each line of output begins with the number of its process. When one process fails, the launcher
ends the others and returns its exit code. With --restarts=N it then starts all of them again, at
most N times; the run goes on from its last checkpoint. Ctrl-C, SIGTERM, SIGHUP and SIGUSR1 are
passed on to every process; a second signal kills them. On a machine with GPUs each process gets an
equal share of them, or as many as --devices-per-process says. On a CPU each process gets one
device, or as many as --devices-per-process says.
"""

import argparse
import ctypes
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import IO

from jaxrl_llm.config.times import STARTED
from jaxrl_llm.launch.runtime import (
    COORDINATOR,
    INTERRUPTED,
    NUM_PROCESSES,
    PROCESS_ID,
    USER_ERROR,
    visible_gpus,
)
from jaxrl_llm.trainer.signals import STOP_SIGNALS, leave_closed_terminals

GRACE_S = 10.0  # after a failure: time for the other processes to end before they are killed
POLL_S = 0.05
WAIT_S = 1.0  # before a restart; twice as long after each failure in a row after the same step
SAME_STEP = 5  # so many of these, and the step is the cause
STEP = re.compile(rb"step (\d+)/")  # begins the line of a step

_PR_SET_PDEATHSIG = 1  # Linux prctl: send a signal to the child when its parent dies


def main(argv: Sequence[str] | None = None) -> int:
    """Read the arguments, run the processes, and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m jaxrl_llm.launch.local",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--processes", type=int, required=True)
    parser.add_argument("--devices-per-process", type=int, default=0, help="0 shares GPUs equally")
    parser.add_argument("--restarts", type=int, default=0, help="after a failure, at most so many")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="-- script.py and its arguments")
    arguments = parser.parse_args(argv)
    command = arguments.command[1:] if arguments.command[:1] == ["--"] else arguments.command
    if not command:
        parser.error("the program is missing: … --processes=2 -- scripts/train.py --config=…")
    if arguments.processes < 1:
        parser.error(f"--processes={arguments.processes}: must be 1 or more")
    if arguments.restarts < 0:
        parser.error(f"--restarts={arguments.restarts}: must be 0 or more")
    if command[0].endswith(".py") and not Path(command[0]).is_file():
        parser.error(f"{command[0]} does not exist")
    number, devices = arguments.processes, arguments.devices_per_process

    own = {STARTED: str(time.time()), **os.environ}

    def environments() -> list[dict[str, str]]:
        """With a port that is free now."""
        return process_environments(number, devices, own, visible_gpus())

    try:
        environments()
    except ValueError as error:
        parser.error(str(error))
    return run_again([sys.executable, *command], environments, arguments.restarts)


@dataclass
class Progress:
    """What is known of a gang while it runs."""

    received: list[int] = field(default_factory=list)  # signals that ask it to end
    step: int | None = None  # the last one that a process reported


def run_again(
    command: Sequence[str], environments: Callable[[], list[dict[str, str]]], restarts: int
) -> int:
    """`run_gang`, again after a failure; returns the last exit code.

    It is not started again after a mistake of the user, after a signal that asked it to end, after
    `restarts` times, or when it failed SAME_STEP times in a row after the same step.
    """
    failed_after: list[int | None] = []
    while True:
        progress = Progress()
        code = run_gang(command, environments(), progress)
        failed_after.append(progress.step)
        tries = len(failed_after)
        if code in (0, USER_ERROR, INTERRUPTED) or progress.received or tries > restarts:
            return code
        others = (n for n, step in enumerate(reversed(failed_after)) if step != progress.step)
        same = next(others, tries)  # failures in a row after this step
        if same == SAME_STEP:
            where = "its first step" if progress.step is None else f"step {progress.step + 1}"
            print(f"not started again: it failed {same} times in {where}", file=sys.stderr)
            return code
        wait_s = WAIT_S * 2 ** (same - 1)
        print(
            f"exit code {code}; restart {tries} of {restarts} in {wait_s:g} s",
            file=sys.stderr,
            flush=True,
        )
        time.sleep(wait_s)


def process_environments(
    processes: int, devices_per_process: int, environment: dict[str, str], gpus: Sequence[str]
) -> list[dict[str, str]]:
    """The environment of each process; `gpus` are the ids to share, empty on a CPU machine.

    Raises: ValueError when there are fewer GPUs than the processes need.
    """
    use_gpus = bool(gpus) and environment.get("JAX_PLATFORMS", "").lower() != "cpu"
    each = devices_per_process or (max(1, len(gpus) // processes) if use_gpus else 1)
    if use_gpus and each * processes > len(gpus):
        raise ValueError(
            f"{processes} processes with {each} GPUs each need {each * processes}, but there are "
            f"{len(gpus)}; use --processes={max(1, len(gpus) // each)}, or JAX_PLATFORMS=cpu"
        )
    # A number of CPU devices in XLA_FLAGS would override ours.
    flags = environment.get("XLA_FLAGS", "")
    flags = re.sub(r"--xla_force_host_platform_device_count=\S+", "", flags).strip()
    shared = {
        **environment,
        "XLA_FLAGS": flags,
        COORDINATOR: f"127.0.0.1:{free_port()}",
        NUM_PROCESSES: str(processes),
        "PYTHONUNBUFFERED": "1",
    }
    result = []
    for rank in range(processes):
        own = {**shared, PROCESS_ID: str(rank)}
        if use_gpus:
            own["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[rank * each : (rank + 1) * each])
        else:
            own["JAX_NUM_CPU_DEVICES"] = str(each)
        result.append(own)
    return result


def free_port() -> int:
    """A free TCP port of the loopback interface."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run_gang(
    command: Sequence[str], environments: Sequence[dict[str, str]], progress: Progress
) -> int:
    """Run `command` once in each environment; returns 0, or the exit code of the first failure.

    A process that signal n ended counts as 128 + n, as in a shell.
    """
    processes: list[subprocess.Popen[bytes]] = []
    readers: list[threading.Thread] = []
    received = progress.received
    lock = threading.Lock()

    def forward(number: int, _: FrameType | None) -> None:
        leave_closed_terminals(terminals)
        received.append(number)
        signal_all(processes, number if len(received) == 1 else signal.SIGKILL)

    terminals = [fd for fd in (1, 2) if os.isatty(fd)]
    ignored = [s for s in STOP_SIGNALS if signal.getsignal(s) == signal.SIG_IGN]  # nohup
    previous = {s: signal.signal(s, forward) for s in STOP_SIGNALS if s not in ignored}
    try:
        for environment in environments:
            process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                # A group of its own: Ctrl-C arrives once, through `forward`.
                start_new_session=True,
                preexec_fn=_die_with_parent if sys.platform == "linux" else None,
            )
            processes.append(process)
        # Threads start after the last fork: a fork copies no thread, but it copies their locks.
        for rank, process in enumerate(processes):
            for source, target in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
                assert source is not None
                reader = threading.Thread(
                    target=_copy_lines, args=(rank, source, target, lock, progress)
                )
                reader.start()
                readers.append(reader)
        return _wait(processes, received)
    finally:
        signal_all(processes, signal.SIGKILL)
        for reader in readers:
            reader.join()
        for number, handler in previous.items():
            signal.signal(number, handler)


def _wait(processes: Sequence[subprocess.Popen[bytes]], received: Sequence[int]) -> int:
    """Wait for all processes. After the first failure, end the others and return its code."""
    first_failure = 0
    deadline = float("inf")
    while True:
        codes = [process.poll() for process in processes]
        if not first_failure and any(codes):
            first_failure = next(code for code in codes if code)
            if not received:  # after a signal the others are already ending and may be saving
                signal_all(processes, signal.SIGTERM)
                deadline = time.monotonic() + GRACE_S
        if None not in codes:
            return first_failure if first_failure >= 0 else 128 - first_failure
        if time.monotonic() > deadline:
            signal_all(processes, signal.SIGKILL)
        time.sleep(POLL_S)


def signal_all(processes: Sequence[subprocess.Popen[bytes]], number: int) -> None:
    """Send a signal to the group of every process that still runs."""
    for process in processes:
        if process.poll() is None:
            try:
                os.killpg(process.pid, number)
            except ProcessLookupError:
                pass  # it ended between the two calls


def _copy_lines(
    rank: int, source: IO[bytes], target: IO[str], lock: threading.Lock, progress: Progress
) -> None:
    for line in source:
        with lock:
            if found := STEP.match(line):
                progress.step = int(found[1])
            target.write(f"[{rank}] {line.decode(errors='replace').rstrip()}\n")
            target.flush()


def _die_with_parent() -> None:
    # Runs in the child before its program: a killed launcher must not leave processes behind.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
