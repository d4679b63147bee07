"""Output into a pipe whose reader has ended, as `head` does."""

import io
import os
import select
import stat
import sys
from typing import Any

from jaxrl_llm.supervision.signals import send_to_null

OUTPUTS = (1, 2)  # stdout and stderr


def broken() -> list[int]:
    """Descriptors of stdout and stderr whose pipes have no reader any more."""
    poll = select.poll()
    for descriptor in OUTPUTS:
        poll.register(descriptor, 0)
    return [descriptor for descriptor, event in poll.poll(0) if event & select.POLLERR]


def leave_broken() -> None:
    """Send what is still to be written to /dev/null, or Python would fail once more at its exit."""
    for descriptor in broken():
        send_to_null(descriptor)


def outlive_readers() -> None:
    """From now on, output into a pipe that nobody reads any more is lost, without an error."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and stream is getattr(sys, f"__{name}__") and _is_pipe(stream):
            stream.flush()
            raw = _Lasting(stream.fileno(), "w", closefd=False)
            # PYTHONUNBUFFERED has no buffer below the text.
            below: Any = raw if stream.write_through else io.BufferedWriter(raw)
            kept = ("encoding", "errors", "line_buffering", "write_through")
            named = {key: getattr(stream, key) for key in kept}
            setattr(sys, name, io.TextIOWrapper(below, **named))


class _Lasting(io.FileIO):
    """A pipe that takes what is written also after its reader has ended."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            send_to_null(self.fileno())
            return len(memoryview(data))


def _is_pipe(stream: Any) -> bool:
    mode = os.fstat(stream.fileno()).st_mode
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)
