"""Several processes of one program on this machine, joined by jax.distributed over loopback.

    python -m jaxrl_llm.launch.local --processes=2 -- scripts/train.py --config=configs/ppo.py

Each line of output begins with the number of its process. When one process fails, the launcher
ends the others and returns its exit code. With --restarts=N it then starts all of them again, at
most N times; the run goes on from its last checkpoint. Ctrl-C, SIGTERM, SIGHUP and SIGUSR1 are
passed on to every process; a second signal kills them. On a machine with GPUs each process gets an
equal share of them, or as many as --devices-per-process says. On a CPU each process gets one
device, or as many as --devices-per-process says.

With --min-processes=N a process that is lost for good does not end the run: it goes on with those
that are left, down to N, on a mesh that the planner chooses. A process is lost when it fails first
in two starts in a row, in the second before a step.
"""

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from functools import partial

from jaxrl_llm.launch.command_line import count
from jaxrl_llm.launch.process_group import (
    Members,
    Output,
    free_port,
    read_arguments,
    read_lines,
    run_again,
    shared_environment,
    signal_process,
    start_process,
)
from jaxrl_llm.launch.runtime import PROCESS_ID, visible_gpus


def main(argv: Sequence[str] | None = None) -> int:
    """Read the arguments, run the processes, and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m jaxrl_llm.launch.local",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--processes", type=count, required=True)
    parser.add_argument(
        "--devices-per-process", type=count, default=0, help="GPUs shared equally without it"
    )
    parser.add_argument(
        "--min-processes", type=count, help="fewest to go on with after a loss; default: all"
    )
    arguments = read_arguments(parser, argv)
    number, devices = arguments.processes, arguments.devices_per_process
    members = Members(
        numbers=list(range(number)), least=min(arguments.min_processes or number, number)
    )

    def environments() -> list[dict[str, str]]:
        """With a port that is free now."""
        every = process_environments(number, devices, dict(os.environ), visible_gpus())
        return [
            every[each] | members.environment | {PROCESS_ID: str(rank)}
            for rank, each in enumerate(members.numbers)
        ]

    try:
        environments()
    except ValueError as error:
        parser.error(str(error))
    return run_again(
        lambda output, _: LocalProcesses(arguments.command, environments(), output),
        arguments.restarts,
        members,
    )


class LocalProcesses:
    """Processes of this machine, one in each environment."""

    def __init__(
        self, command: Sequence[str], environments: Sequence[dict[str, str]], output: Output
    ) -> None:
        self._processes = [start_process(command, environment) for environment in environments]
        # Threads start after the last fork: a fork copies no thread, but it copies their locks.
        self._readers = [
            reader
            for rank, process in enumerate(self._processes)
            for reader in read_lines(process, partial(output.line, rank))
        ]

    def codes(self) -> list[int | None]:
        """Exit codes; None while a process runs."""
        return [process.poll() for process in self._processes]

    def signal(self, number: int) -> None:
        """Send a signal to the group of every process that still runs."""
        for process in self._processes:
            signal_process(process, number)

    def close(self) -> None:
        """Kill what still runs, and wait for the last lines."""
        self.signal(signal.SIGKILL)
        for reader in self._readers:
            reader.join()


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
    shared = shared_environment(environment, f"127.0.0.1:{free_port()}", processes)
    environments = []
    for rank in range(processes):
        numbered = {**shared, PROCESS_ID: str(rank)}
        if use_gpus:
            numbered["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[rank * each : (rank + 1) * each])
        else:
            numbered["JAX_NUM_CPU_DEVICES"] = str(each)
        environments.append(numbered)
    return environments


if __name__ == "__main__":
    sys.exit(main())
