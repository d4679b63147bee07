"""Run a Python program that a model wrote, apart from this process, its files and the network.

What contains a program is listed in SECURITY.md. Without namespaces of the kernel, running one is
refused, unless the caller asks for limits alone.
"""

import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jaxrl_llm
from jaxrl_llm.sandbox.namespaces import python_folders
from jaxrl_llm.sandbox.processes import children, descendants, memory_above, signal_name

PAUSE = 0.05  # seconds between looks at memory and processes
MARGIN = 10.0  # seconds beyond a program's own, to start and to end it
HERE = Path(__file__).resolve().parent
ROOT = str(Path(jaxrl_llm.__file__).resolve().parents[1])
START = """
import json, sys
settings = json.loads(sys.argv[1])
sys.path.insert(0, settings["root"])
from jaxrl_llm.sandbox import init
init.main(settings)
"""


class SandboxUnavailable(ValueError):
    """Namespaces cannot be had here; the text says why and what to do."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of a program, with all processes that it starts."""

    seconds: float = 10.0  # by the clock, and CPU time of each process
    memory_mb: int = 1024
    processes: int = 32
    tmp_mb: int = 64  # size of the only folder that it can write to
    output_kb: int = 1024  # size of each of its outputs


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The end of a program, and its outputs."""

    # "ended" by itself; the limit that it passed; or "lost" with its sandbox
    why: Literal["ended", "timeout", "memory", "processes", "output", "lost"]
    code: int | None = None  # its exit code; a signal is negative
    stdout: str = ""  # other bytes than UTF-8 are replaced
    stderr: str = ""
    result: str = ""  # output on descriptor 3

    @property
    def succeeded(self) -> bool:
        """True if it ended by itself with exit code 0."""
        return self.why == "ended" and self.code == 0

    def describe(self) -> str:
        """Say how it ended."""
        if self.why != "ended":
            return {"timeout": "it ran too long", "memory": "it took too much memory",
                    "processes": "it started too many processes", "lost": "its sandbox was lost",
                    "output": "it printed too much"}[self.why]  # fmt: skip
        if self.code is not None and self.code < 0:
            return signal_name(-self.code)
        last = self.stderr.strip().rpartition("\n")[2][:200]
        return f"exit code {self.code}" + (f", {last}" if self.code and last else "")


class Sandbox:
    """Runs programs one after the other; each finds an empty folder and no other process.

    It ends with the thread that began its first program. Use it in a `with`.
    `channel` is a socket that the first program has as descriptor 4.
    Raises: SandboxUnavailable from `run` and `start`.
    """

    def __init__(
        self,
        limits: Limits | None = None,
        *,
        limits_only: bool = False,
        channel: socket.socket | None = None,
    ) -> None:
        self.limits = limits or Limits()
        self._limits_only = limits_only
        self._channel = channel
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None  # with limits alone
        self._received = bytearray()

    def __enter__(self) -> "Sandbox":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(
        self, arguments: Sequence[str], *, files: Mapping[str, str] | None = None, stdin: str = ""
    ) -> Outcome:
        """Run `python arguments` in a folder with `files`, to its end or its limit."""
        self.start(arguments, files=files, stdin=stdin)
        return self.outcome()

    def run_source(self, source: str, *, stdin: str = "", seconds: float | None = None) -> Outcome:
        """Run a program, for at most `seconds`, and at most the seconds of its limits."""
        self.start(["main.py"], files={"main.py": source}, stdin=stdin, seconds=seconds)
        return self.outcome()

    def start(
        self,
        arguments: Sequence[str],
        *,
        files: Mapping[str, str] | None = None,
        stdin: str = "",
        seconds: float | None = None,
    ) -> None:
        """Begin to run a program, without waiting for it."""
        if self._process is None:
            self._open()
        request = {
            "arguments": list(arguments),
            "files": dict(files or {}),
            "stdin": stdin,
            "seconds": min(seconds or self.limits.seconds, self.limits.seconds),
        }
        assert self._control is not None
        with suppress(OSError):  # `outcome` finds that it is gone
            self._control.sendall(json.dumps(request).encode() + b"\n")

    def outcome(self) -> Outcome:
        """Wait for the program that was started."""
        reply = self._receive(self.limits.seconds + MARGIN)
        if isinstance(reply, str):
            self.close()
            return Outcome(why=reply)  # pyright: ignore[reportArgumentType]
        stdout, stderr, result = (_text(output) for output in reply["outputs"])
        return Outcome(
            why=reply["why"] or "ended",
            code=reply["code"],
            stdout=stdout,
            stderr=stderr,
            result=result,
        )

    def close(self) -> None:
        """End the sandbox with all that runs in it."""
        if self._process is not None:
            if self._limits_only:  # no namespace ends them together
                _end_below(self._process.pid)
            self._process.kill()
            self._process.wait()
        if self._folder is not None:
            self._folder.cleanup()
        if self._control is not None:
            _wait_for_end(self._control)
            self._control.close()
        self._process = self._control = self._folder = None
        self._received.clear()

    # --------------------------------------------------------------------- the first process

    def _open(self) -> None:
        ours, theirs = socket.socketpair()
        channel = None if self._channel is None else self._channel.fileno()
        shared = [theirs.fileno()] + ([] if channel is None else [channel])
        if self._limits_only:
            self._folder = tempfile.TemporaryDirectory(
                prefix="jaxrl_program_", ignore_cleanup_errors=True
            )
        folder = self._folder and self._folder.name
        settings = self._settings(control=theirs.fileno(), channel=channel, folder=folder)
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-S", "-c", START, json.dumps(settings)],
            pass_fds=shared,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL if self._limits_only else None,
            env={"PATH": os.defpath},
            start_new_session=True,
        )
        theirs.close()
        self._control = ours
        reply = self._receive(MARGIN)
        if isinstance(reply, dict) and "ready" in reply:
            return
        self.close()
        why = reply["refused"] if isinstance(reply, dict) else "its first process ended"
        raise SandboxUnavailable(
            f"code of a model cannot be isolated here ({why}). Run where user namespaces are "
            "allowed (sysctl kernel.unprivileged_userns_clone=1, or a container with "
            "--security-opt seccomp=unconfined), or ask for limits alone: limits_only=True."
        )

    def _settings(self, **more: Any) -> dict[str, Any]:
        limits = self.limits
        names = ("site-packages", "dist-packages")
        packages = [os.path.realpath(p) for p in sys.path if Path(p).name in names]
        return {
            "root": ROOT,
            "parent": os.getpid(),
            "limits_only": self._limits_only,
            "read_only": [*python_folders(), *packages, str(HERE)],
            "python": os.path.realpath(sys.executable),
            "python_path": ":".join([ROOT, *packages]),
            "seconds": limits.seconds,
            "memory_bytes": limits.memory_mb << 20,
            "processes": limits.processes,
            "tmp_bytes": limits.tmp_mb << 20,
            "output_bytes": limits.output_kb << 10,
            **more,
        }

    def _receive(self, limit: float) -> dict[str, Any] | str:
        """The next report of the first process, or why there is none."""
        assert self._control is not None
        until = time.monotonic() + limit
        while b"\n" not in self._received:
            if select.select([self._control], [], [], PAUSE)[0]:
                part = self._control.recv(2**20)
                if not part:
                    return "lost"
                self._received += part
            elif excess := self._excess():
                return excess
            elif time.monotonic() > until:
                return "timeout"
        line, _, rest = bytes(self._received).partition(b"\n")
        self._received = bytearray(rest)
        return json.loads(line)

    def _excess(self) -> str:
        """Which sum over all processes is above its limit."""
        assert self._process is not None
        pids = descendants(self._process.pid)
        if len(pids) > self.limits.processes + 2:
            return "processes"
        return "memory" if memory_above(pids, self.limits.memory_mb << 20) else ""


def _end_below(launcher: int) -> None:
    """Kill what the first process has started. It inherits orphans, and collects all of them."""
    until = time.monotonic() + 5.0
    while time.monotonic() < until:
        programs = [pid for first in children(launcher) for pid in descendants(first)]
        if not programs:
            return
        for pid in programs:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(2e-3)


def _wait_for_end(control: socket.socket) -> None:
    """Until the first process, which alone holds the other end, is gone; 5 s at most."""
    control.settimeout(5.0)
    with suppress(OSError):
        while control.recv(2**20):
            pass


def _text(output: str) -> str:
    return output.encode("latin-1").decode(errors="replace")
