"""Files of text that are replaced whole: a reader sees what was there before, or all of the new."""

import os
from pathlib import Path

TEMPORARY = ".{name}.{pid}.tmp"  # a process that is killed may leave one


def write_whole(file: Path, text: str) -> None:
    """Write `text` in UTF-8, or leave what `file` holds where that fails, as on a full disk.

    What is no file, such as /dev/stdout, is written as it is. A link stays one.
    """
    if file.exists() and not file.is_file():
        file.write_text(text, encoding="utf-8", errors="backslashreplace")
        return
    file = file.resolve()
    temporary = file.with_name(TEMPORARY.format(name=file.name, pid=os.getpid()))
    try:
        temporary.write_text(text, encoding="utf-8", errors="backslashreplace")
        os.replace(temporary, file)
    finally:
        temporary.unlink(missing_ok=True)
