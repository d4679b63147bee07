"""A command as a shell would start it, but in the process of the tests."""

import contextlib
import io
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn
from unittest import mock

from jaxrl_llm.launch import exits, local


def run_here(command: Callable[[], NoReturn], words: Sequence[str]) -> subprocess.CompletedProcess:
    """What `command`, which exits, printed, and its exit code. `words` are for messages.

    A process of its own would end at once, whatever its threads do. This one goes on.
    """
    output, errors, code = io.StringIO(), io.StringIO(), None
    goes_on = mock.patch.multiple(exits, leave=sys.exit, end_in_time=sys.exit)
    with goes_on, contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        try:
            command()
        except SystemExit as ended:
            code = ended.code
    assert isinstance(code, int), f"{words} ended with {code!r}"
    return subprocess.CompletedProcess(list(words), code, output.getvalue(), errors.getvalue())


def launch_here(*words: str) -> subprocess.CompletedProcess:
    """`python -m jaxrl_llm.launch.local` of `words` in this process; its processes are real."""
    with mock.patch.dict(os.environ, JAX_PLATFORMS="cpu"):  # the launcher notes when it began
        return run_here(lambda: sys.exit(local.main(words)), words)
