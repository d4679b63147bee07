"""The lock of a run folder: one run at a time, whatever hosts, containers and clocks say.

A run holds the file system's own lock (flock) of RUN/run.lock until it ends. Where another kernel
wrote the file, or the file system has no such locks, that does not tell enough. Then the file's
time is watched for WATCH_S: a live run changes it every HEARTBEAT_S. No clock is compared.

A run that was suspended may lose its folder in this way. So it reads the file before it renews it,
and ends with exit code LOST where another run has written it.
"""

import contextlib
import fcntl
import json
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxrl_llm.config import ConfigError
from jaxrl_llm.observability.timing import Timer
from jaxrl_llm.supervision.listener import Listener

LOCK = "run.lock"
LOST = 2  # the exit code: a launcher must not start the run again
HEARTBEAT_S = 10.0  # between two updates of the file's time
WATCH_S = 60.0  # without an update: the run that wrote the file has ended
POLL_S = 0.5
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(kw_only=True)
class RunLock(Listener):
    """Says whether the run still has its folder. Only the main process looks."""

    lost: str = ""  # message once another run has the folder
    _closed: threading.Event = field(default_factory=threading.Event)

    def begin(self, step: int, timer: Timer) -> None:
        """Raises: ConfigError when another run has the folder."""
        if self.lost:
            raise ConfigError(self.lost)

    def beat(self, file: Path, own: Mapping[str, Any], end: Callable[[int], object] | None) -> None:
        """Renew the file until the lock is released or lost. `end` ends the process."""
        while not self.lost and not self._closed.wait(HEARTBEAT_S):
            try:
                holder = _parsed(file.read_bytes())
                if holder in ({}, own):
                    os.utime(file)
                    continue
            except FileNotFoundError:  # another run may have had the folder, and ended
                self.lost = f"{file} is gone, so other runs may write this folder; this run ends"
            except OSError:  # a file system that fails for a while
                continue
            else:
                self.lost = (
                    f"another run has taken the run folder {file.parent}: {_words(holder)}. This "
                    f"process had not renewed {file.name} for {WATCH_S:g} s. It ends, and the "
                    "other run goes on"
                )
        if self.lost and end is not None:
            print(f"error: {self.lost}", file=sys.stderr, flush=True)
            end(LOST)

    def release(self) -> None:
        """Renew no more."""
        self._closed.set()


@contextmanager
def hold(
    folder: Path, lock: RunLock, free: Path, end: Callable[[int], object] | None
) -> Iterator[None]:
    """Hold the lock of `folder` inside the block. `free` is a folder that a message names.

    Raises: ConfigError when another run holds it; OSError when the folder cannot be written.
    """
    file = folder / LOCK
    own: dict[str, Any] = {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "kernel": _kernel(),
        "token": secrets.token_hex(8),
    }
    descriptor = _acquire(file, own, free)
    thread = threading.Thread(target=lock.beat, args=(file, own, end), name="run lock", daemon=True)
    thread.start()
    try:
        yield
    finally:
        lock.release()
        thread.join()
        with contextlib.suppress(OSError):
            if _parsed(file.read_bytes()) == own:
                file.unlink()
        os.close(descriptor)


def _acquire(file: Path, own: dict[str, Any], free: Path) -> int:
    """Write our lock. Returns the descriptor that holds the file system's lock."""
    while True:
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            locked = _flock(descriptor)
            own["device"] = os.fstat(descriptor).st_dev if locked else None
            holder = _parsed(os.pread(descriptor, 4096, 0))
            if locked is False or (holder and _goes_on(file, holder, own)):
                raise _in_use(file, holder, free)
            # Its last holder may have removed the file since it was opened.
            if os.path.samestat(os.fstat(descriptor), file.stat()):
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, (json.dumps(own) + "\n").encode(), 0)
                return descriptor
        except FileNotFoundError:
            pass
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _flock(descriptor: int) -> bool | None:
    """False where another process has the file; None on a file system without locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _goes_on(file: Path, holder: Mapping[str, Any], own: Mapping[str, Any]) -> bool:
    """True if the run that wrote the file still runs, where flock did not say so."""
    # One kernel and one mount: it would still hold the lock that this process has now.
    known = own["kernel"] and own["device"] is not None
    if not known or any(holder.get(key) != own[key] for key in ("kernel", "device")):
        print(
            f"{file} is of a run on another machine or in another container: {_words(holder)}. "
            f"This start waits {WATCH_S:g} s to see whether that run goes on",
            flush=True,
        )
        before, deadline = _time_of(file), time.monotonic() + WATCH_S
        while time.monotonic() < deadline:
            time.sleep(POLL_S)
            if _time_of(file) != before:
                return True
    print(f"{file} is left over from {_words(holder)}, which has ended; it is taken over")
    return False


def _time_of(file: Path) -> int:
    with open(file) as opened:  # opened: a network file system asks its server then
        return os.fstat(opened.fileno()).st_mtime_ns


def _kernel() -> str:
    """The id of this boot of this machine; empty where the system has none."""
    try:
        return BOOT_ID.read_text().strip()
    except OSError:
        return ""


def _parsed(text: bytes) -> dict[str, Any]:
    """The content of a lock file; empty for one that is new, or that a kill left half written."""
    try:
        content = json.loads(text)
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}


def _words(holder: Mapping[str, Any]) -> str:
    return f"pid {holder.get('pid')} on host {holder.get('host')}, since {holder.get('started')}"


def _in_use(file: Path, holder: Mapping[str, Any], free: Path) -> ConfigError:
    return ConfigError(
        f"another process uses the run folder {file.parent}: {_words(holder)}. Give this run a "
        f"folder of its own: --config.run_dir={free}"
    )
