"""The lock of a run folder: one run at a time, by the file system's own lock (flock)."""

import fcntl
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from jaxrl_llm.config import ConfigError

LOCK = "run.lock"


@contextmanager
def hold(folder: Path, free: Path) -> Iterator[None]:
    """Hold RUN/run.lock inside the block. The file stays; the lock ends with the process.

    A file system without locks gives none. `free` is a folder that a message names.

    Raises: ConfigError when another run holds it; OSError when the folder cannot be written.
    """
    with open(folder / LOCK, "a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise ConfigError(
                f"another process uses the run folder {folder}: {file.read().strip()}. Give this "
                f"run a folder of its own: --config.run_dir={free}"
            ) from None
        except OSError:
            pass
        file.truncate(0)
        since = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        print(f"pid {os.getpid()} on host {socket.gethostname()}, since {since}", file=file)
        file.flush()
        yield
