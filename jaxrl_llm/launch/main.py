"""Where a command begins, before anything large is imported, and how Ctrl-C ends an import.

A KeyboardInterrupt while Python imports prints where it was, is lost in a callback of jax, or
crashes jaxlib. Nothing needs to be put away then, so Ctrl-C ends the process of a command at once.
A program that uses the library keeps its own handlers.
"""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

_SHOW_CURSOR = b"\x1b[?25h\n"  # a line that changes hides it
_is_command = False


def main() -> NoReturn:
    """The console command `jaxrl`."""
    _begin()
    with imports():
        from jaxrl_llm.launch.commands import main
    main()


def run(name: str) -> NoReturn:
    """One command, by its name, on the process's arguments."""
    _begin()
    with imports():
        from jaxrl_llm.launch.commands import COMMANDS, run
    run(COMMANDS[name])


@contextmanager
def imports() -> Iterator[None]:
    """Around imports: Ctrl-C ends the process of a command at once, with one line and code 130."""
    if not _is_command or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, _end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _begin() -> None:
    global _is_command
    _is_command = threading.current_thread() is threading.main_thread()


def _end(number: int, frame: FrameType | None) -> NoReturn:
    if sys.stdout is not None and os.isatty(1):
        os.write(1, _SHOW_CURSOR)
    os.write(2, b"interrupted\n")
    os._exit(128 + number)
