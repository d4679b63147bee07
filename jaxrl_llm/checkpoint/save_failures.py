"""Errors of a disk while a checkpoint is written, by Python or by tensorstore."""

import errno
import os
import re
from collections.abc import Iterator
from pathlib import Path

FULL = {errno.ENOSPC, errno.EDQUOT}  # room may come
_NUMBER = re.compile(r"os_error_code='(\d+)'")  # in messages of tensorstore
_PATH = re.compile(r'"(/[^"]+)"')


class SaveFailed(OSError):
    """A checkpoint could not be written. The message is for the user."""

    @property
    def is_full(self) -> bool:
        """True when the disk has no room, or the user's quota."""
        return self.errno in FULL

    def __str__(self) -> str:
        return self.strerror or ""


def save_failed(error: BaseException, folder: Path) -> SaveFailed | None:
    """The error of a save in two lines; None where no disk is its cause."""
    for each in _chain(error):
        text = str(each)
        if isinstance(each, OSError) and each.errno:
            number, paths = each.errno, [each.filename] if each.filename else []
        elif match := _NUMBER.search(text):
            number, paths = int(match[1]), _PATH.findall(text)
        else:
            continue
        name, path = errno.errorcode.get(number, str(number)), [folder, *paths][-1]
        return SaveFailed(
            number,
            f"no checkpoint was written: {os.strerror(number)} ({name}) at {path}\n"
            "The same command goes on from the last checkpoint, once this path can be written",
        )
    return None


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
