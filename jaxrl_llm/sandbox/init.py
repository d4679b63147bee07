"""The first process of a sandbox: it runs programs one after the other and reports how each ended.

`box.py` starts it. Inside the namespaces it is process 1: programs cannot signal it, and when it
ends, the kernel ends all of them. Programs have no handle of its pipe to the caller.
"""

import fcntl
import json
import os
import resource
import select
import signal
import tempfile
import time
from typing import Any, NoReturn

from jaxrl_llm.sandbox import namespaces, processes, seccomp

RESULT, CHANNEL = 3, 4  # the descriptors of a program beyond the usual three
OPEN_FILES = 64
STACK = 64 * 2**20  # bytes
ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",  # the order of a set is the same each time
    "PYTHONDONTWRITEBYTECODE": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
}


def main(settings: dict[str, Any]) -> NoReturn:
    """Isolate, fork process 1, and wait for it. A refusal is reported on the control pipe."""
    control = os.fdopen(settings["control"], "r+b", buffering=0)
    for descriptor in (settings["control"], settings["channel"]):
        if descriptor is not None:
            os.set_inheritable(descriptor, False)
    isolated = not settings["limits_only"]
    try:
        if isolated:
            namespaces.isolate(settings["read_only"])
    except OSError as error:
        _report(control, {"refused": str(error)})
        os._exit(1)
    processes.end_with_parent(settings["parent"])
    launcher = os.getpid()
    if os.fork():
        os.closerange(3, 256)  # the other end of a socket is closed when its last holder ends
        os.wait()
        os._exit(0)
    # In its own namespace, process 1 does not see its parent.
    processes.end_with_parent(0 if isolated else launcher)
    processes.libc.prctl(processes.PR_SET_DUMPABLE, 0, 0, 0, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # without a handler, process 1 is immune
    processes.adopt_orphans()
    _serve(control, settings, isolated)
    os._exit(0)


def _serve(control: Any, settings: dict[str, Any], isolated: bool) -> None:
    _report(control, {"ready": True})
    reader = os.fdopen(os.dup(control.fileno()), "rb")
    for line in reader:
        request = json.loads(line)
        if isolated:
            namespaces.fresh_folder(settings["tmp_bytes"])
            _report(control, _run(request, namespaces.FOLDER, settings, isolated))
            continue
        with tempfile.TemporaryDirectory(
            dir=settings["folder"], ignore_cleanup_errors=True
        ) as folder:
            outcome = _run(request, folder, settings, isolated)
        _report(control, outcome)


def _report(control: Any, message: dict[str, Any]) -> None:
    rest = memoryview(json.dumps(message).encode() + b"\n")
    while rest:
        rest = rest[control.write(rest) :]


# ------------------------------------------------------------------------- one program


def _run(
    request: dict[str, Any], folder: str, settings: dict[str, Any], isolated: bool
) -> dict[str, Any]:
    """Run a program to its end or its limit, and end all that it started."""
    for name, text in request["files"].items():
        with open(f"{folder}/{name}", "w", encoding="utf-8", errors="surrogatepass") as file:
            file.write(text)
    stdin = os.memfd_create("stdin")
    with open(os.dup(stdin), "wb") as file:
        file.write(request["stdin"].encode(errors="surrogatepass"))
    os.lseek(stdin, 0, os.SEEK_SET)
    readers, writers = zip(*(os.pipe2(os.O_CLOEXEC) for _ in range(3)), strict=True)
    pid = os.fork()
    if pid == 0:
        descriptors = [stdin, *writers, settings["channel"]]
        _become_program(request["arguments"], folder, descriptors, settings)
    # The channel is for one program: its peer sees when that ends.
    channel, settings["channel"] = settings["channel"], None
    for descriptor in (stdin, *writers, channel):
        if descriptor is not None:
            os.close(descriptor)
    outputs = {reader: bytearray() for reader in readers}
    why = _watch(pid, outputs, request["seconds"], settings["output_bytes"])
    status = _end(pid, isolated)
    for reader, output in outputs.items():
        if why != "output":
            _drain(reader, output, settings["output_bytes"])
        os.close(reader)
    texts = [bytes(output[: settings["output_bytes"]]).decode("latin-1") for output in
             outputs.values()]  # fmt: skip
    return {"why": why, "code": os.waitstatus_to_exitcode(status), "outputs": texts}


def _watch(pid: int, outputs: dict[int, bytearray], seconds: float, limit: int) -> str:
    """Read what a program prints until it ends. Which limit it passed, or nothing."""
    ended = os.pidfd_open(pid)
    until = time.monotonic() + seconds
    readers = list(outputs)
    try:
        while True:
            left = until - time.monotonic()
            if left <= 0:
                return "timeout"
            ready, _, _ = select.select([ended, *readers], [], [], left)
            for reader in set(ready) & set(readers):
                part = os.read(reader, 2**16)
                outputs[reader] += part
                if not part:
                    readers.remove(reader)
                if len(outputs[reader]) > limit:
                    return "output"
            if ended in ready:
                return ""
    finally:
        os.close(ended)


def _end(pid: int, isolated: bool) -> int:
    """End the program and all others; the status of the program."""
    if isolated:
        assert os.getpid() == 1  # elsewhere, -1 means every process of the user
        os.kill(-1, signal.SIGKILL)
    else:
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    if isolated:
        _collect()
    else:
        processes.end_all()
    return status


def _collect() -> None:
    """Collect all others. One that was being forked meanwhile is killed in the next turn."""
    while True:
        try:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                os.kill(-1, signal.SIGKILL)
                time.sleep(1e-3)
        except (ChildProcessError, ProcessLookupError):
            return


def _drain(reader: int, output: bytearray, limit: int) -> None:
    """Read the rest. Requires: no writer is left."""
    while len(output) <= limit and (part := os.read(reader, 2**16)):
        output += part


def _become_program(
    arguments: list[str], folder: str, descriptors: list[int | None], settings: dict[str, Any]
) -> NoReturn:
    """In the child: limits, the filter, and the program in place of this one."""
    try:
        os.setsid()
        os.chdir(folder)
        copies = [None if d is None else _above(d) for d in descriptors]
        for target, copy in enumerate(copies):
            if copy is not None:
                os.dup2(copy, target)
        _limit(settings)
        seccomp.refuse_calls()
        environment = {**ENVIRONMENT, "HOME": folder, "TMPDIR": folder,
                       "PYTHONPATH": settings["python_path"]}  # fmt: skip
        os.execve(settings["python"], [settings["python"], "-P", "-s", *arguments], environment)
    except BaseException as error:
        os.write(2, f"the sandbox could not start the program: {error}".encode())
    os._exit(126)


def _above(descriptor: int) -> int:
    """A copy of a descriptor beyond those that the program gets."""
    return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, CHANNEL + 1)


def _limit(settings: dict[str, Any]) -> None:
    seconds = int(settings["seconds"]) + 1
    for kind, value in (
        (resource.RLIMIT_AS, settings["memory_bytes"]),
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_FSIZE, settings["tmp_bytes"]),
        (resource.RLIMIT_NOFILE, OPEN_FILES),
        (resource.RLIMIT_STACK, STACK),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
    ):
        processes.lower_limit(kind, value)
    if not settings["limits_only"]:  # there, it would count all processes of the user
        # Two more are the launcher and process 1.
        processes.lower_limit(resource.RLIMIT_NPROC, settings["processes"] + 2)
