"""Processes on the hosts of a Ray cluster: a real one of two nodes, on this machine."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tiny_run import REPOSITORY, TOTAL_STEPS, TinyRun, assert_same_bits

from jaxrl_llm.launch import ray as launcher

TRAIN = str(REPOSITORY / "scripts" / "train.py")
LOCAL = [sys.executable, "-m", "jaxrl_llm.launch.local", "--processes=2", "--", TRAIN]
WAIT_S = 300
KILLED_IN = 5

# ------------------------------------------------------------------------- without Ray


def node(gpus: int = 0, *, cpus: int = 8, alive: bool = True) -> dict[str, Any]:
    """As ray.nodes() shows one: a resource that it has none of is left out."""
    return {"Alive": alive, "Resources": {"CPU": cpus, **({"GPU": gpus} if gpus else {})}}


def test_an_address_without_a_cluster_is_refused_at_once(monkeypatch) -> None:
    """Ray itself would try for minutes."""
    monkeypatch.setitem(sys.modules, "ray", ModuleType("ray"))  # it is not used before that
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(ConnectionRefusedError):
        launcher.main(["--hosts=2", f"--address=127.0.0.1:{port}", "--", TRAIN])


@pytest.mark.parametrize(
    ("nodes", "hosts", "asked", "gpus"),
    [
        ([node(8), node(8)], 2, None, 8),
        ([node(8), node(4), node(2)], 2, None, 4),
        ([node(8), node(4)], 2, 3, 3),
        ([node(8), node(8)], 2, 0, 0),
        ([node(), node()], 2, None, 0),
        ([node(0, cpus=0), node(8)], 1, None, 8),  # a head node that runs no work
    ],
)
def test_each_host_gives_the_gpus_that_all_have(nodes, hosts, asked, gpus) -> None:
    assert launcher.gpus_of_hosts(nodes, hosts, asked) == gpus


@pytest.mark.parametrize(
    ("nodes", "asked", "message"),
    [
        ([node(8), node(8, alive=False)], None, "1 host is alive .* use --hosts=1"),
        ([node(8), node(cpus=0)], None, "1 host is alive"),
        ([node(8), node()], None, "1 host is alive with GPUs, of 2; .*--gpus_per_host=0"),
    ],
)
def test_too_few_hosts_are_refused_with_their_number(nodes, asked, message) -> None:
    with pytest.raises(ValueError, match=message):
        launcher.gpus_of_hosts(nodes, 2, asked)


# ------------------------------------------------------------------------- two nodes


NODE = {"num_cpus": 1, "object_store_memory": 80 * 2**20}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A cluster of two nodes."""
    pytest.importorskip("ray", reason="needs the extra ray")
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args=NODE | {"include_dashboard": False})
    try:
        cluster.add_node(**NODE)
        yield cluster
    finally:
        cluster.shutdown()


@pytest.fixture
def address(cluster: Any) -> str:
    return cluster.address


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    """A run of two processes that the local launcher started and nothing stopped."""
    run = TinyRun(tmp_path_factory.mktemp("whole"))
    run.finish(launcher=LOCAL)
    return run


def ray_launcher(address: str, *flags: str) -> list[str]:
    return [
        *(sys.executable, "-m", "jaxrl_llm.launch.ray", f"--address={address}", "--hosts=2"),
        *(*flags, "--", TRAIN),
    ]


def processes(run: TinyRun) -> list[int]:
    """The processes that train `run`, in the order of their ranks, without the launcher."""
    found: dict[str, int] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes().decode().split("\0")
            environment = (folder / "environ").read_bytes().decode().split("\0")
        except OSError:
            continue  # it has ended
        if TRAIN in command[1:2] and run.arguments[1] in command:
            rank = next(v for v in environment if v.startswith("JAXRL_PROCESS_ID="))
            found[rank] = int(folder.name)
    return [found[rank] for rank in sorted(found)]


def wait_until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.1)


@pytest.mark.slow
def test_a_run_has_the_metrics_of_the_local_launcher(
    address: str, whole: TinyRun, tmp_path: Path
) -> None:
    run = TinyRun(tmp_path)
    output = run.finish(launcher=ray_launcher(address))
    assert run.metrics() == whole.metrics()
    assert_same_bits(run.weights(TOTAL_STEPS), whole.weights(TOTAL_STEPS))
    assert f"[0] step {TOTAL_STEPS}/{TOTAL_STEPS}" in output


