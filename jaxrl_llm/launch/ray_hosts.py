"""Processes on the hosts of a Ray cluster: an actor runs each, and the launcher follows it.

Only launch/ray.py imports this file, because only it needs Ray.
"""

import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# An `import ray` in this folder looks like ray.py of it to pyright.
# pyright: reportAttributeAccessIssue=false
import ray  # pyright: ignore[reportMissingImports]
from ray.exceptions import RayError  # pyright: ignore[reportMissingImports]
from ray.util.scheduling_strategies import (  # pyright: ignore[reportMissingImports]
    PlacementGroupSchedulingStrategy,
)

from jaxrl_llm.launch.exits import USER_ERROR
from jaxrl_llm.launch.process_group import (
    Members,
    NotStarted,
    Output,
    free_port,
    read_lines,
    shared_environment,
    signal_process,
    start_process,
)
from jaxrl_llm.launch.runtime import PROCESS_ID

# What the processes get of the launcher's environment: variables that begin with these.
PASSED = ("JAX", "XLA_", "NCCL_", "HF_", "TF_CPP_")
# Ray gives it to its workers: one thread, unless an actor asks for more CPUs.
_OF_RAY = "OMP_NUM_THREADS"

PLACE_S = 60.0  # until the hosts are free, and until they answer
RETRY_S = 2.0
LINES_WAIT_S = 1.0
MOST_LINES = 1000  # in one message
KILL_S = 5.0  # until the hosts have killed their processes; then Ray kills both


class Host:
    """The actor of a host: it runs one process there. The launcher calls its methods.

    Ray ends the actor when the launcher ends, in whatever way, and the process dies with it.
    """

    def __init__(self) -> None:
        self._lines: queue.SimpleQueue[tuple[bytes, bool] | int] = queue.SimpleQueue()
        self._process: subprocess.Popen[bytes] | None = None
        self._started = threading.Event()

    def describe(self, folder: str | None) -> tuple[str, int, str]:
        """Address of the host, a port that is free there, and what is wrong with it, if anything.

        `folder` is where the process will run; None is the actor's own, a copy that Ray made.
        """
        address, wrong = ray.util.get_node_ip_address(), ""
        if folder is not None and not Path(folder).is_dir():
            wrong = f"{socket.gethostname()} has no folder {folder}"
        return address, free_port(address), wrong

    def start(
        self, command: Sequence[str], environment: Mapping[str, str], folder: str | None
    ) -> None:
        """Start the process, and return."""
        # The process dies with the thread that starts it. A thread of Ray's may end earlier.
        threading.Thread(target=self._run, args=(command, environment, folder)).start()

    def _run(
        self, command: Sequence[str], environment: Mapping[str, str], folder: str | None
    ) -> None:
        inherited = {name: value for name, value in os.environ.items() if name != _OF_RAY}
        where = None if folder is None else Path(folder)
        try:
            self._process = start_process(command, {**inherited, **environment}, where)
        except OSError as error:
            self._lines.put((str(error).encode(), True))
            self._lines.put(1)
            return
        finally:
            self._started.set()
        readers = read_lines(
            self._process, lambda line, is_error: self._lines.put((line, is_error))
        )
        code = self._process.wait()
        for reader in readers:
            reader.join()
        self._lines.put(code)

    def lines(self) -> list[tuple[bytes, bool] | int]:
        """The next lines, each with whether it came from stderr; the exit code ends them.

        It waits at most LINES_WAIT_S for a line.
        """
        lines: list[tuple[bytes, bool] | int] = []
        try:
            lines.append(self._lines.get(timeout=LINES_WAIT_S))
            while len(lines) < MOST_LINES:
                lines.append(self._lines.get_nowait())
        except queue.Empty:
            pass
        return lines

    def signal(self, number: int) -> None:
        """Send a signal to the process, if it still runs."""
        self._started.wait()
        if self._process is not None:
            signal_process(self._process, number)


# ------------------------------------------------------------------------- in the launcher


