"""Begins a command, before anything large is imported."""

import os
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from jaxrl_llm.launch.interrupts import command, imports


def main() -> NoReturn:
    """The console command `jaxrl`."""
    name, *argv = sys.argv[1:] or ["--help"]
    run(name, argv)


def run(
    work: str | Callable[[list[str]], int | None], argv: Sequence[str] | None = None
) -> NoReturn:
    """Run a command by its name, or a script's function of the arguments, and exit.

    The exit code is the one that it returns (None is 0). exits.py says what errors become.
    `--help` of a script prints its docstring.
    """
    _open_standard_streams()
    arguments = list(sys.argv[1:] if argv is None else argv)
    with command():
        with imports():
            from jaxrl_llm.launch.exits import end_in_time, exit_with
            from jaxrl_llm.observability.garbage import end_without_search
        end_without_search()
        try:
            with imports():
                function = _function(work) if isinstance(work, str) else work
            if callable(work) and {"--help", "-h"} & {*arguments}:
                print((sys.modules["__main__"].__doc__ or "").strip())
                sys.exit(0)
            code = function(arguments) or 0
            sys.stdout.flush()
        except SystemExit:
            raise
        except BaseException as error:  # a panic of Rust is no Exception
            exit_with(error, arguments)
    end_in_time(code)


def _function(name: str) -> Callable[[list[str]], int]:
    from jaxrl_llm.launch.commands import command_of

    return command_of(name)


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
