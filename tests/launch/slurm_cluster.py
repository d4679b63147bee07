"""A real Slurm of two nodes on this machine: munged, slurmctld and two slurmd, in one folder.

Debian has them as `apt-get install slurmctld slurmd slurm-client munge`.
"""

import contextlib
import os
import pwd
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "scancel", "squeue")
WAIT_S = 180
PREEMPTED = "high"  # a job of this partition takes the nodes of one of the default partition

_CONFIG = """
ClusterName=here
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
SlurmctldPort={control}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdSpoolDir={folder}/spool-%n
StateSaveLocation={folder}/state
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MailProg=/bin/true
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName={host} NodeHostname={host} NodeAddr=127.0.0.1 Port={first} CPUs=2
NodeName={host}-second NodeHostname={host} NodeAddr=127.0.0.1 Port={second} CPUs=2
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 GraceTime=120
PartitionName=high Nodes=ALL PriorityTier=10 PreemptMode=OFF
"""


def missing_programs() -> list[str]:
    """The programs of Slurm that are not installed here."""
    path = os.environ["PATH"] + ":/usr/sbin"
    return [name for name in PROGRAMS if shutil.which(name, path=path) is None]


class Slurm:
    """Talks to the cluster whose configuration is `config`."""

    def __init__(self, config: Path) -> None:
        self._environment = {**os.environ, "SLURM_CONF": str(config)}

    def __call__(self, *command: str) -> str:
        """The output of a command of Slurm. Raises CalledProcessError."""
        return subprocess.run(
            command, env=self._environment, check=True, stdout=subprocess.PIPE, text=True
        ).stdout.strip()

    def job(self, number: str) -> dict[str, str]:
        """What `scontrol show job` says of a job."""
        words = self("scontrol", "show", "job", number).split()
        return {name: value for name, _, value in (word.partition("=") for word in words)}

    def wait(self, condition: Callable[[], object], what: str) -> None:
        """Wait until `condition` holds. Raises TimeoutError."""
        deadline = time.monotonic() + WAIT_S
        while not condition():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{what} did not happen within {WAIT_S} s")
            time.sleep(0.2)


@contextlib.contextmanager
def slurm_cluster(folder: Path) -> Iterator[Slurm]:
    """Start the daemons in `folder`, and end them."""
    host, user = socket.gethostname(), pwd.getpwuid(os.getuid()).pw_name
    (folder / "state").mkdir()
    for node in (host, f"{host}-second"):
        (folder / f"spool-{node}").mkdir()
    key = folder / "munge.key"
    key.touch(mode=0o600)
    key.write_bytes(secrets.token_bytes(128))
    config = folder / "slurm.conf"
    control, first, second = _free_ports(3)
    config.write_text(
        _CONFIG.format(
            folder=folder, host=host, user=user, control=control, first=first, second=second
        )
    )
    environment = {**os.environ, "SLURM_CONF": str(config)}
    environment["PATH"] += ":/usr/sbin"
    names = {name: f"--{name}={folder}/munge.{name}" for name in ("socket", "pid-file", "log-file")}
    daemons = [
        ["munged", "--foreground", "--force", f"--key-file={key}", *names.values()],
        ["slurmctld", "-D", "-i"],
        ["slurmd", "-D", "-N", host],
        ["slurmd", "-D", "-N", f"{host}-second"],
    ]
    with contextlib.ExitStack() as stack:
        log = stack.enter_context(open(folder / "daemons.log", "w"))
        for command in daemons:
            process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
            stack.callback(_end, process)
            time.sleep(0.5)
        slurm = Slurm(config)
        slurm.wait(
            lambda: slurm("sinfo", "-h", "-t", "idle", "-p", "low", "-o", "%D") == "2", "two nodes"
        )
        stack.callback(slurm, "scancel", f"--user={user}")
        yield slurm


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _free_ports(number: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(number)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports
