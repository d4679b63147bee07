"""Files of JSON lines, such as metrics.jsonl. They survive `kill -9`; a resume cuts them back."""

import json
import logging
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import orjson

_log = logging.getLogger(__name__)
IMAGES = "images"  # folder of the images of a trace, next to its files
GLOBAL_STEP = "training/global_step"  # the metric that says which step a line is of
CHUNK = 1 << 16  # bytes read at a time when looking for a line from the end


class JsonlFile:
    """Appends objects that carry a step, in the order of the steps.

    Guarantees: every line is valid JSON; NaN and infinity, which JSON lacks, are written as null.
        Floats have the digits that read back as the same float64. After `kill -9` at most the last
        line is torn, because a line is one write; opening the file again removes it.
    Raises: ValueError when a whole line of an existing file is not an object with a step.
    """

    def __init__(self, path: str | os.PathLike[str], *, key: str):
        self.path = Path(path)
        self._key = key
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # Unbuffered: the operating system has the line when `append` returns.
        self._file: IO[bytes] = open(self.path, "ab", buffering=0)
        self._cut(end_of_whole_lines(self.path))
        self.last_step = last_step(self.path, key)

    def append(self, *objects: Mapping[str, Any]) -> None:
        """Write objects. Requires: steps do not decrease."""
        for entry in objects:
            step = entry[self._key]
            assert self.last_step is None or step >= self.last_step, (step, self.last_step)
            self.last_step = step
        lines = "".join(to_line(entry) for entry in objects)
        remaining = memoryview(lines.encode("utf-8", errors="backslashreplace"))
        while remaining:  # a raw write may take only a part
            remaining = remaining[self._file.write(remaining) :]

    def truncate_after(self, step: int) -> None:
        """Remove the lines of later steps, in one atomic operation."""
        if self.last_step is None or self.last_step <= step:
            return
        offset = 0
        for line in self.path.read_bytes().splitlines(keepends=True):
            if parse_step(line, self._key, self.path) > step:
                break
            offset += len(line)
        self._cut(offset)
        self.last_step = last_step(self.path, self._key)

    def _cut(self, size: int) -> None:
        # Steps never decrease, so the lines to remove are at the end and no copy is needed.
        if size < os.fstat(self._file.fileno()).st_size:
            self._file.truncate(size)
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class MetricsWriter(JsonlFile):
    """metrics.jsonl: one object a step, each step once.

    Requires: `truncate_after(N)` is called before a resume from step N.
    """

    def __init__(self, path: str | os.PathLike[str]):
        super().__init__(path, key=GLOBAL_STEP)

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Append the metrics of a step: host numbers, not device arrays.

        Raises: ValueError when the file already has the step.
        """
        if self.last_step is not None and step <= self.last_step:
            raise ValueError(
                f"{self.path} has step {self.last_step} already, so step {step} cannot "
                "follow: resume from a checkpoint (which cuts the file), or take a new run_dir."
            )
        numbers = {n: x if isinstance(x, int | float) else float(x) for n, x in metrics.items()}
        self.append({GLOBAL_STEP: step} | numbers)


def to_line(entry: Mapping[str, Any]) -> str:
    """One line of valid JSON, with null for NaN and infinity. Numpy arrays are lists.

    Floats of an array of float32 have few digits, and read back as the same float32.
    """
    options = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE
    try:
        return orjson.dumps(entry, option=options).decode()
    except TypeError:  # half a surrogate pair, an integer above 64 bits, a key that is no text
        return json.dumps(_plain(entry), ensure_ascii=False, allow_nan=False) + "\n"


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: _plain(x) for key, x in value.items()}
    if as_list := getattr(value, "tolist", None):  # numpy's, which the report does not import
        return _plain(as_list())
    return [_plain(x) for x in value] if isinstance(value, list | tuple) else value


def read_jsonl(
    paths: Iterable[str | os.PathLike[str]], *, key: str = ""
) -> Iterator[dict[str, Any]]:
    """The objects of files, in order, without a torn last line.

    With the `key` of a step, a line that is no object with one is named in the log and left out.
    """
    for path in paths:
        with open(path, "rb") as file:
            for line in file:
                if line.endswith(b"\n"):
                    found = object_of(line, key, path) if key else json.loads(line)
                    if found is not None:
                        yield found


def object_of(line: bytes, key: str, path: str | os.PathLike[str]) -> dict[str, Any] | None:
    """The object of a line; None, and a line in the log, where it has no step under `key`."""
    try:
        found = json.loads(line)
        int(found[key])
    except (ValueError, KeyError, TypeError):
        _log.warning("%s has a damaged line, which is left out: %r", path, line[:80])
        return None
    return found


def end_of_whole_lines(path: Path) -> int:
    """The offset after the last line break. A kill has torn what follows it."""
    with open(path, "rb") as file:
        end = file.seek(0, os.SEEK_END)
        while end > 0:
            start = max(0, end - CHUNK)
            file.seek(start)
            found = file.read(end - start).rfind(b"\n")
            if found >= 0:
                return start + found + 1
            end = start
    return 0


def last_step(path: Path, key: str) -> int | None:
    """The step of the last line of a file of whole lines; None for an empty file."""
    with open(path, "rb") as file:
        start = end = file.seek(0, os.SEEK_END)
        tail = b""
        while start > 0:
            start = max(0, start - CHUNK)
            file.seek(start)
            tail = file.read(end - start)
            if tail.count(b"\n") > 1:
                break
    return parse_step(tail.splitlines()[-1], key, path) if tail else None


def parse_step(line: bytes, key: str, path: Path) -> int:
    """The step of a line; ValueError when it has none."""
    try:
        return int(json.loads(line)[key])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} has a line that is no object with {key!r}: {line[:80]!r}. It was changed by "
            "something else; move it away or repair it, then start again."
        ) from error
