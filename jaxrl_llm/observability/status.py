"""The work before the first step: one changing line on a terminal, lines elsewhere."""

import atexit
import os
import sys
from typing import Any, TextIO

# Set to a number above 0 in all processes but the first.
RANKS = ("JAXRL_PROCESS_ID", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK")


class Status:
    """Says what goes on. It is silent until `begin`, so a library call prints nothing."""

    def __init__(self) -> None:
        self._file: TextIO | None = None
        self._live: Any = None

    def begin(self, file: TextIO | None = None) -> None:
        """Show what follows, in the first process alone."""
        if all(os.environ.get(name, "0") in ("", "0") for name in RANKS):
            self._file = sys.stdout if file is None else file
            atexit.register(self.end)  # after an error too the cursor comes back

    def __call__(self, text: str) -> None:
        """This goes on from now on."""
        if self._file is None:
            return
        if not self._file.isatty():
            print(f"start: {text}", file=self._file, flush=True)
        elif self._live is None:
            from rich.console import Console

            self._live = Console(file=self._file).status(text)
            self._live.start()
        else:
            self._live.update(text)

    def end(self) -> None:
        """Leave the terminal to others, and say nothing more."""
        live, self._live, self._file = self._live, None, None
        if live is not None:
            live.stop()


STATUS = Status()