@pytest.mark.slow
def test_a_killed_rank_starts_again_with_the_same_bits(
    address: str, whole: TinyRun, tmp_path: Path
) -> None:
    run = TinyRun(tmp_path)
    run.pause_at(KILLED_IN)
    with run.process(launcher=ray_launcher(address, "--restarts=2")) as process:
        run.wait_for(run.paused, process)
        os.kill(processes(run)[1], signal.SIGKILL)
        run.unpause()
        assert process.wait(WAIT_S) == 0
    output = (tmp_path / "log.txt").read_text()
    assert "exit code 137; restart 1 of 2 in 1 s" in output
    assert f"resumed from {run.step_path(KILLED_IN - 1)}" in output
    assert run.metrics() == whole.metrics()
    assert_same_bits(run.weights(TOTAL_STEPS), whole.weights(TOTAL_STEPS))


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_is_asked_to_end_saves(address: str, tmp_path: Path, number: int) -> None:
    run = TinyRun(tmp_path)
    run.pause_at(KILLED_IN)
    with run.process(launcher=ray_launcher(address, "--restarts=2")) as process:
        run.wait_for(run.paused, process)
        process.send_signal(number)
        time.sleep(2)
        run.unpause()
        assert process.wait(WAIT_S) == 130
    assert run.saved_steps()[-1] == KILLED_IN
    assert "restart" not in (tmp_path / "log.txt").read_text()


@pytest.mark.slow
def test_a_killed_launcher_leaves_nothing_behind(address: str, tmp_path: Path) -> None:
    run = TinyRun(tmp_path)
    run.pause_at(KILLED_IN)
    with run.process(launcher=ray_launcher(address)) as process:
        run.wait_for(run.paused, process)
        assert len(processes(run)) == 2
        process.kill()
        wait_until(lambda: not processes(run), "processes end")
    wait_until(lambda: placement_groups(address) == {"REMOVED"}, "placement groups are removed")


@pytest.mark.slow
def test_a_run_goes_on_with_the_host_that_is_left(cluster: Any, tmp_path: Path) -> None:
    """Last of the tests: the cluster has one node less."""
    run = TinyRun(tmp_path)
    run.pause_at(KILLED_IN)
    flags = ("--restarts=2", "--min_hosts=1", "--replace_s=5")
    with run.process(launcher=ray_launcher(cluster.address, *flags)) as process:
        run.wait_for(run.paused, process)
        cluster.remove_node(next(iter(cluster.worker_nodes)))
        run.unpause()
        assert process.wait(WAIT_S) == 0, (tmp_path / "log.txt").read_text()
    output = (tmp_path / "log.txt").read_text()
    assert "a host is lost: the run goes on with 1" in output
    assert f"resumed from {run.step_path(KILLED_IN - 1)}" in output
    assert list(run.metrics()) == list(range(TOTAL_STEPS + 1))


def placement_groups(address: str) -> set[str]:
    """The states of all placement groups that the cluster ever had."""
    program = (
        "import json, ray, sys\n"
        "ray.init(sys.argv[1], log_to_driver=False)\n"
        "table = ray.util.placement_group_table()\n"
        "print(json.dumps([group['state'] for group in table.values()]))\n"
    )
    command = [sys.executable, "-c", program, address]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return set(json.loads(result.stdout.splitlines()[-1]))


@pytest.mark.slow
def test_mistakes_end_with_2_and_are_not_started_again(address: str, tmp_path: Path) -> None:
    run = TinyRun(tmp_path)
    launch = ray_launcher(address, "--restarts=2")
    output = run.finish("--config.total_stepz=3", launcher=launch, code=2)
    assert "did you mean 'config.total_steps'?" in output
    assert "restart" not in output
    output = run.finish(launcher=[*launch[:3], "--hosts=3", *launch[3:4], "--", TRAIN], code=2)
    assert "--hosts=3: 2 hosts are alive in the Ray cluster" in output
    assert "Traceback" not in output


WAITS = """
import os, sys, time
from pathlib import Path
print("runs", flush=True)
while not Path(sys.argv[1]).exists():
    time.sleep(0.1)
"""


@pytest.mark.slow
def test_another_host_takes_the_place_of_a_lost_one(cluster: Any, tmp_path: Path) -> None:
    """The last test of the cluster: it takes a node away and adds one."""
    program, end, log = tmp_path / "waits.py", tmp_path / "end", tmp_path / "log.txt"
    program.write_text(WAITS)
    command = [*ray_launcher(cluster.address, "--restarts=1")[:-1], str(program), str(end)]
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file)
    try:
        wait_until(lambda: log.read_text().count("runs") == 2, "both start")
        cluster.add_node(**NODE)
        (lost, *_) = cluster.worker_nodes
        cluster.remove_node(lost, allow_graceful=False)
        wait_until(lambda: log.read_text().count("runs") == 4, "both start again")
        end.touch()
        assert process.wait(WAIT_S) == 0
    finally:
        process.kill()
    assert "or its Ray actor was lost" in log.read_text()
    assert "exit code 137; restart 1 of 1 in 1 s" in log.read_text()
