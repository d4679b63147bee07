"""Ctrl-C while a command or a program imports.

A KeyboardInterrupt while Python imports prints where it was, is lost in a callback of jax, or
crashes jaxlib. It may also leave half of jax imported, with which nothing works. So Ctrl-C ends the
process of a command at once, as nothing needs to be saved yet. In a program that uses the library
it waits for the imports.
"""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

_SHOW_CURSOR = b"\x1b[?25h\n"  # a status line hides the cursor
_is_command = False


@contextmanager
def command() -> Iterator[None]:
    """Marks the process of a command: inside the block, Ctrl-C in `imports` ends it."""
    global _is_command
    before, _is_command = _is_command, True
    try:
        yield
    finally:
        _is_command = before


@contextmanager
def imports() -> Iterator[None]:
    """Guard imports against Ctrl-C.

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


def _end(number: int, frame: FrameType | None) -> NoReturn:
    if sys.stdout is not None and os.isatty(1):
        os.write(1, _SHOW_CURSOR)
    os.write(2, b"interrupted\n")
    os._exit(128 + number)
