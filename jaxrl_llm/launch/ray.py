"""One process a host of a Ray cluster, joined by jax.distributed.

    python -m jaxrl_llm.launch.ray --hosts=2 -- scripts/train.py --config=configs/ppo.py

Needs the extra `ray`. The cluster must run: `ray start`, or `ray job submit` on an existing one.
Each process gets --gpus_per_host GPUs; by default as many as so many hosts have. Lines of output,
failures, --restarts and signals are as in launch/local.py. With --min_hosts=N the run goes on with
fewer hosts where no other one takes the place of a lost one. docs/clusters.md explains the rest.
"""

# To pyright an `import ray` in this folder looks like this file.
# pyright: reportAttributeAccessIssue=false
import argparse
import logging
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from jaxrl_llm.launch.command_line import count
from jaxrl_llm.launch.process_group import Members, read_arguments, run_again

REACH_S = 5.0  # for the first contact with a cluster


def main(argv: Sequence[str] | None = None) -> int:
    """Read the arguments, connect to the cluster, run the processes, and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m jaxrl_llm.launch.ray",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--hosts", type=count, required=True)
    parser.add_argument("--gpus_per_host", type=int, help="0 is for CPUs; all GPUs by default")
    parser.add_argument("--address", default="auto", help="of the cluster; by default this host's")
    parser.add_argument(
        "--min_hosts", type=count, help="fewest to go on with after a loss; default: all"
    )
    parser.add_argument(
        "--replace_s", type=count, default=600, help="wait for a host in place of a lost one"
    )
    arguments = read_arguments(parser, argv)
    least = min(arguments.min_hosts or arguments.hosts, arguments.hosts)
    # Which host a process gets is Ray's choice.
    members = Members(numbers=list(range(arguments.hosts)), least=least, by_failures=False)
    import ray  # pyright: ignore[reportMissingImports]

    _reach(arguments.address)
    with ExitStack() as stack:
        ray.init(arguments.address, log_to_driver=False, logging_level=logging.WARNING)
        stack.callback(ray.shutdown)
        try:
            gpus = gpus_of_hosts(ray.nodes(), arguments.hosts, arguments.gpus_per_host)
        except ValueError as error:
            parser.error(str(error))
        from jaxrl_llm.launch.ray_hosts import RayHosts

        hosts = RayHosts(members, gpus, arguments.replace_s)
        stack.callback(hosts.give_back)
        return run_again(partial(hosts.start, arguments.command), arguments.restarts, members)


def _reach(address: str) -> None:
    """Raises OSError when nothing listens at host:port. Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    if host and port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), timeout=REACH_S).close()


def gpus_of_hosts(nodes: Sequence[Mapping[str, Any]], hosts: int, asked: int | None) -> int:
    """GPUs for the process of a host: `asked`, or as many as `hosts` of the `nodes` all have.

    `nodes` is what ray.nodes() returns.

    Raises: ValueError when there are too few hosts; it says how many are alive.
    """
    alive = [node["Resources"] for node in nodes if node["Alive"]]
    # A head node that runs no work has no CPUs.
    able = sorted((int(n.get("GPU", 0)) for n in alive if n.get("CPU", 0) >= 1), reverse=True)
    if len(able) < hosts:
        raise ValueError(
            f"--hosts={hosts}: {_hosts(len(able))} alive in the Ray cluster; add hosts with "
            f"`ray start --address=HOST:6379`, or use --hosts={len(able)}"
        )
    gpus = able[hosts - 1] if asked is None else asked
    if asked is None and not gpus and able[0]:  # it would train on CPUs
        raise ValueError(
            f"--hosts={hosts}: {_hosts(sum(map(bool, able)))} alive with GPUs, of {len(able)}; "
            "use fewer hosts, or --gpus_per_host=0 to train on CPUs"
        )
    return gpus


def _hosts(number: int) -> str:
    return f"{number} host is" if number == 1 else f"{number} hosts are"


if __name__ == "__main__":
    sys.exit(main())
