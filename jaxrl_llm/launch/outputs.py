"""Files and folders that a command writes, checked before its work. Imports no jax."""

import errno
import os
import re
import shutil
import tempfile
from pathlib import Path

from jaxrl_llm.config import ConfigError
from jaxrl_llm.references import is_file, is_folder

DOCTOR_BYTES = 10**9  # free space that the doctor asks for; its file has an eighth of it

# How the files begin that a command wrote before, and that it may replace.
PAGE = rb"<!doctype html>"
EVALUATION = rb'\{\n  "model": .*\n  "config": '
ANSWERS = rb'\{"index":\d+,"data_source":'
PLAN = rb'\{\n  "name": .*\n  "devices": '
DOCTOR = rb'\{\n  "versions": '
_HEAD = 4096  # bytes of a file that are compared


def check_parent(flag: str, file: Path) -> None:
    """ConfigError unless `file` can be made."""
    if file.is_dir():
        raise ConfigError(f"{flag}={file} is a folder; give a file such as {file}/report.json")
    if not file.parent.is_dir():
        raise ConfigError(f"{flag}={file}: there is no folder {file.parent}")
    if not (os.access(file, os.W_OK) if is_file(file) else _takes_files(file.parent)):
        raise ConfigError(f"{flag}={file} cannot be written; give another file")


def check_other_files(flag: str, file: Path, begins: bytes) -> None:
    """ConfigError for a file of something else, which would be lost.

    `begins` is how a file of this command begins. An empty file may be replaced too.
    """
    if not is_file(file):
        return
    with open(file, "rb") as found:
        head = found.read(_HEAD)
    if head and not re.match(begins, head):
        raise ConfigError(
            f"{flag}={file} exists, and this command did not write it: it would be lost; give a "
            "new file"
        )


def check_writable(flag: str, file: Path, begins: bytes) -> None:
    """Make the folder of `file`. ConfigError where it cannot be written, before it is needed."""
    if is_folder(file):
        raise ConfigError(f"{flag}={file} is a folder; give a file in it")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{flag}={file}: the folder {file.parent} cannot be made ({error.strerror}); give "
            "another"
        ) from None
    if not (os.access(file, os.W_OK) if is_file(file) else _takes_files(file.parent)):
        raise ConfigError(f"{flag}={file} cannot be written; give another file")
    check_other_files(flag, file, begins)


def check_new_folder(flag: str, folder: Path) -> None:
    """ConfigError where `folder`, which need not exist, cannot be made or written."""
    # A link to nothing is there too, and takes no files.
    there = next(x for x in (folder, *folder.absolute().parents) if os.path.lexists(x))
    if not _takes_files(there) or _is_too_long(folder):
        raise ConfigError(f"{flag}={folder} cannot be written; give another directory")


def _takes_files(folder: Path) -> bool:
    """Whether files can be made in a folder. /proc and the like refuse what `access` allows."""
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError:
        return False
    return os.access(folder, os.W_OK)


def _is_too_long(path: Path) -> bool:
    """Whether no file system takes a name of the path."""
    try:
        path.lstat()
    except OSError as error:
        return error.errno == errno.ENAMETOOLONG
    return False


def check_folder(flag: str, folder: Path) -> None:
    """Make `folder` if it is missing; ConfigError unless it can be written and has room."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ConfigError(
            f"{flag}, {folder}, cannot be written: {error.strerror}. Give another folder"
        ) from None
    if (free := shutil.disk_usage(folder).free) < DOCTOR_BYTES:
        raise ConfigError(
            f"{flag}, {folder}, has {free / 1e9:.1f} GB free, and the doctor asks for 1 GB. Delete "
            f"old runs, or give a folder on another disk"
        )
