"""The lock of a run folder: one run at a time, by the file system's own lock (flock)."""

import fcntl
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from jaxrl_llm.config import ConfigError

LOCK = "run.lock"


@contextmanager
def hold(folder: Path, free: Path) -> Iterator[None]:
    """Hold RUN/run.lock inside the block. A file system without locks gives none.

    `free` is a folder that a message names.

    Raises: ConfigError when another run holds it; OSError when the folder cannot be written.
    """
    path = folder / LOCK
    with _locked(path, free) as file:
        file.truncate(0)
        since = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        print(f"pid {os.getpid()} on host {socket.gethostname()}, since {since}", file=file)
        file.flush()
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def _locked(path: Path, free: Path) -> IO[str]:
    while True:
        file = open(path, "a+")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            with file:
                raise ConfigError(
                    f"another process uses the run folder {path.parent}: {file.read().strip()}. "
                    f"Give this run a folder of its own: --config.run_dir={free}"
                ) from None
        except OSError:
            return file
        # Its last holder may have removed the file since it was opened.
        if path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat()):
            return file
        file.close()
