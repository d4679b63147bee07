"""Places that a command writes to, checked before its minutes of work. Imports no jax."""

import tempfile
from pathlib import Path

from jaxrl_llm.config import ConfigError


def check_file(flag: str, file: Path) -> None:
    """ConfigError unless `file` can be written. Its folder is made where it is missing."""
    if file.is_dir():
        raise ConfigError(f"{flag}={file} is a folder; give a file such as {file}/report.json")
    check_folder(flag, file.parent)


def check_folder(flag: str, folder: Path) -> None:
    """ConfigError unless files can be made in `folder`, which is made where it is missing."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ConfigError(
            f"{flag}: files cannot be made in {folder}: {error.strerror}; give another folder"
        ) from None
