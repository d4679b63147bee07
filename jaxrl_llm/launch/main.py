"""Where a command begins, before anything large is imported, and what Ctrl-C does in an import.

A KeyboardInterrupt while Python imports prints where it was, is lost in a callback of jax, or
crashes jaxlib. It may also leave half of jax, with which nothing works. So Ctrl-C ends the process
of a command at once, as nothing needs to be put away. In a program that uses the library it waits
for the imports.
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
    """Guards about a second of imports against Ctrl-C.

    Ctrl-C ends the process of a command with one line and code 130. In another program it is a
    KeyboardInterrupt after them.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    waiting: list[int] = []
    signal.signal(signal.SIGINT, _end if _is_command else lambda number, _: waiting.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if waiting:
        raise KeyboardInterrupt


def _begin() -> None:
    global _is_command
    _is_command = True
    _open_standard_streams()


def _open_standard_streams() -> None:
    """Let stdin, stdout and stderr be /dev/null where the process began without them.

    Otherwise the first files that are opened get their numbers, and what XLA writes to stderr would
    stand in a file of the user.
    """
    for descriptor, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, this one
            setattr(sys, name, open(descriptor, mode, closefd=False))


def _end(number: int, frame: FrameType | None) -> NoReturn:
    if sys.stdout is not None and os.isatty(1):
        os.write(1, _SHOW_CURSOR)
    os.write(2, b"interrupted\n")
    os._exit(128 + number)