@dataclass
class RayHosts:
    """Different hosts, one for each process, which the launcher keeps from start to start.

    Where a host is lost and no other one takes its place in `replace_s`, those that are left go on,
    if `members` allows so few.
    """

    members: Members
    gpus: int
    replace_s: float
    _started: bool = False
    _group: Any = None  # Ray's placement group, of as many hosts as `_reserved`
    _reserved: int = 0

    @property
    def hosts(self) -> int:
        return len(self.members.numbers)

    def start(
        self, command: Sequence[str], output: Output, received: Sequence[int]
    ) -> "RayProcesses":
        """Start `command` on every host. It goes on until a signal is in `received`.

        Raises: NotStarted when the hosts are not free in time, or cannot run it.
        """
        first, seconds = not self._started, self.replace_s if self._started else PLACE_S
        for _ in _seconds(seconds, received):
            self._wait_until_free(seconds, received)
            actors = [self._actor(rank) for rank in range(self.hosts)]
            try:
                return self._start_on(actors, command, output, received, seconds)
            except NotStarted:
                _end(actors)  # the next start needs their places
                raise
            except RayError as error:
                _end(actors)
                # Ray may not have noticed yet that the host of the last failure is lost.
                if first:
                    why = f"a host cannot run the process; is jaxrl_llm installed there? {error}"
                    raise NotStarted(why, USER_ERROR) from None
                time.sleep(RETRY_S)
        raise NotStarted(f"the Ray cluster lost hosts and did not replace them in {seconds:g} s")

    def _start_on(
        self,
        actors: Sequence[Any],
        command: Sequence[str],
        output: Output,
        received: Sequence[int],
        seconds: float,
    ) -> "RayProcesses":
        folder = None if ray.get_runtime_context().runtime_env.get("working_dir") else os.getcwd()
        calls = [actor.describe.remote(folder) for actor in actors]
        answers = _answers(calls, seconds, received)
        if wrong := [message for _, _, message in answers if message]:
            raise NotStarted(
                f"{'; '.join(wrong)}: start this in a folder that all hosts have mounted, or by "
                "`ray job submit --working-dir=.`, which copies it",
                USER_ERROR,
            )
        address, port, _ = answers[0]
        shared = self._environment(f"[{address}]:{port}" if ":" in address else f"{address}:{port}")
        self._started = True
        for rank, actor in enumerate(actors):
            actor.start.remote(command, {**shared, PROCESS_ID: str(rank)}, folder)
        return RayProcesses(actors, [address for address, _, _ in answers], output)

    def give_back(self) -> None:
        """Give the hosts back."""
        if self._group is not None:
            ray.util.remove_placement_group(self._group)

    def _wait_until_free(self, seconds: float, received: Sequence[int]) -> None:
        while True:
            self._reserve()
            for _ in _seconds(seconds, received):
                if self._group.wait(1):
                    return
            if not self._started or not self.members.lose(self.members.numbers[-1]):
                raise NotStarted(
                    f"the Ray cluster did not have {self.hosts} hosts with {self.gpus} free GPUs "
                    f"each within {seconds:g} s; `ray status` shows who uses them"
                )
            print(f"a host is lost: the run goes on with {self.hosts}", file=sys.stderr, flush=True)
            seconds = PLACE_S

    def _reserve(self) -> None:
        """Ask Ray for the hosts, unless it has been asked for so many."""
        if self._reserved == self.hosts:
            return
        self.give_back()
        bundle = {"CPU": 1.0} | ({"GPU": float(self.gpus)} if self.gpus else {})
        self._group = ray.util.placement_group([bundle] * self.hosts, strategy="STRICT_SPREAD")
        self._reserved = self.hosts

    def _actor(self, rank: int) -> Any:
        strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=rank)
        options = {"num_cpus": 1, "num_gpus": self.gpus, "scheduling_strategy": strategy}
        # `lines` waits, and a signal must not wait for it.
        return ray.remote(Host).options(max_concurrency=4, **options).remote()

    def _environment(self, coordinator: str) -> dict[str, str]:
        """Variables of the processes, in addition to Ray's environment on their hosts."""
        variables = {name: value for name, value in os.environ.items() if name.startswith(PASSED)}
        if not self.gpus:
            variables |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}
        return shared_environment(variables, coordinator, self.hosts) | self.members.environment


def _seconds(number: float, received: Sequence[int]) -> Iterator[int]:
    """Counts the seconds of a wait. Raises NotStarted as soon as a signal was received."""
    for second in range(int(number)):
        if received:
            raise NotStarted("ended before the processes were started")
        yield second


def _answers(calls: list[Any], seconds: float, received: Sequence[int]) -> list[Any]:
    """The results of the calls. Raises NotStarted when one does not come in time, or RayError."""
    for _ in _seconds(seconds, received):
        ready, _ = ray.wait(calls, num_returns=len(calls), timeout=1)
        if len(ready) == len(calls):
            break
    else:
        raise NotStarted(f"a host of the Ray cluster did not answer within {seconds:g} s")
    return ray.get(calls)


def _end(actors: Sequence[Any]) -> None:
    for actor in actors:
        ray.kill(actor)


@dataclass
class RayProcesses:
    """The processes of one start, each run by the actor of its host."""

    actors: Sequence[Any]
    addresses: Sequence[str]
    output: Output
    _codes: list[int | None] = field(init=False)
    _lines: list[Any] = field(init=False)  # the pending call of each actor

    def __post_init__(self) -> None:
        self._codes = [None] * len(self.actors)
        self._lines = [actor.lines.remote() for actor in self.actors]

    def codes(self) -> list[int | None]:
        """Print the lines that came; exit codes, None while a process runs."""
        pending = [
            call for call, code in zip(self._lines, self._codes, strict=True) if code is None
        ]
        ready, _ = ray.wait(pending, num_returns=len(pending), timeout=0) if pending else ([], [])
        for call in ready:
            self._take(self._lines.index(call), call)
        return list(self._codes)

    def _take(self, rank: int, call: Any) -> None:
        """Print the lines of a call that is ready, and call again."""
        try:
            lines = ray.get(call)
        except RayError as error:
            reason = str(error).splitlines()[0]
            text = f"host {self.addresses[rank]} or its Ray actor was lost: {reason}"
            self.output.line(rank, text.encode(), is_error=True)
            self._codes[rank] = -signal.SIGKILL
            return
        for item in lines:
            if isinstance(item, int):
                self._codes[rank] = item
            else:
                self.output.line(rank, *item)
        if self._codes[rank] is None:
            self._lines[rank] = self.actors[rank].lines.remote()

    def signal(self, number: int) -> None:
        """Send a signal to each process that runs."""
        for actor, code in zip(self.actors, self._codes, strict=True):
            if code is None:
                actor.signal.remote(number)

    def close(self) -> None:
        """Kill what still runs, and end the actors."""
        running = [a for a, code in zip(self.actors, self._codes, strict=True) if code is None]
        killed = [actor.signal.remote(signal.SIGKILL) for actor in running]
        if killed:
            ray.wait(killed, num_returns=len(killed), timeout=KILL_S)
        self.codes()
        _end(self.actors)
