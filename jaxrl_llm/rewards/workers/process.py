"""One worker process: its start under limits, its messages, and its end.

Nothing that runs in it can stop or hang the trainer.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from jaxrl_llm.rewards.calling import CallError
from jaxrl_llm.sandbox.processes import signal_name

GRACE = 1.0  # seconds for an async call to end at its own limit before its worker is killed
START = """
import importlib, json, sys
settings = json.loads(sys.argv[1])
sys.path[:] = settings["path"]
importlib.import_module(settings["module"]).main(settings)
"""


@dataclass(frozen=True, kw_only=True)
class WorkerLimits:
    """Limits of a worker process."""

    memory_gb: float = 16.0
    file_gb: float = 4.0  # largest file that it may write


class Lost(Exception):
    """The process is gone; `error` says why."""

    def __init__(self, error: CallError) -> None:
        super().__init__(error.message)
        self.error = error


class WorkerProcess:
    """The trainer's end of a process that runs `main` of `module`.

    Its first message is `greeting`. The process ends with the thread that started it.
    """

    def __init__(self, module: str, greeting: Any, limits: WorkerLimits) -> None:
        self._module, self._greeting, self._limits = module, greeting, limits
        self._process: subprocess.Popen[bytes] | None = None
        self.connection: Connection | None = None
        self._closed = False
        self._lock = threading.Lock()

    def start(self) -> bool:
        """Start the process if there is none, or if it has ended. Returns whether it is new."""
        if self._process is not None and self._process.poll() is not None:
            self.kill()  # it died while idle, perhaps out of memory: no call is to blame
        if self._process is not None:
            return False
        ours, theirs = socket.socketpair()
        settings = {
            "module": self._module,
            "socket": theirs.fileno(),
            "trainer": os.getpid(),
            "path": [path or os.getcwd() for path in sys.path],
            "memory_bytes": int(self._limits.memory_gb * 1e9),
            "file_bytes": int(self._limits.file_gb * 1e9),
        }
        with self._lock, theirs:
            if self._closed:
                raise ValueError("the pool of workers was closed")
            self._process = subprocess.Popen(
                [sys.executable, "-u", "-P", "-c", START, json.dumps(settings)],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is the trainer's to handle
                # A user module that imports jax must not take the accelerator from the trainer.
                env={**os.environ, "JAX_PLATFORMS": "cpu"},
            )
        self.connection = Connection(ours.detach())
        self.connection.send(self._greeting)
        return True

    def ask(self, request: Any, limit: float, late: CallError) -> Any:
        """Send a request and wait for its answer, as `receive` does."""
        self.send(request)
        return self.receive(limit, late)

    def send(self, request: Any) -> None:
        """Send a request. Raises Lost where the process has ended."""
        assert self.connection is not None
        try:
            self.connection.send(request)
        except OSError:
            raise Lost(self.crash()) from None

    def receive(self, limit: float, late: CallError) -> Any:
        """The next answer. Raises Lost on a crash, and with `late` after `limit` seconds."""
        assert self.connection is not None
        try:
            if self.connection.poll(limit):
                return self.connection.recv()
        except (EOFError, OSError):
            raise Lost(self.crash()) from None
        self.kill()
        raise Lost(late)

    def crash(self) -> CallError:
        """Remove a process that has ended, and say how it ended."""
        assert self._process is not None
        try:
            code = self._process.wait(timeout=GRACE)
            how = f"exit code {code}" if code >= 0 else signal_name(-code)
        except subprocess.TimeoutExpired:
            how = "it closed its connection"
        self.kill()
        return CallError(kind="crash", message=f"the worker process ended ({how})")

    def kill(self) -> None:
        """End the process and what it has started, except in sessions of their own."""
        with self._lock:
            process, connection = self._process, self.connection
            self._process = self.connection = None
        if process is not None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if connection is not None:
            connection.close()

    def close(self) -> None:
        """End the process for good. A thread that waits for its answer sees it end."""
        with self._lock:
            self._closed = True
            process = self._process
        if process is not None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
