"""Ends a command after an error: with one message and an exit code, or with a traceback."""

import linecache
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from jaxrl_llm.checkpoint.save_failures import SaveFailed
from jaxrl_llm.config import ConfigError, UnknownKeyError
from jaxrl_llm.launch import pipes
from jaxrl_llm.observability.status import STATUS

USER_ERROR = 2
ALARMED = 3  # an alarm ended the run; it saved its last step
NO_LAYOUT = 76  # processes were lost, and no mesh of those left holds the run: fewer may
INTERRUPTED = 128 + signal.SIGINT
UNREAD = 128 + signal.SIGPIPE  # the reader of the output has ended
TOGETHER_S = 5.0  # for the other processes to end, where the error may be theirs too
END_S = 30.0  # for Python's own end, after the work is done
TOGETHER_END_S = 330.0  # the same for one of several processes: jax waits 300 s for the others


class NoMesh(ConfigError):
    """No mesh of the processes that are left divides the batch and the model."""


def exit_with(error: BaseException, arguments: Sequence[str]) -> NoReturn:
    """End the process as `error` asks for. It waits for no thread.

    A mistake of the user (ConfigError, or a ValueError that this package raises) becomes one
    message on stderr and exit code 2, so a launcher does not start it again. So does a run whose
    numbers are not finite. After the loss of processes the code is 76 where these are too many for
    a mesh. An error of a disk is one message and code 1: the next start may work.
    Ctrl-C exits with 130. One of several processes then waits TOGETHER_S for the others. Where the
    reader of the output has ended, the code is 141. Another error is a traceback and code 1.
    """
    if isinstance(error, KeyboardInterrupt):
        print(str(error) or "interrupted", file=sys.stderr)
        _end_together(INTERRUPTED)
    if isinstance(error, ValueError) and is_for_user(error):
        print(f"error: {_message(error, arguments)}", file=sys.stderr)
        _end_together(NO_LAYOUT if isinstance(error, NoMesh) else USER_ERROR)
    if isinstance(error, BrokenPipeError) and pipes.broken():
        pipes.leave_broken()
        _end_together(UNREAD)
    if isinstance(error, SaveFailed):
        print(f"error: {error}", file=sys.stderr)
    else:
        traceback.print_exception(error)
    leave(1)


def end_in_time(code: int) -> NoReturn:
    """Exit with `code` as Python does, but at most END_S after the main thread has ended.

    Python waits for threads, and jax for the other processes.
    """
    seconds = TOGETHER_END_S if _is_one_of_several() else END_S

    def end() -> None:
        threading.main_thread().join()
        time.sleep(seconds)
        leave(code)

    threading.Thread(target=end, name="end", daemon=True).start()
    sys.exit(code)


def is_for_user(error: ValueError) -> bool:
    """True if the message alone tells the user what to do, without a traceback.

    That holds for a ConfigError, and for a ValueError from a `raise` statement of this package:
    these name the remedy. It does not hold for one that numpy or jax raised.
    """
    if isinstance(error, ConfigError):
        return True
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return False
    file = Path(frames[-1].filename).resolve()
    source = linecache.getline(str(file), frames[-1].lineno or 0).strip()
    root = Path(__file__).resolve().parents[2]
    folders = [root / name for name in ("jaxrl_llm", "models", "scripts", "configs")]
    return source.startswith("raise ") and any(file.is_relative_to(folder) for folder in folders)


def _message(error: ValueError, arguments: Sequence[str]) -> str:
    """The message. For a key of verl it names our key, in place of the nearest one."""
    if not isinstance(error, UnknownKeyError):
        return str(error)
    from jaxrl_llm.convert.verl_command import CONVERTS, counterpart

    note = counterpart(error.key, error.value)
    has_prefix = any(word.startswith(f"--config.{error.key}") for word in arguments)
    if note and not has_prefix and CONVERTS not in note:  # the words of a command of verl
        note = f"{note}; {CONVERTS}"
    if not note:
        return str(error)
    first = f"unknown key config.{error.key}" if has_prefix else str(error).splitlines()[0]
    return f"{first}\n{note}"


def _end_together(code: int) -> NoReturn:
    """Exit with `code`, after the others of several processes where these end as well.

    jax waits for them for five minutes, and they may be waiting for this process.
    """
    if _is_one_of_several():
        leaving = threading.Thread(target=sys.modules["jax"].distributed.shutdown, daemon=True)
        leaving.start()
        leaving.join(TOGETHER_S)
    leave(code)


def _is_one_of_several() -> bool:
    """True if jax waits at the exit for other processes, and these for this one."""
    jax = sys.modules.get("jax")
    return jax is not None and jax.distributed.is_initialized()


def leave(code: int) -> NoReturn:
    """End this process at once."""
    STATUS.end()  # which shows the cursor again
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # a terminal that was closed
            stream.flush()
    os._exit(code)
